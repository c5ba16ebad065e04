"""The ceilings of a device, and what a step must move and compute at least."""

from __future__ import annotations

import pytest
import torch

from attnplug import LayerSpec
from attnplug.core.mla.dims import MLADims
from attnplug.registry.measured.step_shapes import StepShape
from attnplug.tuning.timers import COPY, MATMUL, measured_ceilings, share_of_ceiling, step_bytes, step_flops

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=8, head_size_v=6)
DIMS = MLADims(q_lora_rank=None, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32)
SHAPES = ("decode 3 x 70 ragged", "decode 2 x 3 of 50", "prefill 2 x 40", "prefill 2 x 20 of 60 ragged",
          "mixed 3 x 70 + 2 x 20 of 60 ragged")  # fmt: skip


def visible(spec: LayerSpec, position: int, length: int) -> set[int]:
    """The keys that the query at a position sees, one by one."""
    seen = set(range(length if not spec.causal else position + 1))
    if spec.window[0] >= 0:
        seen = {key for key in seen if key >= position - spec.window[0]}
    return seen


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "spec",
    [SPEC, SPEC.replace(sliding_window=7), SPEC.replace(sliding_window=55),
     SPEC.replace(attn_type="encoder_only", causal=False)],
)  # fmt: skip
def test_bytes_and_operations_are_those_of_the_keys_that_queries_see(spec: LayerSpec, shape: str) -> None:
    step = StepShape.parse(shape)
    pairs = keys = 0
    for length, new in zip(step.lengths, step.query_lens, strict=True):
        rows = [visible(spec, position, length) for position in range(length - new, length)]
        pairs += sum(map(len, rows))
        keys += len(set().union(*rows))
    assert step_flops(spec, step) == 2 * 4 * (8 + 6) * pairs
    assert step_bytes(spec, step) == keys * 2 * (8 + 6) * 2 + step.tokens * 4 * (8 + 6) * 2


def test_cached_numbers_of_a_byte_and_latents() -> None:
    step = StepShape.parse("decode 1 x 100")
    ends = 4 * (8 + 6) * 2
    assert step_bytes(SPEC.replace(kv_cache_dtype="fp8"), step) == 100 * 2 * (8 + 6) + ends
    latent = LayerSpec(num_heads=4, num_kv_heads=1, head_size=80, mla=DIMS)
    assert step_bytes(latent, step) == 100 * 80 * 2 + 4 * (latent.query_size + latent.output_size) * 2


def test_a_time_reads_as_a_share_of_what_bounds_it() -> None:
    environment = {COPY: "1", MATMUL: "100"}
    step = StepShape.parse("decode 1 x 100")
    us = step_bytes(SPEC, step) / 1e3
    assert share_of_ceiling(SPEC, step, 2 * us, environment) == ("copy", pytest.approx(0.5))
    assert share_of_ceiling(SPEC, step, us, {COPY: "1e6", MATMUL: "1e-3"})[0] == "matmul"  # type: ignore[index]
    assert share_of_ceiling(SPEC, step, us, {}) is None
    assert share_of_ceiling(SPEC, step, us, {COPY: "1", MATMUL: "unknown"}) is None
    assert share_of_ceiling(SPEC, step, 0.0, environment) is None


def test_the_ceilings_are_the_best_of_some_times() -> None:
    times = iter([9.0, 8.0, 9.0, 9.0, 9.0, 5.0, 4.0, 5.0, 5.0, 5.0])
    found = measured_ceilings(torch.device("cpu"), lambda run: next(times))
    # Each copy moves 32 MiB in 8 us, and a matmul of 256 is 33.6 million operations in 4 us.
    assert found == {COPY: "4194", MATMUL: "8.389"}
