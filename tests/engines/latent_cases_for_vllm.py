"""Layers of latent attention by vLLM's own comparison, which has cases for its GPU backends only.

Run beside vLLM's tests as vllm_harness says; pytest collects it when it is named alone. What those cases take from vLLM's
compiled parts, its writing of latents, is stood in for by torch.
"""

from __future__ import annotations

import inspect
import os
import types
from collections.abc import Iterator

import pytest
import torch
import vllm_harness
from tests.v1.attention import test_mla_backends as theirs
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from attnplug.core.errors import SpecError
from attnplug.integrations.vllm.builder import Builder

_NEEDS = Builder.needs_exact
CHOSEN = [AttentionBackendEnum[name] for name in os.environ["ATTNPLUG_HARNESS"].split(",")]


class NoPrefill:
    """In place of vLLM's prefill backends, which attnplug's layers never call."""

    def __init__(self, **given: object) -> None:
        pass

    @staticmethod
    def validate_configuration(*given: object) -> list[str]:
        return []


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's linear layers ask for their rank."""
    file = tmp_path_factory.mktemp("ranks") / "store"
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{file}", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def write_latents(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor, *, scale: torch.Tensor,
    kv_cache_dtype: str,
) -> None:  # fmt: skip
    latent = torch.cat((kv_c, k_pe), dim=-1)
    rows = kv_cache.view(-1, kv_cache.shape[-1])
    if kv_cache_dtype != "auto":
        rows, latent = rows.view(torch.float8_e4m3fn), latent.float() / scale
        latent = latent.clamp(-448, 448).to(torch.float8_e4m3fn)
        rows, latent = rows.view(torch.uint8), latent.view(torch.uint8)
    rows[slots] = latent


@pytest.fixture(autouse=True)
def configured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(theirs, "BACKENDS_TO_TEST", CHOSEN)
    monkeypatch.setattr(theirs, "BACKEND_BLOCK_SIZES", dict.fromkeys(CHOSEN, 16))
    monkeypatch.setattr(theirs, "SPEC_DECODE_BACKENDS", CHOSEN)
    monkeypatch.setattr(theirs, "get_mla_prefill_backend", lambda config: NoPrefill)
    monkeypatch.setattr(theirs.ops, "concat_and_cache_mla", write_latents)
    if not torch.cuda.is_available():
        monkeypatch.setattr(theirs, "DEVICE_TYPE", "cpu")
    with set_current_vllm_config(VllmConfig()):
        yield


def compare(batch: str, dtype: str = "auto", k_scale: float = 1.0) -> None:
    """vLLM's comparison with its reference in torch, for DeepSeek's shape and 8 of its heads."""
    # Its name and arguments differ by version; the earlier one asks a prefill backend whether it fits.
    run = getattr(theirs, "_run_backend_correctness", theirs.test_backend_correctness)
    asked = types.SimpleNamespace(get_class=lambda: NoPrefill, name="none")
    given = {
        "batch_spec_name": batch,
        "model": vllm_harness.folder("deepseek-ai/DeepSeek-R1"),
        "tensor_parallel_size": 16,
        "kv_cache_dtype": dtype,
        "q_scale": 1.0,
        "k_scale": k_scale,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "prefill_backend": asked if run is theirs.test_backend_correctness else None,
    }
    names = inspect.signature(run).parameters
    needed = [name for name, each in names.items() if each.default is inspect.Parameter.empty]
    run(**{name: given.get(name) for name in needed})


@pytest.mark.parametrize("batch", ["small_decode", "small_prefill", "mixed_small", "single_decode"])
def test_latents(batch: str) -> None:
    compare(batch)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_latents_of_8_bits(scale: float) -> None:
    compare("mixed_small", "fp8", scale)


@pytest.mark.parametrize("batch", ["spec_decode_small", "spec_decode_medium"])
def test_drafts_have_the_lengths_of_the_device(batch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = []
    monkeypatch.setattr(Builder, "needs_exact", lambda *args: exact.append(_NEEDS(*args)) or exact[-1])
    compare(batch)
    assert exact
    assert all(exact)


def reasons(name: str, use_mla: bool) -> list[str]:
    """What the class of that name has against a plain layer, or one of latent attention."""
    cls = AttentionBackendEnum[name].get_class()
    given = {
        "head_size": 576 if use_mla else 128,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "use_mla": use_mla,
        "attn_type": "decoder",
        "device_capability": None,
    }
    parameters = inspect.signature(AttentionBackend.validate_configuration).parameters.values()
    needed = [each.name for each in parameters if each.default is inspect.Parameter.empty]
    return list(cls.validate_configuration(**{name: given.get(name, False) for name in {*needed, *given}}))


def test_each_name_serves_its_kind_of_layers_and_refuses_the_other_with_the_right_name() -> None:
    assert reasons("ATTNPLUG_MLA", use_mla=True) == []
    assert reasons("ATTNPLUG", use_mla=False) == []
    assert "latent attention (MLA) is served by the names that end in _MLA, such as ATTNPLUG_MLA" in reasons(
        "ATTNPLUG", use_mla=True
    )
    assert reasons("ATTNPLUG_MLA", use_mla=False) == [
        "ATTNPLUG_MLA serves latent attention alone; name ATTNPLUG for other layers"
    ]


def test_a_window_over_latents_is_refused_by_name() -> None:
    impl = AttentionBackendEnum["ATTNPLUG_MLA"].get_class().get_impl_cls()
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "qk_head_dim": 192}
    with pytest.raises(SpecError, match=r"sliding_window=.*not served with latent attention"):
        impl(16, 576, 0.1, 1, None, 1024, q_lora_rank=None, v_head_dim=128, kv_b_proj=None, **sizes)
