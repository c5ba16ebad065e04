"""examples/plugins/attnplug-flex, built and installed as a third party's users would install it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from plugin_env import InstallPlugins, RunWithPlugins

SOURCE = Path(__file__).parents[2] / "examples" / "plugins" / "attnplug-flex"


@pytest.fixture
def run(run_with_plugins: RunWithPlugins) -> RunWithPlugins:
    def run_with_flex(command: str | list[str]) -> str:
        done = run_with_plugins([SOURCE], command)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    return run_with_flex


def test_the_list_names_its_distribution(run: RunWithPlugins) -> None:
    listed = json.loads(run(["-m", "attnplug", "list", "--json"]))["backends"]
    (flex,) = [each for each in listed if each["name"] == "FLEX"]
    assert {"distribution": "attnplug-flex", "device_types": ["cpu", "cuda"]}.items() <= flex.items()


def test_it_is_chosen_before_torch_unless_another_is_asked_for(run: RunWithPlugins) -> None:
    asked = ["-m", "attnplug", "explain", "--device", "cpu", "--json", "--soft-cap", "30", "--sinks"]
    assert json.loads(run(asked))["backend"] == "FLEX"
    assert json.loads(run([*asked, "--backend", "TORCH"]))["backend"] == "TORCH"


def test_it_is_explained_without_torch_and_its_options_reach_the_impl(run: RunWithPlugins) -> None:
    code = """
import sys, attnplug
spec = attnplug.LayerSpec(num_heads=4, num_kv_heads=2, head_size=64)
assert attnplug.explain(spec, "sm90", backend="FLEX").backend == "FLEX"
assert "torch" not in sys.modules
print(attnplug.select(spec, "sm90", backend="FLEX", options={"compile": True}).get_options())
"""
    assert run(code) == "FlexOptions(compile=True)\n"


@pytest.mark.slow  # `.ci/run` runs a share of `attnplug conformance FLEX` with the wheel
@pytest.mark.rare
def test_conformance_checks_pass(run: RunWithPlugins) -> None:
    door = ["-m", "pytest", "-q", "-p", "attnplug.testing.plugin", "-p", "no:cacheprovider", "-W", "error"]
    asked = [
        "--pyargs",
        "attnplug.testing.suite",
        "--attn-backend",
        "FLEX",
        "-k",
        "correct and mixed and sinks",
    ]
    out = run([*door, *asked])
    assert int(out.split(" passed")[0].split()[-1]) > 1, out


def test_the_wheel_holds_the_package_and_its_types_only(install_plugins: InstallPlugins) -> None:
    folder = install_plugins(SOURCE)
    package = SOURCE / "attnplug_flex"
    # A test that imported the package before this one left bytecode beside it.
    assert {path.name for path in (folder / "attnplug_flex").iterdir()} - {"__pycache__"} == {
        *(path.name for path in package.glob("*.py")),
        "py.typed",
    }
    assert not (folder / "tests").exists()


def test_it_imports_nothing_of_attnplug_but_its_public_modules() -> None:
    """What makes it a model: a third party has no more than this."""
    lines = [
        line.split()[1]
        for path in (SOURCE / "attnplug_flex").glob("*.py")
        for line in path.read_text().splitlines()
        if line.lstrip().startswith(("from attnplug", "import attnplug")) and "attnplug_flex" not in line
    ]
    assert set(lines) <= {
        "attnplug",
        "attnplug.core",
        "attnplug.errors",
        "attnplug.ops",
        "attnplug.ops.checks",
        "attnplug.ops.storage",
    }
    assert lines


def test_it_asks_for_the_oldest_torch_that_its_declaration_asks_for() -> None:
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    assert "torch>=2.9" in project["dependencies"]
    assert 'requires = ("torch>=2.9",)' in (SOURCE / "attnplug_flex" / "backend.py").read_text()
