"""Partial results over disjoint keys, merged by their LSE, are the whole; a sink counts in one of them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import torch

from attnplug.core.features import Feature
from attnplug.core.metadata import PAD_SLOT_ID
from attnplug.core.spec import LayerSpec
from attnplug.ops.merging import merge_attn_states
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.check import Check, CheckSkipped, ConformanceError
from attnplug.testing.conformance.driving import Answer, Driver
from attnplug.testing.conformance.steps import with_pages
from attnplug.testing.conformance.target import Target
from attnplug.testing.conformance.verdicts import agrees, compare, during

__all__ = ["checks"]

Span: TypeAlias = tuple[int, int]

_TWICE = "sink counted twice in a merge"
_IGNORED = "use_sinks=False ignored"


def checks(target: Target) -> Iterator[Check]:
    """The checks of partial results, where the backend declares LSE."""
    features = target.backend.features
    if Feature.LSE not in features:
        return
    sinks = (False, True) if Feature.SINKS in features else (False,)
    for has_sinks in sinks:
        with_sinks, kind = (" with the sinks in the first", "-sinks") if has_sinks else ("", "")
        for count in (2, 3):
            run = functools.partial(_check_parts, target, count, has_sinks)
            yield Check(f"merge/{count}-parts{kind}", run, f"decodes merge from {count} parts{with_sinks}")
        run = functools.partial(_check_parts, target, 2, has_sinks, short=True)
        summary = f"a part in which a query sees nothing merges as nothing{with_sinks}"
        yield Check(f"merge/empty-part{kind}", run, summary)
        if Feature.NON_CAUSAL in features:
            run = functools.partial(_check_context, target, has_sinks)
            summary = f"the context, seen non-causally, and the new tokens merge{with_sinks}"
            yield Check(f"merge/context-and-new{kind}", run, summary)
    if Feature.SINKS in features:
        run = functools.partial(_check_without_sinks, target)
        yield Check("merge/use_sinks", run, "with use_sinks=False neither output nor LSE has the sinks")


def _layer(target: Target, has_sinks: bool) -> LayerSpec:
    return with_pages(target, target.spec(needs_lse=True, has_sinks=has_sinks))


def _check_parts(target: Target, count: int, has_sinks: bool, short: bool = False) -> None:
    spec = _layer(target, has_sinks)
    size = target.block_size(spec)
    seq_lens = [4 * size + 1, 3 * size, 5 * size - 1] + ([1, size] if short else [])
    whole = target.batch(spec, [1] * len(seq_lens), seq_lens, exact=True)
    pages = [-(-length // size) for length in seq_lens]
    parts = []
    for index in range(count):
        # Whole pages, so that a part is a request of its own; of one page all but the last part have none.
        spans = [
            (n * index // count * size, min(n * (index + 1) // count * size, length))
            for n, length in zip(pages, seq_lens, strict=True)
        ]
        parts.append(_part(whole, spans, spec, size))
    _merge(target, whole, parts)


def _check_context(target: Target, has_sinks: bool) -> None:
    spec = _layer(target, has_sinks)
    size, free = target.block_size(spec), spec.replace(causal=False)
    refused = target.reasons(free)
    if refused:
        raise CheckSkipped(f"{target.name} serves no such layer without causality: {'; '.join(refused)}")
    context, new = [2 * size, 3 * size, 0, size], [3, 5, 4, 1]
    lengths = [old + more for old, more in zip(context, new, strict=True)]
    whole = target.batch(spec, new, lengths, exact=True)
    older = _part(whole, [(0, old) for old in context], free, size)
    newer = _part(whole, list(zip(context, lengths, strict=True)), spec, size)
    _merge(target, whole, [older, newer])


def _part(whole: Batch, spans: Sequence[Span], spec: LayerSpec, size: int) -> Batch:
    """The same queries over the keys `first : last` of each request, which are in its pages already."""
    common, device = whole.common, whole.query.device
    table = common.block_table_tensor.cpu()
    host = np.array([last - first for first, last in spans], dtype=np.int32)
    moved = torch.stack([row.roll(-(first // size)) for row, (first, _) in zip(table, spans, strict=True)])
    part = dataclasses.replace(
        common,
        seq_lens=torch.from_numpy(host.copy()).to(device),
        seq_lens_host=host,
        max_seq_len=int(host.max()),
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
        seq_lens=host.tolist(),
    )


def _merge(target: Target, whole: Batch, parts: Sequence[Batch]) -> None:
    """Run the parts, the first with sinks, and compare what they merge to with the whole's answer."""
    found: list[Answer] = []
    with during("a whole batch, then its parts with key=None"):
        driver = Driver.of(target, whole)
        driver.run(whole, driver.builder.build(0, whole.common))  # puts all keys into the pages
        for index, part in enumerate(parts):
            driver = Driver.of(target, part)
            metadata = driver.builder.build(0, part.common)
            found.append(driver.run(part, metadata, use_sinks=index == 0, writes=False))
    lses = [answer.lse for answer in found if answer.lse is not None]
    merged = Answer(*merge_attn_states([answer.output for answer in found], lses))
    try:
        compare(whole, merged)
    except AssertionError as problem:
        named, why = _fault(parts, found)
        raise ConformanceError(f"{len(parts)} parts, merged: {problem}{why}", named) from None


def _fault(parts: Sequence[Batch], found: Sequence[Answer]) -> tuple[str | None, str]:
    """The name of what is wrong with a part, if it has one, and in which part."""
    for index, (part, answer) in enumerate(zip(parts, found, strict=True)):
        try:
            compare(part, answer, use_sinks=index == 0)
        except AssertionError as problem:
            named = _named(part, answer, use_sinks=index == 0)
            likely = f", and these are the numbers of a known mistake: {named}" if named else ""
            return named, f"; part {index + 1} alone: {problem}{likely}"
    return None, "; each part alone is within its tolerance"


def _named(part: Batch, answer: Answer, use_sinks: bool) -> str | None:
    if part.spec.has_sinks and not use_sinks and agrees(part, answer, use_sinks=True):
        return _TWICE
    expected = part.oracle(use_sinks=use_sinks).lse
    empty = expected == -math.inf
    lse = torch.empty(0) if answer.lse is None else answer.lse.cpu().double()
    if bool((lse[empty] != -math.inf).any()):
        value = lse[empty][lse[empty] != -math.inf][0].item()
        return f"LSE of rows that see nothing is {value:g}, not -inf"
    return None


def _check_without_sinks(target: Target) -> None:
    spec = _layer(target, True)
    size = target.block_size(spec)
    batch = target.batch(spec, [1, 5, 1, size + 3], [size, 2 * size + 5, 3, size + 3])
    driver = Driver.of(target, batch)
    with during("with use_sinks=False"):
        found = driver.run(batch, driver.builder.build(0, batch.common), use_sinks=False)
    try:
        compare(batch, found, use_sinks=False)
    except AssertionError as problem:
        named = _IGNORED if agrees(batch, found, use_sinks=True) else None
        likely = f"; these are the numbers of a known mistake: {named}" if named else ""
        raise ConformanceError(f"with use_sinks=False: {problem}{likely}", named) from None
