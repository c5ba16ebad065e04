"""All keys that a tile of queries sees: the ranges and splits in which its scan goes over them."""

from __future__ import annotations

import triton
import triton.language as tl

from attnplug.backends.triton.kernels.formats import SHIFT, joined
from attnplug.backends.triton.kernels.ranges import common_range
from attnplug.backends.triton.kernels.scan import end_split, scan_keys
from attnplug.backends.triton.kernels.split_places import split_number, split_size, split_start


@triton.jit
def attend(
    q,
    q_tail,
    scale,
    top,
    total,
    positions,
    slopes,
    starts,
    stops,
    first_pos,
    last_pos,
    first_stop,
    last_start,
    lo,
    hi,
    k_head,
    v_head,
    table_row,
    key_shift,
    parts,
    even,
    stride_kb,
    stride_kt,
    stride_vb,
    stride_vt,
    cap,
    left,
    right,
    chunk,
    PAGED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    ALIKE: tl.constexpr,
    PAIRS: tl.constexpr,
    PTX: tl.constexpr,
    SUMS: tl.constexpr,
    ONE: tl.constexpr,
    FIXED: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Weighted sums of values, maximum and sum of queries over the keys `lo .. hi - 1`; see attend_parts.

    With PAIRS `v_head` points to int16, see scan_keys. Over bytes of two elements `q_tail` has those of the high halves.
    """
    PACKED: tl.constexpr = FORMAT[SHIFT] if FORMAT is not None else 0
    TAIL: tl.constexpr = BLOCK_D if PACKED else 0
    acc, odd, top, total = attend_parts(
        q, q_tail, scale, top, total, positions, slopes, starts, stops, first_pos, last_pos, first_stop, last_start,
        lo, hi, k_head, v_head, table_row, key_shift, parts, even,
        stride_kb, stride_kt, stride_vb, stride_vt, cap, left, right, chunk,
        PAGED, BLOCK_SIZE, BLOCK_N, D, DV, BLOCK_D, BLOCK_DV, TAIL, TAIL,
        HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_SPANS, HAS_CAP, HAS_ALIBI, ALIKE, PAIRS, PTX, SUMS, ONE, FIXED, FORMAT,
    )  # fmt: skip
    if PAIRS:
        acc = tl.join(acc, odd).reshape(q.shape[0], BLOCK_DV)
    elif PACKED:
        acc = joined(acc, odd, FORMAT)
    return acc, top, total


@triton.jit
def attend_parts(
    q,
    q_tail,
    scale,
    top,
    total,
    positions,
    slopes,
    starts,
    stops,
    first_pos,
    last_pos,
    first_stop,
    last_start,
    lo,
    hi,
    k_head,
    v_head,
    table_row,
    key_shift,
    parts,
    even,
    stride_kb,
    stride_kt,
    stride_vb,
    stride_vt,
    cap,
    left,
    right,
    chunk,
    PAGED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TAIL: tl.constexpr,
    TAIL_V: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    ALIKE: tl.constexpr,
    PAIRS: tl.constexpr,
    PTX: tl.constexpr,
    SUMS: tl.constexpr,
    ONE: tl.constexpr,
    FIXED: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Accumulators, maximum (base 2) and sum of queries at `first_pos .. last_pos` over the keys `lo .. hi - 1`.

    `top` and `total` are what the softmax starts with: its maximum, in base 2, and its sum. With HAS_SPANS a query
    also sees its multimodal span, `starts [BLOCK_M]` to `stops`; see common_range for those of the first and last.
    The second accumulator is that of the odd elements with PAIRS, and of the values' tail with TAIL_V. With a FORMAT
    `k_head` and `v_head` have the pointers of `head_planes`.

    With ONE all keys are the last range, which is masked. It is for few queries and short windows: masks take less time
    there than each range's wait for its first loads, and the smaller loop needs fewer registers.

    With FIXED the sums of a row have one order, whatever the tiles of rows: see fixed_splits.py. What it returns is then
    that of all splits; with `parts`, see end_split, each is written by itself too. The accumulators are
    those of all splits, and `scale` has a number for each row over 8-bit pages.
    """
    full_lo, full_hi = common_range(
        first_pos, last_pos, lo, hi, first_stop, last_start, left, right, chunk,
        HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_SPANS,
    )  # fmt: skip
    start = lo // BLOCK_SIZE * BLOCK_SIZE if PAGED and BLOCK_N % BLOCK_SIZE == 0 else lo
    if FIXED:
        start = lo // BLOCK_N * BLOCK_N
    full_lo = start + tl.cdiv(full_lo - start, BLOCK_N) * BLOCK_N
    full_hi = full_lo + tl.maximum(full_hi - full_lo, 0) // BLOCK_N * BLOCK_N
    acc = tl.zeros([q.shape[0], BLOCK_DV // 2 if PAIRS else BLOCK_DV], tl.float32)
    more = 0.0
    if PAIRS:
        more = acc
    elif TAIL_V:
        more = tl.zeros([q.shape[0], TAIL_V], tl.float32)
    sums = tl.zeros([q.shape[0], SUMS], tl.float32)
    held = 0.0
    held_more = 0.0
    held_top = 0.0
    held_sums = 0.0
    # Without pages the first key may be anywhere, so the first tile may begin before it.
    FLOOR: tl.constexpr = HAS_LEFT or HAS_CHUNK or (FIXED and not PAGED)
    # On Hopper products of 64 rows and more run while others begin, unless a branch in the loop waits for them.
    NESTED: tl.constexpr = FIXED and q.shape[0] >= 64
    first_sums = tl.where(tl.arange(0, SUMS)[None, :] == 0, total[:, None], 0.0)
    if FIXED:
        held = acc
        held_more = more
        held_top = top
        held_sums = first_sums
        top = tl.full([q.shape[0]], float("-inf"), tl.float32)
    else:
        sums = first_sums
    if NESTED:
        for number in tl.range(split_number(lo, even), tl.where(hi > lo, split_number(hi - 1, even) + 1, 0)):
            begin = split_start(number, even)
            end = begin + split_size(begin, even)
            acc = tl.zeros_like(acc)
            if PAIRS or TAIL_V:
                more = tl.zeros_like(more)
            top = tl.full([q.shape[0]], float("-inf"), tl.float32)
            sums = tl.zeros_like(sums)
            acc, more, top, sums, _, _, _, _ = scan_keys(
                acc, more, top, sums, 0.0, 0.0, 0.0, 0.0, q, q_tail, positions, slopes,
                starts, stops, tl.maximum(begin, start), tl.minimum(end, hi), lo, hi,
                k_head, v_head, table_row, key_shift, None, even,
                stride_kb, stride_kt, stride_vb, stride_vt, scale, cap, left, right, chunk,
                True, FLOOR, PAGED, BLOCK_SIZE, BLOCK_N, D, DV, BLOCK_D, BLOCK_DV, TAIL, TAIL_V,
                HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_SPANS, HAS_CAP, HAS_ALIBI, ALIKE, PAIRS, PTX, SUMS, FIXED, False, FORMAT,
            )  # fmt: skip
            held, held_more, held_top, held_sums = end_split(
                held, held_more, held_top, held_sums, acc, more, top, sums, number, parts, DV, PAIRS, TAIL_V
            )
        return held, held_more, held_top, held_sums
    for stretch in tl.static_range(2 if ONE else 0, 3):
        # Three ranges: masked keys at the left edge, keys that all see, masked keys at the right edge.
        if stretch == 0:
            begin, end = start, tl.minimum(full_lo, hi)
        elif stretch == 1:
            begin, end = full_lo, full_hi
        else:
            begin, end = start if ONE else full_hi, hi
        if stretch != 0 or FLOOR:
            acc, more, top, sums, held, held_more, held_top, held_sums = scan_keys(
                acc, more, top, sums, held, held_more, held_top, held_sums, q, q_tail, positions, slopes,
                starts, stops, begin, end, lo, hi, k_head, v_head, table_row, key_shift, parts, even,
                stride_kb, stride_kt, stride_vb, stride_vt, scale, cap, left, right, chunk,
                stretch != 1, FLOOR, PAGED, BLOCK_SIZE, BLOCK_N, D, DV, BLOCK_D, BLOCK_DV, TAIL, TAIL_V,
                HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_SPANS, HAS_CAP, HAS_ALIBI, ALIKE, PAIRS, PTX, SUMS, FIXED, FIXED, FORMAT,
            )  # fmt: skip
    if FIXED:
        # The last split, unless it ended with a tile.
        past = start + tl.cdiv(tl.maximum(hi - start, 0), BLOCK_N) * BLOCK_N
        if (past > start) & (past & (split_size(past - 1, even) - 1) != 0):
            held, held_more, held_top, held_sums = end_split(
                held, held_more, held_top, held_sums, acc, more, top, sums, split_number(past - 1, even), parts, DV, PAIRS, TAIL_V
            )  # fmt: skip
        return held, held_more, held_top, held_sums
    else:
        return acc, more, top, tl.sum(sums, 1)
