"""`attnplug new-backend` and `new-format`: write a package that works, for an author to add kernels or bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
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

    @property
    def format(self) -> str:
        """The name of a KV format."""
        return self.backend.lower()

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


_Parent = Annotated[
    Path, typer.Option("--path", metavar="DIR", help="Parent folder of the new package attnplug-NAME.")
]


def new_backend(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Name of the backend, such as acme: letters, digits, - and _."),
    ],
    path: _Parent = Path(),
    as_json: AsJson = False,
) -> None:
    """Write a package with a working backend, tests and CI, for you to add kernels."""
    names = PackageNames.from_name(name)
    _refuse_taken(name, names)
    what = f"the backend {names.backend}, in plain PyTorch until you add kernels"
    _new_package("backend", names, path, as_json, what, f"attnplug explain --backend {names.backend}")


def new_format(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Name of the format, such as acme_int6: letters, digits, - and _."
        ),
    ],
    path: _Parent = Path(),
    as_json: AsJson = False,
) -> None:
    """Write a package with a working KV format, tests and CI, for you to change its bytes."""
    names = PackageNames.from_name(name)
    _refuse_taken_format(name, names)
    what = f"the KV format {names.format}, of 6 bits until you change its bytes"
    _new_package("format", names, path, as_json, what, f"attnplug conformance --format {names.format}")


def _new_package(kind: str, names: PackageNames, path: Path, as_json: bool, what: str, command: str) -> None:
    """Write a package of a kind, "backend" or "format", and say what it is and which command shows it."""
    target = path / names.distribution
    written = _write(target, _rendered(kind, names))
    if as_json:
        fields = ("distribution", "package", "entry_point", kind, "prefix")
        report = {field: getattr(names, field) for field in fields}
        print_json({**report, "path": str(target), "files": written}, f"attnplug.new-{kind}")
        return
    # pip would take `attnplug-acme` without ./ for a distribution of that name.
    source = str(target) if target.is_absolute() else f"./{target}"
    echo(f"{target}: {what}\n")
    for file in written:
        echo(f"  {file}")
    echo("\nNext:\n")
    echo(f"  pip install -e {shlex.quote(f'{source}[test]')}")
    echo(f"  pytest {shlex.quote(str(target))}")
    echo(f"  {command}")
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
    _refuse_installed(name, names, remedy)


def _refuse_taken_format(name: str, names: PackageNames) -> None:
    """PolicyError if a KV format or distribution of this name is installed."""
    from attnplug.core.kv_format import is_format_name, kv_cache_dtypes

    remedy = "choose another name, because two formats of one name conflict"
    # The formats of plugins are in the table once the plugins are loaded.
    _refuse_installed(name, names, remedy)
    if not is_format_name(names.format):
        raise PolicyError("NAME", name, f"is taken: attnplug reads {names.format} in another way", remedy)
    if names.format in kv_cache_dtypes():
        raise PolicyError("NAME", name, f"is taken: the KV format {names.format} is installed", remedy)


def _refuse_installed(name: str, names: PackageNames, remedy: str) -> None:
    from attnplug.registry.default import get_registry

    if any(record.answers_to(names.distribution) for record in get_registry().plugins.records):
        raise PolicyError("NAME", name, f"is taken: {names.distribution} is installed", remedy)


def _write(target: Path, rendered: dict[str, str]) -> list[str]:
    """Write the files of a package to `target` in one step, and return their relative paths.

    Raises:
        PolicyError: `target` exists or cannot be written.
    """
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


def _rendered(kind: str, names: PackageNames) -> dict[str, str]:
    """The files of a package by their paths: those of all kinds, and those of "backend" or "format"."""
    from packaging.version import Version

    known = {
        **dataclasses.asdict(names),
        "format": names.format,
        "kit": {
            "backend": "The conformance kit, and that attnplug selects the backend.",
            "format": "The conformance kit.",
        }[kind],
        "attnplug_source": ATTNPLUG_SOURCE,
        "attnplug_version": Version(version("attnplug")).public,
    }
    rendered = {}
    folder = package_files("attnplug") / "templates"
    roots = [_templates(folder / each, PurePosixPath()) for each in ("common", kind)]
    for place, template in itertools.chain(*roots):
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
