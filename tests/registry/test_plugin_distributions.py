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
# What each bad module does, seen from outside attnplug; opening a door is not part of it.
EXAMINE = """
import importlib, json, sys
from attnplug import AttentionBackend, Device, LayerSpec
spec = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype="float32")

def answer(call, *arguments):
    try:
        return call(*arguments)
    except Exception as error:
        return type(error).__name__

def examine(name):
    try:
        module = importlib.import_module(name)
    except (ImportError, SystemExit) as error:
        return {"raises": type(error).__name__}
    hooks = [key for key in vars(module) if key.startswith("attnplug_")]
    offered = getattr(module, hooks[0])()
    found = {"api": getattr(module, "ATTNPLUG_API", None), "hooks": hooks, "offers": offered}
    if isinstance(offered, list):
        (backend,) = offered
        found["offers"] = backend.get_name()
        found["is_backend"] = issubclass(backend, AttentionBackend)
    if found.get("is_backend"):
        found["refuses"] = answer(backend.validate_configuration, spec, Device("cpu"))
    return found

print(json.dumps({name: examine(name) for name in sys.argv[1:]}))
"""
LOOKS_SOUND = {
    "attnplug-bad-aborts",
    "attnplug-bad-door-hangs",
    "attnplug-bad-kernels",
    "attnplug-bad-liar",
    "attnplug-bad-missing-symbol",
    "attnplug-bad-imports-torch",
}
WRONG: dict[str, dict[str, object]] = {
    "attnplug-bad-api-range": {"api": [97, 99]},
    "attnplug-bad-future-hook": {"hooks": ["attnplug_backends", "attnplug_rank"]},
    "attnplug-bad-misspelt": {"hooks": ["attnplug_backend"]},
    "attnplug-bad-no-api": {"api": None},
    "attnplug-bad-not-a-backend": {"is_backend": False},
    "attnplug-bad-not-a-sequence": {"offers": 1},
    "attnplug-bad-raises": {"refuses": "RuntimeError"},
    "attnplug-bad-ranks": {"hooks": ["attnplug_backends", "attnplug_rank"]},
    "attnplug-bad-returns-string": {"refuses": "layer not supported on Tuesdays"},
    "attnplug-bad-squats-torch": {"offers": "TORCH"},
    "attnplug-bad-twin-a": {"offers": "TWIN"},
    "attnplug-bad-twin-b": {"offers": "TWIN"},
}


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


def test_one_bad_plugin_imports_torch_to_say_what_it_offers(run_with_plugins: RunWithPlugins) -> None:
    done = run_with_plugins(["attnplug-bad-imports-torch"], ["-c", OFFER, "attnplug_bad_imports_torch"])
    assert done.stdout.split() == ["BAD_IMPORTS_TORCH", "True"], done.stderr


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


def test_each_bad_plugin_does_one_thing_wrong_and_is_sound_but_for_that(
    run_with_plugins: RunWithPlugins,
) -> None:
    names = sorted(LOOKS_SOUND.union(WRONG))
    done = run_with_plugins(names, ["-c", EXAMINE, *(name.replace("-", "_") for name in names)])
    found = json.loads(done.stdout)
    for name in names:
        offers = name.removeprefix("attnplug-").upper().replace("-", "_")
        sound = {
            "api": [1, 1],
            "hooks": ["attnplug_backends"],
            "offers": offers,
            "is_backend": True,
            "refuses": [],
        }
        assert {**sound, **found[name.replace("-", "_")]} == {**sound, **WRONG.get(name, {})}, name


@pytest.mark.parametrize(
    ("name", "error"), [("attnplug-bad-import", "ImportError"), ("attnplug-bad-exit", "SystemExit")]
)
def test_two_bad_plugins_raise_when_imported(name: str, error: str, run_with_plugins: RunWithPlugins) -> None:
    module = name.replace("-", "_")
    assert json.loads(run_with_plugins([name], ["-c", EXAMINE, module]).stdout) == {module: {"raises": error}}
