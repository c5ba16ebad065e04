"""Opens the pages of requests once for all tiles of their queries: pages of 16 bits, which kernels read as they are."""

from __future__ import annotations

import triton
import triton.language as tl

from attnplug.backends.triton.kernels.formats import (
    ROW_SCALES,
    SHIFT,
    head_planes,
    joined,
    open_rows,
    row_scales,
)


# Values that differ between steps must not compile another kernel.
@triton.jit(
    do_not_specialize=["num_reqs", "stride_table"],
    do_not_specialize_on_alignment=["block_table", "seq_lens", "table"],
)
def open_pages_kernel(
    k_cache,
    v_cache,
    block_table,
    seq_lens,
    table,
    k_opened,
    v_opened,
    num_reqs,
    stride_table,
    stride_page,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    REQS: tl.constexpr,
    TILE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """TILE tokens of one head in page `program_id(0)` of those that all requests have, counted one after the other.

    The opened page `[BLOCK_SIZE, HEADS, D]` has that number, which `table` gets where `block_table` has the page's. Scales
    of rows come after it, float32 `[BLOCK_SIZE, HEADS]`. Programs past the last page do nothing.
    """
    page = tl.program_id(0)
    head = tl.program_id(1)
    requests = tl.arange(0, REQS)
    lens = tl.load(seq_lens + requests, mask=requests < num_reqs, other=0)
    counts = (lens + BLOCK_SIZE - 1) // BLOCK_SIZE
    request = tl.sum((tl.cumsum(counts, 0) <= page).to(tl.int32), 0)
    if request >= num_reqs:
        return
    place = page - tl.sum(tl.where(requests < request, counts, 0), 0)
    entry = request.to(tl.int64) * stride_table + place
    block = tl.load(block_table + entry).to(tl.int64)
    first = tl.program_id(2) * TILE
    if head == 0 and first == 0:
        tl.store(table + entry, page)
    tokens = first + tl.arange(0, TILE)
    begin = page.to(tl.int64) * stride_page
    k_planes = _head(k_cache, head, stride_kh, FORMAT)
    v_planes = _head(v_cache, head, stride_vh, FORMAT)
    k_page = k_opened + begin
    v_page = v_opened + begin
    _open(k_planes, block, tokens, head, stride_kb, stride_kt, k_page, BLOCK_SIZE, HEADS, D, WIDTH, FORMAT)
    _open(v_planes, block, tokens, head, stride_vb, stride_vt, v_page, BLOCK_SIZE, HEADS, D, WIDTH, FORMAT)


@triton.jit
def _head(pages, head, stride_head, FORMAT: tl.constexpr):
    """The first row of a head, as head_planes."""
    if FORMAT is None:
        return pages + head.to(tl.int64) * stride_head
    else:
        return head_planes(pages, head, stride_head, FORMAT)


@triton.jit
def _open(
    planes,
    block,
    tokens,
    head,
    stride_block,
    stride_token,
    opened,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
):
    there = tokens < BLOCK_SIZE
    rows = tokens * HEADS + head
    if FORMAT is None:
        columns = tl.arange(0, WIDTH)[None, :]
        inside = there[:, None] & (columns < D)
        stored = planes + (block * stride_block + tokens * stride_token)[:, None] + columns
        # float16 has every 8-bit float, and GPUs convert to it fastest.
        _store(opened + (rows * D)[:, None], tl.load(stored, mask=inside, other=0.0).to(tl.float16), there, D)
    else:
        low, high = open_rows(
            planes, block, tokens, stride_block, stride_token, there, D, WIDTH, True, FORMAT
        )
        places = opened + (rows * D)[:, None]
        if FORMAT[SHIFT] == 1:
            # Halves beside each other are stored together: apart, each store would have 2 bytes of every 4.
            _store(places, joined(low, high, FORMAT), there, D)
        elif FORMAT[SHIFT]:
            _store(places, low, there, D // 2)
            _store(places + FORMAT[SHIFT], high, there, D // 2)
        else:
            _store(places, low, there, D)
        if FORMAT[ROW_SCALES]:
            scales = (opened + BLOCK_SIZE * HEADS * D).to(tl.pointer_type(tl.float32), bitcast=True)
            own = row_scales(planes, block, tokens, stride_block, there, True, FORMAT)
            tl.store(scales + rows, own, mask=there)


@triton.jit
def _store(places, numbers, there, SIZE: tl.constexpr):
    """The first SIZE columns of rows that are `there`."""
    columns = tl.arange(0, numbers.shape[1])[None, :]
    numbers = numbers.to(places.dtype.element_ty)
    tl.store(places + columns, numbers, mask=there[:, None] & (columns < SIZE))
