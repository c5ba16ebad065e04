"""How many blocks and tokens fit: every number here was counted by hand."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_layers import BLOCK, PAGE, SLIDING, caches, gemma_3, gpt_oss, llama, llama_4, model, whisper

from attnplug.core import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheConfig, SlidingWindowSpec
from attnplug.core.errors import LayoutError
from attnplug.runtime import (
    blocks_needed,
    bytes_per_block,
    fit_kv_cache,
    get_kv_cache_spec,
    group_kv_caches,
    parse_memory,
)

PAGES = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (1000, 1000),
        ("1000", 1000),
        ("512 B", 512),
        ("80GiB", 80 * 2**30),
        ("80 GB", 80 * 10**9),
        ("80g", 80 * 10**9),
        ("1.5gib", 3 * 2**29),
        ("2TiB", 2**41),
        ("3 kib", 3072),
        ("7kB", 7000),
        ("12MiB", 12 * 2**20),
        ("12mb", 12 * 10**6),
        (" 4 ", 4),
        (2**60 + 1, 2**60 + 1),
    ],
)
def test_memory_is_read_in_bytes_decimal_and_binary_units(text, expected):
    assert parse_memory(text) == expected


@pytest.mark.parametrize("text", ["", "lots", "-1", "GiB", "1 GiBs", "1e9", "1,000", "1..5", True])
def test_memory_that_says_nothing_is_refused(text):
    with pytest.raises(LayoutError, match="must be bytes, or a number with KiB"):
        parse_memory(text)


# Blocks of one sequence


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (1, 1), (16, 1), (17, 2), (160, 10)])
def test_full_attention_keeps_every_page(tokens, expected):
    assert blocks_needed(FullAttentionSpec(**PAGES), tokens) == expected


@pytest.mark.parametrize(
    ("window", "expected"),
    [(1, 1), (2, 2), (16, 2), (17, 2), (18, 3), (32, 3), (33, 3), (34, 4), (128, 9)],
)
def test_a_window_may_begin_in_the_last_place_of_a_page(window, expected):
    spec = SlidingWindowSpec(**PAGES, sliding_window=window)
    assert blocks_needed(spec, 10_000) == expected
    assert blocks_needed(spec, 16) == 1


@pytest.mark.parametrize(
    ("chunk", "expected"),
    # 24: chunks begin at 0 or 8 of a page, and 8 + 24 = 32. 20: at 0, 4, 8 or 12, and 12 + 20 = 32.
    [(16, 1), (64, 4), (8, 1), (24, 2), (20, 2), (33, 3)],
)
def test_a_chunk_begins_at_its_multiples(chunk, expected):
    assert blocks_needed(ChunkedLocalAttentionSpec(**PAGES, chunk=chunk), 10_000) == expected


@given(
    kind=st.sampled_from(["window", "chunk"]),
    size=st.integers(1, 12),
    block=st.integers(1, 8),
    new=st.integers(1, 30),
    tokens=st.integers(0, 20) | st.just(250),
)
def test_blocks_needed_is_the_most_that_any_step_holds(kind, size, block, new, tokens):
    pages = PAGES | {"block_size": block}
    spec = (
        SlidingWindowSpec(**pages, sliding_window=size)
        if kind == "window"
        else ChunkedLocalAttentionSpec(**pages, chunk=size)
    )
    most = 0
    for first in range(max(tokens, 1)):
        last = min(first + new, tokens) - 1
        if last < first:
            break
        oldest = max(first - size + 1, 0) if kind == "window" else first // size * size
        most = max(most, last // block - oldest // block + 1)
    needed = blocks_needed(spec, tokens, new)
    assert needed >= most
    if tokens == 250:  # long enough for the worst place to come up
        assert needed == most


# What fits


def test_one_kind_of_layer_by_hand():
    config = group_kv_caches(caches(llama))
    assert bytes_per_block(config) == 32 * PAGE
    budget = fit_kv_cache(config, 10 * 32 * PAGE + 5)
    assert (budget.num_blocks, budget.usable_blocks, budget.max_tokens) == (10, 9, 9 * 16)
    assert budget.tokens_of(budget.groups[0]) == 144
    assert budget.padding_layers == 0


@pytest.mark.parametrize("num_blocks", [1, 7, 1000])
def test_the_pool_that_a_configuration_has_plays_no_part(num_blocks):
    config = group_kv_caches(caches(llama), num_blocks)
    assert bytes_per_block(config) == 32 * PAGE
    assert fit_kv_cache(config, 10 * 32 * PAGE).max_tokens == 144


def test_a_window_takes_its_blocks_from_the_same_pool():
    # A window of 128 holds at most ceil(127 / 16) + 1 = 9 blocks; full attention has the others.
    budget = fit_kv_cache(group_kv_caches(caches(gpt_oss)), 101 * 12 * PAGE)
    assert budget.num_blocks == 101
    assert budget.max_tokens == (100 - 9) * 16


def test_a_pool_smaller_than_the_windows_holds_as_much_of_each_group():
    budget = fit_kv_cache(group_kv_caches(caches(gpt_oss)), 11 * 12 * PAGE)
    assert budget.max_tokens == 5 * 16


def test_gemma_3_pays_for_six_windows_and_reports_its_padding():
    budget = fit_kv_cache(group_kv_caches(caches(gemma_3)), 1001 * 10 * PAGE)
    assert budget.max_tokens == (1000 - 6 * 9) * 16
    assert budget.padding_layers == 8


def test_llama_4_pays_for_three_chunks():
    budget = fit_kv_cache(group_kv_caches(caches(llama_4)), 101 * 12 * PAGE)
    assert budget.max_tokens == (100 - 3 * 4) * 16


def test_a_cross_group_is_counted_with_as_many_encoder_tokens():
    budget = fit_kv_cache(group_kv_caches(caches(whisper)), 101 * 4 * PAGE)
    assert budget.max_tokens == 50 * 16


def test_tokens_computed_at_once_are_held_at_once():
    # 64 new tokens of a window of 128 span 191 positions: at most ceil(190 / 16) + 1 = 13 blocks.
    budget = fit_kv_cache(group_kv_caches(caches(gpt_oss)), 101 * 12 * PAGE, new_tokens=64)
    assert budget.max_tokens == (100 - 13) * 16


def test_where_every_layer_has_a_window_that_fits_any_length_does():
    config = group_kv_caches(get_kv_cache_spec(model([SLIDING] * 4), BLOCK))
    assert fit_kv_cache(config, 10 * 4 * PAGE).max_tokens is None
    assert fit_kv_cache(config, 9 * 4 * PAGE).max_tokens == 8 * 16


def test_a_model_without_caches_fits_into_nothing():
    budget = fit_kv_cache(group_kv_caches({}), 0)
    assert (budget.num_blocks, budget.usable_blocks, budget.max_tokens) == (0, 0, None)


@pytest.mark.parametrize("memory", [0, -5, 2 * 32 * PAGE - 1])
def test_memory_for_less_than_two_blocks_is_refused(memory):
    with pytest.raises(LayoutError) as error:
        fit_kv_cache(group_kv_caches(caches(llama)), memory)
    assert f"memory={memory} must have room for two blocks of {32 * PAGE} bytes" in str(error.value)


def test_two_blocks_are_the_null_block_and_one_to_use():
    assert fit_kv_cache(group_kv_caches(caches(llama)), 2 * 32 * PAGE).max_tokens == 16


def test_a_configuration_without_blocks_is_refused():
    with pytest.raises(LayoutError, match=r"config\.num_blocks=0 must be at least 1"):
        bytes_per_block(KVCacheConfig(0, (), ()))


def test_a_budget_is_a_json_object():
    budget = fit_kv_cache(group_kv_caches(caches(gpt_oss)), 101 * 12 * PAGE)
    found = json.loads(json.dumps(budget.to_dict()))
    assert found["memory"] == 101 * 12 * PAGE
    assert found["bytes_per_block"] == 12 * PAGE
    assert [group["kind"] for group in found["groups"]] == ["SlidingWindowSpec", "FullAttentionSpec"]
    assert found["groups"][0]["layers"] == [f"layers.{2 * i}" for i in range(12)]
    assert {group["tokens"] for group in found["groups"]} == {1600}
    assert {(group["block_size"], group["page_size_bytes"]) for group in found["groups"]} == {(16, PAGE)}
