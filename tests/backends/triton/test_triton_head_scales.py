"""TRITON over pages whose KV heads have scales of their own: decodes, prompts, and equal bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from attnplug.backends.triton import TritonBackend
from attnplug.core import LayerSpec
from attnplug.testing import paged_batch, run_batch
from attnplug.testing.conformance.harness import Output
from attnplug.testing.conformance.mistakes.expectations import difference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPEC = LayerSpec(
    num_heads=6, num_kv_heads=3, head_size=64, dtype="bfloat16", kv_cache_dtype="fp8_e5m2", head_scales=True
)
STEPS = {
    "decode": ([1] * 3, [40, 300, 1]),
    "long decode": ([1], [1500]),
    "mixed": ([1, 5, 40], [300, 29, 40]),
    "many rows": ([33] * 2, [64, 40]),
}


@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize(
    "own",
    [
        {},
        {"needs_lse": True, "has_sinks": True},
        {"logits_soft_cap": 3.0, "has_alibi": True},
        {"dtype": "float32"},
    ],
    ids=str,
)
def test_each_head_is_read_with_its_scale(lengths: Any, own: dict[str, Any]) -> None:
    spec = SPEC.replace(**own)
    batch = paged_batch(spec, *lengths, k_scale=0.37, v_scale=1.9, device=DEVICE, backend=TritonBackend)
    assert difference(batch, Output(*run_batch(TritonBackend, batch))) is None


@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS)
def test_equal_bits_are_kept_with_them(lengths: Any) -> None:
    spec = SPEC.replace(invariance=("batch", "rows"))
    batch = paged_batch(spec, *lengths, k_scale=0.37, v_scale=1.9, device=DEVICE, backend=TritonBackend)
    assert difference(batch, Output(*run_batch(TritonBackend, batch))) is None


def test_one_scale_for_all_heads_gives_the_bits_of_a_layer_without_them() -> None:
    outputs = []
    for spec in (SPEC.replace(head_scales=False), SPEC):
        batch = paged_batch(
            SPEC.replace(head_scales=False), *STEPS["mixed"], k_scale=0.375, v_scale=1.5, device=DEVICE
        )
        batch.spec = spec
        outputs.append(run_batch(TritonBackend, batch)[0])
    assert torch.equal(*outputs)
