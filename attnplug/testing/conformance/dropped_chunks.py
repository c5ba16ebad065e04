"""The mistakes of a prefill of latents that leaves out a chunk of the computed tokens, or attends it twice."""

from __future__ import annotations

import dataclasses

import torch

from attnplug.mla.chunks import ContextChunk, plan_context_chunks
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.expectations import difference
from attnplug.testing.conformance.harness import Answer


def dropped_chunk(batch: Batch, found: Answer, rows: int, threshold: int) -> str | None:
    """The chunk without which, or with twice which, the step has these numbers; None if no chunk explains them.

    Args:
        batch: the step.
        found: the wrong answer.
        rows: rows of the workspace in which computed tokens are expanded.
        threshold: the longest query that is decoded, not prefilled.
    """
    new = batch.common.query_start_loc_cpu.diff().tolist()
    first = next((row for row, count in enumerate(new) if count > threshold), len(new))
    context = [tokens - count for tokens, count in zip(batch.seq_lens, new, strict=True)][first:]
    size = batch.common.block_table_tensor.shape[1] if batch.kv_cache is None else batch.kv_cache.shape[1]
    chunks = plan_context_chunks(context, rows, size) if rows >= size else []
    for number, chunk in enumerate(chunks, 1):
        for times, what in ((0, "left out of a prefill"), (2, "attended twice in a prefill")):
            if difference(_repeated(batch, chunk, first, times), found) is None:
                return f"chunk {number} of {len(chunks)} of the computed tokens {what}"
    return None


def _repeated(batch: Batch, chunk: ContextChunk, first: int, times: int) -> Batch:
    """The batch with the chunk's tokens so many times."""
    keys, values, lengths = [*batch.keys], [*batch.values], [*batch.seq_lens]
    for place, (start, count) in enumerate(zip(chunk.starts, chunk.lengths, strict=True)):
        row = first + chunk.first + place
        for tensors in (keys, values):
            own = tensors[row]
            tensors[row] = torch.cat(
                [own[:start], *[own[start : start + count]] * times, own[start + count :]]
            )
        lengths[row] += (times - 1) * count
    return dataclasses.replace(batch, keys=keys, values=values, seq_lens=lengths)
