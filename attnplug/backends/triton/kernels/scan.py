"""The scan over the keys that queries see, and what finishes it: the part that the kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

from attnplug.backends.triton.kernels.formats import (
    ROW_SCALES,
    SHIFT,
    joined,
    log_above,
    open_rows,
    row_scales,
)
from attnplug.backends.triton.kernels.ranges import common_range
from attnplug.backends.triton.kernels.split_places import (
    fold_weights,
    split_number,
    split_size,
    split_start,
)
from attnplug.backends.triton.kernels.tiles import halves_of, pages_of, rows_of

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


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

    With PAIRS `v_head` points to int16, see _scan_keys. Over bytes of two elements `q_tail` has those of the high halves.
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
    that of all splits; with `parts`, see _end_split, each is written by itself too. The accumulators are
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
            acc, more, top, sums, _, _, _, _ = _scan_keys(
                acc, more, top, sums, 0.0, 0.0, 0.0, 0.0, q, q_tail, positions, slopes,
                starts, stops, tl.maximum(begin, start), tl.minimum(end, hi), lo, hi,
                k_head, v_head, table_row, key_shift, None, even,
                stride_kb, stride_kt, stride_vb, stride_vt, scale, cap, left, right, chunk,
                True, FLOOR, PAGED, BLOCK_SIZE, BLOCK_N, D, DV, BLOCK_D, BLOCK_DV, TAIL, TAIL_V,
                HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_SPANS, HAS_CAP, HAS_ALIBI, ALIKE, PAIRS, PTX, SUMS, FIXED, False, FORMAT,
            )  # fmt: skip
            held, held_more, held_top, held_sums = _end_split(
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
            acc, more, top, sums, held, held_more, held_top, held_sums = _scan_keys(
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
            held, held_more, held_top, held_sums = _end_split(
                held, held_more, held_top, held_sums, acc, more, top, sums, split_number(past - 1, even), parts, DV, PAIRS, TAIL_V
            )  # fmt: skip
        return held, held_more, held_top, held_sums
    else:
        return acc, more, top, tl.sum(sums, 1)


@triton.jit
def _scan_keys(
    acc,
    more,
    top,
    sums,
    held,
    held_more,
    held_top,
    held_sums,
    q,
    q_tail,
    positions,
    slopes,
    starts,
    stops,
    begin,
    end,
    floor,
    limit,
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
    scale,
    cap,
    left,
    right,
    chunk,
    MASKED: tl.constexpr,
    FLOOR: tl.constexpr,
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
    FIXED: tl.constexpr,
    FOLDS: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Attend the keys `begin .. end - 1`, tile by tile: accumulators, running maximum (base 2) and sums.

    Without MASKED every key of every tile is seen by every query, and is there; else keys at `limit` and after, and
    with FLOOR those before `floor`, are neither read nor seen. With FOLDS each split that ends is folded into what is
    `held` of the splits before. Where pages divide tiles, `begin` is the start of a page. Values of
    8 bits may come as PAIRS, in int16: shared memory is transposed for matrix products in no less than 16 bits. With
    PAIRS `acc` gathers the even elements and `more` the odd ones.

    TAIL and TAIL_V are the columns of a second tile, for heads past BLOCK_D and BLOCK_DV elements: 96 are 64 and 32,
    which no single power of two holds without waste. With a FORMAT of bytes with two elements they are the high halves.
    """
    OWN_SCALES: tl.constexpr = FORMAT[ROW_SCALES] if FORMAT is not None else False
    WIDTH: tl.constexpr = BLOCK_DV // 2 if PAIRS else BLOCK_DV
    SIZE_V: tl.constexpr = DV // 2 if PAIRS else DV
    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, WIDTH)
    if TAIL:
        dims_tail = tl.arange(0, TAIL)
    if TAIL_V:
        dims_tail_v = tl.arange(0, TAIL_V)
    # Queries of 8-bit pages are multiplied with a power of two, and with FIXED each row has its own.
    BY_ROW: tl.constexpr = (k_head.dtype.element_ty.primitive_bitwidth == 8) if FIXED else False
    lanes = tl.arange(0, BLOCK_N)
    if PAGED:
        # Look up the next tile's pages during this tile, so that loads of keys do not wait for the table.
        next_blocks = pages_of(table_row, begin, end, BLOCK_SIZE, BLOCK_N)
    if OWN_SCALES:
        next_k, next_v = _tile_scales(
            k_head, v_head, next_blocks, begin, floor, limit, stride_kb, stride_vb, MASKED, FLOOR, BLOCK_SIZE, BLOCK_N, FORMAT
        )  # fmt: skip
    for start in tl.range(begin, end, BLOCK_N):
        keys = start + lanes
        there = (keys >= floor) & (keys < limit) if FLOOR else keys < limit
        if PAGED:
            blocks = next_blocks.to(tl.int64)
            next_blocks = pages_of(table_row, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
            places = ((lanes if BLOCK_N % BLOCK_SIZE == 0 else keys) % BLOCK_SIZE).to(tl.int64)
            k_rows = blocks * stride_kb + places * stride_kt
            v_rows = k_rows if ALIKE else blocks * stride_vb + places * stride_vt
        else:
            places = (keys + key_shift).to(tl.int64)
            k_rows = places * stride_kt
            v_rows = k_rows if ALIKE else places * stride_vt
        if FORMAT is None:
            k = rows_of(k_head, k_rows, dims, there, D, BLOCK_D, MASKED)
            if TAIL:
                k_tail = rows_of(k_head + BLOCK_D, k_rows, dims_tail, there, D - BLOCK_D, TAIL, MASKED)
            v = rows_of(v_head, v_rows, dims_v, there, SIZE_V, WIDTH, MASKED)
            if TAIL_V:
                v_tail = rows_of(v_head + WIDTH, v_rows, dims_tail_v, there, DV - WIDTH, TAIL_V, MASKED)
        else:
            k, k_tail = open_rows(
                k_head, blocks, places, stride_kb, stride_kt, there, D, BLOCK_D, MASKED, FORMAT
            )
            v, v_tail = open_rows(
                v_head, blocks, places, stride_vb, stride_vt, there, DV, BLOCK_DV, MASKED, FORMAT
            )
        if OWN_SCALES:
            k_own, v_own = next_k, next_v

        logits = tl.dot(q, tl.trans(k).to(q.dtype), input_precision="ieee")
        if TAIL:
            logits = tl.dot(q_tail, tl.trans(k_tail).to(q.dtype), logits, input_precision="ieee")
        if OWN_SCALES:
            logits = logits * k_own[None, :]
        # The softmax is in base 2. Logits are scaled within its one FMA, unless slopes are added before.
        by_row = scale[:, None] if BY_ROW else scale
        factor = scale * LOG2E
        if HAS_CAP:
            logits = _tanh(logits * (by_row / cap))
            factor = cap * LOG2E
        if HAS_ALIBI:
            distance = tl.abs(keys[None, :] - positions[:, None]).to(tl.float32)
            logits = logits * (factor[:, None] if BY_ROW and not HAS_CAP else factor)
            logits = tl.fma(distance, -(slopes * LOG2E)[:, None], logits)
            factor = 1.0
        if MASKED:
            seen = tl.broadcast_to(there[None, :], logits.shape)
            if HAS_LEFT:
                seen = seen & (keys[None, :] >= positions[:, None] - left)
            if HAS_RIGHT:
                seen = seen & (keys[None, :] <= positions[:, None] + right)
            if HAS_CHUNK:
                at = tl.maximum(positions, 0)[:, None]
                seen = seen & (keys[None, :] // chunk == at // chunk) & (positions >= 0)[:, None]
            if HAS_SPANS:
                together = (keys[None, :] >= starts[:, None]) & (keys[None, :] < stops[:, None])
                seen = seen | (together & there[None, :])
            logits = tl.where(seen, logits, float("-inf"))
        factors = factor[:, None] if BY_ROW and not (HAS_CAP or HAS_ALIBI) else factor
        if OWN_SCALES:
            # The maximum is that of weights times scales, which are then 1 and less: in float16 others would be 0.
            sizes = log_above(v_own)
            new_top = tl.maximum(top, tl.max(tl.fma(logits, factors, sizes[None, :]), 1))
        else:
            new_top = tl.maximum(top, tl.max(logits, 1) * factor)
        pivot = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
        weights = tl.exp2(tl.fma(logits, factors, -pivot[:, None]))
        fade = tl.exp2(top - pivot)
        of_tile = tl.sum(tl.reshape(weights, [q.shape[0], BLOCK_N // SUMS, SUMS]), 1)
        sums = tl.fma(sums, fade[:, None], of_tile)
        if OWN_SCALES:
            weights = weights * v_own[None, :]
        weights = weights.to(q.dtype)
        if PAIRS:
            low, high = halves_of(v, k_head.dtype.element_ty, PTX)
            acc = tl.dot(weights, low.to(q.dtype), acc * fade[:, None], input_precision="ieee")
            more = tl.dot(weights, high.to(q.dtype), more * fade[:, None], input_precision="ieee")
        else:
            acc = tl.dot(weights, v.to(q.dtype), acc * fade[:, None], input_precision="ieee")
            if TAIL_V:
                more = tl.dot(weights, v_tail.to(q.dtype), more * fade[:, None], input_precision="ieee")
        top = new_top
        if OWN_SCALES:
            # Scales of a few bytes have no asynchronous copies, so the next tile's are asked for one turn ahead.
            next_k, next_v = _tile_scales(
                k_head, v_head, next_blocks, start + BLOCK_N, floor, limit, stride_kb, stride_vb,
                MASKED, FLOOR, BLOCK_SIZE, BLOCK_N, FORMAT,
            )  # fmt: skip
        if FOLDS:
            if (start + BLOCK_N) & (split_size(start, even) - 1) == 0:
                held, held_more, held_top, held_sums = _end_split(
                    held, held_more, held_top, held_sums, acc, more, top, sums, split_number(start, even), parts, DV, PAIRS, TAIL_V
                )  # fmt: skip
                acc = tl.zeros_like(acc)
                if PAIRS or TAIL_V:
                    more = tl.zeros_like(more)
                top = tl.full([q.shape[0]], float("-inf"), tl.float32)
                sums = tl.zeros_like(sums)
    return acc, more, top, sums, held, held_more, held_top, held_sums


@triton.jit
def _tile_scales(
    k_head,
    v_head,
    blocks,
    start,
    floor,
    limit,
    stride_kb,
    stride_vb,
    MASKED: tl.constexpr,
    FLOOR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """The scales of the rows of keys, and of values, of a tile whose `blocks` are known."""
    lanes = tl.arange(0, BLOCK_N)
    keys = start + lanes
    there = (keys >= floor) & (keys < limit) if FLOOR else keys < limit
    places = ((lanes if BLOCK_N % BLOCK_SIZE == 0 else keys) % BLOCK_SIZE).to(tl.int64)
    blocks = blocks.to(tl.int64)
    k_own = row_scales(k_head, blocks, places, stride_kb, there, MASKED, FORMAT)
    return k_own, row_scales(v_head, blocks, places, stride_vb, there, MASKED, FORMAT)


@triton.jit
def _end_split(
    held,
    held_more,
    held_top,
    held_sums,
    acc,
    more,
    top,
    sums,
    number,
    parts,
    DV: tl.constexpr,
    PAIRS: tl.constexpr,
    TAIL_V: tl.constexpr,
):
    """What is held of the splits before, and split `number` more; where a share has cut its stream, it is written too.

    `parts` is None, or has the places of parts: their sums, the maximum and sums of weights, the row of each query's part
    of the split `first`, rows from one split to the next, which queries have a part, and whether there are any.
    """
    if parts is not None:
        partials, partial_sums, rows, step, first, inside, is_cut = parts
        if is_cut:
            out = tl.join(acc, more).reshape(acc.shape[0], 2 * acc.shape[1]) if PAIRS else acc
            store_part(partials, partial_sums, rows + (number - first) * step, out, top, sums, inside, DV)
    before, after, held_top = fold_weights(held_top, top)
    held = tl.fma(acc, after[:, None], held * before[:, None])
    held_sums = tl.fma(sums, after[:, None], held_sums * before[:, None])
    if PAIRS or TAIL_V:
        held_more = tl.fma(more, after[:, None], held_more * before[:, None])
    return held, held_more, held_top, held_sums


@triton.jit
def store_part(partials, partial_sums, rows, out, top, sums, inside, DV: tl.constexpr):
    """Write what a share has of a stream that it cuts: for each row its sums, and the maximum before the sums of weights."""
    dims = tl.arange(0, out.shape[1])[None, :]
    tl.store(partials + rows[:, None] * DV + dims, out, mask=inside[:, None] & (dims < DV))
    places = partial_sums + rows * (sums.shape[1] + 1)
    tl.store(places, top, mask=inside)
    lanes = tl.arange(0, sums.shape[1])[None, :]
    tl.store(places[:, None] + 1 + lanes, sums, mask=inside[:, None])


@triton.jit
def in_one_order(sums):
    """The sum of each row of at least 8 columns, two and two; the order of one tl.sum depends on who has which columns."""
    EIGHTS: tl.constexpr = sums.shape[1] // 8
    pairs = tl.sum(sums.reshape(sums.shape[0], EIGHTS, 2, 2, 2), 4)
    rest = tl.sum(tl.sum(pairs, 3), 2)
    for _ in tl.static_range(4):
        if rest.shape[1] > 1:
            rest = tl.sum(rest.reshape(rest.shape[0], 2, rest.shape[1] // 2), 1)
    return rest.reshape(rest.shape[0])


@triton.jit
def _tanh(x):
    """To the last bits of float32; the usual form by exp2 loses the small arguments."""
    size = tl.abs(x)
    fade = tl.exp2(size * (-2.0 * LOG2E))
    large = (1.0 - fade) / (1.0 + fade)
    square = x * x
    small = size * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    found = tl.where(size < 0.15, small, large)
    return tl.where(x < 0, -found, found)


@triton.jit
def add_parts(acc, top, total, out, found):
    """Add partial results of one row, `out [n, D]` with LSEs `found [n]` in base 2, to those gathered before."""
    new_top = tl.maximum(top, tl.max(found, 0))
    pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(found - pivot)
    fade = tl.exp2(top - pivot)
    return acc * fade + tl.sum(out * weights[:, None], 0), new_top, total * fade + tl.sum(weights, 0)


@triton.jit
def finish(acc, top, total):
    """Output rows, and their LSE in base 2: 0 and -inf where nothing was seen."""
    empty = total == 0.0
    safe = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), top + tl.log2(safe))
    return acc * (1.0 / safe)[:, None], lse
