"""Builders may attend a prefix that all requests share once, and the numbers stay the same."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from attnplug.core.features import Feature
from attnplug.core.metadata import CommonAttentionMetadata
from attnplug.core.sparse import SparseSpec
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.cases.steps import BatchFactory, layer_without_limits, with_lengths
from attnplug.testing.conformance.check import Check, ConformanceError, error_context
from attnplug.testing.conformance.harness import Harness
from attnplug.testing.conformance.mistakes.expectations import StepMistake, expect_correct_step
from attnplug.testing.conformance.target import Target, of_phase
from attnplug.testing.drawn_values import FP8_SCALES

_LONG = 272
"""Tokens of a long prefix."""
_LAYERS: dict[str, tuple[Feature, dict[str, Any]]] = {
    "full": (Feature(0), {}),
    "window": (Feature.SLIDING_WINDOW, {"window": (1 << 14, 0)}),
    "chunk": (Feature.CHUNKED_LOCAL, {"chunk_size": 1 << 14}),
    "cap": (Feature.SOFT_CAP, {"logits_soft_cap": 3.0}),
    "slopes": (Feature.ALIBI, {"has_alibi": True}),
    "sinks": (Feature.SINKS, {"has_sinks": True}),
    "lse": (Feature.LSE, {"needs_lse": True}),
    "lse-sinks": (Feature.LSE | Feature.SINKS, {"needs_lse": True, "has_sinks": True}),
    "fp8": (Feature.FP8_KV, {"kv_cache_dtype": "fp8"}),
    "one-kv-head": (Feature(0), {"num_heads": 4, "num_kv_heads": 1}),
    "sparse": (Feature.SPARSE, {"sparse": SparseSpec("token_topk", 24)}),
}
"""Layers whose queries all see the prefix: no window or chunk ends within the steps."""
_TOGETHER = ("cap", "slopes", "lse-sinks", "fp8")
"""The names of _LAYERS whose fields one layer has at once."""


def checks(target: Target) -> Iterator[Check]:
    """The check of a shared prefix, for each of these layers that the backend declares."""
    summary = "a prefix that all requests share changes no number, and use_cascade_attention answers"
    features = target.backend.features
    own = {name: target.storing(fields) for name, (needed, fields) in _LAYERS.items() if needed in features}
    for name, fields in own.items():
        yield Check.of(f"builder/common-prefix-{name}", summary, _check_prefix, target, **fields)
    asked = [fields for name, fields in own.items() if name in _TOGETHER]
    together = {field: value for fields in asked for field, value in fields.items()}
    yield Check.of("builder/common-prefix-together", summary, _check_prefix, target, **together)
    for dtype in target.dtypes[1:]:
        yield Check.of(f"builder/common-prefix-{dtype}", summary, _check_prefix, target, dtype=dtype)
    for layout in target.backend.supported_kv_cache_layouts()[1:]:
        yield Check.of(f"builder/common-prefix-{layout}", summary, _check_prefix, target, layout)
    for size in target.block_sizes[1:2]:
        yield Check.of(f"builder/common-prefix-b{size}", summary, _check_prefix, target, block_size=size)


def _check_prefix(target: Target, layout: str | None = None, **fields: Any) -> None:
    spec, size = layer_without_limits(target, **fields)
    options = FP8_SCALES if spec.has_kv_scales else {}
    options = options | ({} if layout is None else {"layout": layout})
    long = -(-_LONG // size) * size
    steps = (
        ([1, 1, 1, 1], [2 * size, 2 * size + 3, 3 * size, 4 * size + 1]),
        ([1, 1, 5, size + 3], [2 * size, 2 * size + 3, 3 * size, 4 * size + 1]),
        ([1, 3], [2 * size, 2 * size + 3]),
        ([3, 3, 20], [2 * size, 2 * size, 3 * size]),
        # Libraries attend a prefix once only where it is long and shared by many requests.
        ([1, 2, *[1] * 7], [long + 3 * more for more in range(9)]),
    )
    for new, context in steps:
        lens, lengths = of_phase(target.phase, new, [a + b for a, b in zip(context, new, strict=True)])
        # A one-phase backend may have got longer queries, so fewer computed tokens.
        blocks = min(length - count for count, length in zip(lens, lengths, strict=True)) // size
        make = functools.partial(target.batch, spec, lens, lengths, padding=3, **options)
        # Builders must also take fewer blocks than the requests share.
        *prefixes, longest = sorted({size, blocks // 2 * size, (blocks - 1) * size, blocks * size} - {0})
        # Pages may be shared though no prefix is given. One step tries all of these prefixes, the others the last two.
        prefixes = [0, *prefixes] if new is steps[0][0] else prefixes[-1:]
        expected = share_prefix(make(), blocks, size)
        for shared in prefixes:
            _check_shared(target, share_prefix(make(), blocks, size), expected, shared, size)
        harness = _check_shared(target, share_prefix(make(), blocks, size), expected, longest, size)
        _check_after(target, make, harness)


def _check_shared(target: Target, batch: Batch, expected: Batch, shared: int, size: int) -> Harness:
    """One step with `shared` tokens in common, whose answer is that of `expected`; gives the layer that ran it."""
    harness = Harness.of(target, batch)
    if shared:
        _ask(harness, batch, shared)
    lens = np.diff(batch.common.query_start_loc_cpu.numpy()).tolist()
    what = f"build(common_prefix_len={shared}) of {len(lens)} requests with {lens} new tokens"
    with error_context(what):
        found = harness.run(batch, harness.builder.build(shared, batch.common))
    left_out: StepMistake = functools.partial(_without, shared // size, shared)
    # Without a prefix, leaving it out changes nothing, so any wrong answer would have that name.
    mistakes = {"the shared prefix not attended": left_out} if shared else {}
    expect_correct_step(target, lambda: expected, found, what, mistakes)
    return harness


def _check_after(target: Target, make: BatchFactory, harness: Harness) -> None:
    """A step without a shared prefix is right after one with it."""
    batch, what = make(), "build(common_prefix_len=0) after a step with a shared prefix"
    with error_context(what):
        found = harness.run(batch, harness.builder.build(0, batch.common))
    expect_correct_step(target, make, found, what)


def _ask(harness: Harness, batch: Batch, shared: int) -> None:
    spec, builder = batch.spec, harness.builder
    query_lens = np.diff(batch.common.query_start_loc_cpu.numpy())
    given = query_lens.copy()
    with error_context("use_cascade_attention"):
        wants: object = builder.use_cascade_attention(
            common_prefix_len=shared,
            query_lens=given,
            num_query_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            use_alibi=spec.has_alibi,
            use_sliding_window=spec.window[0] >= 0,
            use_local_attention=spec.chunk_size is not None,
            num_sms=1,
            dcp_world_size=1,
        )
    if not isinstance(wants, (bool, np.bool_)):
        raise ConformanceError(f"use_cascade_attention gave {wants!r}; it must give True or False")
    if not np.array_equal(given, query_lens):
        found = f"{query_lens.tolist()} became {given.tolist()}"
        raise ConformanceError(f"use_cascade_attention modified query_lens: {found}")


def share_prefix(batch: Batch, blocks: int, size: int) -> Batch:
    """The batch with the first `blocks` blocks of `size` tokens of its first request in all requests.

    Every request must have computed them.
    """
    table, tokens = batch.common.block_table_tensor.clone(), blocks * size
    table[1:, :blocks] = table[0, :blocks]
    for rows in (batch.keys, batch.values):
        for tensor in rows[1:]:
            tensor[:tokens] = rows[0][:tokens]
    return dataclasses.replace(batch, common=dataclasses.replace(batch.common, block_table_tensor=table))


def _without(blocks: int, tokens: int, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
    # A step over the later blocks only, with lengths to match.
    table = common.block_table_tensor[:, blocks:].contiguous()
    cut = with_lengths(common, common.seq_lens.cpu() - tokens)
    return dataclasses.replace(cut, block_table_tensor=table)
