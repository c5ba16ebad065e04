"""attnplug's backends in SGLang's own kit of attention cases, where SGLang is at hand; CPUs are enough.

`ATTNPLUG_SGLANG_SOURCE` names a folder with SGLang and what it imports, such as `sglang_packages.txt` makes it.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from plugin_env import InstallPlugins

from attnplug.integrations.sglang import decisions, register

HERE = Path(__file__).parent
SOURCE = os.environ.get("ATTNPLUG_SGLANG_SOURCE")
KIT, ADAPTER = "kit_cases_for_sglang.py", "adapter_cases_for_sglang.py"


def run(
    file: str, *words: str, backends: str, plugins: Path | None = None, **variables: str
) -> tuple[int, int, str]:
    """Passed and failed of the cases in a file, and what pytest printed; `plugins` is a folder of installed ones."""
    if SOURCE is None:
        pytest.skip("SGLang is not at hand: ATTNPLUG_SGLANG_SOURCE is not set")
    folders = [HERE.parents[1], HERE, *filter(None, [plugins]), Path(SOURCE).resolve()]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "ATTNPLUG_HARNESS": backends,
        **variables,
    }
    plain = ["-q", "-p", "sglang_harness", "-p", "no:cacheprovider", "-W", "ignore", "--show-capture=no"]
    command = [sys.executable, "-m", "pytest", *plain, "--tb=short", "-o", "addopts=", f"--rootdir={HERE}"]
    done = subprocess.run(
        [*command, str(HERE / file), *words],
        cwd=HERE,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed)", done.stdout)}
    return counts.get("passed", 0), counts.get("failed", 0), done.stdout + done.stderr


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.slow)])
def test_the_numbers_are_those_of_sglangs_own_kit(dtype: str) -> None:
    passed, failed, printed = run(KIT, backends="attnplug,attnplug_torch", ATTNPLUG_HARNESS_DTYPE=dtype)
    assert failed == 0, printed
    assert passed >= 160, printed


def test_the_client_fits_sglangs_own_classes() -> None:
    passed, failed, printed = run(ADAPTER, backends="attnplug")
    assert failed == 0, printed
    assert passed >= 14, printed


@pytest.mark.parametrize("mutant", ["swapped", "window", "slots"])
def test_the_kit_notices_mistakes(mutant: str) -> None:
    words = ("-k", "test_steps and swa_decode and shuffled")
    passed, failed, printed = run(KIT, *words, backends="attnplug", ATTNPLUG_HARNESS_MUTANT=mutant)
    assert (passed, failed) == (0, 2), printed


@pytest.mark.slow
def test_kernels_of_triton_run_there_too() -> None:
    words = ("-k", "test_steps and shuffled or test_decodes_of_graphs or test_verified_drafts")
    passed, failed, printed = run(KIT, *words, backends="attnplug_triton", TRITON_INTERPRET="1")
    assert failed == 0, printed
    assert passed >= 30, printed


@pytest.mark.slow
def test_a_plugin_of_a_third_party_runs_unchanged(install_plugins: InstallPlugins) -> None:
    plugins = install_plugins(HERE.parents[1] / "examples" / "plugins" / "attnplug-flex")
    words = ("-k", "test_steps and decode and shuffled")
    passed, failed, printed = run(KIT, *words, backends="attnplug_flex", plugins=plugins)
    assert failed == 0, printed
    assert passed > 0, printed


def test_sglang_finds_the_plugin_by_its_entry_point() -> None:
    points = importlib.metadata.entry_points(group="sglang.srt.plugins")
    [point] = [point for point in points if point.name == "attnplug"]
    assert point.load().__module__ == "attnplug.integrations.sglang"
    assert "sglang" not in sys.modules


def test_an_sglang_without_the_interface_starts_without_attnplugs_names(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "attnplug.integrations.sglang.names", raising=False)
    monkeypatch.setitem(sys.modules, "sglang", types.ModuleType("sglang"))
    register()
    assert "not that of 0.5.23" in caplog.text


def test_decisions_of_other_backends_are_none() -> None:
    class OtherBackend:
        def __init__(self, **inner: Any) -> None:
            vars(self).update(inner)

    loop = OtherBackend()
    loop.again = loop
    assert decisions(OtherBackend(prefill=loop, backends=[OtherBackend(), None])) == {}
    assert decisions(None) == {}
