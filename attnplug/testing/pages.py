"""Pages with traps: shuffled blocks, NaN in unused rows, table tails that must not be followed.

Multimodal spans with traps: at position 0, side by side, of one token, across windows, chunks and pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnplug.core.backend import AttentionBackend
from attnplug.core.spec import LayerSpec
from attnplug.ops.storage import STORAGE_DTYPES
from attnplug.testing.oracle import Spans
from attnplug.testing.views import trap


def block_table(
    seq_lens: Sequence[int], block_size: int, generator: torch.Generator, skip: int = 0
) -> tuple[torch.Tensor, int]:
    """The shuffled pages of each request, int32 `[R, width]`, and the number of blocks: `skip` more than they need."""
    counts = [-(-seq_len // block_size) for seq_len in seq_lens]
    # Blocks are shuffled and never 0, so a kernel that assumes consecutive blocks reads wrong rows.
    blocks = torch.randperm(sum(counts) + 3, generator=generator)[: sum(counts)] + 1 + skip
    # Two entries beyond the longest request give each row a tail, even the longest one.
    width = max(counts, default=0) + 2
    # Tails hold numbers far outside the cache, so a backend that follows one fails.
    table = torch.randint(-(2**30), 2**30, (len(counts), width), generator=generator).int()
    for row, count in enumerate(counts):
        table[row, :count], blocks = blocks[:count].int(), blocks[count:]
    return table, sum(counts) + 4 + skip


def poisoned_cache(
    spec: LayerSpec, num_blocks: int, block_size: int, layout: str, backend: type[AttentionBackend]
) -> torch.Tensor:
    """The logical view of a cache of NaN, but for the null block, which holds zeros."""
    shape = backend.get_kv_cache_shape(
        num_blocks, block_size, spec.num_kv_heads, spec.head_size, spec.kv_cache_dtype, spec.head_size_v
    )
    order = backend.get_kv_cache_stride_order(layout=layout, spec=spec)
    dtype = STORAGE_DTYPES[spec.resolved_kv_cache_dtype]
    # NaN in unused rows reaches the output of a backend that reads them.
    physical = trap(dtype).expand([shape[dim] for dim in order]).contiguous()
    cache = physical.permute([order.index(dim) for dim in range(len(order))])
    # Block 0 holds zeros because table entries of dropped pages point to it.
    cache[0].zero_() if dtype.itemsize > 1 else cache.view(torch.uint8)[0].zero_()
    return cache


def fill_with_nan(cache: torch.Tensor, blocks: torch.Tensor) -> None:
    """Fill whole blocks with NaN, those of integers with the largest one."""
    worst = trap(cache.dtype)
    if cache.dtype.itemsize == 1:
        # torch assigns no elements of 8-bit floats.
        cache, worst = cache.view(torch.uint8), worst.view(torch.uint8)
    cache[blocks] = worst


def put(pages: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor, stored: torch.Tensor) -> None:
    """Write tokens `[n, Hkv, D]`, already rounded or quantised, to rows of the pages."""
    # A value times its scale and divided by it may be just below an integer in float64, but not in float32.
    tokens = stored.float().to(pages.dtype)
    # The assignment copies the bytes of fp8 values, which are already rounded.
    if pages.dtype.itemsize == 1:
        pages, tokens = pages.view(torch.uint8), tokens.view(torch.uint8)
    pages[blocks, offsets] = tokens


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
