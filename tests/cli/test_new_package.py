"""`new-backend` and `new-format`: what they write works as it is, and never replaces what is in the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import yaml

from attnplug.cli.commands.new_package import ATTNPLUG_SOURCE

FILES = [
    ".github/workflows/ci.yml",
    ".gitignore",
    "README.md",
    "attnplug_acme/__init__.py",
    "attnplug_acme/backend.py",
    "attnplug_acme/builder.py",
    "attnplug_acme/impl.py",
    "pyproject.toml",
    "tests/test_conformance.py",
    "tests/test_selection.py",
]
FORMAT_FILES = [
    ".github/workflows/ci.yml",
    ".gitignore",
    "README.md",
    "attnplug_acme/__init__.py",
    "attnplug_acme/codec.py",
    "pyproject.toml",
    "tests/test_format.py",
]
COMMANDS = pytest.mark.parametrize("command", ["new-backend", "new-format"])
LONGEST = "abcdefghijklmnopqrstuvwx"


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_it_writes_a_package_and_says_what_comes_next(run, tmp_path: Path) -> None:
    outcome = run("new-backend", "acme", "--path", tmp_path / "build")
    package = tmp_path / "build" / "attnplug-acme"
    assert outcome.code == 0
    assert files(tmp_path / "build") == [f"attnplug-acme/{file}" for file in FILES]
    assert all(f"  {file}\n" in outcome.out for file in FILES)
    assert [line.strip() for line in outcome.out.partition("Next:")[2].splitlines() if line[:1] == " "] == [
        f"pip install -e '{package}[test]'",
        f"pytest {package}",
        "attnplug explain --backend ACME",
        f"pip wheel --no-deps -w {package}/wheels .",
    ]
    assert not [
        file for file in FILES if "$" in (package / file).read_text().replace("${{ matrix.python }}", "")
    ]


def test_a_format_is_written_in_the_same_way(run, tmp_path: Path) -> None:
    outcome = run("new-format", "acme", "--path", tmp_path)
    package = tmp_path / "attnplug-acme"
    assert outcome.code == 0
    assert files(package) == FORMAT_FILES
    assert "the KV format acme, of 6 bits until you change its bytes" in outcome.out
    assert "attnplug conformance --format acme\n" in outcome.out
    assert "$" not in "".join((package / file).read_text() for file in FORMAT_FILES[1:])


@pytest.mark.parametrize("name", ["codec", "auto", "float8-rows"])
def test_a_name_that_no_format_can_have_is_refused(name: str, run, tmp_path: Path) -> None:
    outcome = run("new-format", name, "--path", tmp_path)
    assert outcome.code == 2
    assert f"attnplug reads {name.replace('-', '_')} in another way" in outcome.err


@pytest.mark.parametrize("name", ["nvfp4", "FP8", "fp8-e4m3"])
def test_a_name_that_a_format_has_is_refused(name: str, run, tmp_path: Path) -> None:
    outcome = run("new-format", name, "--path", tmp_path)
    assert outcome.code == 2
    taken = name.lower().replace("-", "_")
    assert f"NAME={name!r} is taken: the KV format {taken} is installed; choose another name" in outcome.err
    assert list(tmp_path.iterdir()) == []


@COMMANDS
def test_its_help_fits_80_columns(command: str, run) -> None:
    outcome = run(command, "--help")
    assert outcome.code == 0
    assert max(map(len, outcome.out.splitlines())) <= 80


def test_a_relative_folder_is_one_that_pip_does_not_take_for_a_name(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "pip install -e './attnplug-acme[test]'" in run("new-backend", "acme").out


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("acme", ("attnplug-acme", "attnplug_acme", "acme", "ACME", "Acme")),
        (
            "Acme-Sparse_2",
            (
                "attnplug-acme-sparse-2",
                "attnplug_acme_sparse_2",
                "acme-sparse-2",
                "ACME_SPARSE_2",
                "AcmeSparse2",
            ),
        ),
    ],
)
def test_every_name_follows_from_the_one_given(
    name: str, expected: tuple[str, ...], run, tmp_path: Path
) -> None:
    data = run("new-backend", name, "--path", tmp_path, "--json").json
    assert (
        data["distribution"],
        data["package"],
        data["entry_point"],
        data["backend"],
        data["prefix"],
    ) == expected
    project = tomllib.loads((tmp_path / expected[0] / "pyproject.toml").read_text())["project"]
    assert project["name"] == expected[0]
    assert project["entry-points"]["attnplug.backends"] == {expected[2]: expected[1]}
    assert f"class {expected[4]}Backend(" in (tmp_path / expected[0] / expected[1] / "backend.py").read_text()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "must begin with a letter"),
        ("2fast", "must begin with a letter"),
        ("ac me", "must begin with a letter"),
        ("acme-", "must begin with a letter"),
        ("../acme", "must begin with a letter"),
        ("acme\n", "must begin with a letter"),
        ("café", "must begin with a letter"),
        ("attnplug-acme", "must not begin with attnplug; the command adds that prefix"),
        ("class", "is a Python keyword or module"),
        ("match", "is a Python keyword or module"),
        ("queue", "is a Python keyword or module"),
        (f"{LONGEST}x", "must have at most 24 characters"),
        ("torch", "is taken: TORCH is reserved by attnplug"),
        ("Flash-Attn", "is taken: FLASH_ATTN is reserved by attnplug"),
    ],
)
def test_a_name_that_cannot_be_is_refused_with_the_reason(name: str, why: str, run, tmp_path: Path) -> None:
    outcome = run("new-backend", "--path", tmp_path / "build", "--", name)
    assert outcome.code == 2
    assert outcome.err.startswith(f"attnplug: NAME={name!r} {why}")
    assert not (tmp_path / "build").exists()


@pytest.mark.parametrize(
    ("name", "why"),
    [("acme-sm80", "the backend ACME_SM80 is installed"), ("bad-import", "attnplug-bad-import is installed")],
)
def test_a_name_that_an_installed_package_has_is_refused(
    name: str, why: str, run_with_plugins, tmp_path: Path
) -> None:
    plugins = ["attnplug-acme-sm80", "attnplug-bad-import"]
    done = run_with_plugins(
        plugins, ["-m", "attnplug", "new-backend", name, "--path", str(tmp_path / "build")]
    )
    assert done.returncode == 2
    assert why in done.stderr
    assert not (tmp_path / "build").exists()


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_what_stands_where_it_would_write_is_left_alone(kind: str, run, tmp_path: Path) -> None:
    target = tmp_path / "attnplug-acme"
    if kind == "folder":
        target.mkdir()
    elif kind == "file":
        target.write_text("mine")
    else:
        target.symlink_to(tmp_path / "nowhere")
    before = target.lstat().st_ino
    outcome = run("new-backend", "acme", "--path", tmp_path)
    assert outcome.code == 2
    assert f"target={str(target)!r} exists; nothing is overwritten" in outcome.err
    assert target.lstat().st_ino == before
    assert [path.name for path in tmp_path.iterdir()] == ["attnplug-acme"]


def test_a_folder_that_is_none_cannot_be_written_to(run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    outcome = run("new-backend", "acme", "--path", tmp_path / "file")
    assert outcome.code == 2
    assert "cannot be written: " in outcome.err
    assert (tmp_path / "file").read_text() == "mine"


def test_nothing_half_written_is_left_behind(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_text

    def fails_in_the_middle(path: Path, *arguments: Any, **options: Any) -> int:
        if path.name == "pyproject.toml":
            raise OSError(28, "No space left on device")
        return write(path, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", fails_in_the_middle)
    outcome = run("new-backend", "acme", "--path", tmp_path)
    assert outcome.code == 2
    assert "cannot be written: No space left on device" in outcome.err
    assert list(tmp_path.iterdir()) == []


@COMMANDS
@pytest.mark.parametrize("name", ["a", "a-b_c", LONGEST])
def test_what_it_writes_passes_its_own_lint_whatever_it_is_called(
    name: str, command: str, run, tmp_path: Path
) -> None:
    package = Path(run(command, name, "--path", tmp_path, "--json").json["path"])
    for check in (["format", "--check"], ["check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *check, "--no-cache"],
            cwd=package,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("command", "listed"), [("new-backend", FILES), ("new-format", FORMAT_FILES)])
def test_its_workflow_runs_what_its_readme_says(command: str, listed: list[str], run, tmp_path: Path) -> None:
    package = Path(run(command, "acme", "--path", tmp_path, "--json").json["path"])
    workflow = yaml.safe_load((package / ".github/workflows/ci.yml").read_text())
    steps = [step["run"] for step in workflow["jobs"]["check"]["steps"] if "run" in step]
    install = f"pip install {ATTNPLUG_SOURCE} -e '.[test]'"
    assert steps == [install, "ruff format --check && ruff check", "mypy", "pytest"]
    readme = (package / "README.md").read_text()
    unmentioned = {file for file in listed if f"`{file}`" not in readme}
    assert unmentioned - {"pyproject.toml"} == {".gitignore", "README.md"}
    assert f"installs attnplug from `{ATTNPLUG_SOURCE}`" in readme


def test_with_a_release_it_is_installed_by_name(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The module of this name in the package is hidden by the function.
    command = sys.modules["attnplug.cli.commands.new_package"]
    monkeypatch.setattr(command, "ATTNPLUG_SOURCE", "attnplug")
    assert "wheel" not in run("new-backend", "acme", "--path", tmp_path).out
    assert "pip install attnplug -e" in (tmp_path / "attnplug-acme/.github/workflows/ci.yml").read_text()


class Installed:
    """A generated package, installed into a folder of its own that children see."""

    def __init__(self, folder: Path, command: str = "new-backend") -> None:
        self.source = folder / "attnplug-acme"
        self._path = folder / "site"
        self.python("-m", "attnplug", command, "acme", "--path", str(folder), seen=False)
        options = ["--isolated", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
        self.python(
            "-m", "pip", "install", *options, "--target", str(self._path), str(self.source), seen=False
        )

    def python(self, *arguments: str, seen: bool = True, code: int = 0) -> str:
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("ATTNPLUG_", "PYTEST"))
        }
        done = subprocess.run(
            [sys.executable, *arguments],
            env={**kept, **({"PYTHONPATH": str(self._path)} if seen else {}), "COLUMNS": "80"},
            cwd=self.source if self.source.exists() else None,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, f"{arguments}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("acme"))


def test_the_package_is_not_installed_here() -> None:
    assert "acme" not in entry_points(group="attnplug.backends").names


def test_once_installed_it_is_listed_and_chosen_by_name_and_by_default(acme: Installed) -> None:
    listed = json.loads(acme.python("-m", "attnplug", "list", "--json"))
    (listing,) = (each for each in listed["backends"] if each["name"] == "ACME")
    assert listing["distribution"] == "attnplug-acme"
    for choice in ([], ["--backend", "ACME"]):
        found = json.loads(acme.python("-m", "attnplug", "explain", "--device", "cpu", "--json", *choice))
        assert found["backend"] == "ACME"


def test_listing_it_imports_no_torch(acme: Installed) -> None:
    code = "import sys, attnplug; print(list(attnplug.list_backends()), 'torch' in sys.modules)"
    names, imports_torch = acme.python("-c", code).rsplit(maxsplit=1)
    assert ("'ACME'" in names, imports_torch) == (True, "False")


@pytest.mark.slow
@pytest.mark.rare
def test_its_own_tests_pass(acme: Installed) -> None:
    out = acme.python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "selection or decode or extend")
    assert int(out.split()[-4]) > 5, out


@pytest.mark.slow
@pytest.mark.rare
def test_its_types_are_strict(acme: Installed) -> None:
    acme.python("-m", "mypy", "--cache-dir", os.devnull)


@pytest.mark.slow
@pytest.mark.rare
def test_the_whole_kit_passes_on_it(acme: Installed) -> None:
    out = acme.python("-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert "failed" not in out.splitlines()[-1]


@pytest.mark.slow
def test_a_new_format_is_proven_and_its_types_are_strict(tmp_path: Path) -> None:
    written = Installed(tmp_path, "new-format")
    listed = json.loads(
        written.python("-m", "attnplug", "explain", "--device", "cpu", "--kv-cache-dtype", "acme", "--json")
    )
    assert listed["backend"] == "TORCH"
    out = written.python("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider")
    *_, skipped, last = out.splitlines()
    assert last.startswith("21 passed, 1 skipped")
    assert skipped.endswith("acme turns no rows")
    written.python("-m", "mypy", "--cache-dir", os.devnull)
