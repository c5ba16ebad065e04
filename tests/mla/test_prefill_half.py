"""The expanded prefill of a layer with latents is an ordinary decision about keys of 192 and values of 128."""

from __future__ import annotations

import pytest

import attnplug
from attnplug.backends.flashinfer.latent_backend import FlashInferMLABackend
from attnplug.core import LayerSpec, MLADims, Phase, SparseSpec
from attnplug.registry import get_registry

DIMS = MLADims(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
LAYER = LayerSpec(num_heads=16, num_kv_heads=1, head_size=576, mla=DIMS, scale=0.1)
ALL = {"assume_installed": "all"}


def prefills(device: str, spec: LayerSpec = LAYER) -> dict[str, str]:
    """By candidate, its reasons against the prefill of the layer; empty if it is accepted."""
    decision = get_registry().decide(spec, device, phase=Phase.PREFILL, layer_name=None, **ALL)
    return {each.name: "; ".join(map(str, each.reasons)) for each in decision.candidates}


def test_the_expanded_layer_has_its_own_heads_sizes_and_scale() -> None:
    spec = LAYER.expanded()
    assert (spec.num_kv_heads, spec.head_size, spec.head_size_v, spec.scale) == (16, 192, 128, 0.1)
    assert (spec.direct_kv, spec.needs_lse, spec.causal, spec.mla) == (True, True, False, None)


def test_backends_that_declare_other_value_sizes_prefill_and_others_say_why_not() -> None:
    found = prefills("sm90")
    accepted = [name for name, reason in found.items() if not reason]
    assert accepted == ["FLASH_ATTN_4", "FLASH_ATTN_3", "TRITON", "TORCH"]
    assert found["FLASH_ATTN_2"] == "head_size_v not supported"
    # FLASHINFER decodes latents, and prefills no expanded layer.
    assert found["FLASHINFER"] == "phase not supported: prefill is not decode"


@pytest.mark.parametrize("device", ["sm80", "sm100", "rocm:9.4", "cpu"])
def test_other_devices_have_a_prefill_too(device: str) -> None:
    accepted = [name for name, reason in prefills(device).items() if not reason]
    assert "TORCH" in accepted
    assert "TRITON" in accepted or device == "cpu"


def test_a_plan_binds_the_best_prefill_to_the_best_decode() -> None:
    for heads, expected in ((8, "FLASH_ATTN_4+TRITON"), (128, "FLASH_ATTN_4+FLASH_MLA+TRITON")):
        made = attnplug.plan({"0": LAYER.replace(num_heads=heads)}, "sm90", **ALL)
        assert made.decisions["0"].backend == expected
    decision = attnplug.plan({"0": LAYER}, "sm90", backend="decode=FLASHINFER", **ALL).decisions["0"]
    assert decision.backend == "FLASH_ATTN_4+FLASHINFER"
    serving = decision.get_backend_cls()
    assert issubclass(serving, FlashInferMLABackend)
    assert serving.prefill.get_name() == "FLASH_ATTN_4"
    for rule, expected in (
        ("prefill=FLASH_ATTN_3", "FLASH_ATTN_3+FLASH_MLA"),
        ("decode=TRITON", "FLASH_ATTN_4+TRITON"),
        ("TRITON", "TRITON"),
    ):
        chosen = attnplug.plan({"0": LAYER}, "sm90", backend=rule, **ALL).decisions["0"]
        assert chosen.backend == expected


def test_a_sparse_layer_expands_nothing_and_has_one_backend_for_both_phases() -> None:
    sparse = LAYER.replace(sparse=SparseSpec("token_topk", 2048))
    found = prefills("sm90", sparse)
    assert [name for name, reason in found.items() if not reason] == ["TRITON", "FLASH_MLA", "TORCH"]
    assert "MLA not supported" in found["FLASH_ATTN_4"]
    decision = attnplug.plan({"0": sparse}, "sm90", **ALL).decisions["0"]
    assert decision.backend == "TRITON"
    assert decision.get_backend_cls().is_selecting
