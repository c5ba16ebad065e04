"""Multimodal spans with traps: at position 0, side by side, of one token, across windows, chunks and pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnplug.testing.oracle import Spans


def default_spans(query_lens: Sequence[int], seq_lens: Sequence[int]) -> list[Spans]:
    """Spans among the new tokens of each request, as positions `[start, stop)`.

    Few tokens are one span. More tokens have two spans side by side, a span of one token, and a long span.
    In every other request the first token is text and the last one is in a span; in the others it is the reverse.
    """
    return [
        _spans(row, new, tokens) for row, (new, tokens) in enumerate(zip(query_lens, seq_lens, strict=True))
    ]


def _spans(row: int, new: int, tokens: int) -> Spans:
    # Rows of a padding request before position 0 are no tokens.
    new = min(new, tokens)
    first, text = tokens - new, row % 2
    if new < 12:
        return [(first + text, tokens)] if new > text else []
    quarter = new // 4
    marks = [
        text,
        text + quarter,
        text + 2 * quarter - 2,
        new // 2 + 1,
        new // 2 + 2,
        new // 2 + 3,
        new - 1 + text,
    ]
    start, middle, end, single, after, long, last = (first + mark for mark in marks)
    return [(start, middle), (middle, end), (single, after), (long, last)]


def rows_of_spans(spans: Sequence[Spans], query_lens: Sequence[int], seq_lens: Sequence[int]) -> torch.Tensor:
    """The span of each new token, int32 `[T, 2]`: `CommonAttentionMetadata.mm_prefix_spans`."""
    rows = torch.zeros(sum(query_lens), 2, dtype=torch.int32)
    at = 0
    for own, new, tokens in zip(spans, query_lens, seq_lens, strict=True):
        positions = torch.arange(tokens - new, tokens)
        for start, stop in own:
            inside = (positions >= max(start, 0)) & (positions < stop)
            rows[at : at + new][inside] = torch.tensor([start, stop], dtype=torch.int32)
        at += new
    return rows
