"""Pages of fewer bits that are opened before a prefill, where many tiles of queries read each page."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from attnplug.backends.impl import Pages
from attnplug.backends.triton.formats import format_values, row_of, stride_arguments
from attnplug.backends.triton.kernels.opened_pages import open_pages_kernel
from attnplug.backends.triton.layout import tile_side
from attnplug.backends.triton.metadata import TritonMetadata
from attnplug.core.spec import LayerSpec
from attnplug.ops.reach import Reach
from attnplug.ops.triton.launch import BoundKernel, power_of_two

_KERNEL: Any = open_pages_kernel
_MOST_BYTES = 256 << 20
"""Bytes of opened pages. Steps with more keys open them in each tile of their queries."""
# Rows of a request, on average, from which opened pages gain: four tiles read each page. It is estimated.
_LEAST_ROWS = 512
_WIDEST = 256
"""Elements of a head of which one program has all columns of its values."""
_TILE = 64
"""Most tokens of a program."""
_SCALES = 2048
"""Scales of keys of a program that compares them: enough for its loads to wait together."""


class Opened(NamedTuple):
    """Keys and values `[pages, block_size, Hkv, D]` in 16 bits, and int32 tables `[R, max_blocks]` of their pages.

    Where rows have scales, `form` says where they are, and layers multiply with them. Such numbers are exact. With
    `powers` numbers are float16 with the scales of their rows, and need a power of two as their factor.
    """

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    form: tuple[Any, ...] | None
    """FORMAT of kernels/formats.py; None for numbers that need no scale of their row."""
    powers: torch.Tensor | None = None
    """Float32 `[2, R, Hkv]`, the factors of keys and of values."""
    tops: torch.Tensor | None = None
    """Int32 `[spans, 2, Hkv]`, of scale_tops_kernel."""


class PageOpener:
    """Opens the pages of a layer's longer requests, for caches of one form.

    Args:
        spec: of the layer.
        pages: the cache.
        stride_table: of the block table.
        reqs: the most requests of a step, a power of two.
        reach: opens rows with scales as numbers, those that queries see by it; None: as codes.
    """

    def __init__(
        self, spec: LayerSpec, pages: Pages, stride_table: int, reqs: int, reach: Reach | None = None
    ) -> None:
        _, block_size, heads, _ = pages.k.shape
        self._shape = block_size, heads, spec.head_size
        found = {"BLOCK_D": tile_side(spec.head_size), "FORMAT": None}
        found |= stride_arguments(pages.k.stride(), pages.v.stride()) | format_values(spec, pages.k, pages.v)
        row = row_of(spec)
        has_scales = row is not None and bool(row.planes[1].per_row) and reach is None
        # The codes of rows with scales are numbers of float16, whatever the type of the layer.
        self._dtype = torch.float16 if has_scales or reach is not None else getattr(torch, spec.dtype)
        elements = block_size * heads * spec.head_size
        self._form = ("opened", elements, 2 * heads, 2, True, True, 1, 0) if has_scales else None
        # In elements of 16 bits; each page begins at a multiple of 16 bytes.
        self._page = -(-(elements + (2 * block_size * heads if has_scales else 0)) // 8) * 8
        tile = min(tile_side(block_size), _TILE)
        self._grid = heads, -(-block_size // tile)
        names = (f"stride_{part}{axis}" for part in "kv" for axis in "bth")
        strides = {"stride_page": self._page, **{name: found[name] for name in names}}
        sizes = {"BLOCK_SIZE": block_size, "HEADS": heads, "D": spec.head_size, "WIDTH": found["BLOCK_D"]}
        values = {"stride_table": stride_table, **strides, **sizes}
        values |= {"REQS": reqs, "TILE": tile, "FORMAT": found["FORMAT"]}
        values |= {"SPAN": 0, "left": -1, "chunk": 0}
        self._span, self._compare = 0, None
        if reach is not None:
            from attnplug.backends.triton.kernels.hopper.scale_tops import scale_tops_kernel

            width = power_of_two(heads)
            self._span = max(_SCALES // width, 16)
            values |= {"SPAN": self._span, "left": reach.left, "chunk": reach.chunk}
            kernel: Any = scale_tops_kernel
            self._compare = BoundKernel(kernel, 7, values | {"WIDTH": width}, num_warps=4)
        self._kernel = BoundKernel(_KERNEL, 11, values, num_warps=4)

    def places(self, meta: TritonMetadata) -> Opened:
        """Room for the pages of the requests after the decodes."""
        block_size, heads, head_size = self._shape
        count = _pages(meta, block_size)
        reqs = meta.num_reqs - meta.num_decodes
        # A bound of the spans that all requests have.
        spans = int((-(-meta.key_bounds // self._span)).sum()) if self._span else 0
        entries, factors = reqs * meta.block_table.stride(0), 2 * reqs * heads if self._span else 0
        size = entries + factors + spans * 2 * heads
        held, more = meta.workspace.opened(2 * count * self._page, size, self._dtype)
        strides = self._page, heads * head_size, head_size, 1
        k, v = (
            held.as_strided((count, *self._shape), strides, part * count * self._page) for part in range(2)
        )
        opened = Opened(k, v, more[:entries].view(reqs, meta.block_table.stride(0)), self._form)
        if not self._span:
            return opened
        tops = entries + factors
        powers = more[entries:tops].view(torch.float32).view(2, reqs, heads)
        return opened._replace(powers=powers, tops=more[tops:].view(spans, 2, heads))

    def __call__(self, meta: TritonMetadata, pages: Pages, opened: Opened | None = None) -> Opened:
        """The opened pages of the requests after the decodes, at their `places`."""
        opened = self.places(meta) if opened is None else opened
        count, reqs = opened.k.shape[0], meta.num_reqs - meta.num_decodes
        starts, lens, table, _ = meta.others
        # Kernels that open codes do not use the last two.
        factors = lens, lens
        if opened.tops is not None and opened.powers is not None and self._compare is not None:
            factors = opened.tops, opened.powers
            if spans := opened.tops.shape[0]:
                self._compare((spans,), pages.k, pages.v, table, starts, lens, opened.tops, reqs)
            # The first programs write the powers of a request each.
            count = max(count, reqs)
        if count:
            made = opened.table, opened.k, opened.v, *factors
            self._kernel((count, *self._grid), pages.k, pages.v, table, starts, lens, *made, reqs)
        return opened


def may_open(spec: LayerSpec) -> bool:
    """Whether prefills of a layer may read opened pages; sums of layers with invariance would depend on the step."""
    wide = max(spec.head_size, spec.head_size_v) > _WIDEST or spec.head_size_v != spec.head_size
    plain = spec.dtype != "float32" and not spec.invariance and not spec.head_scales
    return spec.has_quantized_kv_cache and plain and not wide


def may_round(spec: LayerSpec) -> bool:
    """Whether opened pages of a layer may be float16 numbers, which are codes with their row's scale, rounded to 11 bits."""
    row = row_of(spec)
    # They are too few for the bounds of float16.
    rounds = spec.dtype == "bfloat16" and spec.logits_soft_cap is None
    return rounds and row is not None and bool(row.planes[1].per_row)


def gains(spec: LayerSpec, meta: TritonMetadata, block_size: int) -> bool:
    """Whether the requests after the decodes read each page so often that it is opened first, and these have room."""
    reqs = meta.num_reqs - meta.num_decodes
    keys, queries = int(meta.key_bounds.sum()), meta.num_actual_tokens - meta.num_decode_tokens
    # A window's queries read few pages of a long context. It is estimated.
    sees_most = (spec.window[0] < 0 and spec.chunk_size is None) or keys <= 8 * queries
    size = 4 * _pages(meta, block_size) * block_size * spec.num_kv_heads * spec.head_size
    rows = queries * (spec.num_heads // spec.num_kv_heads)
    return rows >= _LEAST_ROWS * reqs and sees_most and size <= _MOST_BYTES


def _pages(meta: TritonMetadata, block_size: int) -> int:
    """The pages of the requests after the decodes, or an upper bound."""
    return int((-(-meta.key_bounds // block_size)).sum())
