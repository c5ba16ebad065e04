"""What both kernels share: which keys a tile of queries sees, and the walk over them."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["finish", "key_range", "load_queries", "scan_keys"]

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def key_range(
    first_pos,
    last_pos,
    first_key,
    seq_len,
    left,
    right,
    chunk,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
):
    """`[lo, hi)`: the keys that some query at `first_pos .. last_pos` sees."""
    lo = first_key
    hi = seq_len
    if HAS_LEFT:
        lo = tl.maximum(lo, first_pos - left)
    if HAS_RIGHT:
        hi = tl.minimum(hi, last_pos + right + 1)
    if HAS_CHUNK:
        lo = tl.maximum(lo, tl.maximum(first_pos, 0) // chunk * chunk)
        hi = tl.minimum(hi, tl.where(last_pos < 0, lo, (tl.maximum(last_pos, 0) // chunk + 1) * chunk))
    return lo, hi


@triton.jit
def common_range(
    first_pos,
    last_pos,
    lo,
    hi,
    left,
    right,
    chunk,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
):
    """`[lo, hi)`: the keys of a range that every query at `first_pos .. last_pos` sees."""
    if HAS_LEFT:
        lo = tl.maximum(lo, last_pos - left)
    if HAS_RIGHT:
        hi = tl.minimum(hi, first_pos + right + 1)
    if HAS_CHUNK:
        lo = tl.maximum(lo, tl.maximum(last_pos, 0) // chunk * chunk)
        hi = tl.minimum(hi, tl.where(first_pos < 0, lo, (tl.maximum(first_pos, 0) // chunk + 1) * chunk))
    return lo, hi


@triton.jit
def load_queries(
    query,
    rows,
    num_rows,
    first_token,
    kv_head,
    stride_qt,
    stride_qh,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    scale,
    COMPUTE: tl.constexpr,
):
    """Queries `[BLOCK_M, BLOCK_D]` and the scale that their logits still need.

    Row i is head `i % GROUP` of the KV head's group, token `i // GROUP`. Keys, values and weights follow the
    type of the queries: COMPUTE, or their own where it is None. In float16 they are scaled here, so that no
    size of a bfloat16 query is too large for it.
    """
    dims = tl.arange(0, BLOCK_D)
    tokens = (first_token + rows // GROUP).to(tl.int64)
    heads = kv_head * GROUP + rows % GROUP
    mask = (rows < num_rows)[:, None]
    if D < BLOCK_D:
        mask = mask & (dims < D)[None, :]
    places = tokens[:, None] * stride_qt + heads[:, None] * stride_qh + dims[None, :]
    q = tl.load(query + places, mask=mask, other=0.0)
    if COMPUTE is not None:
        if COMPUTE == tl.float16:
            q = q.to(tl.float32) * scale
            scale = scale * 0.0 + 1.0
        q = q.to(COMPUTE)
    return q, scale


@triton.jit
def scan_keys(
    acc,
    top,
    total,
    q,
    positions,
    slopes,
    begin,
    end,
    limit,
    k_head,
    v_head,
    table_row,
    key_shift,
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
    HAS_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
):
    """Attend the keys `begin .. end - 1`, tile by tile: accumulator, running maximum (base 2) and sum.

    Without MASKED every key of every tile is seen by every query, and is there; else keys at `limit` and
    after are neither read nor seen.
    """
    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    for start in tl.range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        there = keys < limit
        if PAGED:
            if MASKED:
                blocks = tl.load(table_row + keys // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
            else:
                blocks = tl.load(table_row + keys // BLOCK_SIZE).to(tl.int64)
            k_rows = blocks * stride_kb + (keys % BLOCK_SIZE) * stride_kt
            v_rows = blocks * stride_vb + (keys % BLOCK_SIZE) * stride_vt
        else:
            places = (keys + key_shift).to(tl.int64)
            k_rows = places * stride_kt
            v_rows = places * stride_vt
        k_places = k_head + k_rows[None, :] + dims[:, None]
        v_places = v_head + v_rows[:, None] + dims_v[None, :]
        if MASKED:
            if D < BLOCK_D:
                k = tl.load(k_places, mask=there[None, :] & (dims < D)[:, None], other=0.0)
            else:
                k = tl.load(k_places, mask=there[None, :], other=0.0)
            if DV < BLOCK_DV:
                v = tl.load(v_places, mask=there[:, None] & (dims_v < DV)[None, :], other=0.0)
            else:
                v = tl.load(v_places, mask=there[:, None], other=0.0)
        else:
            if D < BLOCK_D:
                k = tl.load(k_places, mask=(dims < D)[:, None], other=0.0)
            else:
                k = tl.load(k_places)
            if DV < BLOCK_DV:
                v = tl.load(v_places, mask=(dims_v < DV)[None, :], other=0.0)
            else:
                v = tl.load(v_places)

        logits = tl.dot(q, k.to(q.dtype), input_precision="ieee")
        # The softmax is in base 2, and what no cap, slope or mask changes is scaled within its one FMA.
        FUSED: tl.constexpr = not (HAS_CAP or HAS_ALIBI or MASKED)
        if HAS_CAP:
            logits = cap * LOG2E * _tanh(logits * (scale / cap))
        elif not FUSED:
            logits = logits * (scale * LOG2E)
        if HAS_ALIBI:
            distance = tl.abs(keys[None, :] - positions[:, None]).to(tl.float32)
            logits -= (slopes * LOG2E)[:, None] * distance
        if MASKED:
            seen = tl.broadcast_to(there[None, :], logits.shape)
            if HAS_LEFT:
                seen = seen & (keys[None, :] >= positions[:, None] - left)
            if HAS_RIGHT:
                seen = seen & (keys[None, :] <= positions[:, None] + right)
            if HAS_CHUNK:
                at = tl.maximum(positions, 0)[:, None]
                seen = seen & (keys[None, :] // chunk == at // chunk) & (positions >= 0)[:, None]
            logits = tl.where(seen, logits, float("-inf"))
        if FUSED:
            new_top = tl.maximum(top, tl.max(logits, 1) * (scale * LOG2E))
            pivot = new_top
            weights = tl.exp2(logits * (scale * LOG2E) - pivot[:, None])
        else:
            new_top = tl.maximum(top, tl.max(logits, 1))
            pivot = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
            weights = tl.exp2(logits - pivot[:, None])
        fade = tl.exp2(top - pivot)
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * fade[:, None], input_precision="ieee")
        top = new_top
    return acc, top, total


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
def finish(acc, top, total):
    """Output rows, and their LSE in base 2: 0 and -inf where nothing was seen."""
    empty = total == 0.0
    safe = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), top + tl.log2(safe))
    return acc / safe[:, None], lse
