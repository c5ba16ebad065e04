"""A request's prompt in pieces and its decodes, step by step, for each kind of layer; cross layers read on."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from attnplug.core.features import Feature
from attnplug.core.spec import LayerSpec
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.check import Check, error_context
from attnplug.testing.conformance.expectations import expect_correct
from attnplug.testing.conformance.harness import Answer, Harness
from attnplug.testing.conformance.requests import piece
from attnplug.testing.conformance.steps import with_lengths, with_pages
from attnplug.testing.conformance.target import Target

_LAYERS: dict[str, tuple[Feature, dict[str, Any]]] = {
    "full": (Feature(0), {}),
    "window": (Feature.SLIDING_WINDOW, {"window": (6, 0)}),
    "wide-window": (Feature.SLIDING_WINDOW, {"window": (21, 0)}),
    "chunk": (Feature.CHUNKED_LOCAL, {"chunk_size": 32}),
    "cap": (Feature.SOFT_CAP, {"logits_soft_cap": 3.7}),
    "slopes": (Feature.ALIBI, {"has_alibi": True}),
    "sinks": (Feature.SINKS, {"has_sinks": True}),
    "window-sinks": (Feature.SLIDING_WINDOW | Feature.SINKS, {"window": (9, 0), "has_sinks": True}),
    "fp8": (Feature.FP8_KV, {"kv_cache_dtype": "fp8"}),
}


def checks(target: Target) -> Iterator[Check]:
    """The check of each of these layers, in each dtype, and of cross layers."""
    if target.phase is None:
        for name, (needed, fields) in _LAYERS.items():
            if needed in target.backend.features:
                summary = (
                    "a prompt in pieces, then decodes and verified drafts, give the result of one prefill"
                )
                yield Check.of(f"batch/chain-{name}", summary, _check_chain, target, **fields)
        for dtype in target.dtypes[1:]:
            summary = f"so do those of a {dtype} layer"
            yield Check.of(f"batch/chain-{dtype}", summary, _check_chain, target, dtype=dtype)
    if Feature.CROSS | Feature.NON_CAUSAL in target.backend.features and target.phase is None:
        summary = "later steps of a cross layer read the encoder's tokens that its first step wrote"
        yield Check.of("batch/cross-steps", summary, _check_cross, target)


def _check_chain(target: Target, **fields: Any) -> None:
    spec, size = with_pages(target, _spec(target, **fields))
    # Pieces around the ends of pages, single decodes across one, and steps that verify two or three tokens.
    counts = [size - 1, 3, size, *[1] * (size // 2), 2, 2, 3, *[1] * 4, 2, size + 1, *[1] * 3]
    ends = list(itertools.accumulate(counts))
    scales: dict[str, Any] = {"k_scale": 0.37, "v_scale": 1.9} if spec.has_quantized_kv_cache else {}
    # A span is computed as a whole, so these pieces have none.
    spans: list[Any] | None = [[]] if spec.mm_prefix else None
    whole = target.batch(spec, [ends[-1]], [ends[-1]], exact=True, spans=spans, **scales)
    harness = Harness.of(target, whole, num_speculative_tokens=2)
    outputs = []
    for number, (start, end) in enumerate(itertools.pairwise((0, *ends)), 1):
        what = f"step {number} of a chain, tokens {start} .. {end - 1}"
        # A step with drafts that are rejected comes first; the next one writes their slots again.
        if end - start == 2:
            drafts = _with_other_tokens(piece(whole, start, end))
            with error_context(f"{what}, as drafts that are rejected"):
                harness.run(drafts, harness.builder.build(0, drafts.common))
        step = piece(whole, start, end)
        outputs.append(harness.forward(step, what=what).output)
    lengths = "+".join(map(str, counts[:3]))
    what = (
        f"a prompt in pieces of {lengths} tokens, then decodes, with drafts that were rejected between them"
    )
    expect_correct(whole, Answer(torch.cat(outputs), None), what)


def _spec(target: Target, **fields: Any) -> LayerSpec:
    if "chunk_size" in fields:
        fields["chunk_size"] = 2 * target.backend.get_preferred_block_size()
    return target.paged_spec(attn_type="decoder", causal=True, **fields)


def _with_other_tokens(step: Batch) -> Batch:
    """The step with other keys and values, as drafts have."""
    return dataclasses.replace(step, key=step.key.flip(-1) + 1, value=step.value.flip(-1) + 1)


def _check_cross(target: Target) -> None:
    spec = target.spec(attn_type="encoder_decoder")
    size = target.block_size(spec)
    encoder = [size + 3, 9, 2 * size, 5]
    # Requests by step: those that write their encoder's tokens now, and the queries of all.
    steps: tuple[tuple[Sequence[int], list[int]], ...] = (
        ((0, 1), [4, 1, 0, 0]),
        ((2,), [1, 1, 7, 0]),
        ((), [1, 1, 1, 0]),
        ((3,), [2, 1, 1, 1]),
        ((), [1, 1, 1, 1]),
        ((), [3, 1, 5, 1]),
    )
    first = target.batch(spec, steps[0][1], encoder)
    harness = Harness.of(target, first)
    lengths = [0] * len(encoder)
    for number, (writers, queries) in enumerate(steps, 1):
        for request in writers:
            lengths[request] = encoder[request]
        batch = _cross_step(target, first, queries, lengths, writers, number)
        what = (
            f"step {number} of a cross layer, in which {len(writers)} requests write their encoder's tokens"
        )
        with error_context(what):
            metadata = harness.builder.build(0, batch.common)
            found = harness.run(batch, metadata, writes=bool(writers))
        expect_correct(batch, found, what)


def _cross_step(
    target: Target,
    first: Batch,
    queries: list[int],
    lengths: list[int],
    writers: Sequence[int],
    seed: int,
) -> Batch:
    """A step over the pages of `first` with new queries; `writers` give the keys of their encoders now.

    Requests of length 0 have no encoder tokens yet.
    """
    encoder = first.seq_lens
    drawn = target.batch(first.spec, queries, encoder, seed=seed)
    starts = [0, *itertools.accumulate(encoder)]
    own = [row for request in writers for row in range(starts[request], starts[request + 1])]
    rows = torch.tensor(own, dtype=torch.int64, device=first.key.device)
    common = dataclasses.replace(
        with_lengths(drawn.common, torch.tensor(lengths)),
        block_table_tensor=first.common.block_table_tensor,
        slot_mapping=first.common.slot_mapping[rows],
    )
    return dataclasses.replace(
        drawn,
        common=common,
        kv_cache=first.kv_cache,
        key=first.key[rows],
        value=first.value[rows],
        keys=[tokens[:length] for tokens, length in zip(first.keys, lengths, strict=True)],
        values=[tokens[:length] for tokens, length in zip(first.values, lengths, strict=True)],
        seq_lens=list(lengths),
    )
