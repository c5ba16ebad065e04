"""The kernel libraries as `attnplug doctor` reports them: versions, this GPU, what is broken, and remedies."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest
from packaging.specifiers import SpecifierSet

from attnplug import explain
from attnplug.backends.libraries import LIBRARY_RULES
from attnplug.backends.unbound_libraries import UNBOUND_LIBRARIES
from attnplug.cli.output.doctor_sections import library_states, unbound_states, used_by_phase
from attnplug.core import Device, LayerSpec, MLADims
from attnplug.registry.plugins.installed import installed_version

MLA = MLADims(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
H200 = Device("cuda", (9, 0), "NVIDIA H200")


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put distributions in front of the path: `install("flash-attn", "2.8.3", "flash_attn_2_cuda.py")`."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def put(name, version, *files):
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        for file in files:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text("")
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in ("notice.txt", *files)))
        importlib.invalidate_caches()
        installed_version.cache_clear()
        return tmp_path

    installed_version.cache_clear()
    yield put
    installed_version.cache_clear()


def states(device=H200, *backends):
    return {state.backend: state for state in library_states(device, backends or None)}


def test_what_is_missing_comes_with_what_it_would_do_and_how_to_get_it():
    state = states()["FLASH_ATTN_4"]
    assert (state.version, state.state) == (None, "missing")
    assert "sinks" in state.detail
    assert state.remedy == "pip install 'flash-attn-4>=4.0.0b26,<5'"


def test_where_there_is_no_gpu_nothing_is_to_be_done():
    for state in states(Device("cpu")).values():
        assert (state.state, state.remedy) == ("missing", None)
        assert state.detail == "not for cpu: it needs an NVIDIA GPU"


def test_a_library_that_fits_says_what_it_compiles(install):
    install("flash-attn-4", "4.0.0b36", "flash_attn/cute/interface.py")
    state = states()["FLASH_ATTN_4"]
    assert (state.version, state.state, state.remedy) == ("4.0.0b36", "ok", None)
    assert "CuTe DSL" in state.compiles


@pytest.mark.parametrize(
    ("name", "version", "detail"),
    [
        ("flash-attn-4", "4.0.0b20", "this version: sinks are rounded to bfloat16"),
        ("flash-attn", "2.6.3", "this version: its kernels take other arguments"),
        ("flash-attn-3", "4.0", "this version is not one of >=3.0.0b1,<4"),
    ],
)
def test_another_version_is_refused_with_the_one_to_install(install, name, version, detail):
    install(name, version)
    (state,) = [each for each in library_states(H200) if each.version == version]
    assert (state.state, state.detail) == ("refused", detail)
    assert state.remedy.startswith(f"pip install '{name}")


def test_another_gpu_is_refused_with_what_serves_it(install):
    install("flash-attn-4", "4.0.0b36", "flash_attn/cute/interface.py")
    install("flash-attn-3", "3.0.0b1")
    found = states(Device("cuda", (8, 0)))
    assert found["FLASH_ATTN_4"].detail == "not for sm80: no paged KV cache there"
    assert found["FLASH_ATTN_4"].remedy == "pip install 'flash-attn>=2.7,<3' for FLASH_ATTN_2"
    assert found["FLASH_ATTN_3"].detail == "not for sm80: its kernels are made for other GPUs"
    assert found["FLASH_ATTN_3"].remedy is None


def test_where_the_device_is_not_known_versions_are_judged_alone(install):
    install("flash-attn-4", "4.0.0b36", "flash_attn/cute/interface.py")
    assert states(None)["FLASH_ATTN_4"].state == "ok"
    assert states(Device("cuda"))["FLASH_ATTN_4"].state == "ok"


def test_a_broken_library_is_told_and_not_used(install):
    install("flash-attn-4", "4.0.0b36")
    install("flash-attn", "2.8.3", "flash_attn/__init__.py", "flash_attn_2_cuda.py")
    found = library_states(H200)
    broken = next(state for state in found if state.backend == "FLASH_ATTN_4")
    assert broken.state == "broken"
    assert "is not where Python looks for it" in broken.detail
    assert broken.remedy.startswith("pip install --force-reinstall")
    assert used_by_phase(H200, found)["prefill"] == "TRITON"


def test_the_newest_generation_installed_serves(install):
    install("flash-attn-4", "4.0.0b36", "flash_attn/cute/interface.py")
    install("flash-attn", "2.8.3", "flash_attn/__init__.py", "flash_attn_2_cuda.py")
    assert used_by_phase(H200, library_states(H200))["prefill"] == "FLASH_ATTN_4"


def test_an_installed_kernel_that_no_backend_calls_is_named_with_the_reason(install):
    assert unbound_states() == []
    install("flash-mla", "1.0.0", "flash_mla/__init__.py")
    (state,) = unbound_states()
    assert (state.library, state.version, state.state) == ("FlashMLA", "1.0.0", "refused")
    assert state.detail.startswith("not called: it divides the requests in a step's first call")
    assert state.remedy == "FLASH_MLA serves such layers"


def test_each_kernel_that_no_backend_calls_has_a_reason_and_a_gpu_for_it():
    served = {rule.distribution for rule in LIBRARY_RULES if rule.serves}
    for each in UNBOUND_LIBRARIES:
        assert each.distribution not in served, each
        capabilities = [(major, 0) for major in range(8, 13)]
        assert any(SpecifierSet(each.capabilities).contains(f"{a}.{b}") for a, b in capabilities)
        assert each.why
        assert not each.what.endswith(".")
        layer = LayerSpec(num_heads=16, num_kv_heads=1, head_size=576, mla=MLA)
        accepted = explain(layer, H200, "decode", assume_installed="all").candidates
        assert each.instead in [candidate.name for candidate in accepted if candidate.accepted]


@pytest.mark.slow
def test_doctor_reports_the_libraries_of_the_backends_asked_for(run):
    report = run("doctor", "--json", "FLASH_ATTN").json
    assert [state["backend"] for state in report["libraries"]] == [
        "FLASH_ATTN_2",
        "FLASH_ATTN_3",
        "FLASH_ATTN_4",
    ]
    assert report["device"]["type"]
    assert set(report["used"]) == {"prefill", "decode"}
    assert "kernel library" in run("doctor", "FLASH_ATTN_2").out


def test_every_rule_can_be_met_and_refusals_have_a_remedy():
    for rule in LIBRARY_RULES:
        SpecifierSet(rule.versions), SpecifierSet(rule.capabilities)
        assert rule.serves or rule.remedy, rule
        assert not rule.what.endswith(".")


def test_the_table_imports_nothing_heavy():
    code = "import sys, json, attnplug.backends.libraries; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "packaging", "flash_attn"} & set(json.loads(done.stdout))
