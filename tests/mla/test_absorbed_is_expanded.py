"""Queries decoded on latents have the numbers of the same queries over expanded keys; chunks of context too."""

from __future__ import annotations

import itertools

import pytest
import torch

from attnplug.backends.torch_native.backend import TorchMLABackend
from attnplug.core import LayerSpec, MLADims, QueryLens
from attnplug.testing import assert_close, paged_batch, run_batch, tolerance
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.harness import Output
from attnplug.testing.conformance.mistakes.expectations import difference


class Expanding(TorchMLABackend):
    """TORCH, which here prefills every request of more than one query."""

    query_lens = QueryLens.SINGLE
    decode_threshold = 1


def layer(heads: int, rank: int, rope: int) -> LayerSpec:
    dims = MLADims(
        q_lora_rank=None, kv_lora_rank=rank, qk_nope_head_dim=16, qk_rope_head_dim=rope, v_head_dim=16
    )
    size = {"num_kv_heads": 1, "head_size": rank + rope, "mla": dims}
    return LayerSpec(num_heads=heads, dtype="float32", needs_lse=True, **size)


def answer(backend: type[TorchMLABackend], batch: Batch, **config: int) -> Output:
    found = Output(*run_batch(backend, batch, **config))
    assert difference(batch, found) is None
    return found


def expect_equal(one: Output, other: Output, spec: LayerSpec) -> None:
    bound = tolerance(spec)
    assert_close(one.output, other.output, bound.output)
    assert one.lse is not None
    assert other.lse is not None
    assert_close(one.lse, other.lse, bound.output)


HEADS = [1, 4, 12, 16, 20, 64, 128]
RANKS = [(512, 64), (256, 64), (512, 0), (256, 32)]
QUICK = {*zip(HEADS, itertools.cycle(RANKS), strict=False)}


@pytest.mark.parametrize(
    ("heads", "rank", "rope"),
    [
        pytest.param(
            heads, *ranks, marks=() if (heads, ranks) in QUICK else [pytest.mark.slow, pytest.mark.rare]
        )
        for heads, ranks in itertools.product(HEADS, RANKS)
    ],
)
def test_heads_and_dimensions(heads: int, rank: int, rope: int) -> None:
    spec = layer(heads, rank, rope)
    batch = paged_batch(spec, [3, 5, 2], [40, 5, 70], block_size=16)
    expect_equal(answer(TorchMLABackend, batch), answer(Expanding, batch), spec)


@pytest.mark.parametrize(
    "lengths",
    [([40, 30], [5000, 9000]), ([20, 17, 33], [4095 + 20, 4096 + 17, 33])],
    ids=["long", "at-the-border"],
)
def test_a_context_in_chunks_of_4096_rows_is_that_of_one_pass(lengths: tuple[list[int], list[int]]) -> None:
    spec = layer(2, 32, 8)
    batch = paged_batch(spec, *lengths, block_size=16)
    whole = answer(Expanding, batch, context_chunk_rows=1 << 14)
    expect_equal(answer(Expanding, batch, context_chunk_rows=4096), whole, spec)
    # Chunks that end within pages of requests, too.
    assert torch.isfinite(whole.output).all()
    expect_equal(answer(Expanding, batch, context_chunk_rows=1000), whole, spec)
