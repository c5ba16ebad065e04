"""attnplug's backends in vLLM's own numeric tests, where a source tree of vLLM is at hand; CPUs are enough.

`ATTNPLUG_VLLM_SOURCE` names an unpacked sdist of vLLM, in an environment with what vLLM imports. Several are joined by
the separator of paths.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
from plugin_env import InstallPlugins

from attnplug.integrations.vllm import register

HERE = Path(__file__).parent
SOURCES = [Path(path) for path in os.environ.get("ATTNPLUG_VLLM_SOURCE", "").split(os.pathsep) if path]
THEIRS = "tests/v1/attention/test_attention_backends.py"
SMALL = "(causal and (small or single_decode)) or non_causal or (sliding and small)"


def run(
    source: Path, *words: str, backends: str, plugins: Path | None = None, **variables: str
) -> tuple[int, int, str]:
    """Passed and failed of pytest in vLLM's tree, and what it printed; `plugins` is a folder of installed ones."""
    folders = [source, HERE.parents[1], HERE, *filter(None, [plugins])]
    path = os.pathsep.join(map(str, folders))
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        "PYTHONPATH": path,
        "ATTNPLUG_HARNESS": backends,
        **variables,
    }
    plain = [
        "-q",
        "-p",
        "vllm_harness",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
        "--show-capture=no",
        "--tb=short",
    ]
    command = [sys.executable, "-m", "pytest", *plain, "-o", "addopts=", f"--rootdir={source}", *words]
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False)
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed)", done.stdout)}
    return counts.get("passed", 0), counts.get("failed", 0), done.stdout + done.stderr


@pytest.fixture(params=SOURCES or [None], ids=lambda path: path.name if path else "none")
def source(request: pytest.FixtureRequest) -> Path:
    if request.param is None:
        pytest.skip("no source tree of vLLM: ATTNPLUG_VLLM_SOURCE is not set")
    assert isinstance(request.param, Path)
    return request.param


@pytest.mark.slow
def test_the_numbers_are_those_of_vllms_own_reference(source: Path) -> None:
    passed, failed, printed = run(source, THEIRS, "-k", SMALL, backends="ATTNPLUG")
    assert failed == 0, printed
    assert passed >= 20 or "0.25" in source.name, printed
    passed, failed, printed = run(source, str(HERE / "cases_for_vllm.py"), backends="ATTNPLUG_TORCH")
    assert failed == 0, printed


@pytest.mark.slow
def test_latent_attention_gives_the_numbers_of_vllms_own_reference(source: Path) -> None:
    cases = str(HERE / "latent_cases_for_vllm.py")
    passed, failed, printed = run(source, cases, backends="ATTNPLUG_MLA,ATTNPLUG_TORCH_MLA")
    assert failed == 0, printed
    assert passed >= 9, printed
    words = (cases, "-k", "latents and small_decode")
    mutant = {"ATTNPLUG_HARNESS_MUTANT": "swapped"}
    passed, failed, printed = run(source, *words, backends="ATTNPLUG_MLA", **mutant)
    assert (passed, failed) == (0, 1), printed


@pytest.mark.slow
def test_sparse_layers_attend_the_keys_that_were_picked(source: Path) -> None:
    cases, layers = (str(HERE / f"sparse_{what}_for_vllm.py") for what in ("cases", "layers"))
    passed, failed, printed = run(source, cases, layers, backends="ATTNPLUG_MLA,ATTNPLUG_TORCH_MLA")
    assert failed == 0, printed
    assert passed >= 30, printed
    words = (layers, "-k", "steps or one_builder")
    passed, failed, printed = run(source, *words, backends="ATTNPLUG_TRITON_MLA", TRITON_INTERPRET="1")
    assert failed == 0, printed
    assert passed >= 4, printed


@pytest.mark.slow
def test_first_steps_compile_all_kernels_of_latent_layers(source: Path) -> None:
    # Kernels are counted on a pretended GPU, which the interpreter is not.
    given = {"backends": "ATTNPLUG_TRITON_MLA", "TRITON_INTERPRET": "0"}
    passed, failed, printed = run(source, str(HERE / "warm_cases_for_vllm.py"), **given)
    assert failed == 0, printed
    assert passed == 12, printed


@pytest.mark.slow
def test_the_adapter_answers_what_vllm_asks(source: Path) -> None:
    passed, failed, printed = run(source, str(HERE / "adapter_cases_for_vllm.py"), backends="ATTNPLUG")
    assert failed == 0, printed
    assert passed >= 10, printed


@pytest.mark.slow
def test_their_tests_notice_swapped_keys_and_values(source: Path) -> None:
    words = (THEIRS, "-k", "causal and small_decode")
    passed, failed, printed = run(source, *words, backends="ATTNPLUG", ATTNPLUG_HARNESS_MUTANT="swapped")
    assert failed > 0, printed
    assert passed == 0, printed


@pytest.mark.slow
def test_a_plugin_of_a_third_party_runs_unchanged(source: Path, install_plugins: InstallPlugins) -> None:
    plugins = install_plugins(HERE.parents[1] / "examples" / "plugins" / "attnplug-flex")
    words = (THEIRS, "-k", "(causal or sliding) and (small_decode or mixed_small) and not encoder")
    passed, failed, printed = run(source, *words, backends="ATTNPLUG_FLEX", plugins=plugins)
    assert failed == 0, printed
    assert passed > 0, printed


@pytest.mark.slow
def test_the_suite_of_all_engines_runs_through_vllm(source: Path) -> None:
    suite = HERE.parent / "testing" / "test_engine_suite.py"
    words = (str(suite), "-m", "", "-k", "vllm")
    passed, failed, printed = run(source, *words, backends="ATTNPLUG")
    assert failed == 0, printed
    assert passed >= 19, printed


def test_vllm_finds_the_plugin_by_its_entry_point() -> None:
    [point] = [
        point
        for point in importlib.metadata.entry_points(group="vllm.general_plugins")
        if point.name == "attnplug"
    ]
    assert point.load().__module__ == "attnplug.integrations.vllm"
    assert "vllm" not in sys.modules


_REGISTRY = """
import enum

class AttentionBackendEnum(enum.Enum):
    FLASH_ATTN = "theirs"

def register_backend(name, path):
    raise AssertionError("this version has no names of others")
"""


@pytest.mark.parametrize("name", ["ATTNPLUG", "ATTNPLUG_TORCH", "ATTNPLUG_TRITON_MLA"])
def test_names_reach_processes_that_have_loaded_no_plugin(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "vllm" / "v1" / "attention" / "backends"
    folder.mkdir(parents=True)
    (folder / "registry.py").write_text(_REGISTRY)
    there = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import pickle; "
    begin = there + "from attnplug.integrations.vllm import register; register(); "
    member = "from vllm.v1.attention.backends.registry import AttentionBackendEnum as names; "
    told = f"print(pickle.dumps([names[{name!r}], names.FLASH_ATTN]).hex())"
    sent = subprocess.run([sys.executable, "-c", begin + member + told], capture_output=True, check=True)
    own = f"mine, theirs = pickle.loads(bytes.fromhex({sent.stdout.decode().strip()!r})); {member}"
    asked = f"print(mine is names[{name!r}], theirs is names.FLASH_ATTN)"
    found = subprocess.run([sys.executable, "-c", there + own + asked], capture_output=True, check=True)
    assert found.stdout.decode().split() == ["True", "True"]


def test_a_vllm_without_the_interface_starts_without_attnplugs_names(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "attnplug.integrations.vllm.names", raising=False)
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    register()
    assert "0.20 to 0.33" in caplog.text
    assert "vllm.v1" in caplog.text
