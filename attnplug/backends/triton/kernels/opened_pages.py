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
    do_not_specialize=["num_reqs", "left", "chunk", "stride_table"],
    do_not_specialize_on_alignment=["block_table", "query_start_loc", "seq_lens", "table", "tops", "powers"],
)
def open_pages_kernel(
    k_cache,
    v_cache,
    block_table,
    query_start_loc,
    seq_lens,
    table,
    k_opened,
    v_opened,
    tops,
    powers,
    num_reqs,
    left,
    chunk,
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
    SPAN: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """TILE tokens of one head in page `program_id(0)` of those that all requests have, counted one after the other.

    The opened page `[BLOCK_SIZE, HEADS, D]` has that number, which `table` gets where `block_table` has the page's. Scales
    of rows come after it, float32 `[BLOCK_SIZE, HEADS]`. Programs past the last page do nothing.

    With SPAN pages have numbers in place of codes and scales, and zeros for rows that no query of the request sees. They
    need powers of two as factors, float32 `[2, num_reqs, HEADS]` for keys and for values. `tops` are those of
    scale_tops_kernel for so many tokens. Programs are no fewer than the requests.
    """
    page = tl.program_id(0)
    head = tl.program_id(1)
    requests = tl.arange(0, REQS)
    lens = tl.load(seq_lens + requests, mask=requests < num_reqs, other=0)
    first = tl.program_id(2) * TILE
    if SPAN:
        spans = (lens + SPAN - 1) // SPAN
        if page < num_reqs and first == 0:
            k_field, v_field = _power_fields(tops, requests, spans, page, head, HEADS, FORMAT)
            tl.store(powers + page * HEADS + head, _power(k_field))
            tl.store(powers + (num_reqs + page) * HEADS + head, _power(v_field))
    request, place = request_of(page, requests, (lens + BLOCK_SIZE - 1) // BLOCK_SIZE)
    if request >= num_reqs:
        return
    entry = request.to(tl.int64) * stride_table + place
    block = tl.load(block_table + entry).to(tl.int64)
    if head == 0 and first == 0:
        tl.store(table + entry, page)
    tokens = first + tl.arange(0, TILE)
    begin = page.to(tl.int64) * stride_page
    k_planes = _head(k_cache, head, stride_kh, FORMAT)
    v_planes = _head(v_cache, head, stride_vh, FORMAT)
    k_page = k_opened + begin
    v_page = v_opened + begin
    if SPAN:
        seq_len = tl.load(seq_lens + request)
        positions = place * BLOCK_SIZE + tokens
        seen = positions >= first_seen(query_start_loc, request, seq_len, left, chunk)
        seen = seen & (positions < seq_len) & (tokens < BLOCK_SIZE)
        k_field, v_field = _power_fields(tops, requests, spans, request, head, HEADS, FORMAT)
        _open_numbers(
            k_planes, block, tokens, head, stride_kb, stride_kt, k_page, seen, _power(254 - k_field),
            BLOCK_SIZE, HEADS, D, WIDTH, FORMAT,
        )  # fmt: skip
        _open_numbers(
            v_planes, block, tokens, head, stride_vb, stride_vt, v_page, seen, _power(254 - v_field),
            BLOCK_SIZE, HEADS, D, WIDTH, FORMAT,
        )  # fmt: skip
    else:
        _open(
            k_planes, block, tokens, head, stride_kb, stride_kt, k_page, BLOCK_SIZE, HEADS, D, WIDTH, FORMAT
        )
        _open(
            v_planes, block, tokens, head, stride_vb, stride_vt, v_page, BLOCK_SIZE, HEADS, D, WIDTH, FORMAT
        )


@triton.jit
def request_of(part, requests, counts):
    """The request that has `part` of all parts, counted one after the other, and its place among the request's.

    `counts` are the parts of each of `requests`. Parts past the last one have a request past the last one.
    """
    request = tl.sum((tl.cumsum(counts, 0) <= part).to(tl.int32), 0)
    return request, part - tl.sum(tl.where(requests < request, counts, 0), 0)


@triton.jit
def first_seen(query_start_loc, request, seq_len, left, chunk):
    """The first key that a query of the request sees; its page table need not have pages before it."""
    queries = tl.load(query_start_loc + request + 1) - tl.load(query_start_loc + request)
    first = tl.maximum(seq_len - queries, 0)
    low = tl.where(left >= 0, tl.maximum(first - left, 0), 0)
    return tl.maximum(low, tl.where(chunk > 0, first // tl.maximum(chunk, 1) * chunk, 0))


@triton.jit
def _power_fields(tops, requests, spans, request, head, HEADS: tl.constexpr, FORMAT: tl.constexpr):
    """The exponents, as float32 has them, of the powers of two that a request's numbers are divided by: keys, values."""
    begin = tl.sum(tl.where(requests < request, spans, 0), 0)
    count = tl.sum(tl.where(requests == request, spans, 0), 0)
    k_top = 0
    v_top = 0
    for at in range(0, count, 128):
        lanes = at + tl.arange(0, 128)
        places = tops + (begin + lanes) * (2 * HEADS) + head
        k_top = tl.maximum(k_top, tl.max(tl.load(places, mask=lanes < count, other=0), 0))
        v_top = tl.maximum(v_top, tl.max(tl.load(places + HEADS, mask=lanes < count, other=0), 0))
    # Codes of 8 bits are at most 2**7, and those of 4 bits less than 2**3. So the largest number is at most 2**15.
    LOG: tl.constexpr = 3 if FORMAT[SHIFT] else 7
    return tl.maximum(k_top, 32) + (LOG - 14), tl.maximum(v_top, 32) + (LOG - 14)


@triton.jit
def _power(field):
    """The power of two with such an exponent."""
    return (field << 23).to(tl.float32, bitcast=True)


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
def _open_numbers(
    planes,
    block,
    tokens,
    head,
    stride_block,
    stride_token,
    opened,
    seen,
    factor,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Write rows as numbers: codes times their row's scale and `factor`; zeros where they are not `seen`."""
    low, high = open_rows(planes, block, tokens, stride_block, stride_token, seen, D, WIDTH, True, FORMAT)
    scales = row_scales(planes, block, tokens, stride_block, seen, True, FORMAT) * factor
    there = tokens < BLOCK_SIZE
    places = opened + ((tokens * HEADS + head) * D)[:, None]
    if FORMAT[SHIFT]:
        _store(places, low.to(tl.float32) * scales[:, None], there, D // 2)
        _store(places + FORMAT[SHIFT], high.to(tl.float32) * scales[:, None], there, D // 2)
    else:
        _store(places, low.to(tl.float32) * scales[:, None], there, D)


@triton.jit
def _store(places, numbers, there, SIZE: tl.constexpr):
    """The first SIZE columns of rows that are `there`."""
    columns = tl.arange(0, numbers.shape[1])[None, :]
    numbers = numbers.to(places.dtype.element_ty)
    tl.store(places + columns, numbers, mask=there[:, None] & (columns < SIZE))
