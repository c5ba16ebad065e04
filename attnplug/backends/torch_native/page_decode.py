"""One new token over a few hundred keys on a CPU: gathers whole pages into a buffer that fits the CPU's cache."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from attnplug.backends.torch_native.metadata import TorchMetadata
from attnplug.backends.torch_native.softmax import Scoring
from attnplug.backends.torch_native.source import KeySource, PagedKeys
from attnplug.ops.reach import Reach

_MIN_BYTES = 1 << 17
"""Bytes of a request's K and V below which a share of a tile costs less than calls of its own."""
_MAX_BYTES = 1 << 22
"""Largest buffer: more bytes would leave the cache between the gather and their use."""


@dataclasses.dataclass(frozen=True, slots=True)
class _PageRows:
    """A cache as rows of one page each: block b is row `b * step` for keys, `b * step + value` for values."""

    block_size: int
    heads: int
    head_size: int
    unit: int
    step: int
    value: int

    @classmethod
    def of(cls, source: PagedKeys) -> _PageRows | None:
        """None if K and V differ in shape or strides, or a page is not contiguous with heads innermost."""
        k, v = source.k, source.v
        if not len(k) or k.shape != v.shape or k.stride() != v.stride() or not k[0].is_contiguous():
            return None
        apart = v.storage_offset() - k.storage_offset()
        if apart < 0 or k.untyped_storage().data_ptr() != v.untyped_storage().data_ptr():
            return None
        unit = math.gcd(k.stride(0), apart)
        block_size, heads, head_size = k.shape[1:]
        return cls(block_size, heads, head_size, unit, k.stride(0) // unit, apart // unit)

    def view(self, k: torch.Tensor) -> torch.Tensor:
        """The rows of a cache whose keys are `k`."""
        count = (k.shape[0] - 1) * self.step + self.value + 1
        return k.as_strided((count, k[0].numel()), (self.unit, 1))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PageDecodes:
    """The requests of a step that attend whole pages; its layers share plan and buffer.

    Args:
        chosen: bool `[R]`.
        queries: int64, their rows of the packed queries.
        pages: the view of the cache.
        parts: per request: rows of its pages, their place in the buffer, and its keys and values there.
    """

    chosen: npt.NDArray[np.bool_]
    queries: torch.Tensor
    pages: _PageRows
    parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]


def plan_page_decodes(
    query: torch.Tensor, source: KeySource, metadata: TorchMetadata, reach: Reach, scoring: Scoring
) -> PageDecodes | None:
    """The requests for `attend_pages`; None if it cannot attend this layer, or no request would gain.

    It attends a plain softmax of scaled scores over a cache of the queries' own dtype.
    """
    if query.device.type != "cpu" or not isinstance(source, PagedKeys) or not scoring.is_plain:
        return None
    pages = _PageRows.of(source)
    if pages is None or source.k.dtype != query.dtype:
        return None
    key = (PageDecodes, pages, reach)
    if key not in metadata.plans:
        metadata.plans[key] = _plan(source, metadata, reach, pages)
    plan: PageDecodes | None = metadata.plans[key]
    return plan


def attend_pages(
    query: torch.Tensor, source: KeySource, plan: PageDecodes, scoring: Scoring, output: torch.Tensor
) -> None:
    """Attend the queries `[T, H, D]` of the plan's requests, and write their rows of `output [T, H, D]`."""
    rows = plan.pages.view(source.k)
    # Heads of a group become queries of one head, which reads their keys once.
    queries = query[plan.queries].view(len(plan.parts), 1, plan.pages.heads, -1, plan.pages.head_size)
    attended = []
    for one, (index, place, keys, values) in zip(queries.unbind(), plan.parts, strict=True):
        torch.index_select(rows, 0, index, out=place)
        attended.append(scaled_dot_product_attention(one, keys, values, scale=scoring.scale))
    rows_of = torch.cat(attended).view(-1, *output.shape[1:])
    output.index_copy_(0, plan.queries, rows_of.to(output.dtype))


def _plan(source: PagedKeys, metadata: TorchMetadata, reach: Reach, pages: _PageRows) -> PageDecodes | None:
    is_single = metadata.query_lens == 1
    spans = None
    if metadata.spans is not None and len(metadata.spans):
        # Rows of other requests are not read below, but must be rows.
        spans = metadata.spans[np.minimum(metadata.query_starts[:-1], len(metadata.spans) - 1)]
    low, high = reach.bounds(metadata.seq_lens - 1, source.first, source.end, spans)
    seen = (high - low) * 2 * source.k[0, 0].nbytes
    chosen = is_single & (seen >= _MIN_BYTES) & (seen <= _MAX_BYTES)
    if not chosen.any():
        return None
    low, high, size = low[chosen], high[chosen], pages.block_size
    first, last = low // size, -(-high // size)
    buffer = source.k.new_empty(2 * int((last - first).max()), source.k[0].numel())
    tables = source.block_table[torch.from_numpy(np.flatnonzero(chosen))].long() * pages.step
    bounds = np.stack([first, last, low - first * size, high - first * size], 1).tolist()
    parts = []
    for table, (start, stop, begin, end) in zip(tables, bounds, strict=True):
        keys = table[start:stop]
        place = buffer[: 2 * keys.numel()]
        halves = place.view(2, 1, -1, pages.heads, pages.head_size)[:, :, begin:end].transpose(2, 3)
        parts.append((torch.cat([keys, keys + pages.value]), place, halves[0], halves[1]))
    return PageDecodes(chosen, torch.from_numpy(metadata.query_starts[:-1][chosen]), pages, parts)
