"""Every feature, alone and with every other, over one batch that mixes all kinds of requests."""

from __future__ import annotations

import itertools

import pytest
import torch

from attnplug.backends.torch_native import TorchBackend
from attnplug.core import LayerSpec
from attnplug.testing import (
    Batch,
    assert_close,
    assert_lse_close,
    direct_batch,
    paged_batch,
    run_batch,
    tolerance,
)

SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "dtype": "float32"}

FEATURES = {
    "window": {"sliding_window": 9},
    "chunk": {"chunk_size": 8},
    "soft_cap": {"logits_soft_cap": 2.0},
    "sinks": {"has_sinks": True},
    "alibi": {"has_alibi": True},
    "lse": {"needs_lse": True},
    "head_size_v": {"head_size_v": 24},
    "non_causal": {"causal": False},
    "two_sided_window": {"causal": False, "window": (5, 3)},
    "window_ahead": {"causal": False, "window": (-1, 2)},
    "fp8": {"kv_cache_dtype": "fp8"},
    "mqa": {"num_kv_heads": 1},
    "mha": {"num_kv_heads": 4},
    "half": {"dtype": "float16"},
}
REACHES = {"window", "chunk", "non_causal", "two_sided_window", "window_ahead"}
HEADS = {"mqa", "mha"}

# Decodes, speculative decodes, extends, prefills short and long, one without new tokens, one without any.
QUERY_LENS = [1, 3, 20, 0, 12, 1, 40, 3, 70, 1]
SEQ_LENS = [33, 29, 20, 9, 12, 1, 90, 64, 70, 0]


def pairs() -> list[tuple[str, str]]:
    return [
        pair
        for pair in itertools.combinations_with_replacement(FEATURES, 2)
        if pair[0] == pair[1] or not (set(pair) <= REACHES or set(pair) <= HEADS)
    ]


def check(batch: Batch, *, use_sinks: bool = True) -> None:
    found, lse = run_batch(TorchBackend, batch, use_sinks=use_sinks)
    expected, bound = batch.oracle(use_sinks=use_sinks), tolerance(batch.spec)
    tokens = batch.common.num_actual_tokens
    assert_close(found[:tokens], expected.output, bound.output)
    assert found[tokens:].isnan().all()
    if lse is not None:
        assert_lse_close(lse[:tokens], expected.lse, bound.lse)
        assert lse[tokens:].isnan().all()


@pytest.mark.parametrize("pair", pairs(), ids="-".join)
def test_features_are_honoured_together(pair: tuple[str, str]) -> None:
    first, second = pair
    spec = LayerSpec(**{**SIZES, **FEATURES[first], **FEATURES[second]})
    batch = paged_batch(spec, QUERY_LENS, SEQ_LENS, block_size=4, padding=2, k_scale=0.5, v_scale=0.25)
    check(batch)


@pytest.mark.parametrize("feature", ["soft_cap", "sinks", "alibi", "window", "chunk", "two_sided_window"])
def test_an_ignored_feature_would_be_noticed(feature: str) -> None:
    spec = LayerSpec(**SIZES, **FEATURES[feature])
    plain = {"causal": spec.causal}
    batch = paged_batch(spec, QUERY_LENS, SEQ_LENS)
    found, _ = run_batch(TorchBackend, batch)
    with pytest.raises(AssertionError):
        assert_close(found, batch.oracle(LayerSpec(**SIZES, **plain)).output, tolerance(spec).output)


@pytest.mark.parametrize("needs_lse", [False, True])
def test_sinks_can_be_left_out_of_a_partial_result(needs_lse: bool) -> None:
    spec = LayerSpec(**SIZES, has_sinks=True, needs_lse=needs_lse, sliding_window=9)
    check(paged_batch(spec, QUERY_LENS, SEQ_LENS), use_sinks=False)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("query_len", [2, 40])
def test_a_query_that_sees_nothing_gives_zero_and_its_sink(has_sinks: bool, query_len: int) -> None:
    spec = LayerSpec(**SIZES, has_sinks=has_sinks, needs_lse=True, causal=False, direct_kv=True)
    batch = direct_batch(spec, [query_len, query_len], [50, 60], key_lens=[0, 3])
    found, lse = run_batch(TorchBackend, batch)
    assert lse is not None
    assert torch.equal(found[:query_len], torch.zeros_like(found[:query_len]))
    expected = batch.tensors.sinks if has_sinks else torch.full((spec.num_heads,), -torch.inf)
    assert expected is not None
    assert torch.equal(lse[:query_len], expected.expand(query_len, -1))
    check(batch)


@pytest.mark.parametrize("query_len", [3, 60])
def test_rows_of_a_request_that_see_nothing_do_not_disturb_the_others(query_len: int) -> None:
    spec = LayerSpec(**SIZES, direct_kv=True)
    batch = direct_batch(spec, [query_len], [200], key_lens=[query_len - 2])
    found, _ = run_batch(TorchBackend, batch)
    assert torch.equal(found[:2], torch.zeros_like(found[:2]))
    check(batch)


def test_a_batch_may_narrow_a_layer_to_causal() -> None:
    spec = LayerSpec(**SIZES, causal=False, window=(6, 5))
    check(paged_batch(spec, QUERY_LENS, SEQ_LENS, causal=True))


def test_a_window_reads_no_page_that_was_freed() -> None:
    spec = LayerSpec(**SIZES, sliding_window=9)
    batch = paged_batch(spec, [1, 20, 3, 40], [90, 95, 47, 80], block_size=4, drop_window=True)
    assert batch.kv_cache is not None
    batch.kv_cache[0] = torch.nan
    check(batch)


@pytest.mark.parametrize("features", [{}, {"has_sinks": True, "has_alibi": True}], ids=["fused", "explicit"])
@pytest.mark.parametrize(
    "reach",
    [
        {},
        {"sliding_window": 1},
        {"sliding_window": 40},
        {"sliding_window": 600},
        {"chunk_size": 3},
        {"chunk_size": 128},
        {"chunk_size": 1000},
        {"causal": False, "window": (700, 30)},
    ],
    ids=str,
)
def test_long_requests_are_tiled_without_seams(reach: dict[str, object], features: dict[str, object]) -> None:
    spec = LayerSpec(num_heads=2, num_kv_heads=1, head_size=8, dtype="float32", **reach, **features)
    check(paged_batch(spec, [1100, 700], [1100, 1500], block_size=64))


@pytest.mark.parametrize("chunk", [8, 16])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_chunks_end_where_positions_cross_a_multiple(chunk: int, offset: int) -> None:
    spec = LayerSpec(**SIZES, chunk_size=chunk)
    length = 3 * chunk + offset
    check(paged_batch(spec, [1, 2, 5, chunk + 2, length], [length] * 5, block_size=8))
