"""Copies each request's pages behind those of the request before it: a program for each request."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["page_indices_kernel"]


@triton.jit(do_not_specialize=["stride_row"])
def page_indices_kernel(
    block_table, indptr, rows, out, stride_row, stride_page, HAS_ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write `out[indptr[i] : indptr[i + 1]]` from the front of request i's row."""
    request = tl.program_id(0)
    row = request
    if HAS_ROWS:
        row = tl.load(rows + request)
    begin = tl.load(indptr + request)
    count = tl.load(indptr + request + 1) - begin
    source = block_table + row.to(tl.int64) * stride_row
    for start in range(0, count, BLOCK):
        places = start + tl.arange(0, BLOCK)
        inside = places < count
        pages = tl.load(source + places.to(tl.int64) * stride_page, mask=inside)
        tl.store(out + begin + places, pages, mask=inside)
