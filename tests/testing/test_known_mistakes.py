"""Wrong numbers of known mistakes are named, and no others are."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch
from catching import torch_cases

from attnplug.backends.torch_native import TorchBackend
from attnplug.core import Device, LayerSpec, MLADims
from attnplug.testing import Batch, assert_close, assert_lse_close, direct_batch, paged_batch
from attnplug.testing.conformance.mistakes import mistake_recognition
from attnplug.testing.conformance.mistakes.attention_rules import requests_of, rules_of
from attnplug.testing.conformance.mistakes.deviation import deviation_of
from attnplug.testing.conformance.mistakes.known_mistakes import KNOWN_MISTAKES, LSE_MISTAKES
from attnplug.testing.conformance.mistakes.mistake_oracle import attend
from attnplug.testing.conformance.mistakes.mistake_recognition import (
    NAN_FOR_EMPTY_ROWS,
    mistaken_answers,
)
from attnplug.testing.conformance.target import Target

NAMES = [mistake.name for mistake in (*KNOWN_MISTAKES, *LSE_MISTAKES)]
SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=8, dtype="float32")
LENGTHS = [1, 5, 9], [12, 15, 9]


@functools.cache
def target() -> Target:
    return Target(TorchBackend, Device("cpu"))


def with_scales() -> Batch:
    """Scales that are no powers of two, and not inverse to each other."""
    return paged_batch(SPEC.replace(kv_cache_dtype="fp8_e4m3"), *LENGTHS, k_scale=0.37, v_scale=1.9)


def with_head_scales() -> Batch:
    """Three KV heads: the next one is not the first, and the largest scale is of neither."""
    spec = SPEC.replace(num_heads=6, num_kv_heads=3, kv_cache_dtype="fp8_e4m3", head_scales=True)
    return paged_batch(spec, *LENGTHS, k_scale=0.37, v_scale=1.9)


def with_slopes() -> Batch:
    """Slopes of no formula."""
    batch = paged_batch(SPEC.replace(has_alibi=True), *LENGTHS)
    slopes = torch.tensor([0.9, 0.05, 0.3, 0.6])
    return dataclasses.replace(batch, tensors=dataclasses.replace(batch.tensors, alibi_slopes=slopes))


def with_latents(dtype: str = "auto", k_scale: float = 1.0) -> Batch:
    """Latents of 32 + 8 elements, in 8 bits with a scale if asked."""
    dims = MLADims(q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)
    spec = LayerSpec(
        num_heads=4, num_kv_heads=1, head_size=40, mla=dims, dtype="float32", kv_cache_dtype=dtype
    )
    return paged_batch(spec, *LENGTHS, backend=TorchBackend.for_layer(spec), k_scale=k_scale)


def with_scaled_latents() -> Batch:
    return with_latents("fp8_e4m3", 0.02)


@functools.cache
def recognised() -> frozenset[str]:
    """The mistakes that some designed case of TORCH recognises."""
    left = set(NAMES)
    for make in (
        with_scales,
        with_head_scales,
        with_slopes,
        with_latents,
        with_scaled_latents,
        *(functools.partial(case.batch, target()) for case in torch_cases()),
    ):
        if left:
            batch = make()
            wrong = mistaken_answers(batch, frozenset(left))
            left -= {name for name, output, lse in wrong if recognise(batch, output, lse) == name}
    return frozenset(NAMES) - left


def recognise(batch: Batch, output: torch.Tensor, lse: torch.Tensor | None) -> str | None:
    return mistake_recognition.recognise(deviation_of(batch, output, lse, batch.oracle())).name


def numbers_of(batch: Batch, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    ((_, output, lse),) = mistaken_answers(batch, {name})
    return output, lse


@pytest.mark.slow
def test_a_designed_case_recognises_each_mistake() -> None:
    # One test for all of them: in several processes, each would search again.
    assert [name for name in NAMES if name not in recognised()] == []


def test_names_are_unique() -> None:
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.slow
def test_the_right_rules_give_the_oracle() -> None:
    for case in torch_cases():
        batch = case.batch(target())
        right, requests, truth = rules_of(batch), requests_of(batch), batch.oracle()
        outputs, lses = zip(*(attend(right, requests, row) for row in range(len(requests))), strict=True)
        assert_close(batch.compared(torch.cat(outputs)), truth.output, 1e-12)
        assert_lse_close(batch.compared(torch.cat(lses)), truth.lse, 1e-12)


def test_right_numbers_have_no_name() -> None:
    batch = paged_batch(SPEC.replace(sliding_window=4, needs_lse=True), *LENGTHS)
    truth = batch.oracle()
    assert recognise(batch, truth.output, truth.lse) is None
    assert recognise(batch, truth.output.float(), truth.lse.float()) is None


def test_unknown_numbers_have_no_name() -> None:
    batch = paged_batch(SPEC.replace(sliding_window=4), *LENGTHS)
    output = batch.oracle().output
    assert recognise(batch, output + 0.1, None) is None
    assert recognise(batch, output.roll(1, 0), None) is None
    assert recognise(batch, torch.full_like(output, math.nan), None) is None


def test_a_mistake_on_one_path_is_named() -> None:
    batch = paged_batch(SPEC.replace(sliding_window=4), *LENGTHS)
    wrong, _ = numbers_of(batch, "sliding window ignored")
    mixed = batch.oracle().output
    mixed[0] = wrong[0]
    assert recognise(batch, mixed, None) == "sliding window ignored"
    mixed[1] += 1.0
    assert recognise(batch, mixed, None) is None


def test_a_mistake_is_named_in_the_dtype_of_the_layer() -> None:
    batch = paged_batch(SPEC.replace(dtype="bfloat16", has_sinks=True), *LENGTHS)
    wrong, _ = numbers_of(batch, "sinks ignored")
    assert recognise(batch, wrong.bfloat16(), None) == "sinks ignored"


def test_a_mistake_that_changes_nothing_is_not_named() -> None:
    batch = paged_batch(SPEC.replace(sliding_window=40), *LENGTHS)
    wrong, _ = numbers_of(batch, "sliding window ignored")
    assert recognise(batch, wrong, None) is None
    assert recognise(batch, wrong * (1 + 3e-5), None) is None


def test_freed_pages_read_as_zeros() -> None:
    batch = paged_batch(SPEC.replace(sliding_window=4), [1], [40], block_size=4, drop_window=True)
    assert not requests_of(batch)[0].key[:36].any()
    assert requests_of(batch)[0].key[36:].all()
    kept = paged_batch(SPEC.replace(sliding_window=4), [1], [40], block_size=4)
    assert requests_of(kept)[0].key.all()
    assert recognise(batch, numbers_of(batch, "sliding window ignored")[0], None) == "sliding window ignored"
    assert recognise(batch, numbers_of(kept, "sliding window ignored")[0], None) is None


def test_a_mistake_is_named_only_where_it_can_be_made() -> None:
    plain = {name for name, *_ in mistaken_answers(paged_batch(SPEC, *LENGTHS))}
    assert plain == {
        "causal mask ignored",
        "causal aligned at the start",
        "queries one position early",
        "queries one position late",
        "scale left out",
        "scale applied twice",
        "head groups interleaved",
        "KV head 0 for all heads",
        "K and V swapped",
        "mask after the softmax, not normalised again",
        "last key missed",
        "first key missed",
        "new tokens missed: only keys of earlier steps are read",
        "keys of earlier steps missed: only new tokens are read",
        "keys in a partial last block missed",
        "keys past the first block missed",
        "lengths without the new tokens",
        "length of the next request",
        "length of the request before",
        "length of the first request",
        "blocks of half the size",
        "blocks of twice the size",
        "half of each block read",
        "blocks taken as consecutive",
        "pages of HND read as NHD",
        "pages of NHD read as HND",
        "pages of the next request",
        "pages of the request before",
        "pages of the first request",
    }


def test_several_features_ignored_at_once_are_the_last_resort() -> None:
    spec = SPEC.replace(sliding_window=4, logits_soft_cap=1.0, has_sinks=True)
    batch = paged_batch(spec, *LENGTHS)
    everything = batch.oracle(SPEC).output
    assert recognise(batch, everything, None) == "all features ignored"
    some = batch.oracle(spec.replace(window=(-1, -1), logits_soft_cap=None)).output
    assert recognise(batch, some, None) is None


def test_a_batch_narrowed_to_causal_is_read_as_causal() -> None:
    batch = paged_batch(SPEC.replace(causal=False), *LENGTHS, causal=True)
    names = {name for name, *_ in mistaken_answers(batch)}
    assert "causal mask ignored" in names
    assert "non-causal taken as causal" not in names
    wide = paged_batch(SPEC.replace(causal=False), *LENGTHS).oracle().output
    assert recognise(batch, wide, None) == "causal mask ignored"


def test_direct_keys_are_the_last_ones() -> None:
    batch = direct_batch(SPEC.replace(direct_kv=True, sliding_window=4), [1, 3], [30, 8], key_lens=[6, 6])
    wrong, _ = numbers_of(batch, "sliding window ignored")
    assert recognise(batch, wrong, None) == "sliding window ignored"


def test_an_lse_alone_is_named() -> None:
    batch = paged_batch(SPEC.replace(needs_lse=True, has_sinks=True), *LENGTHS, padding=2)
    truth = batch.oracle()
    assert recognise(batch, truth.output, truth.lse / math.log(2)) == "LSE in base 2"
    assert recognise(batch, truth.output, batch.oracle(use_sinks=False).lse) == "LSE without the sink"
    assert recognise(batch, truth.output, truth.lse + 1) is None
    found = torch.full((truth.lse.shape[0] + 2, 4), math.nan, dtype=torch.float64)
    padded = torch.cat([truth.lse, found[-2:]])
    assert (
        recognise(batch, truth.output, padded.T.reshape(found.shape)[:-2])
        == "LSE transposed, with its padding rows"
    )


@pytest.mark.parametrize("has_sinks", [False, True])
def test_nan_where_nothing_is_seen_is_named(has_sinks: bool) -> None:
    batch = paged_batch(SPEC.replace(has_sinks=has_sinks), [1, 2], [0, 6])
    output = batch.oracle().output
    output[0] = math.nan
    assert recognise(batch, output, None) == NAN_FOR_EMPTY_ROWS
    output[1] = math.nan
    assert recognise(batch, output, None) is None


def test_an_empty_batch_has_nothing_wrong() -> None:
    batch = paged_batch(SPEC, [], [])
    assert recognise(batch, batch.oracle().output, None) is None
