"""The plugins under tests/plugins are real distributions; the tests of the registry stand on this."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from plugin_env import PLUGINS, InstallPlugins, RunWithPlugins, distribution_names

ENTRY_POINTS = """
import json
from importlib.metadata import entry_points
print(json.dumps({e.dist.name: [e.name, e.value] for e in entry_points(group="attnplug.backends")}))
"""
GOOD = ["attnplug-acme-decode", "attnplug-acme-sm80"]
OFFER = """
import importlib, sys
module = importlib.import_module(sys.argv[1])
for backend in module.attnplug_backends():
    print(backend.get_name())
print("torch" in sys.modules)
"""


@pytest.mark.parametrize("name", distribution_names())
def test_every_distribution_builds_into_one_wheel_of_python_alone(
    name: str, plugin_wheels: dict[str, Path]
) -> None:
    with zipfile.ZipFile(plugin_wheels[name]) as wheel:
        folders = {Path(entry).parts[0] for entry in wheel.namelist()}
    module = name.replace("-", "_")
    assert folders == {module, f"{module}-0.1.0.dist-info"}


def test_every_entry_point_is_seen_from_the_scratch_folder_and_names_a_module(
    run_with_plugins: RunWithPlugins,
) -> None:
    seen = json.loads(run_with_plugins(distribution_names(), ENTRY_POINTS).stdout)
    seen.pop("attnplug", None)
    expected = {
        name: [name.removeprefix("attnplug-"), name.replace("-", "_")] for name in distribution_names()
    }
    assert seen == expected


def test_only_the_distributions_asked_for_are_seen(run_with_plugins: RunWithPlugins) -> None:
    seen = json.loads(run_with_plugins(GOOD[:1], ENTRY_POINTS).stdout)
    assert set(seen) - {"attnplug"} == {GOOD[0]}


@pytest.mark.parametrize("name", GOOD)
def test_the_good_plugins_offer_a_backend_without_importing_torch(
    name: str, run_with_plugins: RunWithPlugins
) -> None:
    module = name.replace("-", "_")
    done = run_with_plugins([name], ["-c", OFFER, module])
    assert done.stdout.split() == [module.removeprefix("attnplug_").upper(), "False"], done.stderr


def test_switches_of_the_surrounding_shell_do_not_reach_the_child(
    run_with_plugins: RunWithPlugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNPLUG_STRICT", "1")
    code = "import os; print(sorted(name for name in os.environ if name.startswith('ATTNPLUG_')))"
    assert run_with_plugins([], code).stdout.strip() == "[]"
    assert run_with_plugins([], code, env={"ATTNPLUG_PLUGINS": ""}).stdout.strip() == "['ATTNPLUG_PLUGINS']"


def test_a_set_of_plugins_is_installed_once(install_plugins: InstallPlugins) -> None:
    assert install_plugins(*GOOD) == install_plugins(*reversed(GOOD))


def test_an_unknown_plugin_is_an_error_that_lists_those_there_are(install_plugins: InstallPlugins) -> None:
    with pytest.raises(
        ValueError, match="no such test plugin: attnplug-acme; there are attnplug-acme-decode"
    ):
        install_plugins("attnplug-acme")


def test_the_readme_has_one_line_for_each_distribution() -> None:
    lines = (PLUGINS / "README.md").read_text(encoding="utf-8").splitlines()
    rows = [line.split("|")[1].strip().strip("`") for line in lines if line.startswith("| `attnplug-")]
    assert sorted(rows) == distribution_names()
