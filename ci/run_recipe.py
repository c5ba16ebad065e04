"""Makes the environment of one recipe and runs the conformance kit in it, for one backend.

    python3.12 ci/run_recipe.py ci/recipes/cpu-py3.12-torch-2.13.toml --backend ACME --install ./attnplug-acme

With `--matrix DIR` the cells of the compatibility matrix are run as well, and written to DIR under the recipe's name.
The Python that runs this is the recipe's. Needs nothing but Python. The exit code is the kit's, or the matrix's where
the kit finds nothing, and 2 for bad usage or an environment that cannot be made.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from recipe import Recipe, RecipeError, find_recipes, known_failures_toml

__all__ = ["differences", "main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the recipe; gives the exit code."""
    given = _parser().parse_args(arguments)
    try:
        recipes = find_recipes(given.recipe)
        chosen = _this_environment(recipes) if given.use_current else _only(recipes)
        print(f"run_recipe: {chosen.path}: {chosen.summary}", flush=True)
        if given.matrix is not None:
            _make_folder(given.matrix)
        with tempfile.TemporaryDirectory(prefix="recipe-") as scratch:
            python = sys.executable
            if not given.use_current:
                python = _make(given.env or Path(scratch, "env"), [*chosen.requirements, *given.install])
            commands = [_kit(python, chosen, given.backend, given.level, Path(scratch))]
            if given.matrix is not None:
                commands.append(_cells(python, chosen, given.backend, given.matrix))
            # Elsewhere than here, so that what is installed is checked and not what lies in this folder.
            codes = [subprocess.run(command, cwd=scratch, check=False).returncode for command in commands]
            return next(filter(None, codes), 0)
    except RecipeError as problem:
        print(f"run_recipe: {problem}", file=sys.stderr)
        return 2


def differences(recipe: Recipe) -> list[str]:
    """The differences of this environment from the recipe, each as a sentence."""
    here = {"torch": recipe.torch, **recipe.libraries}
    found = [
        f"{name} is {installed or 'not installed'}, not {due}"
        for name, due in here.items()
        if (installed := _installed(name)) != due
    ]
    return [*_python_differs(recipe), *found]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="run_recipe", description="Run the conformance kit as a recipe says."
    )
    parser.add_argument("recipe", nargs="+", help="the recipe; with --use-current, those to choose from")
    parser.add_argument("--backend", required=True, metavar="NAME", help="the backend to check")
    parser.add_argument("--level", choices=("smoke", "full"), default="smoke", help="how much is tried")
    parser.add_argument(
        "--install",
        action="append",
        default=[],
        metavar="REQUIREMENT",
        help="the other requirements for pip: attnplug[testing], and the backend's package",
    )
    parser.add_argument(
        "--matrix",
        type=Path,
        metavar="DIR",
        help="run the cells of the compatibility matrix too, and write them to DIR/RECIPE.json",
    )
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--env", type=Path, metavar="DIR", help="a new folder for the environment, to be kept")
    place.add_argument(
        "--use-current",
        action="store_true",
        help="make no environment: run the recipe that describes this one, and fail if none does",
    )
    return parser


def _only(recipes: Sequence[Recipe]) -> Recipe:
    if len(recipes) != 1:
        names = ", ".join(recipe.name for recipe in recipes)
        raise RecipeError(f"an environment is made for one recipe, not for {len(recipes)}: {names}")
    (recipe,) = recipes
    for difference in _python_differs(recipe):
        raise RecipeError(f"{recipe.path}: {difference}; run this with python{recipe.python}")
    return recipe


def _this_environment(recipes: Sequence[Recipe]) -> Recipe:
    against = {recipe.name: differences(recipe) for recipe in recipes}
    for recipe in recipes:
        if not against[recipe.name]:
            return recipe
    told = "\n".join(f"  {name}: {'; '.join(found)}" for name, found in against.items())
    raise RecipeError(f"no recipe describes this environment:\n{told}")


def _python_differs(recipe: Recipe) -> list[str]:
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    return [] if here == recipe.python else [f"Python is {here}, not {recipe.python}"]


def _installed(distribution: str) -> str | None:
    try:
        # "+cpu" and the like say how it was built, not what it is.
        return version(distribution).partition("+")[0]
    except PackageNotFoundError:
        return None


def _make(folder: Path, requirements: Sequence[str]) -> str:
    """A new environment with everything installed in one step, so that pip honours all versions at once."""
    if folder.exists():
        raise RecipeError(f"--env {folder}: exists; an environment is made in a new folder")
    print(f"run_recipe: installing {' '.join(requirements)}", flush=True)
    venv.create(folder, with_pip=True)
    python = folder.absolute() / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    if subprocess.run([python, "-m", "pip", "install", "--quiet", *requirements], check=False).returncode:
        raise RecipeError(f"pip cannot install {' '.join(requirements)}")
    return str(python)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise RecipeError(f"--matrix {folder}: cannot be made: {problem.strerror}") from None


def _kit(python: str, recipe: Recipe, backend: str, level: str, scratch: Path) -> list[str]:
    command = [python, "-m", "attnplug", "conformance", backend]
    command += ["--device", recipe.device, "--level", level]
    known = recipe.known_failures.get(backend.partition("@")[0])
    if known:
        file = scratch / "known_failures.toml"
        file.write_text(known_failures_toml(known), encoding="utf-8")
        command += ["--known-failures", str(file)]
    return command


def _cells(python: str, recipe: Recipe, backend: str, folder: Path) -> list[str]:
    command = [python, "-m", "attnplug", "matrix", "--verify", "--backend", backend]
    return [*command, "--device", recipe.device, "--json", str(folder.absolute() / f"{recipe.name}.json")]


if __name__ == "__main__":
    sys.exit(main())
