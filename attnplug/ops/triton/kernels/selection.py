"""The chosen keys of each query as pages of one token."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _request_of(token, query_start_loc, seq_lens, num_reqs):
    """The request of the query `token`, and one past its position: the keys that it sees."""
    # Where all requests have as many queries, this is right, and saves the search and its waiting.
    request = (token.to(tl.int64) * num_reqs // tl.num_programs(0)).to(tl.int32)
    start = tl.load(query_start_loc + request)
    stop = tl.load(query_start_loc + request + 1)
    seq_len = tl.load(seq_lens + request)
    if (start > token) | (stop <= token):
        request = 0
        after = num_reqs
        while after - request > 1:
            middle = (request + after) // 2
            if tl.load(query_start_loc + middle) <= token:
                request = middle
            else:
                after = middle
        stop = tl.load(query_start_loc + request + 1)
        seq_len = tl.load(seq_lens + request)
    return request, tl.maximum(seq_len - stop + token + 1, 0)


@triton.jit(
    do_not_specialize=["num_reqs"], do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "ends"]
)
def query_ends_kernel(query_start_loc, seq_lens, ends, num_reqs):
    """Write the number of keys that the query of this program sees."""
    token = tl.program_id(0)
    _, end = _request_of(token, query_start_loc, seq_lens, num_reqs)
    tl.store(ends + token, end)


# Values that differ between steps must not compile another kernel.
@triton.jit(
    do_not_specialize=["num_reqs", "stride_positions", "stride_table", "stride_pages"],
    do_not_specialize_on_alignment=[
        *("positions", "counts", "query_start_loc", "seq_lens", "block_table"),
        *("page_table", "key_counts", "ends"),
    ],
)
def token_table_kernel(
    positions,
    counts,
    query_start_loc,
    seq_lens,
    block_table,
    page_table,
    key_counts,
    ends,
    num_reqs,
    most,
    width,
    stride_positions,
    stride_table,
    stride_pages,
    block_step,
    token_step,
    BLOCK_SIZE: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The row of one query: its chosen keys in their order, without those that it does not see.

    A chosen number means CHOSEN consecutive positions. At most `most` numbers are read and `width` pages
    written.
    """
    token = tl.program_id(0)
    row = positions + token.to(tl.int64) * stride_positions
    lanes = tl.arange(0, BLOCK)
    # Loads that wait for no other come first.
    count = tl.load(counts + token)
    number = tl.load(row + lanes // CHOSEN, mask=lanes < most * CHOSEN, other=-1)
    request, end = _request_of(token, query_start_loc, seq_lens, num_reqs)
    tl.store(ends + token, end)
    table_row = block_table + request.to(tl.int64) * stride_table
    pages_row = page_table + token.to(tl.int64) * stride_pages
    count = tl.minimum(count, most) * CHOSEN
    done = 0
    for start in tl.range(0, count, BLOCK):
        at = start + lanes
        key = number.to(tl.int64) * CHOSEN + at % CHOSEN
        there = (at < count) & (number >= 0) & (key < end)
        block = tl.load(table_row + key // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        place = done + tl.cumsum(there.to(tl.int32), 0) - 1
        page = block * block_step + (key % BLOCK_SIZE) * token_step
        tl.store(pages_row + place, page.to(tl.int32), mask=there & (place < width))
        done += tl.sum(there.to(tl.int32), 0)
        at += BLOCK
        number = tl.load(row + at // CHOSEN, mask=at < count, other=-1)
    tl.store(key_counts + token, tl.minimum(done, width))
