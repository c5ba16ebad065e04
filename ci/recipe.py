"""Recipes: one environment each, where backends are checked, and the failures known there.

Run as `python ci/recipe.py GLOB...` it prints the rows of a GitHub Actions matrix as JSON. Needs nothing but
Python: it also runs where the environment of a recipe is yet to be made. `ci/recipes/README.md` has the schema.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["Recipe", "RecipeError", "find_recipes", "known_failures_toml", "matrix"]

_VERSION = re.compile(r"\d+(\.\w+)*")
_DEVICES = ("cpu", "cuda", "rocm", "xpu")


class RecipeError(ValueError):
    """A recipe that means nothing: the file, the key, what was found and what is due."""


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """One row: Python x torch x library versions.

    Args:
        path: the file.
        summary: one line for people.
        python: as "3.12".
        torch: as "2.13.0".
        device: what the kit runs on.
        runner: labels of the GitHub Actions runner.
        libraries: version by distribution, of the other distributions that matter.
        known_failures: for each backend, why a check fails by its id or a pattern of ids.
    """

    path: Path
    summary: str
    python: str
    torch: str
    device: str
    runner: tuple[str, ...]
    libraries: Mapping[str, str]
    known_failures: Mapping[str, Mapping[str, str]]

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return self.path.stem

    @property
    def requirements(self) -> list[str]:
        """The requirements that pip must install, in these versions alone."""
        return [f"torch=={self.torch}", *(f"{name}=={version}" for name, version in self.libraries.items())]

    @classmethod
    def read(cls, path: Path) -> Recipe:
        """The recipe in a TOML file.

        Raises:
            RecipeError: a file that cannot be read, has no valid TOML, or has a key missing, unknown or of no meaning.
        """
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
            raise RecipeError(f"{path}: cannot be read: {problem}") from None
        return cls(path=path, **_checked(path, data))


def find_recipes(patterns: Iterable[str]) -> list[Recipe]:
    """The recipes that the globs match, sorted by path; RecipeError for a glob that matches none."""
    paths: set[Path] = set()
    for pattern in patterns:
        names = glob.glob(pattern, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
        found = [Path(name) for name in names if name.endswith(".toml")]
        if not found:
            raise RecipeError(f"{pattern}: matches no recipe, which is a file that ends in .toml")
        paths.update(found)
    return [Recipe.read(path) for path in sorted(paths)]


def matrix(recipes: Iterable[Recipe]) -> dict[str, list[dict[str, Any]]]:
    """The `strategy.matrix` of GitHub Actions with one job for each recipe."""
    rows = [
        {
            "name": recipe.name,
            "recipe": recipe.path.as_posix(),
            "python": recipe.python,
            "runner": [*recipe.runner],
        }
        for recipe in recipes
    ]
    return {"include": rows}


def known_failures_toml(known: Mapping[str, str]) -> str:
    """The failures known of one backend as the kit's `--known-failures` takes them."""
    lines = [f"{_toml_string(check)} = {_toml_string(reason)}" for check, reason in known.items()]
    return "\n".join(["[known_failures]", *lines, ""])


def _toml_string(text: str) -> str:
    # JSON escapes as TOML does, but for the one control character that JSON does not count as one.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _checked(path: Path, data: Mapping[str, Any]) -> dict[str, Any]:
    def need(fits: bool, key: str, due: str) -> None:
        if not fits:
            found = repr(data[key]) if key in data else "missing"
            raise RecipeError(f"{path}: {key} is {found}; it must be {due}")

    known = [field.name for field in dataclasses.fields(Recipe) if field.name != "path"]
    for key in data:
        if key not in known:
            raise RecipeError(f"{path}: {key} is no key of a recipe; keys are {', '.join(known)}")
    need(_is_text(data.get("summary")), "summary", "a line of text")
    python = data.get("python")
    need(isinstance(python, str) and bool(re.fullmatch(r"3\.\d+", python)), "python", 'a version as "3.12"')
    need(_is_version(data.get("torch")), "torch", 'a version as "2.13.0"')
    need(data.get("device") in _DEVICES, "device", f"one of {', '.join(_DEVICES)}")
    runner = data.get("runner")
    is_list = isinstance(runner, list) and bool(runner) and all(map(_is_text, runner))
    need(is_list, "runner", "a list of the runner's labels")
    libraries = data.get("libraries", {})
    is_table = isinstance(libraries, dict) and all(map(_is_version, libraries.values()))
    need(
        is_table and "torch" not in libraries, "libraries", "a table of version by distribution, torch apart"
    )
    failures = data.get("known_failures", {})
    is_table = isinstance(failures, dict) and all(map(_is_reasons, failures.values()))
    need(is_table, "known_failures", "tables [known_failures.BACKEND] of reason by check id")
    return {"libraries": {}, "known_failures": {}, **data, "runner": tuple(runner or ())}


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_version(value: object) -> bool:
    return isinstance(value, str) and bool(_VERSION.fullmatch(value))


def _is_reasons(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value)) and all(map(_is_text, value.values()))


def main(patterns: list[str]) -> int:
    """Print the matrix; exit code 2 for a recipe or glob that means nothing."""
    try:
        print(json.dumps(matrix(find_recipes(patterns))))
    except RecipeError as problem:
        print(f"recipe: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
