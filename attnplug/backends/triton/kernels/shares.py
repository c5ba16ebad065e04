"""Equal shares of keys: the plan that divides the tiles of all requests, and the merge of what shares cut."""

from __future__ import annotations

import triton
import triton.language as tl

from attnplug.backends.triton.kernels.ranges import key_range
from attnplug.backends.triton.kernels.scan import LN2, add_parts
from attnplug.backends.triton.kernels.tiles import of_head

SLACK: tl.constexpr = tl.constexpr(4)
"""Tiles that take about as long as the merge of what is cut."""


@triton.jit
def request_range(
    first_row,
    query_len,
    seq_len,
    mm_spans,
    left,
    right,
    chunk,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    HAS_SPANS: tl.constexpr,
):
    """`[lo, hi)`: the keys that some query of a request sees; its first query is row `first_row` of the batch."""
    lo, hi = key_range(
        seq_len - query_len, seq_len - 1, seq_len * 0, seq_len, left, right, chunk,
        HAS_LEFT, HAS_RIGHT, HAS_CHUNK,
    )  # fmt: skip
    if HAS_SPANS:
        # The queries are a request's last tokens, so a span ends with the keys.
        place = mm_spans + first_row.to(tl.int64) * 2
        start = tl.load(place, mask=query_len > 0, other=0)
        stop = tl.load(place + 1, mask=query_len > 0, other=0)
        lo = tl.where(stop > start, tl.minimum(lo, start), lo)
    return lo, hi


