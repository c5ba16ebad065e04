"""Random selections of keys for sparse layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnplug.core.selection import Selection
from attnplug.core.spec import LayerSpec
from attnplug.testing.oracle import Spans
from attnplug.testing.spans import rows_of_spans

_WIDER = 3
"""Columns of a selection beyond the layer's topk."""
_ROUND, _FEWER, _NONE = 7, 4, 2
"""Of so many queries in a row, this one chooses half as many keys as it may, and this one none."""


def random_selection(
    spec: LayerSpec,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    causal: bool,
    spans: Sequence[Spans] | None = None,
    padding: int = 0,
    seed: int = 0,
    device: str = "cpu",
) -> Selection | None:
    """A selection for a sparse layer, in no order; None for other layers.

    Most queries choose as many keys as they may, or all where these are fewer. Some choose fewer, and some none. The
    buffer is wider than the layer's topk, as if another layer chooses more keys.

    Args:
        spec: the layer.
        query_lens: new tokens of each request.
        seq_lens: all tokens of each request.
        causal: whether queries choose no key after their own position, but for the rest of their span.
        spans: the multimodal spans of each request.
        padding: rows past the batch's tokens, which are not given.
        seed: of the random choice.
        device: of the tensors.
    """
    sparse = spec.sparse
    if sparse is None:
        return None
    # Not the seed of the keys, so that both can change alone.
    generator = torch.Generator().manual_seed(seed + 7919)
    chosen = Selection.allocate(sum(query_lens) + padding, sparse.topk + _WIDER, "cpu")
    inside = [(0, 0)] * sum(query_lens)
    if spans is not None:
        inside = [(start, stop) for start, stop in rows_of_spans(spans, query_lens, seq_lens).tolist()]
    token = 0
    for new, length in zip(query_lens, seq_lens, strict=True):
        for position in range(length - new, length):
            end = max(position + 1, inside[token][1]) if causal else length
            among = -(-max(end, 0) // sparse.block)
            most = min(among, sparse.topk)
            count = {_FEWER: (most + 1) // 2, _NONE: 0}.get(token % _ROUND, most)
            chosen.positions[token, :count] = torch.randperm(among, generator=generator)[:count].int()
            chosen.counts[token] = count
            token += 1
    return Selection(chosen.positions.to(device), chosen.counts.to(device))
