"""Sums whose order no step changes: splits of keys at fixed places, folded from left to right, and the merge of cut ones.

A request's keys have splits that begin at the same places in every step, whatever other requests there are, and however
its tokens came. Each split is summed by itself, then folded into what was before it. All kernels fold alike, so a row
has the same bits in each of them, and wherever shares are cut.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnplug.backends.triton.kernels.scan import LN2, in_one_order
from attnplug.backends.triton.kernels.shares import request_range, row_to_merge, wait_for_parts
from attnplug.backends.triton.kernels.split_places import (
    even_log,
    fold_weights,
    nearest_split,
    split_number,
)


@triton.jit(
    do_not_specialize=[
        "num_reqs",
        "slots",
        "block_rows",
        "by_share",
        "left",
        "right",
        "chunk",
        "ahead",
        "stride_lse",
    ],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "mm_spans", "lse"],
)
def merge_splits_kernel(
    partials,
    partial_sums,
    output,
    lse,
    query_start_loc,
    seq_lens,
    tiles,
    mm_spans,
    num_reqs,
    slots,
    block_rows,
    by_share,
    left,
    right,
    chunk,
    ahead,
    value_scale,
    stride_ot,
    stride_oh,
    stride_lse,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    PDL: tl.constexpr,
    EVEN: tl.constexpr,
):
    """BLOCK elements of one row that shares cut, for one KV head: fold its parts from left to right, and write it.

    The grid is that of merge_shares_kernel. `partials [shares, slots, Hkv, block_rows, SIZE]` have weighted sums of
    values, and `partial_sums [shares, slots, Hkv, block_rows, 1 + TILE / 2]` the maximum, in base 2, and sums of weights. A share
    has the parts of the stream that it begins and does not end: in slot 0 its own splits, and in the others each split
    of the shares behind it.
    """
    PIECES: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    IN_SIZE: tl.constexpr = SIZE % BLOCK == 0
    kv_head = tl.program_id(2) // PIECES
    kv_heads = tl.num_programs(2) // PIECES
    request, row, token, num_rows, first, count, is_other = row_to_merge(
        query_start_loc, tiles, num_reqs, block_rows, by_share, GROUP
    )
    size = tl.load(tiles + num_reqs + 2)
    stream = first + row // block_rows * count
    share = stream // size
    length = tl.load(seq_lens + request)
    even = even_log(length, num_rows // GROUP, EVEN)
    base, past = request_range(
        token, num_rows // GROUP, length, mm_spans, left, right, chunk,
        HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_SPANS,
    )  # fmt: skip
    origin = base // TILE - ahead - stream
    cut = (share + 1) * size
    start = nearest_split((origin + cut) * TILE, base, even)
    is_other |= (row >= num_rows) | (cut >= stream + count) | (start >= past)
    if PDL:
        wait_for_parts(is_other)
    if is_other:
        return

    dims = tl.program_id(2) % PIECES * BLOCK + tl.arange(0, BLOCK)
    step = kv_heads * block_rows
    rows = (share * slots * kv_heads + kv_head).to(tl.int64) * block_rows + row % block_rows
    held = _parts(partials, partial_sums, rows, dims, 1, step, SIZE, TILE // 2, IN_SIZE, 1)[0]
    number = split_number(start, even)
    count = split_number(past - 1, even) + 1 - number
    rows += (1 + number - split_number(base, even)) * step
    # All parts of a round are loaded before the first is added, because compilers keep that order.
    if count <= PARTS // 2:
        few = _parts(partials, partial_sums, rows, dims, count, step, SIZE, TILE // 2, IN_SIZE, PARTS // 2)
        held = _folded(held, few)
    else:
        for done in tl.range(0, count, PARTS):
            left = count - done
            many = _parts(partials, partial_sums, rows, dims, left, step, SIZE, TILE // 2, IN_SIZE, PARTS)
            held = _folded(held, many)
            rows += PARTS * step
    acc, top, sums = held
    total = tl.sum(in_one_order(sums[None, :]), 0)
    empty = total == 0.0
    safe = tl.where(empty, 1.0, total)
    at = (token + row // GROUP).to(tl.int64)
    head = (kv_head * GROUP + row % GROUP).to(tl.int64)
    places = output + at * stride_ot + head * stride_oh + dims
    tl.store(places, (acc * (1.0 / safe) * value_scale).to(output.dtype.element_ty), mask=dims < SIZE)
    if HAS_LSE:
        tl.store(lse + at * stride_lse + head, tl.where(empty, float("-inf"), top + tl.log2(safe)) * LN2)


@triton.jit
def _parts(
    partials, partial_sums, row, dims, count, step,
    SIZE: tl.constexpr, SUMS: tl.constexpr, IN_SIZE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Of each of PARTS splits of a row: weighted sums of values, the maximum, sums of weights; nothing from `count` on."""
    parts = ()
    values = partials + row * SIZE + dims
    places = partial_sums + row * (SUMS + 1)
    for index in tl.static_range(PARTS):
        there = index < count
        mask = there if IN_SIZE else (dims < SIZE) & there
        out = tl.load(values, mask=mask, other=0.0)
        top = tl.load(places, mask=there, other=float("-inf"))
        parts = parts + ((out, top, tl.load(places + 1 + tl.arange(0, SUMS), mask=there, other=0.0)),)
        values += step * SIZE
        places += step * (SUMS + 1)
    return parts


@triton.jit
def _folded(held, parts):
    """What is held of the splits before, and these splits more."""
    acc, top, sums = held
    for index in tl.static_range(len(parts)):
        out, found, weights = parts[index]
        before, after, top = fold_weights(top, found)
        acc = tl.fma(out, after, acc * before)
        sums = tl.fma(weights, after, sums * before)
    return acc, top, sums
