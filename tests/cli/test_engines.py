"""`attnplug doctor` on engines: which are installed, whether attnplug is active in them, and how to activate it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from attnplug.cli.output.doctor_sections import EngineState, engine_states

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Makes a distribution of that version, in place of the one installed."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)

    def make(name: str, version: str, *requires: str) -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {each}" for each in requires]
        (folder / "METADATA").write_text("\n".join(lines) + "\n")

    return make


def state_of(engine: str) -> EngineState:
    (found,) = [state for state in engine_states() if state.engine == engine]
    return found


def test_vllm_is_active_where_its_plugins_are_not_restricted(install: Install) -> None:
    install("vllm", "0.33.0")
    state = state_of("vLLM")
    assert (state.version, state.state) == ("0.33.0", "active")
    assert state.activate == "vllm serve MODEL --attention-backend ATTNPLUG"


@pytest.mark.parametrize(
    ("plugins", "state", "activate"),
    [
        ("", "inactive", "VLLM_PLUGINS=attnplug"),
        ("other", "inactive", "VLLM_PLUGINS=other,attnplug"),
        ("other,attnplug", "active", "vllm serve MODEL --attention-backend ATTNPLUG"),
    ],
)
def test_vllm_is_inactive_where_a_variable_leaves_attnplug_out(
    install: Install, monkeypatch: pytest.MonkeyPatch, plugins: str, state: str, activate: str
) -> None:
    install("vllm", "0.25.1")
    monkeypatch.setenv("VLLM_PLUGINS", plugins)
    found = state_of("vLLM")
    assert (found.state, found.activate) == (state, activate)


SERVE_SGLANG = "sglang serve --model-path MODEL --attention-backend attnplug"


@pytest.mark.parametrize(
    ("plugins", "state", "activate"),
    [
        (None, "active", SERVE_SGLANG),
        ("", "active", SERVE_SGLANG),
        ("other", "inactive", "SGLANG_PLUGINS=other,attnplug"),
        ("other, attnplug", "active", SERVE_SGLANG),
    ],
)
def test_sglang_is_inactive_where_a_variable_leaves_attnplug_out(
    install: Install, monkeypatch: pytest.MonkeyPatch, plugins: str | None, state: str, activate: str
) -> None:
    install("sglang", "0.5.23")
    if plugins is not None:
        monkeypatch.setenv("SGLANG_PLUGINS", plugins)
    found = state_of("SGLang")
    assert (found.version, found.state, found.activate) == ("0.5.23", state, activate)


def test_versions_before_the_adapter_are_refused(install: Install) -> None:
    install("vllm", "0.11.0")
    install("sglang", "0.5.17")
    install("transformers", "4.57.1")
    assert (state_of("vLLM").state, state_of("vLLM").detail) == ("refused", "the adapter needs vllm>=0.20")
    assert state_of("SGLang").detail == "the adapter needs sglang>=0.5.23"
    assert state_of("transformers").state == "refused"


def test_transformers_is_activated_by_each_program(install: Install) -> None:
    install("transformers", "5.23.0")
    state = state_of("transformers")
    assert (state.version, state.state) == ("5.23.0", "ready")
    assert "set_attention" in str(state.activate)


def test_packages_that_require_flash_attn_are_named(install: Install) -> None:
    install("nano-vllm", "0.2.0", "torch", "flash_attn>=2.7")
    install("with-an-extra", "1.0", "flash-attn; extra == 'fast'")
    state = state_of("nano-vllm")
    assert (state.version, state.state) == ("0.2.0", "ready")
    assert "attnplug.integrations.flash_attn" in str(state.activate)
    assert "with-an-extra" not in {each.engine for each in engine_states()}
