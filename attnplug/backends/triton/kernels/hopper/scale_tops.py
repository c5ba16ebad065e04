"""The largest scales of the rows that requests read, which decide what the numbers of opened pages are divided by."""

from __future__ import annotations

import triton
import triton.language as tl

from attnplug.backends.triton.kernels.formats import head_planes, row_scales
from attnplug.backends.triton.kernels.opened_pages import first_seen, request_of


# Values that differ between steps must not compile another kernel.
@triton.jit(
    do_not_specialize=["num_reqs", "left", "chunk", "stride_table"],
    do_not_specialize_on_alignment=["block_table", "query_start_loc", "seq_lens", "tops"],
)
def scale_tops_kernel(
    k_cache,
    v_cache,
    block_table,
    query_start_loc,
    seq_lens,
    tops,
    num_reqs,
    left,
    chunk,
    stride_table,
    stride_kb,
    stride_vb,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    REQS: tl.constexpr,
    SPAN: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Exponents of the largest scales of SPAN tokens of a request, int32 `[programs, 2, HEADS]`, of keys and of values.

    Programs count the spans of all requests one after the other; those past the last one do nothing. Rows that no query
    sees, and scales that are not finite, do not count.
    """
    span = tl.program_id(0)
    requests = tl.arange(0, REQS)
    lens = tl.load(seq_lens + requests, mask=requests < num_reqs, other=0)
    request, place = request_of(span, requests, (lens + SPAN - 1) // SPAN)
    if request >= num_reqs:
        return
    seq_len = tl.load(seq_lens + request)
    low = first_seen(query_start_loc, request, seq_len, left, chunk)
    positions = place * SPAN + tl.arange(0, SPAN)
    there = (positions >= low) & (positions < seq_len)
    pages = block_table + request.to(tl.int64) * stride_table + positions // BLOCK_SIZE
    blocks = tl.load(pages, mask=there, other=0).to(tl.int64)[:, None]
    places = (positions % BLOCK_SIZE)[:, None]
    heads = tl.arange(0, WIDTH)
    there = there[:, None] & (heads < HEADS)[None, :]
    k_planes = head_planes(k_cache, heads[None, :], 0, FORMAT)
    v_planes = head_planes(v_cache, heads[None, :], 0, FORMAT)
    into = tops + span * (2 * HEADS) + heads
    k_top = _exponents(k_planes, blocks, places, stride_kb, there, FORMAT)
    v_top = _exponents(v_planes, blocks, places, stride_vb, there, FORMAT)
    tl.store(into, k_top, mask=heads < HEADS)
    tl.store(into + HEADS, v_top, mask=heads < HEADS)


@triton.jit
def _exponents(planes, blocks, places, stride_block, there, FORMAT: tl.constexpr):
    """The exponent of each head's largest scale, as float32 has it."""
    scales = row_scales(planes, blocks, places, stride_block, there, True, FORMAT)
    exponents = (scales.to(tl.int32, bitcast=True) >> 23) & 255
    return tl.max(tl.where(exponents < 255, exponents, 0), 0)
