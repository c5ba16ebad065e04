"""`attnplug new-backend`: writes a package with a working backend, for an author to add kernels."""

from __future__ import annotations

import contextlib
import dataclasses
import keyword
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from importlib.resources import files as package_files
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath
from string import Template
from typing import Annotated

import typer

from attnplug._system import files
from attnplug.cli.arguments import AsJson
from attnplug.cli.output.output import echo, print_json
from attnplug.core.errors import PolicyError

# A longer name would make lines of the package longer than its own lint allows.
_LONGEST_NAME = 24
_SUFFIX = ".tmpl"
ATTNPLUG_SOURCE = "wheels/attnplug-*.whl"
"""What the CI of a new package gives pip for attnplug: a wheel that its author keeps beside it.

With a release on PyPI this becomes "attnplug". Until then anyone may take that name there.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class PackageNames:
    """The names of a new package, which its templates contain."""

    distribution: str
    package: str
    entry_point: str
    backend: str
    prefix: str

    @classmethod
    def from_name(cls, name: str) -> PackageNames:
        """The names derived from `name`.

        Raises:
            PolicyError: other characters than letters, digits, - and _, a Python keyword or module, or too long.
        """
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9]*([-_][A-Za-z0-9]+)*", name):
            limit = "must begin with a letter, and contain only letters and digits, with single - or _ between them"
            raise PolicyError("NAME", name, limit)
        parts = re.split("[-_]", name.lower())
        if parts[0] == "attnplug":
            raise PolicyError("NAME", name, "must not begin with attnplug", "the command adds that prefix")
        if len(name) > _LONGEST_NAME:
            raise PolicyError("NAME", name, f"must have at most {_LONGEST_NAME} characters")
        plain = "_".join(parts)
        if keyword.iskeyword(plain) or keyword.issoftkeyword(plain) or plain in sys.stdlib_module_names:
            limit = "is a Python keyword or module"
            raise PolicyError("NAME", name, limit, "name it after its kernels, their library or its author")
        return cls(
            distribution=f"attnplug-{'-'.join(parts)}",
            package=f"attnplug_{plain}",
            entry_point="-".join(parts),
            backend=plain.upper(),
            prefix="".join(part.capitalize() for part in parts),
        )


def new_backend(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Name of the backend, such as acme: letters, digits, - and _."),
    ],
    path: Annotated[
        Path, typer.Option("--path", metavar="DIR", help="Parent folder of the new package attnplug-NAME.")
    ] = Path(),
    as_json: AsJson = False,
) -> None:
    """Write a package with a working backend, tests and CI, for you to add kernels."""
    names = PackageNames.from_name(name)
    _refuse_taken(name, names)
    target = path / names.distribution
    written = _write(target, names)
    if as_json:
        report = {**dataclasses.asdict(names), "path": str(target), "files": written}
        print_json(report, "attnplug.new-backend")
        return
    # pip would take `attnplug-acme` without ./ for a distribution of that name.
    source = str(target) if target.is_absolute() else f"./{target}"
    echo(f"{target}: the backend {names.backend}, in plain PyTorch until you add kernels\n")
    for file in written:
        echo(f"  {file}")
    echo("\nNext:\n")
    echo(f"  pip install -e {shlex.quote(f'{source}[test]')}")
    echo(f"  pytest {shlex.quote(str(target))}")
    echo(f"  attnplug explain --backend {names.backend}")
    if ATTNPLUG_SOURCE != "attnplug":
        echo("\nattnplug has no release yet, so CI installs its wheel. In a clone of attnplug:\n")
        echo(f"  pip wheel --no-deps -w {shlex.quote(str(target.absolute() / 'wheels'))} .")


def _refuse_taken(name: str, names: PackageNames) -> None:
    """PolicyError if a backend, family or distribution of this name is installed."""
    from attnplug.registry.default import get_registry
    from attnplug.registry.plugins.discovery import RESERVED_NAMES

    remedy = "choose another name, because two backends of one name conflict"
    if names.backend in RESERVED_NAMES:
        raise PolicyError("NAME", name, f"is taken: {names.backend} is reserved by attnplug", remedy)
    plugins = get_registry().plugins
    for taken in plugins.names:
        if taken.upper().replace("-", "_") == names.backend:
            raise PolicyError("NAME", name, f"is taken: the backend {taken} is installed", remedy)
    for record in plugins.records:
        if record.answers_to(names.distribution):
            raise PolicyError("NAME", name, f"is taken: {names.distribution} is installed", remedy)


def _write(target: Path, names: PackageNames) -> list[str]:
    """Write the package to `target` in one step, and return the relative paths of its files.

    Raises:
        PolicyError: `target` exists or cannot be written.
    """
    rendered = _rendered(names)
    try:
        with contextlib.suppress(FileNotFoundError):
            # `exists` would say no for a link without a target.
            target.lstat()
            remedy = "nothing is overwritten: move it away, or give another --path"
            raise PolicyError("target", str(target), "exists", remedy)
        files.make_folder(target.parent)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as beside:
            # One level down, because only the owner may read the temporary folder itself.
            unfinished = Path(beside, target.name)
            for file, text in rendered.items():
                made = unfinished / file
                made.parent.mkdir(parents=True, exist_ok=True)
                made.write_text(text, encoding="utf-8", newline="\n")
            unfinished.rename(target)
    except OSError as problem:
        limit = f"cannot be written: {files.why(problem)}"
        raise PolicyError("target", str(target), limit, "give another --path") from problem
    return sorted(rendered)


def _rendered(names: PackageNames) -> dict[str, str]:
    from packaging.version import Version

    known = {
        **dataclasses.asdict(names),
        "attnplug_source": ATTNPLUG_SOURCE,
        "attnplug_version": Version(version("attnplug")).public,
    }
    rendered = {}
    for place, template in _templates(package_files("attnplug") / "templates" / "backend", PurePosixPath()):
        parts = [names.package if part == "package" else part for part in place.parts]
        file = PurePosixPath(*parts).as_posix().removesuffix(_SUFFIX)
        rendered[file] = Template(template.read_text(encoding="utf-8")).substitute(known)
    return rendered


def _templates(folder: Traversable, place: PurePosixPath) -> Iterator[tuple[PurePosixPath, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _templates(entry, place / entry.name)
        elif entry.name.endswith(_SUFFIX):
            yield place / entry.name, entry
