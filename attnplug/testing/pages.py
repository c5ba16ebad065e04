"""Pages with traps: shuffled blocks, NaN in unused rows, table tails that must not be followed.

Multimodal spans with traps: at position 0, side by side, of one token, across windows, chunks and pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attnplug.core.backend import AttentionBackend
from attnplug.core.kv_format import kv_format
from attnplug.core.spec import LayerSpec
from attnplug.ops.kv_codec import codec_of, encoded, page_planes, typed
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


def put(
    pages: torch.Tensor,
    blocks: torch.Tensor,
    offsets: torch.Tensor,
    tokens: torch.Tensor,
    stored: torch.Tensor,
    spec: LayerSpec,
    scale: Any,
) -> None:
    """Write tokens `[n, Hkv, D]`, whose `stored_values` are given, to rows of the pages."""
    codec = codec_of(spec)
    if codec is not None:
        planes = page_planes(pages, kv_format(spec.resolved_kv_cache_dtype), spec.head_size)
        for plane, items in zip(planes, encoded(codec, tokens, scale), strict=True):
            plane[blocks, offsets] = items
        return
    stored = stored / (scale if spec.has_quantized_kv_cache else 1.0)
    # A value times its scale and divided by it may be just below an integer in float64, but not in float32.
    tokens = stored.float().to(pages.dtype)
    # The assignment copies the bytes of fp8 values, which are already rounded.
    if pages.dtype.itemsize == 1:
        pages, tokens = pages.view(torch.uint8), tokens.view(torch.uint8)
    pages[blocks, offsets] = tokens


def rows_at(pages: torch.Tensor, slots: torch.Tensor, spec: LayerSpec, scale: Any = 1.0) -> torch.Tensor:
    """What K or V pages give back at slots, float64 `[T, Hkv, D]`."""
    size = pages.shape[1]
    codec = codec_of(spec)
    if codec is None:
        rows = pages.float()[slots // size, slots % size].double()
        if isinstance(scale, torch.Tensor):
            scale = scale.to(rows.device)
        return rows * scale if spec.has_kv_scales else rows
    row = kv_format(spec.resolved_kv_cache_dtype)
    planes = page_planes(pages, row, spec.head_size)
    items = (
        typed(plane[slots // size, slots % size], each.dtype)
        for plane, each in zip(planes, row.planes, strict=True)
    )
    return codec.decode(tuple(items), scale).double()


def row_bytes(pages: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
    """The bytes of each row of K or V pages, uint8 `[num_blocks, block_size, ...]`."""
    if codec_of(spec) is None:
        return pages.contiguous().view(torch.uint8).flatten(2)
    planes = page_planes(pages, kv_format(spec.resolved_kv_cache_dtype), spec.head_size)
    return torch.cat([plane.flatten(2) for plane in planes], 2)


def encoding_fault(found: torch.Tensor, wanted: torch.Tensor, rows: torch.Tensor) -> str | None:
    """Why `found`, decoded from pages, is no encoding of `rows` as good as the codec's `wanted`; None if it is.

    A kernel may round otherwise than the codec: a row's error is at most 1.05 times the codec's, and that of all rows
    together 1.005 times.
    """
    if torch.equal(found, wanted):
        return None
    if not bool(found.isfinite().all()):
        return f"{int((~found.isfinite()).sum())} elements are NaN or infinite"
    rows = rows.double()
    error, best = ((each - rows).norm(dim=-1) for each in (found, wanted))
    # An exact row has no error to compare with, only the rounding of float32.
    more = error - 1.05 * best - 1e-6 * rows.norm(dim=-1)
    if bool((more > 0).any()):
        place = int(more.argmax())
        ratio = float(error.flatten()[place] / best.flatten()[place].clamp_min(1e-30))
        return f"the error of a row is {ratio:.3g} times that of the codec, more than 1.05 times"
    total, least = float(error.norm()), float(best.norm())
    if total > 1.005 * least + 1e-6 * float(rows.norm()):
        return f"the error of all rows is {total / least:.4g} times that of the codec, more than 1.005 times"
    return None


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
