"""Recipes: each is valid and says what is true, and is run as it says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import run_recipe
from recipe import Recipe, RecipeError, find_recipes, known_failures_toml
from recipe import main as print_matrix

from attnplug.testing.conformance.check_filter import read_known_failures

ROOT = Path(__file__).parents[2]
RECIPES = find_recipes([str(ROOT / "ci/recipes/*.toml")])
GOOD = """
summary = "one"
python = "3.12"
torch = "2.13.0"
device = "cpu"
runner = ["ubuntu-latest"]
"""
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to_file(text: str = GOOD, name: str = "row.toml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return to_file


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipe_is_named_after_what_it_says(recipe: Recipe) -> None:
    kind = "cpu" if recipe.device == "cpu" else "gpu"
    series = ".".join(recipe.torch.split(".")[:2])
    assert recipe.name == f"{kind}-py{recipe.python}-torch-{series}"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipe_asks_for_versions_that_attnplug_allows(recipe: Recipe) -> None:
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    allowed = [
        Requirement(text) for text in [*project["dependencies"], *extras["testing"], *extras["triton"]]
    ]
    by_name = {requirement.name: requirement.specifier for requirement in allowed}
    for name, version in {"torch": recipe.torch, **recipe.libraries}.items():
        assert version in by_name[name], f"{name} {version} is not {by_name[name]}"


def test_the_oldest_versions_that_attnplug_allows_have_a_recipe() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lowest = dict(
        re.findall(r'"([a-z-]+)>=([\d.]+)', "".join(f'"{text}"' for text in project["dependencies"]))
    )
    (oldest,) = [recipe for recipe in RECIPES if "oldest" in recipe.summary]
    assert oldest.python == project["requires-python"].removeprefix(">=")
    for name, version in {"torch": oldest.torch, **oldest.libraries}.items():
        if name in lowest:
            assert f"{version}.0".startswith(f"{lowest.pop(name)}.0"), name
    assert lowest == {}


def test_the_example_in_the_readme_is_a_recipe(write: Write) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", (ROOT / "ci/recipes/README.md").read_text(), re.DOTALL)
    recipe = Recipe.read(write(example))
    assert recipe.requirements == ["torch==2.13.0", "triton==3.7.1"]
    assert recipe.known_failures == {"ACME": {"correct/decode-*": "acme-kernels#12"}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("3.12", "3.12.1"), "python is '3.12.1'; it must be a version as \"3.12\""),
        (('"2.13.0"', "2.13"), 'torch is 2.13; it must be a version as "2.13.0"'),
        (("2.13.0", ">=2.9"), "torch is '>=2.9'; it must be a version"),
        (('device = "cpu"', ""), "device is missing; it must be one of cpu, cuda, rocm, xpu"),
        (('"cpu"', '"gpu"'), "device is 'gpu'; it must be one of"),
        (('["ubuntu-latest"]', '"ubuntu-latest"'), "runner is 'ubuntu-latest'; it must be a list"),
        (('["ubuntu-latest"]', "[]"), "runner is []; it must be a list"),
        (('"one"', '" "'), "summary is ' '; it must be a line of text"),
        (("summary", "sumary"), "sumary is no key of a recipe; keys are summary, python,"),
        (("summary", "path"), "path is no key of a recipe"),
        (
            ('["ubuntu-latest"]', '["x"]\n[libraries]\ntorch = "2.9.0"'),
            "libraries is {'torch': '2.9.0'}; it must",
        ),
        (('["ubuntu-latest"]', '["x"]\n[libraries]\nnumpy = 2'), "libraries is {'numpy': 2}; it must"),
        (
            ('["ubuntu-latest"]', '["x"]\n[known_failures]\n"a" = "b"'),
            "known_failures is {'a': 'b'}; it must",
        ),
        (
            ('["ubuntu-latest"]', '["x"]\n[known_failures.TORCH]\n"a" = " "'),
            "known_failures is {'TORCH': {'a': ' '}}",
        ),
        (("summary", "= summary"), "cannot be read: "),
    ],
)
def test_a_recipe_that_means_nothing_is_refused_with_file_key_and_limit(
    change: tuple[str, str], message: str, write: Write
) -> None:
    path = write(GOOD.replace(*change))
    with pytest.raises(RecipeError) as refused:
        Recipe.read(path)
    assert str(refused.value).startswith(f"{path}: {message}")


def test_a_glob_that_matches_no_recipe_is_an_error_and_prints_no_empty_matrix(
    capsys: pytest.CaptureFixture[str], write: Write
) -> None:
    path = write(name="row.txt")
    assert print_matrix([str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"{path}: matches no recipe" in printed.err


def test_the_matrix_has_one_job_for_each_recipe(capsys: pytest.CaptureFixture[str], write: Write) -> None:
    path = write()
    assert print_matrix([str(path), str(path.parent / "*.toml")]) == 0
    row = {"name": "row", "recipe": path.as_posix(), "python": "3.12", "runner": ["ubuntu-latest"]}
    assert json.loads(capsys.readouterr().out) == {"include": [row]}


def test_the_kit_reads_the_failures_known_as_they_were_written(write: Write) -> None:
    known = {"correct/decode-*": 'not "yet"', "layout/a.b": "a\\b \x7f é"}
    path = write(known_failures_toml(known))
    assert read_known_failures(path) == known


class TestRunning:
    """run_recipe, with the kit and pip left out."""

    @pytest.fixture
    def commands(self, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
        """Every command it would run; `pip` and the kit both end with 0."""
        found: list[list[str]] = []

        def ran(command: list[Any], **options: Any) -> subprocess.CompletedProcess[str]:
            found.append([str(part) for part in command])
            if "--known-failures" in command:
                found.append([Path(command[-1]).read_text()])
            return subprocess.CompletedProcess(command, 0)

        monkeypatch.setattr(subprocess, "run", ran)
        monkeypatch.setattr("venv.create", lambda folder, with_pip: None)
        return found

    def here(self, **libraries: str) -> str:
        from importlib.metadata import version

        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        text = GOOD.replace("3.12", python).replace("2.13.0", version("torch").partition("+")[0])
        return f"{text}[libraries]\n" + "".join(f'{name} = "{found}"\n' for name, found in libraries.items())

    def test_the_recipe_that_describes_this_environment_is_run_in_it(
        self, write: Write, commands: list[list[str]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        write(self.here(numpy="1.0"), "other.toml")
        path = write(self.here() + '[known_failures.ACME]\n"x" = "why"\n')
        given = [str(path.parent / "*.toml"), "--use-current", "--backend", "ACME@attnplug-acme"]
        assert run_recipe.main([*given, "--level", "full"]) == 0
        assert f"{path}: one" in capsys.readouterr().out
        kit, known = commands
        asked = "attnplug conformance ACME@attnplug-acme --device cpu --level full --known-failures"
        assert kit[:-1] == [sys.executable, "-m", *asked.split()]
        assert known == ['[known_failures]\n"x" = "why"\n']

    def test_no_recipe_for_this_environment_is_an_error_that_says_how_each_differs(
        self, write: Write, commands: list[list[str]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        write(self.here(numpy="1.0", nonesuch="2"), "a.toml")
        path = write(self.here().replace(f"3.{sys.version_info.minor}", "3.99"), "b.toml")
        assert run_recipe.main([str(path.parent / "*.toml"), "--use-current", "--backend", "TORCH"]) == 2
        told = capsys.readouterr().err
        assert re.search(
            r"  a: numpy is [\d.]+, not 1.0; nonesuch is not installed, not 2$", told, re.MULTILINE
        )
        assert re.search(r"  b: Python is 3.\d+, not 3.99$", told, re.MULTILINE)
        assert commands == []

    def test_an_environment_is_made_in_one_step_and_the_kit_is_run_by_its_python(
        self, write: Write, commands: list[list[str]], tmp_path: Path
    ) -> None:
        path = write(self.here(numpy="1.26.0"))
        given = ["--env", str(tmp_path / "env"), "--install", ".[testing]", "--install", "./acme"]
        assert run_recipe.main([str(path), "--backend", "ACME", *given]) == 0
        pip, kit = commands
        assert pip[0] == kit[0] == str(tmp_path / "env/bin/python")
        assert pip[1:5] == ["-m", "pip", "install", "--quiet"]
        assert pip[5].startswith("torch==")
        assert pip[6:] == ["numpy==1.26.0", ".[testing]", "./acme"]
        assert "--known-failures" not in kit

    def test_the_cells_of_the_matrix_are_run_in_the_same_environment_and_written_under_the_recipes_name(
        self, write: Write, commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        path = write(self.here())
        given = ["--use-current", "--backend", "ACME@attnplug-acme", "--matrix", "new/rows"]
        assert run_recipe.main([str(path), *given]) == 0
        kit, cells = commands
        asked = "attnplug matrix --verify --backend ACME@attnplug-acme --device cpu --json"
        assert kit[2:4] == ["attnplug", "conformance"]
        assert cells == [sys.executable, "-m", *asked.split(), str(tmp_path / "new/rows/row.json")]
        assert (tmp_path / "new/rows").is_dir()

    @pytest.mark.parametrize(("kit", "cells", "code"), [(0, 4, 4), (1, 0, 1), (1, 4, 1), (2, 2, 2)])
    def test_the_cells_are_run_though_the_kit_fails_and_the_first_failure_is_the_exit_code(
        self, kit: int, cells: int, code: int, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        codes = [kit, cells]
        ended = subprocess.CompletedProcess[str]
        monkeypatch.setattr(subprocess, "run", lambda command, **options: ended(command, codes.pop(0)))
        given = ["--use-current", "--backend", "ACME", "--matrix", str(tmp_path)]
        assert run_recipe.main([str(write(self.here())), *given]) == code
        assert codes == []

    @pytest.mark.parametrize("wrong", ["python", "two", "env", "pip", "matrix"])
    def test_what_keeps_it_from_making_the_environment_is_one_line_and_exit_code_2(
        self,
        wrong: str,
        write: Write,
        commands: list[list[str]],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        text, more = self.here(), []
        if wrong == "python":
            text = text.replace(f"3.{sys.version_info.minor}", "3.99")
        elif wrong == "two":
            more = [str(write(text, "second.toml"))]
        elif wrong == "env":
            more = ["--env", str(tmp_path)]
        elif wrong == "matrix":
            more = ["--matrix", str(write("", "rows.txt"))]
        else:
            fails = subprocess.CompletedProcess[str]([], 1)
            monkeypatch.setattr(subprocess, "run", lambda *command, **options: fails)
        assert run_recipe.main([str(write(text)), *more, "--backend", "TORCH"]) == 2
        expected = {
            "python": "run this with python3.99",
            "two": "an environment is made for one recipe, not for 2: row, second",
            "env": "exists; an environment is made in a new folder",
            "pip": "pip cannot install torch==",
            "matrix": "rows.txt: cannot be made: File exists",
        }
        assert expected[wrong] in capsys.readouterr().err
        assert commands == []


@pytest.mark.slow
@pytest.mark.rare
def test_a_failure_that_is_known_and_does_not_happen_fails_the_row(tmp_path: Path) -> None:
    text = TestRunning().here() + '[known_failures.TORCH]\n"correct/one-*" = "never true"\n'
    path = tmp_path / "row.toml"
    path.write_text(text)
    command = [
        sys.executable,
        str(ROOT / "ci/run_recipe.py"),
        str(path),
        "--use-current",
        "--backend",
        "TORCH",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "never true" in done.stdout
