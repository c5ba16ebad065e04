"""Copies each request's pages behind those of the requests before it: a program for each request."""

from __future__ import annotations

import triton
import triton.language as tl


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
    pages = tl.minimum(pages, count - begin)
    source = block_table + row.to(tl.int64) * stride_row
    for start in range(0, pages, BLOCK):
        places = start + tl.arange(0, BLOCK)
        inside = places < pages
        held = tl.load(source + places.to(tl.int64) * stride_page, mask=inside)
        tl.store(out + begin + places, held, mask=inside)
