"""The slot of every token of a batch: each finds its request, then its page."""

from __future__ import annotations

import triton
import triton.language as tl


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
