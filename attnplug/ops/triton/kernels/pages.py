"""Copies the keys and values of all requests out of their pages: a tile of (token, head) rows per program.

Copies each request's pages behind those of the requests before it: a program for each request.

The slot of every token of a batch: each finds its request, then its page.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["num_reqs", "num_rows", "stride_row"],
    do_not_specialize_on_alignment=["block_table", "cu_lens"],
)
def gather_keys_kernel(
    k_cache,
    v_cache,
    block_table,
    cu_lens,
    k_out,
    v_out,
    num_reqs,
    num_rows,
    stride_row,
    stride_page,
    K_PAGES: tl.constexpr,
    V_PAGES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    TILE: tl.constexpr,
    REQS: tl.constexpr,
):
    """Rows `(token, head)` of K and V to contiguous outputs; request i has the tokens `cu_lens[i] : cu_lens[i + 1]`.

    K_PAGES and V_PAGES are the strides of a cache by block, token, head and dimension. TILE has the rows of a program, D
    and DV as powers of two. REQS requests are compared with the rows at once.
    """
    rows = tl.program_id(0) * TILE[0] + tl.arange(0, TILE[0])
    inside = rows < num_rows
    tokens = rows // HEADS
    owners = tl.zeros_like(tokens)
    begins = tl.zeros_like(tokens)
    for first in range(0, num_reqs, REQS):
        each = first + tl.arange(0, REQS)
        # The largest int32, so that lanes past the last request never end before a token.
        ends = tl.load(cu_lens + 1 + each, mask=each < num_reqs, other=2147483647).to(tl.int32)[None, :]
        # A token's request comes after all those that end at it or before.
        passed = ends <= tokens[:, None]
        owners += tl.sum(passed.to(tl.int32), 1)
        begins = tl.maximum(begins, tl.max(tl.where(passed, ends, 0), 1))
    inside = inside & (owners < num_reqs)
    places = tokens - begins
    pages = owners.to(tl.int64) * stride_row + (places // BLOCK_SIZE).to(tl.int64) * stride_page
    blocks = tl.load(block_table + pages, mask=inside, other=0).to(tl.int64)
    places = (places % BLOCK_SIZE).to(tl.int64)
    heads = (rows % HEADS).to(tl.int64)
    dims = tl.arange(0, TILE[1]).to(tl.int64)[None, :]
    dims_v = tl.arange(0, TILE[2]).to(tl.int64)[None, :]
    from_k = (blocks * K_PAGES[0] + places * K_PAGES[1] + heads * K_PAGES[2])[:, None] + dims * K_PAGES[3]
    from_v = (blocks * V_PAGES[0] + places * V_PAGES[1] + heads * V_PAGES[2])[:, None] + dims_v * V_PAGES[3]
    is_k = inside[:, None] & (dims < D)
    is_v = inside[:, None] & (dims_v < DV)
    k = tl.load(k_cache + from_k, mask=is_k)
    v = tl.load(v_cache + from_v, mask=is_v)
    to = rows.to(tl.int64)[:, None]
    tl.store(k_out + to * D + dims, k, mask=is_k)
    tl.store(v_out + to * DV + dims_v, v, mask=is_v)


@triton.jit(
    do_not_specialize=["count", "stride_row"],
    do_not_specialize_on_alignment=["block_table", "seq_lens", "rows"],
)
def page_indices_kernel(
    block_table,
    seq_lens,
    rows,
    out,
    count,
    stride_row,
    stride_page,
    PAGE_SIZE: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the pages of request i at the number of pages that those before it have, none at or past `count`."""
    request = tl.program_id(0)
    begin = 0
    for start in range(0, request, BLOCK):
        before = start + tl.arange(0, BLOCK)
        inside = before < request
        whose = tl.load(rows + before, mask=inside, other=0) if HAS_ROWS else before
        tokens = tl.load(seq_lens + whose, mask=inside, other=0).to(tl.int32)
        begin += tl.sum(tl.cdiv(tokens, PAGE_SIZE), 0)
    row = tl.load(rows + request) if HAS_ROWS else request
    pages = tl.cdiv(tl.load(seq_lens + row).to(tl.int32), PAGE_SIZE)
    # `out` has room for `count` pages only, and the lengths on the device may be longer than the host's.
    pages = tl.minimum(pages, count - begin)
    source = block_table + row.to(tl.int64) * stride_row
    for start in range(0, pages, BLOCK):
        places = start + tl.arange(0, BLOCK)
        inside = places < pages
        held = tl.load(source + places.to(tl.int64) * stride_page, mask=inside)
        tl.store(out + begin + places, held, mask=inside)


@triton.jit(do_not_specialize=["num_reqs", "num_positions", "num_slots", "width", "steps"])
def slot_mapping_kernel(
    block_table,
    query_start_loc,
    positions,
    start_idx,
    slots,
    num_reqs,
    num_positions,
    num_slots,
    width,
    steps,
    stride_request,
    stride_block,
    stride_loc,
    stride_position,
    stride_start,
    stride_slot,
    BLOCK_SIZE: tl.constexpr,
    HAS_START: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`slots[t]` of BLOCK tokens; `steps` halvings find one of `num_reqs` requests."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    known = tokens < num_positions
    # The number of requests that end at or before the token is the index of its request.
    low = tl.zeros([BLOCK], tl.int32)
    high = low + num_reqs
    for _ in range(steps):
        middle = (low + high) // 2
        searching = low < high
        end = tl.load(query_start_loc + (middle + 1) * stride_loc, mask=searching, other=0)
        past = searching & (end <= tokens)
        high = tl.where(searching & (end > tokens), middle, high)
        low = tl.where(past, middle + 1, low)
    known &= low < num_reqs
    position = tl.load(positions + tokens * stride_position, mask=known, other=-1).to(tl.int64)
    known &= position >= 0
    if HAS_START:
        known &= position >= tl.load(start_idx + low * stride_start, mask=known, other=0)
    block = position // BLOCK_SIZE
    known &= block < width
    place = low.to(tl.int64) * stride_request + block * stride_block
    page = tl.load(block_table + place, mask=known, other=0).to(tl.int64)
    slot = tl.where(known, page * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(slots + tokens * stride_slot, slot, mask=tokens < num_slots)
