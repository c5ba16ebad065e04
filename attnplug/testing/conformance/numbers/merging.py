"""Partial results over disjoint keys, merged by their LSE, give the whole result; one part has the sinks."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch

from attnplug.core.features import Feature
from attnplug.core.metadata import PAD_SLOT_ID
from attnplug.core.spec import LayerSpec, Phase
from attnplug.ops.merging import merge_attn_states
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.cases.steps import decode_lengths, layer_without_limits, with_lengths
from attnplug.testing.conformance.check import Check, CheckSkipped, SkipKind, error_context
from attnplug.testing.conformance.harness import Harness, Output
from attnplug.testing.conformance.mistakes.expectations import difference, expect_correct, wrong_answer
from attnplug.testing.conformance.target import Target, of_phase
from attnplug.testing.drawn_values import FP8_SCALES

Span: TypeAlias = tuple[int, int]


def checks(target: Target) -> Iterator[Check]:
    """The checks of partial results, where the backend declares LSE."""
    features = target.backend.features
    if Feature.LSE not in features:
        return
    for has_sinks in (False, True) if Feature.SINKS in features else (False,):
        with_sinks, kind = (" with the sinks in the first", "-sinks") if has_sinks else ("", "")
        for count, fields in forms_of_groups(target, has_sinks, target.scaled_families.values()):
            summary, name = f"decodes merge from {count} parts{with_sinks}", "-".join(fields.values())
            place = f"merge/{count}-parts{kind}{name and '-'}{name}"
            yield Check.of(place, summary, _check_parts, target, count, has_sinks, **fields)
        summary = f"a part without keys for a query adds nothing to the merged result{with_sinks}"
        yield Check.of(f"merge/empty-part{kind}", summary, _check_parts, target, 2, has_sinks, short=True)
        if Feature.NON_CAUSAL in features:
            summary = f"the context, attended without a causal mask, and the new tokens merge{with_sinks}"
            yield Check.of(f"merge/context-and-new{kind}", summary, _check_context, target, has_sinks)
    if Feature.SINKS in features:
        summary = "with use_sinks=False neither output nor LSE includes the sinks"
        yield Check.of("merge/use_sinks", summary, _check_without_sinks, target)


_GROUPS = (2, 3, 4, 8)
"""Numbers of parts or ranks: pairs, an odd number, and those of models that use most GPUs of a host."""


def forms_of_groups(
    target: Target, has_sinks: bool, stored: Iterable[str] = ()
) -> Iterator[tuple[int, dict[str, str]]]:
    """Numbers of parts, each with fields of a layer: the plainest for small ones, all other types for the larger ones.

    The larger numbers share the other dtypes and the `stored` types, and exchange them where layers have sinks.
    """
    other = [*({"dtype": name} for name in target.dtypes[1:]), *({"kv_cache_dtype": name} for name in stored)]
    for place, count in enumerate(_GROUPS):
        own = [{}] if count < 4 else other[(place + has_sinks) % 2 :: 2] or [{}]
        yield from ((count, fields) for fields in own)


# More to ask of a layer with sinks: a path of its own may read them elsewhere.
_BESIDE_SINKS: tuple[dict[str, Any], ...] = (
    {"logits_soft_cap": 3.0},
    {"window": (6, 0)},
    {"chunk_size": 64},
    {"has_alibi": True},
    {"scale": 0.15},
    {"kv_cache_dtype": "fp8_e4m3"},
    {"dtype": "bfloat16"},
    {"causal": False},
    {"num_heads": 8, "num_kv_heads": 1},
    {"head_size": 128, "head_size_v": 128},
    {"block_size": 64},
)


def layer_to_divide(target: Target, has_sinks: bool, **fields: Any) -> tuple[LayerSpec, int]:
    """A layer whose requests may be divided into parts, and its block size; CheckSkipped if there is none."""
    spec, size = layer_without_limits(target, needs_lse=True, has_sinks=has_sinks, **fields)
    if spec.has_alibi or spec.mm_prefix:
        raise CheckSkipped("the positions of a part's keys are not those in the request", SkipKind.LAYER)
    if spec.sparse is not None:
        raise CheckSkipped(
            "the selection of a sparse layer is for all keys of a request, not for parts of them"
        )
    return spec, size


def without_mask(target: Target, spec: LayerSpec) -> LayerSpec:
    """The layer without a causal mask; CheckSkipped if the backend serves none such."""
    # A window of a causal layer says nothing of later keys, which these queries see.
    return target.changed(spec, causal=False, window=(spec.window[0], -1))


def _check_parts(target: Target, count: int, has_sinks: bool, short: bool = False, **fields: str) -> None:
    spec, size = layer_to_divide(target, has_sinks, **fields)
    # Up to three parts have keys of each request; of more, some have none of the second one.
    most = max(count + 1, 4)
    seq_lens = [most * size + 1, 3 * size, (most + 1) * size - 1] + ([1, size] if short else [])
    scales = FP8_SCALES if spec.has_kv_scales else {}
    whole = target.batch(spec, [1] * len(seq_lens), seq_lens, exact=True, **scales)
    pages = [-(-length // size) for length in seq_lens]
    parts = []
    for index in range(count):
        # Whole pages, so that a part is a request. All parts but the last of a one-page request have no keys.
        spans = [
            (n * index // count * size, min(n * (index + 1) // count * size, length))
            for n, length in zip(pages, seq_lens, strict=True)
        ]
        parts.append(_part(whole, spans, spec, size))
    _merge(target, whole, parts)


def _check_context(target: Target, has_sinks: bool) -> None:
    spec, size = layer_to_divide(target, has_sinks)
    free = without_mask(target, spec)
    # Short queries come first, but in a step that must begin with a long one.
    new, context = of_phase(target.phase and Phase.PREFILL, [1, 3, 4, 5], [size, 2 * size, 0, 3 * size])
    lengths = [old + more for old, more in zip(context, new, strict=True)]
    whole = target.batch(spec, new, lengths, exact=True)
    older = _part(whole, [(0, old) for old in context], free, size)
    newer = _part(whole, list(zip(context, lengths, strict=True)), spec, size)
    _merge(target, whole, [older, newer])


def _part(whole: Batch, spans: Sequence[Span], spec: LayerSpec, size: int) -> Batch:
    """The same queries over the keys `first : last` of each request, which its pages already contain."""
    common, device = whole.common, whole.query.device
    table = common.block_table_tensor.cpu()
    lengths = [last - first for first, last in spans]
    moved = torch.stack([row.roll(-(first // size)) for row, (first, _) in zip(table, spans, strict=True)])
    part = dataclasses.replace(
        with_lengths(common, torch.tensor(lengths)),
        block_table_tensor=moved.to(device),
        slot_mapping=torch.full_like(common.slot_mapping, PAD_SLOT_ID),
        causal=spec.causal,
    )
    return dataclasses.replace(
        whole,
        spec=spec,
        common=part,
        keys=[keys[first:last] for keys, (first, last) in zip(whole.keys, spans, strict=True)],
        values=[values[first:last] for values, (first, last) in zip(whole.values, spans, strict=True)],
        seq_lens=lengths,
    )


def _merge(target: Target, whole: Batch, parts: Sequence[Batch]) -> None:
    """Run the parts, the first with sinks, and compare the merged result with the whole batch's."""
    found: list[Output] = []
    with error_context("a whole batch, then its parts with key=None"):
        harness = Harness.of(target, whole)
        harness.run(whole, harness.builder.build(0, whole.common))  # writes all keys to the pages
        for index, part in enumerate(parts):
            harness = Harness.of(target, part)
            metadata = harness.builder.build(0, part.common)
            found.append(harness.run(part, metadata, use_sinks=index == 0, writes=False))
    lses = [answer.lse for answer in found if answer.lse is not None]
    merged = Output(*merge_attn_states([answer.output for answer in found], lses))
    if problem := difference(whole, merged):
        problem = f"{len(parts)} parts, merged: {problem}"
        for index, (part, answer) in enumerate(zip(parts, found, strict=True)):
            if wrong := difference(part, answer, use_sinks=index == 0):
                mistake = part_mistake(part, answer, index == 0)
                raise wrong_answer(f"{problem}; part {index + 1} alone: {wrong}", mistake)
        raise wrong_answer(f"{problem}; each part alone is within its tolerance", None)


