"""The loop in registers over the keys of a stream: logits, softmax and weighted sums of values."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from attnplug.backends.triton.kernels.formats import LEAST_SCALE
from attnplug.backends.triton.kernels.registers.openings import (
    keep_above,
    key_scales,
    log2,
    open_keys,
    open_values,
    turn,
    value_scales,
)
from attnplug.backends.triton.kernels.registers.operands import (
    even_tokens,
    key_offsets,
    keys_operand,
    value_offsets,
    values_operand,
)
from attnplug.backends.triton.kernels.registers.tiles import load_keys, load_values, warp_rows
from attnplug.backends.triton.kernels.scan import LOG2E, tanh

_UNSEEN: gl.constexpr = gl.constexpr(-1e30)
"""The maximum of a row that has seen no key: finite, so that no difference of two of them is NaN."""


@gluon.jit
def scan_tiles(
    q,
    q_high,
    scale,
    bias,
    positions,
    lo,
    hi,
    full_lo,
    full_hi,
    k_head,
    v_head,
    kv_head,
    table_row,
    cap,
    left,
    right,
    chunk,
    MMA: gl.constexpr,
    PAGES: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    N: gl.constexpr,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    W: gl.constexpr,
    WARPS: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    HAS_CHUNK: gl.constexpr,
    HAS_CAP: gl.constexpr,
    PACKED: gl.constexpr,
    OWN: gl.constexpr,
    PINNED: gl.constexpr,
    NAME: gl.constexpr,
    FORMAT: gl.constexpr,
):
    """Weighted sums of values `[W, N]`, of the low halves and of the high ones, maxima (base 2) and sums `[N]` of all warps."""
    T: gl.constexpr = BLOCK_N // WARPS
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(1, MMA)
    TOKENS: gl.constexpr = gl.SliceLayout(2, MMA)
    WARP: gl.constexpr = gl.SliceLayout(1, TOKENS)
    OUT: gl.constexpr = gl.SliceLayout(0, MMA)
    ROWS: gl.constexpr = gl.SliceLayout(0, OUT)
    KEYS: gl.constexpr = gl.BlockedLayout(
        [T // 8, 1, 1, 1, W // 16], [1, 1, 8, 4, 1], [1, WARPS, 1, 1, 1], [4, 3, 2, 1, 0]
    )
    VALUES: gl.constexpr = gl.BlockedLayout(
        [T // 16, 2, 1, 1, 1, W // 32], [1, 1, 1, 8, 4, 1], [1, 1, WARPS, 1, 1, 1], [5, 4, 3, 2, 1, 0]
    )
    # Of the scales of blocks: a thread has those of its bytes as one integer.
    KEY_SCALES: gl.constexpr = gl.BlockedLayout(
        [T // 8, 1, 1, 1, 1], [1, 1, 8, 4, 1], [1, WARPS, 1, 1, 1], [4, 3, 2, 1, 0]
    )
    VALUE_SCALES: gl.constexpr = gl.BlockedLayout(
        [T // 16, 2, 1, 1, 1, 1], [1, 1, 1, 8, 4, 1], [1, 1, WARPS, 1, 1, 1], [5, 4, 3, 2, 1, 0]
    )
    BLOCKS: gl.constexpr = NAME == "nvfp4"
    K_COUNT: gl.constexpr = W // 32
    V_COUNT: gl.constexpr = W // 64 if W > 64 else 1
    V_THREADS: gl.constexpr = 2 if W == 32 else 1
    k_words = k_head.to(gl.pointer_type(gl.int32), bitcast=True)
    v_words = v_head.to(gl.pointer_type(gl.int32), bitcast=True)
    ROW: gl.constexpr = PAGES[1] // 4
    k_offsets = key_offsets(KEYS, WARPS, ROW, W // 16)
    v_offsets = value_offsets(VALUES, WARPS, ROW, W // 32, 1)
    token = (
        gl.arange(0, WARPS, layout=WARP)[:, None] * T
        + gl.arange(0, T, layout=gl.SliceLayout(0, TOKENS))[None, :]
    )
    # Without scales, nothing reads what fills in for them.
    k_scales, v_scales, ks_offsets, vs_offsets = k_words, v_words, k_offsets, v_offsets
    if FORMAT is not None:
        # Pointers to the scales of the head, from those to its data.
        k_start = k_head + (FORMAT[1] + kv_head.to(gl.int64) * (FORMAT[3] - PAGES[2]))
        v_start = v_head + (FORMAT[1] + kv_head.to(gl.int64) * (FORMAT[3] - PAGES[2]))
    if BLOCKS:
        K_WORD: gl.constexpr = gl.int32 if K_COUNT == 4 else gl.uint16 if K_COUNT == 2 else gl.uint8
        V_WORD: gl.constexpr = gl.uint16 if V_COUNT == 2 else gl.uint8
        k_scales = k_start.to(gl.pointer_type(K_WORD), bitcast=True)
        v_scales = v_start.to(gl.pointer_type(V_WORD), bitcast=True)
        ks_offsets = key_offsets(KEY_SCALES, WARPS, FORMAT[2] // K_COUNT, 1)
        vs_offsets = value_offsets(VALUE_SCALES, WARPS, FORMAT[2] // V_COUNT, 1, V_THREADS)
        K_SCALES: gl.constexpr = (FORMAT[2], K_COUNT, KEY_SCALES)
        V_SCALES: gl.constexpr = (FORMAT[2], V_COUNT, VALUE_SCALES)
    elif OWN:
        OWN_TYPE: gl.constexpr = gl.float32 if NAME == "int8_token_head" else gl.float16
        OWN_SIZE: gl.constexpr = 4 if NAME == "int8_token_head" else 2
        k_scales = k_start.to(gl.pointer_type(OWN_TYPE), bitcast=True)
        v_scales = v_start.to(gl.pointer_type(OWN_TYPE), bitcast=True)
        ks_offsets = gl.arange(0, T, layout=gl.SliceLayout(0, TOKENS))[None, :] * (FORMAT[2] // OWN_SIZE)
        vs_offsets = ks_offsets
        K_SCALES: gl.constexpr = (FORMAT[2], OWN_SIZE, None)
        V_SCALES: gl.constexpr = K_SCALES
    else:
        K_SCALES: gl.constexpr = None
        V_SCALES: gl.constexpr = None

    # It is 1, which the assembler does not know: openings.py has the reason.
    one = gl.num_programs(2)
    # What logits are multiplied with by the exponential; above 0, as what is not seen is infinite.
    unit, unseen = 1.0, _UNSEEN
    if not HAS_CAP and not OWN:
        unit = gl.maximum(scale * LOG2E, 2.0**-60)
        # Its product with the unit is finite for large queries too. No sum of 256 products is below: halves times E5M2, or
        # times 2**-9 of NVFP4.
        MOST: gl.constexpr = 2.0**27 if BLOCKS else 2.0**40
        unseen = gl.minimum(_UNSEEN / gl.maximum(unit, 1.0), -MOST)

    start = lo // BLOCK_N * BLOCK_N
    blocks, places = warp_rows(table_row, start, lo, hi, WARP, T, WARPS, BLOCK_SIZE)
    next_blocks, next_places = warp_rows(table_row, start + BLOCK_N, lo, hi, WARP, T, WARPS, BLOCK_SIZE)
    k, k_s = load_keys(k_words, k_scales, k_offsets, ks_offsets, blocks, places, PAGES, KEYS, T, K_SCALES)
    v, v_odd, v_s, v_s_odd = load_values(
        v_words, v_scales, v_offsets, vs_offsets, blocks, places, PAGES, VALUES, T, V_SCALES
    )
    top = gl.full([WARPS, N], unseen, gl.float32, COLUMNS)
    # A thread has the sums of its own keys.
    LANES: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1]] if N == 8 else [[0, 0, 1], [0, 0, 8]],
        [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[1, 0, 0]] if WARPS == 2 else [[1, 0, 0], [2, 0, 0]],
        [],
        [WARPS, 8, N],
    )
    total = gl.full([WARPS, 8, N], 0.0, gl.float32, LANES)
    acc = gl.full([WARPS, W, N], 0.0, gl.float32, MMA)
    acc_high = acc
    full_lo = start + gl.cdiv(full_lo - start, BLOCK_N) * BLOCK_N
    full_hi = full_lo + gl.maximum(full_hi - full_lo, 0) // BLOCK_N * BLOCK_N
    # Without a limit on the left, the first tile begins with the first key. One loop with a branch for the masks would do
    # less: the assembler moves loads past a branch, which is next to their use.
    FLOOR: gl.constexpr = HAS_LEFT or HAS_CHUNK
    for stretch in gl.static_range(0 if FLOOR else 1, 3):
        if stretch == 0:
            begin, end = start, gl.minimum(full_lo, hi)
        elif stretch == 1:
            begin, end = full_lo, full_hi
        else:
            begin, end = full_hi, hi
        for key in range(begin, end, BLOCK_N):
            if not PINNED:
                # A whole turn ahead, as memory takes about as long to answer.
                next_k, next_k_s = load_keys(
                    k_words, k_scales, k_offsets, ks_offsets, next_blocks, next_places, PAGES, KEYS, T, K_SCALES,
                )  # fmt: skip
                next_v, next_v_odd, next_v_s, next_v_s_odd = load_values(
                    v_words, v_scales, v_offsets, vs_offsets, next_blocks, next_places, PAGES, VALUES, T, V_SCALES,
                )  # fmt: skip
                next_blocks, next_places = warp_rows(
                    table_row, key + 2 * BLOCK_N, lo, hi, WARP, T, WARPS, BLOCK_SIZE
                )
            logits = _logits(
                k, k_s, one, q, q_high, bias, scale, cap, MMA, KEYS, T, W, WARPS, HAS_CAP, PACKED, OWN, NAME
            )
            if PINNED:
                # Into the registers that the products have read; the assembler would load next to the use.
                k, k_s = load_keys(
                    k_words, k_scales, k_offsets, ks_offsets, next_blocks, next_places, PAGES, KEYS, T, K_SCALES,
                )  # fmt: skip
                keep_above(next_places)
            if OWN:
                v_scale = v_s.to(gl.float32)
                if stretch != 1:
                    v_scale = gl.where((key + token >= lo) & (key + token < hi), v_scale, 0.0)
            if stretch != 1:
                keys = (key + token)[:, :, None]
                seen = (keys >= lo) & (keys < hi)
                at = positions[None, None, :]
                if HAS_LEFT:
                    seen = seen & (keys >= at - left)
                if HAS_RIGHT:
                    seen = seen & (keys <= at + right)
                if HAS_CHUNK:
                    seen = seen & (keys // chunk == gl.maximum(at, 0) // chunk) & (at >= 0)
                logits = gl.where(seen, logits, float("-inf"))
                # What is beside the keys may be no number, which a weight of 0 would not hide.
                at_pair = key + even_tokens(VALUES, T, WARPS)
                v = gl.where((at_pair >= lo) & (at_pair < hi), v, 0)
                v_odd = gl.where((at_pair + 1 >= lo) & (at_pair + 1 < hi), v_odd, 0)
                if BLOCKS:
                    at_pair = key + even_tokens(VALUE_SCALES, T, WARPS)
                    v_s = gl.where((at_pair >= lo) & (at_pair < hi), v_s, 0).to(v_s.dtype)
                    v_s_odd = gl.where((at_pair + 1 >= lo) & (at_pair + 1 < hi), v_s_odd, 0).to(v_s.dtype)
            if OWN:
                # As in scan.py, the maximum is that of weights times scales.
                sizes = log2(gl.maximum(v_scale, LEAST_SCALE))
                new_top = gl.maximum(top, gl.max(logits + sizes[:, :, None], 1))
            else:
                new_top = gl.maximum(top, gl.max(logits, 1))
            fade = gl.exp2((top - new_top) * unit)
            weights = gl.exp2(logits * unit - (new_top * unit)[:, None, :])
            total = total * gl.convert_layout(fade, gl.SliceLayout(1, LANES))[:, None, :]
            total += gl.convert_layout(gl.sum(weights.reshape([WARPS, T // 8, 8, N]), 1), LANES)
            top = new_top
            if OWN:
                weights = weights * v_scale[:, :, None]
            weights = _turned(weights.to(gl.float16), MMA, T, N, WARPS)
            opened = open_values(v, v_odd, one, NAME)
            a, b, c, d = opened[0], opened[1], opened[2], opened[3]
            e, f, g, h = opened[4], opened[5], opened[6], opened[7]
            if PACKED:
                i, j, m, n = opened[8], opened[9], opened[10], opened[11]
                o, p, r, u = opened[12], opened[13], opened[14], opened[15]
            if BLOCKS:
                s, t = value_scales(v_s.to(gl.int32), v_s_odd.to(gl.int32), V_COUNT)
                s = _spread(s, VALUES, V_COUNT, T, W, WARPS)
                t = _spread(t, VALUES, V_COUNT, T, W, WARPS)
                a, c, e, g, i, m, o, r = a * s, c * s, e * s, g * s, i * s, m * s, o * s, r * s
                b, d, f, h, j, n, p, u = b * t, d * t, f * t, h * t, j * t, n * t, p * t, u * t
            if PINNED:
                v, v_odd, v_s, v_s_odd = load_values(
                    v_words, v_scales, v_offsets, vs_offsets, next_blocks, next_places, PAGES, VALUES, T, V_SCALES,
                )  # fmt: skip
                next_blocks, next_places = warp_rows(
                    table_row, key + 2 * BLOCK_N, lo, hi, WARP, T, WARPS, BLOCK_SIZE
                )
            acc = acc * fade[:, None, :]
            acc = mma_v2(values_operand(a, b, c, d, e, f, g, h, LEFT, T, W, WARPS), weights, acc)
            if PACKED:
                acc_high = acc_high * fade[:, None, :]
                acc_high = mma_v2(
                    values_operand(i, j, m, n, o, p, r, u, LEFT, T, W, WARPS), weights, acc_high
                )
            if not PINNED:
                k, k_s = next_k, next_k_s
                v, v_odd, v_s, v_s_odd = next_v, next_v_odd, next_v_s, next_v_s_odd
    whole_top = gl.max(top, 0)
    fade = gl.exp2((top - gl.convert_layout(whole_top, gl.SliceLayout(0, COLUMNS))[None, :]) * unit)
    total = gl.convert_layout(gl.sum(total, 1), COLUMNS)
    total = gl.convert_layout(gl.sum(total * fade, 0), ROWS)
    acc = gl.sum(acc * fade[:, None, :], 0)
    if PACKED:
        acc_high = gl.sum(acc_high * fade[:, None, :], 0)
    else:
        acc_high = acc
    return acc, acc_high, gl.convert_layout(whole_top * unit, ROWS), total


@gluon.jit
def _logits(
    k,
    k_s,
    one,
    q,
    q_high,
    bias,
    scale,
    cap,
    MMA: gl.constexpr,
    KEYS: gl.constexpr,
    T: gl.constexpr,
    W: gl.constexpr,
    WARPS: gl.constexpr,
    HAS_CAP: gl.constexpr,
    PACKED: gl.constexpr,
    OWN: gl.constexpr,
    NAME: gl.constexpr,
):
    """Logits `[WARPS, T, N]` in base 2 of the words of a tile of keys, with their scales and the cap."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    COUNT: gl.constexpr = W // 32
    N: gl.constexpr = q.shape[2]
    opened = open_keys(k, one, NAME)
    a, b, c, d = opened[0], opened[1], opened[2], opened[3]
    if PACKED:
        e, f, g, h = opened[4], opened[5], opened[6], opened[7]
    if NAME == "nvfp4":
        s = key_scales(k_s, COUNT)
        s = s.reshape([T // 8, WARPS, 8, 4, COUNT, 1]).broadcast_to([T // 8, WARPS, 8, 4, COUNT, 2])
        s = gl.convert_layout(s.reshape([T // 8, WARPS, 8, 4, W // 16]), KEYS)
        a, b, c, d, e, f, g, h = a * s, b * s, c * s, d * s, e * s, f * s, g * s, h * s
    none = gl.full([WARPS, T, N], 0.0, gl.float32, MMA)
    logits = mma_v2(keys_operand(a, b, c, d, LEFT, T, W, WARPS), q, none + bias[:, None, :])
    if PACKED:
        # Two sums of half the length, as a product waits for the sum before.
        logits += mma_v2(keys_operand(e, f, g, h, LEFT, T, W, WARPS), q_high, none)
    if HAS_CAP:
        if OWN:
            logits = logits * (k_s.to(gl.float32) * (scale / cap))[:, :, None]
        else:
            logits = logits * (scale / cap)
        return tanh(logits) * (cap * LOG2E)
    elif OWN:
        return logits * (k_s.to(gl.float32) * (scale * LOG2E))[:, :, None]
    else:
        return logits


@gluon.jit
def _spread(
    scales, L: gl.constexpr, COUNT: gl.constexpr, T: gl.constexpr, W: gl.constexpr, WARPS: gl.constexpr
):
    """The scales of blocks for each word of values."""
    WORDS: gl.constexpr = W // 32 // COUNT
    scales = scales.reshape([T // 16, 2, WARPS, 8, 4, COUNT, 1])
    scales = scales.broadcast_to([T // 16, 2, WARPS, 8, 4, COUNT, WORDS])
    return gl.convert_layout(scales.reshape([T // 16, 2, WARPS, 8, 4, W // 32]), L)


@gluon.jit
def _turned(weights, MMA: gl.constexpr, T: gl.constexpr, N: gl.constexpr, WARPS: gl.constexpr):
    """Weights `[WARPS, T, N]` of a product as the right operand of the next one."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    blocks = weights.reshape([WARPS, T // 8, 8, N // 8, 8]).permute([0, 1, 3, 2, 4])
    blocks = turn(blocks).permute([0, 1, 4, 2, 3])
    return gl.convert_layout(blocks.reshape([WARPS, T, N]), OPERAND)
