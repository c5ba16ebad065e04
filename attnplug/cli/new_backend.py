"""`attnplug new-backend`: writes a package with a working backend, for its author to put kernels in."""

from __future__ import annotations

import dataclasses
import keyword
import re
import shlex
import sys
import tempfile
from importlib.metadata import version
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath
from string import Template
from typing import Annotated

import typer
from packaging.version import Version

from attnplug.cli.arguments import AsJson
from attnplug.cli.output import print_json
from attnplug.core.errors import PolicyError

__all__ = ["new_backend"]

_LONGEST_NAME = 24
"""With which the lines of the package still have the length that its own lint allows."""
_SUFFIX = ".tmpl"


@dataclasses.dataclass(frozen=True, slots=True)
class Names:
    """All that a new package is called by; what the templates say of it."""

    distribution: str
    package: str
    entry_point: str
    backend: str
    prefix: str

    @classmethod
    def of(cls, name: str) -> Names:
        """The names that follow from `name`.

        Raises:
            PolicyError: no letters, digits, - and _, a word of Python's own, or too long.
        """
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9]*([-_][A-Za-z0-9]+)*", name):
            limit = "must begin with a letter and have letters, digits, and - or _ between them"
            raise PolicyError("NAME", name, limit)
        parts = re.split("[-_]", name.lower())
        if parts[0] == "attnplug":
            raise PolicyError(
                "NAME", name, "must not begin with attnplug", "that is put in front of it anyway"
            )
        if len(name) > _LONGEST_NAME:
            raise PolicyError("NAME", name, f"must have at most {_LONGEST_NAME} characters")
        plain = "_".join(parts)
        if keyword.iskeyword(plain) or keyword.issoftkeyword(plain) or plain in sys.stdlib_module_names:
            limit = "is a word of Python's own"
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
        str, typer.Argument(metavar="NAME", help="What to call it: letters, digits, - and _, as acme.")
    ],
    path: Annotated[
        Path, typer.Option("--path", metavar="DIR", help="The folder to write attnplug-NAME into.")
    ] = Path(),
    as_json: AsJson = False,
) -> None:
    """Write a package with a working backend, its tests and its CI, to put your kernels in."""
    names = Names.of(name)
    _refuse_taken(name, names)
    target = path / names.distribution
    written = _write(target, names)
    if as_json:
        print_json({**dataclasses.asdict(names), "path": str(target), "files": written})
        return
    place = shlex.quote(str(target))
    typer.echo(f"{target}: the backend {names.backend}, in plain PyTorch until your kernels are in\n")
    for file in written:
        typer.echo(f"  {file}")
    typer.echo("\nNext:\n")
    typer.echo(f"  pip install -e {shlex.quote(f'{_as_path(target)}[test]')}")
    typer.echo(f"  pytest {place}")
    typer.echo(f"  attnplug explain --backend {names.backend}")


def _as_path(target: Path) -> str:
    """What pip takes for a folder: `attnplug-acme` alone would be a distribution of that name."""
    return str(target) if target.is_absolute() else f"./{target}"


def _refuse_taken(name: str, names: Names) -> None:
    """PolicyError where a backend, a family or a distribution of this name is here already."""
    from attnplug.registry.default import get_registry
    from attnplug.registry.discovery import RESERVED_NAMES

    remedy = "two backends of one name are a conflict: choose another"
    if names.backend in RESERVED_NAMES:
        raise PolicyError("NAME", name, f"is taken: {names.backend} is a name of attnplug's own", remedy)
    plugins = get_registry().plugins
    for taken in plugins.names:
        if taken.upper().replace("-", "_") == names.backend:
            raise PolicyError("NAME", name, f"is taken: the backend {taken} is installed", remedy)
    for record in plugins.records:
        if record.answers_to(names.distribution):
            raise PolicyError("NAME", name, f"is taken: {names.distribution} is installed", remedy)


def _write(target: Path, names: Names) -> list[str]:
    """Write the package to `target` in one step; the files' paths in it.

    Raises:
        PolicyError: `target` exists, or cannot be written.
    """
    rendered = _rendered(names)
    try:
        if target.exists() or target.is_symlink():
            remedy = "nothing is overwritten: move it away, or give another --path"
            raise PolicyError("target", str(target), "exists", remedy)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as beside:
            # One level down: the temporary folder itself is closed to other users.
            unfinished = Path(beside, target.name)
            for file, text in rendered.items():
                made = unfinished / file
                made.parent.mkdir(parents=True, exist_ok=True)
                made.write_text(text, encoding="utf-8", newline="\n")
            unfinished.rename(target)
    except OSError as problem:
        limit = f"cannot be written: {problem.strerror or problem}"
        raise PolicyError("target", str(target), limit) from problem
    return sorted(rendered)


def _rendered(names: Names) -> dict[str, str]:
    """The text of each file of the package, by its path in it."""
    known = dataclasses.asdict(names)
    known["attnplug_version"] = Version(version("attnplug")).public
    found = _templates(files("attnplug") / "templates" / "backend", PurePosixPath())
    rendered = {}
    for place, template in found.items():
        parts = [names.package if part == "package" else part for part in place.parts]
        file = PurePosixPath(*parts).as_posix().removesuffix(_SUFFIX)
        rendered[file] = Template(template.read_text(encoding="utf-8")).substitute(known)
    return rendered


def _templates(folder: Traversable, place: PurePosixPath) -> dict[PurePosixPath, Traversable]:
    found: dict[PurePosixPath, Traversable] = {}
    for entry in folder.iterdir():
        if entry.is_dir():
            found |= _templates(entry, place / entry.name)
        elif entry.name.endswith(_SUFFIX):
            found[place / entry.name] = entry
    return found