def part_mistake(part: Batch, answer: Output, use_sinks: bool) -> str | None:
    """The mistake of partial results that gives an answer: sinks in every part, or a wrong LSE of empty rows."""
    if part.spec.has_sinks and not use_sinks and not difference(part, answer, use_sinks=True):
        return "sink counted twice in a merge"
    expected = part.oracle(use_sinks=use_sinks).lse
    lse = expected if answer.lse is None else answer.lse.cpu().double()
    wrong = lse[(expected == -math.inf) & (lse != -math.inf)]
    return f"LSE of rows that see nothing is {wrong[0].item():g}, not -inf" if wrong.numel() else None


def _check_without_sinks(target: Target) -> None:
    plain, size = layer_to_divide(target, True)
    steps = ([1, 5, 1, size + 3], [size, 2 * size + 5, 3, size + 3]), decode_lengths(size)
    for fields, spec in target.variants(plain, [{}, *map(target.storing, _BESIDE_SINKS)], set()):
        # Kernels that split long contexts count the sinks where they merge the parts.
        for lengths in steps if fields else (*steps, ([1, 5], [1100, 600])):
            _expect_without_sinks(target, target.batch(spec, *lengths))


def _expect_without_sinks(target: Target, batch: Batch) -> None:
    """Expect that a layer leaves the sinks out, includes them in the next call, and leaves them out again."""
    harness = Harness.of(target, batch)
    before = ""
    for use_sinks in (False, True, False):
        what = f"with use_sinks={use_sinks}{before}"
        with error_context(what):
            found = harness.run(batch, harness.builder.build(0, batch.common), use_sinks=use_sinks)
        mistake = functools.partial(_name_ignored, batch, found, use_sinks)
        expect_correct(batch, found, what, mistake, use_sinks=use_sinks)
        before = f", after a call with use_sinks={use_sinks}"


def _name_ignored(batch: Batch, found: Output, use_sinks: bool) -> str | None:
    return None if difference(batch, found, use_sinks=not use_sinks) else f"use_sinks={use_sinks} ignored"
