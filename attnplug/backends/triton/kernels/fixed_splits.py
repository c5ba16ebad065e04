"""Sums whose order no step changes: splits of keys at fixed places, folded from left to right, and the merge of cut ones.

A request's keys have splits that begin at the same places in every step, whatever other requests there are, and however
its tokens came. Each split is summed by itself, then folded into what was before it. All kernels fold alike, so a row
has the same bits in each of them, and wherever shares are cut.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnplug.backends.triton.kernels.scan import LN2, in_one_order
from attnplug.backends.triton.kernels.shares import first_key, request_range, row_to_merge, wait_for_parts
from attnplug.backends.triton.kernels.split_places import (
    even_log,
    fold_weights,
    nearest_split,
    split_number,
)
from attnplug.backends.triton.kernels.tiles import of_head


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
        "is_followed",
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
    is_followed,
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
    SUMS: tl.constexpr,
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
    values, and `partial_sums [shares, slots, Hkv, block_rows, 1 + SUMS]` the maximum, in base 2, and sums of weights. A share
    has the parts of the stream that it begins and does not end: in slot 0 its own splits, and in the others each split
    of the shares behind it. `is_followed` is that of merge_shares_kernel.
    """
    if PDL:
        if is_followed:
            tl.extra.cuda.gdc_launch_dependents()
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
    origin = first_key(base, past, count, ahead, 0, TILE) - stream
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
    inside = True if IN_SIZE else dims < SIZE
    held_top = partial_sums + rows * (SUMS + 1)
    held = (
        tl.load(partials + rows * SIZE + dims, mask=inside, other=0.0),
        tl.load(held_top),
        tl.load(held_top + 1 + tl.arange(0, SUMS)),
    )
    number = split_number(start, even)
    count = split_number(past - 1, even) + 1 - number
    rows += (1 + number - split_number(base, even)) * step
    # All parts of a round are loaded before the first is added, because compilers keep that order.
    if count <= PARTS // 2:
        HALF: tl.constexpr = PARTS // 2
        held = _folded(held, partials, partial_sums, rows, dims, count, step, SIZE, SUMS, IN_SIZE, HALF)
    else:
        for done in tl.range(0, count, PARTS):
            left = count - done
            held = _folded(held, partials, partial_sums, rows, dims, left, step, SIZE, SUMS, IN_SIZE, PARTS)
            rows += PARTS * step
    acc, top, sums = held
    total = tl.sum(in_one_order(sums[None, :]), 0)
    empty = total == 0.0
    safe = tl.where(empty, 1.0, total)
    at = (token + row // GROUP).to(tl.int64)
    head = (kv_head * GROUP + row % GROUP).to(tl.int64)
    places = output + at * stride_ot + head * stride_oh + dims
    value_scale = of_head(value_scale, kv_head)
    tl.store(places, (acc * (1.0 / safe) * value_scale).to(output.dtype.element_ty), mask=dims < SIZE)
    if HAS_LSE:
        tl.store(lse + at * stride_lse + head, tl.where(empty, float("-inf"), top + tl.log2(safe)) * LN2)


@triton.jit
def _folded(
    held, partials, partial_sums, row, dims, count, step,
    SIZE: tl.constexpr, SUMS: tl.constexpr, IN_SIZE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """What is held of the splits before, and PARTS splits of a row more; nothing from `count` on."""
    acc, top, sums = held
    values = partials + row * SIZE + dims
    places = partial_sums + row * (SUMS + 1)
    lanes = tl.arange(0, PARTS)
    tops = tl.load(places + lanes * (step * (SUMS + 1)), mask=lanes < count, other=float("-inf"))
    loaded = ()
    for index in tl.static_range(PARTS):
        there = index < count
        mask = there if IN_SIZE else (dims < SIZE) & there
        out = tl.load(values, mask=mask, other=0.0)
        loaded += ((out, tl.load(places + 1 + tl.arange(0, SUMS), mask=there, other=0.0)),)
        values += step * SIZE
        places += step * (SUMS + 1)
    # Each lane has the factors of one split: those of fold_weights.
    maxima = tl.associative_scan(tl.maximum(tops, top), 0, _maximum)
    earlier = tl.where(lanes == 0, top, tl.gather(maxima, tl.maximum(lanes - 1, 0), 0))
    before, after, _ = fold_weights(earlier, tops)
    for index in tl.static_range(PARTS):
        out, weights = loaded[index]
        at = tl.full([dims.shape[0]], index, tl.int32)
        acc = tl.fma(out, tl.gather(after, at, 0), acc * tl.gather(before, at, 0))
        at = tl.full([SUMS], index, tl.int32)
        sums = tl.fma(weights, tl.gather(after, at, 0), sums * tl.gather(before, at, 0))
    return acc, tl.max(maxima, 0), sums


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b)
