"""The scan over tiles of keys, and what finishes it: the part that the kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

from attnplug.backends.triton.kernels.formats import ROW_SCALES, log_above, open_rows, row_scales
from attnplug.backends.triton.kernels.split_places import fold_weights, split_number, split_size
from attnplug.backends.triton.kernels.tiles import halves_of, pages_of, rows_of

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def scan_keys(
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
            logits = tanh(logits * (by_row / cap))
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
                held, held_more, held_top, held_sums = end_split(
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
def end_split(
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
def tanh(x):
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