@triton.jit
def first_key(base, past, count, ahead, shared, TILE: tl.constexpr):
    """The tile of keys at which a stream of `count` tiles begins, for a request that sees the keys `[base, past)`.

    Tiles without keys come first: `ahead`, or as many as the plan gave the stream.
    """
    first = tl.maximum(base // TILE, shared)
    own = tl.maximum(tl.cdiv(past, TILE) - first, 1)
    return first - tl.maximum(tl.minimum(count - own, ahead), 0)


@triton.jit(
    do_not_specialize=["num_reqs", "prefix", "left", "right", "chunk", "programs", "least", "ahead", "most"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "mm_spans"],
)
def plan_shares_kernel(
    query_start_loc,
    seq_lens,
    tiles,
    mm_spans,
    num_reqs,
    prefix,
    left,
    right,
    chunk,
    programs,
    least,
    ahead,
    most,
    REQS: tl.constexpr,
    MANY: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    HAS_SPANS: tl.constexpr,
):
    """Number the tiles of all requests, and divide them.

    A request has a stream of tiles for each BLOCK_M of its rows, which are its queries times GROUP; it has no fewer
    than one tile, none past `most` keys, and none without queries. A program needs time to begin a stream. Each stream
    has `ahead` tiles without keys for it, so that shares of many short requests take no longer than others. Streams
    of almost equal length all get as many tiles as the longest, if shares become little longer and cut fewer of them.
    Behind the requests comes the prefix that all of them share, in whole tiles, with a stream for each BLOCK_M of the
    rows of all requests.

    `tiles [num_reqs + 3 + programs]` gets the first tile of each request and of the prefix, then the number of all
    tiles. Next come the tiles of one program's share, at least `least` or a whole stream. Last, each share has its
    first entry: the request, or num_reqs for the prefix, that its first tile belongs to.

    Requests are numbered all at once, or with MANY in turns of REQS.
    """
    shared = prefix // TILE
    streams, each, tokens = _streams(
        query_start_loc, seq_lens, mm_spans, 0, num_reqs, shared, left, right, chunk, ahead, most,
        REQS, TILE, GROUP, BLOCK_M, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_SPANS,
    )  # fmt: skip
    own = tl.sum(streams * each, 0)
    blocks = tl.sum(each, 0)
    queries = tl.sum(tokens, 0)
    longest = tl.maximum(tl.max(streams, 0), 1)
    if MANY:
        for begin in tl.range(REQS, num_reqs, REQS):
            more, of_each, tokens = _streams(
                query_start_loc, seq_lens, mm_spans, begin, num_reqs, shared, left, right, chunk, ahead, most,
                REQS, TILE, GROUP, BLOCK_M, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_SPANS,
            )  # fmt: skip
            own += tl.sum(more * of_each, 0)
            blocks += tl.sum(of_each, 0)
            queries += tl.sum(tokens, 0)
            longest = tl.maximum(longest, tl.max(more, 0))
    others = shared * tl.cdiv(queries * GROUP, BLOCK_M)
    size, padded = _share_size(own, others, blocks, longest, programs, least, ahead)
    reqs = tl.arange(0, REQS)
    ends = tl.cumsum(tl.where(padded > 0, padded, streams) * each, 0)
    tl.store(tiles + 1 + reqs, ends, mask=reqs < num_reqs)
    done = tl.max(ends, 0)
    if MANY:
        for begin in tl.range(REQS, num_reqs, REQS):
            more, of_each, _ = _streams(
                query_start_loc, seq_lens, mm_spans, begin, num_reqs, shared, left, right, chunk, ahead, most,
                REQS, TILE, GROUP, BLOCK_M, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_SPANS,
            )  # fmt: skip
            ends = done + tl.cumsum(tl.where(padded > 0, padded, more) * of_each, 0)
            tl.store(tiles + 1 + begin + reqs, ends, mask=begin + reqs < num_reqs)
            done = tl.max(ends, 0)
    tl.store(tiles, 0)
    tl.store(tiles + 1 + num_reqs, done + others)
    tl.store(tiles + 2 + num_reqs, size)
    if MANY:
        # All threads must write their ends before others search them.
        tl.debug_barrier()
    SHARES: tl.constexpr = 128 if MANY else 16
    lanes = tl.arange(0, SHARES)
    for first in tl.range(0, programs, SHARES):
        shares = first + lanes
        if MANY:
            entries = lanes * 0
            past = entries + num_reqs
            gap = num_reqs
            while gap > 0:
                middle = (entries + past) // 2
                is_open = entries < past
                end = tl.load(tiles + 1 + middle, mask=is_open, other=0, cache_modifier=".cg")
                is_before = is_open & (end <= shares * size)
                past = tl.where(is_open & (end > shares * size), middle, past)
                entries = tl.where(is_before, middle + 1, entries)
                gap //= 2
        else:
            before = (reqs < num_reqs)[None, :] & (ends[None, :] <= (shares * size)[:, None])
            entries = tl.sum(before.to(tl.int32), 1)
        tl.store(tiles + 3 + num_reqs + shares, entries, mask=shares < programs)


@triton.jit
def _share_size(own, others, blocks, longest, programs, least, ahead):
    """Tiles of a share, and tiles that each stream gets; 0 for as many as it has.

    A cut costs about as much as some tiles. Streams of almost equal length are not cut where a share has a whole number
    of them, and are cut in equal parts where each has a whole number of shares. Their lengths are almost equal if shares
    become little longer when all are as long as the longest. The prefix, `others` tiles, is only divided with equal parts.
    Each equal part begins one stream, as others do, so they are cut without the tiles `ahead` where that makes them shorter.
    """
    size = tl.maximum(tl.cdiv(own + others, programs), least)
    slack = tl.maximum(size // 32, SLACK)
    whole = tl.maximum(tl.cdiv(blocks, programs), 1) * longest
    part = _equal_part(longest, others, blocks, programs, least)
    # If parts are as long without `ahead`, they may be fewer. On an H200 that took 41.1 us in place of 42.2 for 8 x 32k with one
    # KV head, which have less to merge. One request has more programs idle then: 11.3 us in place of 11.0 for 1 x 8k.
    bare = tl.maximum(longest - ahead, 1)
    bare_part = _equal_part(bare, others, blocks, programs, least)
    length = tl.where((bare_part < part) | ((blocks > 1) & (bare_part == part)), bare, longest)
    part = tl.minimum(part, bare_part)
    several = tl.maximum(tl.cdiv(blocks * longest + others, programs), least)
    is_cut = part < length
    part = tl.where(is_cut, part, tl.cdiv(several, longest) * longest)
    is_whole = (others == 0) & (whole - size <= slack)
    part = tl.where(is_whole, whole, part)
    stream = tl.where(is_cut & (is_whole == 0), tl.cdiv(length, part) * part, longest)
    # Divisions in 64 bits would take a part of a microsecond, so sums past 32 bits are divided as they are.
    fits = (blocks.to(tl.int64) + programs) * longest + others < 1 << 30
    is_alike = fits & (part - size <= slack) & (blocks * stream + others <= part * programs)
    return tl.where(is_alike, part, size), tl.where(is_alike, stream, 0)


@triton.jit
def _equal_part(length, others, blocks, programs, least):
    """Tiles of each share if all streams have `length` and are cut in equal parts; no fewer than that if none is cut."""
    part = tl.maximum(tl.cdiv(blocks * length + others, programs), least)
    # One part more makes all of them shorter, where there are programs for it.
    parts = tl.cdiv(length, part)
    cut = tl.cdiv(length, parts)
    fewer = tl.cdiv(length, tl.maximum(length // part, 1))
    cut = tl.where(blocks * parts * cut + others <= cut * programs, cut, fewer)
    return tl.where(part < length, cut, part)


@triton.jit
def _streams(
    query_start_loc,
    seq_lens,
    mm_spans,
    begin,
    num_reqs,
    shared,
    left,
    right,
    chunk,
    ahead,
    most,
    REQS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    HAS_SPANS: tl.constexpr,
):
    """Of REQS requests from `begin` on: the tiles of a stream, the number of streams, and the queries."""
    reqs = begin + tl.arange(0, REQS)
    here = reqs < num_reqs
    starts = tl.load(query_start_loc + reqs, mask=here, other=0)
    stops = tl.load(query_start_loc + reqs + 1, mask=here, other=0)
    lens = tl.minimum(tl.load(seq_lens + reqs, mask=here, other=0), most)
    queries = stops - starts
    lo, hi = request_range(
        starts, queries, lens, mm_spans, left, right, chunk, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_SPANS
    )
    first = tl.maximum(lo // TILE, shared)
    tiles = tl.where(queries > 0, tl.maximum(tl.cdiv(hi, TILE) - first, 1) + ahead, 0)
    return tiles, tl.cdiv(queries * GROUP, BLOCK_M), queries


WIDE: tl.constexpr = tl.constexpr(4096)
"""Elements that one warp reads at once of a row with more than 16 parts. 8/1, 128k and 63 x 512: 35.4 us (H200), 39.3 with 2048."""


@triton.jit(
    do_not_specialize=[
        "num_reqs",
        "prefix",
        "max_blocks",
        "block_rows",
        "by_share",
        "is_followed",
        "stride_lse",
    ],
    do_not_specialize_on_alignment=["query_start_loc", "lse"],
)
def merge_shares_kernel(
    partials,
    partial_lses,
    output,
    lse,
    query_start_loc,
    tiles,
    num_reqs,
    prefix,
    max_blocks,
    block_rows,
    by_share,
    is_followed,
    value_scale,
    stride_ot,
    stride_oh,
    stride_lse,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK elements of one row of a request, for one KV head: merge its parts by their LSE, always in one order.

    The first axis of the grid is requests, and the second one their rows. With `by_share` they are shares but the
    first, and the rows of the stream that ends first in such a share after it began in the one before: many requests
    have fewer of these than rows. A row whose keys are all in one share is written already, unless there is a prefix,
    which `by_share` does not serve. Partial results are in `partials [places, Hkv, block_rows, SIZE]`; see `place_of`
    for the places.

    PARTS of a row are merged at a time. With 1, many rows have a warp each: it takes few parts one after another, and
    WIDE elements at a time of a long request.

    If it `is_followed` by a kernel that waits for no decode, that is launched before the merge ends.
    """
    if PDL:
        if is_followed:
            tl.extra.cuda.gdc_launch_dependents()
    PIECES: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    kv_head = tl.program_id(2) // PIECES
    kv_heads = tl.num_programs(2) // PIECES
    request, row, token, num_rows, first, count, is_other = row_to_merge(
        query_start_loc, tiles, num_reqs, block_rows, by_share, GROUP
    )
    size = tl.load(tiles + num_reqs + 2)
    stream = first + row // block_rows * count
    share = stream // size
    parts = (stream + count - 1) // size - share + 1
    shared = prefix // TILE
    is_other |= (row >= num_rows) | ((parts == 1) & (shared == 0))
    if PDL:
        wait_for_parts(is_other)
    if is_other:
        return
    # Rows of the prefix are those of all requests.
    shared_row = (token - tl.load(query_start_loc)) * GROUP + row
    shared_stream = tl.load(tiles + num_reqs) + shared_row // block_rows * shared
    shared_share = shared_stream // size
    shared_parts = (shared_stream + shared - 1) // size - shared_share + 1
    all_parts = parts + tl.where(shared > 0, shared_parts, 0)

    dims = tl.program_id(2) % PIECES * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    total = 0.0
    top = float("-inf")
    where = request, row, share, parts, max_blocks, shared, shared_row, shared_share, num_reqs
    pages = partials, partial_lses, kv_heads, kv_head, block_rows
    # One warp would wait for each of a long request's parts.
    few = tl.where((PARTS == 1) & (all_parts > 16), 0, all_parts)
    # Parts that come one after another are loaded at the same time.
    for done in tl.range(0, few, PARTS, loop_unroll_factor=4 if PARTS == 1 else 1):
        out, found = load_parts(done + tl.arange(0, PARTS), all_parts, where, pages, dims, SIZE)
        acc, top, total = add_parts(acc, top, total, out, found)
    if PARTS == 1:
        for done in tl.range(few, all_parts, WIDE // BLOCK):
            out, found = load_parts(done + tl.arange(0, WIDE // BLOCK), all_parts, where, pages, dims, SIZE)
            acc, top, total = add_parts(acc, top, total, out, found)
    empty = total == 0.0
    safe = tl.where(empty, 1.0, total)
    at = (token + row // GROUP).to(tl.int64)
    head = (kv_head * GROUP + row % GROUP).to(tl.int64)
    places = output + at * stride_ot + head * stride_oh + dims
    value_scale = of_head(value_scale, kv_head)
    tl.store(places, (acc / safe * value_scale).to(output.dtype.element_ty), mask=dims < SIZE)
    if HAS_LSE:
        tl.store(lse + at * stride_lse + head, tl.where(empty, float("-inf"), top + tl.log2(safe)) * LN2)


@triton.jit
def wait_for_inputs():
    """Wait until the kernel has ended that a decode was launched behind, and let the merge be launched."""
    tl.extra.cuda.gdc_wait()
    # A merge that begins earlier could read what that kernel has not written yet.
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_parts(is_other):
    """Wait until the kernel has ended that writes partial results, where a program merges a row.

    A merge is launched while that kernel runs. What its programs have read until then is older than that.
    """
    # Programs without a row end at once, and leave their places to others. The first one always waits: else the merge
    # could end before the other kernel, and what comes next would begin too early.
    is_first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0) & (tl.program_id(2) == 0)
    if is_first | (not is_other):
        tl.extra.cuda.gdc_wait()


@triton.jit
def row_to_merge(query_start_loc, tiles, num_reqs, block_rows, by_share, GROUP: tl.constexpr):
    """What a program of a merge has to write.

    These are the request, the row in it, its first token and number of rows, its first tile and the tiles of each of its
    streams, and whether another program writes the row, or none.

    The first axis of the grid is requests, and the second one their rows. With `by_share` they are shares but the
    first, and the rows of the stream that ends first in such a share after it began in the one before.
    """
    request = tl.program_id(0)
    row = tl.program_id(1)
    size = tl.load(tiles + num_reqs + 2)
    cut = (request + 1) * size
    is_past = cut >= tl.load(tiles + num_reqs + 1)
    is_other = (by_share != 0) & is_past
    if by_share:
        request = tl.load(tiles + num_reqs + 4 + request, mask=not is_past, other=0)
    token = tl.load(query_start_loc + request)
    num_rows = (tl.load(query_start_loc + request + 1) - token) * GROUP
    first = tl.load(tiles + request)
    count = (tl.load(tiles + request + 1) - first) // tl.maximum(tl.cdiv(num_rows, block_rows), 1)
    if by_share:
        block = (cut - first) // tl.maximum(count, 1)
        begin = first + block * count
        is_other |= (begin >= cut) | (begin < cut - size)
        row += block * block_rows
    return request, row, token, num_rows, first, count, is_other


@triton.jit
def place_of(entry, block, share, begins, max_blocks, shared):
    """The place of the partial result of one stream in one share.

    Without a prefix a share cuts at most two streams: place 2c has that which an earlier share began, and 2c + 1 that
    which `begins` here. With a prefix every stream needs a place: from one part to the next, in the order of the
    tiles, either the stream or the share grows.
    """
    return tl.where(shared == 0, 2 * share + tl.where(begins, 1, 0), entry * max_blocks + block + share)


@triton.jit
def load_parts(part, all_parts, where, pages, dims, SIZE: tl.constexpr):
    """Parts `part [n]` of a row: `[n, dims]`, and their LSEs; -inf past the last part.

    Args:
        part: their numbers; those of the prefix come after the request's own.
        all_parts: of the row.
        where: the request, its row, its first share and number of parts, streams per request, tiles of the prefix, the
            prefix's row and first share, and the number of requests.
        pages: partial results, their LSEs, the number of KV heads, this one, and rows of a place.
        dims: elements of a row.
        SIZE: elements of a value.
    """
    request, row, share, parts, max_blocks, shared, shared_row, shared_share, num_reqs = where
    partials, partial_lses, kv_heads, kv_head, block_rows = pages
    there = part < all_parts
    own = part < parts
    place = tl.where(
        own,
        place_of(request, row // block_rows, share + part, part == 0, max_blocks, shared),
        place_of(num_reqs, shared_row // block_rows, shared_share + part - parts, False, max_blocks, shared),
    )
    inner = tl.where(own, row, shared_row) % block_rows
    rows = (place * kv_heads + kv_head).to(tl.int64) * block_rows + inner
    found = tl.load(partial_lses + rows, mask=there, other=float("-inf"))
    inside = there[:, None] & (dims < SIZE)[None, :]
    return tl.load(partials + rows[:, None] * SIZE + dims[None, :], mask=inside, other=0.0), found
