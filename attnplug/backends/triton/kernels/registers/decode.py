"""Decode of equal shares over pages of 8 and 4 bits, on NVIDIA GPUs: tiles stay in registers, and each warp has its own tokens.

It does what share_decode_kernel does, from the same plan and for the same merge. Keys are the left operand of the product,
and queries the right one, so that 8 rows of queries waste nothing. Warps exchange nothing within the loop, whose next tile is
loaded one turn ahead.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents

from attnplug.backends.triton.kernels.formats import LEAST_SCALE, ROW_SCALES, SHIFT, STEP
from attnplug.backends.triton.kernels.ranges import common_range, key_range
from attnplug.backends.triton.kernels.registers.openings import (
    block_scales,
    keep_above,
    log2,
    open_keys,
    open_values,
    turn,
)
from attnplug.backends.triton.kernels.registers.operands import (
    even_tokens,
    key_offsets,
    keys_operand,
    load_query,
    value_offsets,
    values_operand,
)
from attnplug.backends.triton.kernels.scan import LN2, LOG2E, _tanh
from attnplug.backends.triton.kernels.shares import place_of, request_range

_UNSEEN: gl.constexpr = gl.constexpr(-1e30)
"""The maximum of a row that has seen no key: finite, so that no difference of two of them is NaN."""


# Values that differ between steps, or between a step and a graph's buffers, must not compile another kernel.
@gluon.jit(
    do_not_specialize=[
        "num_reqs",
        "prefix",
        "max_blocks",
        "slots",
        "block_rows",
        "ahead",
        "left",
        "right",
        "chunk",
        "stride_table",
        "stride_lse",
    ],
    do_not_specialize_on_alignment=["lse", "query_start_loc", "seq_lens", "block_table", "mm_spans"],
)
def register_decode_kernel(
    query,
    k_cache,
    v_cache,
    output,
    lse,
    query_start_loc,
    seq_lens,
    block_table,
    tiles,
    sinks,
    alibi_slopes,
    mm_spans,
    partials,
    partial_lses,
    num_reqs,
    prefix,
    max_blocks,
    slots,
    block_rows,
    ahead,
    scale,
    value_scale,
    cap,
    left,
    right,
    chunk,
    stride_qt,
    stride_qh,
    stride_ot,
    stride_oh,
    stride_table,
    stride_lse,
    PAGES: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    WARPS: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    HAS_CHUNK: gl.constexpr,
    HAS_CAP: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    HAS_LSE: gl.constexpr,
    COMPUTE: gl.constexpr,
    PDL: gl.constexpr,
    PINNED: gl.constexpr,
    NAME: gl.constexpr,
    FORMAT: gl.constexpr,
):
    """As share_decode_kernel, without prefix, slopes and spans, for BLOCK_M of 8 or 16 rows.

    PAGES has the bytes from block to block, token to token and head to head, which K and V have alike. Pages have a multiple of
    BLOCK_N / WARPS tokens. NAME is the format's, and FORMAT that of kernels/formats.py.
    """
    if PDL:
        gdc_launch_dependents()
    PACKED: gl.constexpr = FORMAT[SHIFT] if FORMAT is not None else 0
    STEPS: gl.constexpr = FORMAT[STEP] if FORMAT is not None else 1
    OWN: gl.constexpr = FORMAT[ROW_SCALES] if FORMAT is not None else False
    W: gl.constexpr = D // 2 if PACKED else D
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    COLUMNS: gl.constexpr = gl.SliceLayout(1, MMA)
    OUT: gl.constexpr = gl.SliceLayout(0, MMA)
    ROWS: gl.constexpr = gl.SliceLayout(0, OUT)
    kv_head = gl.program_id(0)
    share = gl.program_id(1)
    kv_heads = gl.num_programs(0)
    size = gl.load(tiles + num_reqs + 2)
    begin = share * size
    end = gl.minimum(begin + size, gl.load(tiles + num_reqs + 1))
    if begin >= end:
        return
    entry = gl.load(tiles + num_reqs + 3 + share)
    k_head = k_cache + kv_head.to(gl.int64) * PAGES[2]
    v_head = v_cache + kv_head.to(gl.int64) * PAGES[2]
    tile = begin
    while tile < end:
        entry_begin = gl.load(tiles + entry)
        entry_end = gl.load(tiles + entry + 1)
        if entry_end > tile:
            first = gl.load(query_start_loc + entry)
            tokens = gl.load(query_start_loc + entry + 1) - first
            num_rows = tokens * GROUP
            count = (entry_end - entry_begin) // gl.cdiv(num_rows, BLOCK_M)
            block = (tile - entry_begin) // count
            stream = entry_begin + block * count
            stop = gl.minimum(stream + count, end)
            length = gl.load(seq_lens + entry)
            computed = length - tokens
            first_pos = computed + block * BLOCK_M // GROUP
            last_pos = computed + (gl.minimum((block + 1) * BLOCK_M, num_rows) - 1) // GROUP
            base, _ = request_range(
                first, tokens, length, mm_spans, left, right, chunk, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, False
            )
            origin = base // BLOCK_N - ahead - stream
            lo, hi = key_range(
                first_pos, last_pos, 0, length, left, right, chunk, HAS_LEFT, HAS_RIGHT, HAS_CHUNK
            )
            lo = gl.maximum(lo, (origin + tile) * BLOCK_N)
            hi = gl.minimum(hi, (origin + stop) * BLOCK_N)
            full_lo, full_hi = common_range(
                first_pos, last_pos, lo, hi, 0, 0, left, right, chunk, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, False
            )
            begins = tile == stream
            is_whole = begins & (stream + count <= end)

            q, q_high, unit, bias = _queries(
                query, first, block * BLOCK_M, num_rows, kv_head, stride_qt, stride_qh,
                COLUMNS, MMA, GROUP, BLOCK_M, W, WARPS, PACKED, STEPS, COMPUTE, NAME,
            )  # fmt: skip
            row = block * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, COLUMNS))
            positions = computed + gl.minimum(row, num_rows - 1) // GROUP
            table_row = block_table + entry.to(gl.int64) * stride_table
            acc, acc_high, top, total = _scan(
                q, q_high, scale * unit, bias, positions, lo, hi, full_lo, full_hi, k_head, v_head, kv_head,
                table_row, cap, left, right, chunk, MMA, PAGES, BLOCK_SIZE, BLOCK_M, BLOCK_N, D, W, WARPS,
                HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, PACKED, OWN, PINNED, NAME, FORMAT,
            )  # fmt: skip

            rows = block * BLOCK_M + gl.arange(0, BLOCK_M, layout=ROWS)
            inside = rows < num_rows
            own = first + gl.minimum(rows, num_rows - 1) // GROUP
            heads = kv_head * GROUP + rows % GROUP
            factor = gl.full([BLOCK_M], 1.0, gl.float32, ROWS)
            if HAS_SINKS:
                sink = gl.load(sinks + heads, mask=inside & begins, other=float("-inf")) * LOG2E
                new_top = gl.maximum(top, sink)
                factor = gl.exp2(top - new_top)
                total = total * factor + gl.exp2(sink - new_top)
                top = new_top
            empty = total == 0.0
            safe = gl.where(empty, 1.0, total)
            out_lse = gl.where(empty, float("-inf"), top + gl.log2(safe))
            factor = factor / safe
            if NAME == "rotated4":
                factor *= 512.0
            column = gl.arange(0, W, layout=gl.SliceLayout(1, OUT))
            element = ((column % 8) * (W // 8) + column // 8) * STEPS
            mask = inside[None, :] & (element >= 0)[:, None]
            acc = acc * factor[None, :]
            if is_whole:
                places = output + (own.to(gl.int64) * stride_ot + heads.to(gl.int64) * stride_oh)[None, :]
                places = places + element[:, None]
                gl.store(places, (acc * value_scale).to(output.dtype.element_ty), mask=mask)
                if PACKED:
                    high = acc_high * (factor * value_scale)[None, :]
                    gl.store(places + PACKED, high.to(output.dtype.element_ty), mask=mask)
                if HAS_LSE:
                    gl.store(lse + own.to(gl.int64) * stride_lse + heads, out_lse * LN2, mask=inside)
            else:
                place = place_of(entry, block, share, begins, max_blocks, 0)
                here = (place * kv_heads + kv_head).to(gl.int64) * BLOCK_M + gl.arange(
                    0, BLOCK_M, layout=ROWS
                )
                parts = partials + (here * D)[None, :] + element[:, None]
                gl.store(parts, acc, mask=mask)
                if PACKED:
                    gl.store(parts + PACKED, acc_high * factor[None, :], mask=mask)
                gl.store(partial_lses + here, out_lse, mask=inside)
            tile = stop
        entry += gl.where(tile >= entry_end, 1, 0)


@gluon.jit
def _queries(
    query,
    first,
    first_row,
    num_rows,
    kv_head,
    stride_qt,
    stride_qh,
    COLUMNS: gl.constexpr,
    MMA: gl.constexpr,
    GROUP: gl.constexpr,
    N: gl.constexpr,
    W: gl.constexpr,
    WARPS: gl.constexpr,
    PACKED: gl.constexpr,
    STEPS: gl.constexpr,
    COMPUTE: gl.constexpr,
    NAME: gl.constexpr,
):
    """Both halves of the queries as right operands, the factor that logits need, and what they begin with `[WARPS, N]`.

    As in load_queries, a power of two makes float16 of any bfloat16. Codes without a sign are stored as their distance to
    the least one: the sum of the queries takes the middle away.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 2, 1], [1, 4, 8], [WARPS, 1, 1], [1, 2, 0])
    OPERAND: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    EVEN_FIRST: gl.constexpr = NAME == "rotated4"
    low = load_query(
        query, first, first_row, num_rows, kv_head, stride_qt, stride_qh, 0, L, GROUP, N, W, WARPS, STEPS, EVEN_FIRST
    )  # fmt: skip
    high = low
    if PACKED:
        high = load_query(
            query, first, first_row, num_rows, kv_head, stride_qt, stride_qh, PACKED, L, GROUP, N, W, WARPS, STEPS, EVEN_FIRST
        )  # fmt: skip
    unit = 1.0
    if COMPUTE is not None:
        low, high = low.to(gl.float32), high.to(gl.float32)
        sizes = gl.maximum(_finite_size(low), _finite_size(high))
        largest = gl.max(gl.max(gl.max(sizes, 2), 1), 0)
        shift = 14.0 - gl.floor(gl.log2(gl.maximum(largest, 1e-30)))
        low, high, unit = low * gl.exp2(shift), high * gl.exp2(shift), gl.exp2(-shift)
    low, high = low.to(gl.float16), high.to(gl.float16)
    bias = gl.full([WARPS, N], 0.0, gl.float32, COLUMNS)
    if NAME == "int8_token_head":
        bias = gl.convert_layout(gl.sum(low.to(gl.float32), 1) * (-128.0 * 2.0**-24), COLUMNS)
        unit = unit * 2.0**24
    elif NAME == "rotated4":
        sums = gl.sum(low.to(gl.float32) + high.to(gl.float32), 1)
        bias = gl.convert_layout(sums * (-7.5 * 2.0**-24), COLUMNS)
        unit = unit * 2.0**24
        high = high * 0.0625
    return gl.convert_layout(low, OPERAND), gl.convert_layout(high, OPERAND), unit, bias


@gluon.jit
def _finite_size(x):
    size = gl.abs(x)
    return gl.where(size < float("inf"), size, 0.0)


@gluon.jit
def _warp_rows(
    table_row,
    start,
    lo,
    hi,
    L: gl.constexpr,
    T: gl.constexpr,
    WARPS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):
    """The block of each warp's tokens of a tile, int64 `[WARPS]`, and the place of the first one in it.

    Tiles at the ends have tokens without a block: these warps read another one of the keys `lo .. hi - 1`.
    """
    at = start + gl.arange(0, WARPS, layout=L) * T
    block = gl.minimum(gl.maximum(at // BLOCK_SIZE, lo // BLOCK_SIZE), (hi - 1) // BLOCK_SIZE)
    return gl.load(table_row + block, mask=(at * 0 + hi) > lo, other=0).to(gl.int64), at % BLOCK_SIZE


@gluon.jit
def _scan(
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
    k_offsets = key_offsets(KEYS, T, WARPS, ROW, W // 16)
    v_offsets = value_offsets(VALUES, T, WARPS, ROW, W // 32, 1)
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
        K_WORD: gl.constexpr = gl.int32 if K_COUNT == 4 else gl.int16 if K_COUNT == 2 else gl.uint8
        V_WORD: gl.constexpr = gl.int16 if V_COUNT == 2 else gl.uint8
        k_scales = k_start.to(gl.pointer_type(K_WORD), bitcast=True)
        v_scales = v_start.to(gl.pointer_type(V_WORD), bitcast=True)
        ks_offsets = key_offsets(KEY_SCALES, T, WARPS, FORMAT[2] // K_COUNT, 1)
        vs_offsets = value_offsets(VALUE_SCALES, T, WARPS, FORMAT[2] // V_COUNT, 1, V_THREADS)
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

    start = lo // BLOCK_N * BLOCK_N
    blocks, places = _warp_rows(table_row, start, lo, hi, WARP, T, WARPS, BLOCK_SIZE)
    next_blocks, next_places = _warp_rows(table_row, start + BLOCK_N, lo, hi, WARP, T, WARPS, BLOCK_SIZE)
    k, k_s = _load_keys(k_words, k_scales, k_offsets, ks_offsets, blocks, places, PAGES, KEYS, K_SCALES)
    v, v_odd, v_s, v_s_odd = _load_values(
        v_words, v_scales, v_offsets, vs_offsets, blocks, places, PAGES, VALUES, V_SCALES
    )
    top = gl.full([WARPS, N], _UNSEEN, gl.float32, COLUMNS)
    total = gl.full([WARPS, N], 0.0, gl.float32, COLUMNS)
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
            # A whole turn ahead, as memory takes about as long to answer. The assembler would move them next to their use.
            next_k, next_k_s = _load_keys(
                k_words, k_scales, k_offsets, ks_offsets, next_blocks, next_places, PAGES, KEYS, K_SCALES
            )
            next_v, next_v_odd, next_v_s, next_v_s_odd = _load_values(
                v_words, v_scales, v_offsets, vs_offsets, next_blocks, next_places, PAGES, VALUES, V_SCALES
            )
            next_blocks, next_places = _warp_rows(
                table_row, key + 2 * BLOCK_N, lo, hi, WARP, T, WARPS, BLOCK_SIZE
            )
            if PINNED:
                next_places = keep_above(next_places)
            logits = _logits(
                k, k_s, q, q_high, bias, scale, cap, MMA, KEYS, T, W, WARPS, HAS_CAP, PACKED, OWN, NAME
            )
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
            fade = gl.exp2(top - new_top)
            weights = gl.exp2(logits - new_top[:, None, :])
            total, top = total * fade + gl.sum(weights, 1), new_top
            if OWN:
                weights = weights * v_scale[:, :, None]
            weights = _turned(weights.to(gl.float16), MMA, T, N, WARPS)
            opened = open_values(v, v_odd, NAME)
            a, b, c, d = opened[0], opened[1], opened[2], opened[3]
            e, f, g, h = opened[4], opened[5], opened[6], opened[7]
            if PACKED:
                i, j, m, n = opened[8], opened[9], opened[10], opened[11]
                o, p, r, u = opened[12], opened[13], opened[14], opened[15]
            if BLOCKS:
                s = _spread(block_scales(v_s.to(gl.int32), V_COUNT), VALUES, V_COUNT, T, W, WARPS)
                t = _spread(block_scales(v_s_odd.to(gl.int32), V_COUNT), VALUES, V_COUNT, T, W, WARPS)
                a, c, e, g, i, m, o, r = a * s, c * s, e * s, g * s, i * s, m * s, o * s, r * s
                b, d, f, h, j, n, p, u = b * t, d * t, f * t, h * t, j * t, n * t, p * t, u * t
            acc = acc * fade[:, None, :]
            acc = mma_v2(values_operand(a, b, c, d, e, f, g, h, LEFT, T, W, WARPS), weights, acc)
            if PACKED:
                acc_high = acc_high * fade[:, None, :]
                acc_high = mma_v2(
                    values_operand(i, j, m, n, o, p, r, u, LEFT, T, W, WARPS), weights, acc_high
                )
            k, k_s = next_k, next_k_s
            v, v_odd, v_s, v_s_odd = next_v, next_v_odd, next_v_s, next_v_s_odd
    whole_top = gl.max(top, 0)
    fade = gl.exp2(top - gl.convert_layout(whole_top, gl.SliceLayout(0, COLUMNS))[None, :])
    total = gl.convert_layout(gl.sum(total * fade, 0), ROWS)
    acc = gl.sum(acc * fade[:, None, :], 0)
    if PACKED:
        acc_high = gl.sum(acc_high * fade[:, None, :], 0)
    else:
        acc_high = acc
    return acc, acc_high, gl.convert_layout(whole_top, ROWS), total


@gluon.jit
def _logits(
    k,
    k_s,
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
    opened = open_keys(k, NAME)
    a, b, c, d = opened[0], opened[1], opened[2], opened[3]
    if PACKED:
        e, f, g, h = opened[4], opened[5], opened[6], opened[7]
    if NAME == "nvfp4":
        s = block_scales(k_s.to(gl.int32), COUNT)
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
        return _tanh(logits) * (cap * LOG2E)
    elif OWN:
        return logits * (k_s.to(gl.float32) * (scale * LOG2E))[:, :, None]
    else:
        return logits * (scale * LOG2E)


@gluon.jit
def _load_keys(
    words,
    scales,
    offsets,
    scale_offsets,
    blocks,
    places,
    PAGES: gl.constexpr,
    L: gl.constexpr,
    SCALES: gl.constexpr,
):
    """Words of a tile's keys, and their scales, as each warp's block and place have them.

    SCALES is None without scales. Else it has the bytes from token to token, those of an item, and the layout of the scales of
    blocks, or None where a row has one scale.
    """
    rows = blocks * (PAGES[0] // 4) + places * (PAGES[1] // 4)
    found = gl.load(words + (_rows_of_keys(rows, L) + offsets))
    own = found
    if SCALES is not None:
        rows = blocks * (PAGES[0] // SCALES[1]) + places * (SCALES[0] // SCALES[1])
        if SCALES[2] is None:
            own = gl.load(scales + (rows[:, None] + scale_offsets))
        else:
            own = gl.load(scales + (_rows_of_keys(rows, SCALES[2]) + scale_offsets))
    return found, own


@gluon.jit
def _load_values(
    words,
    scales,
    offsets,
    scale_offsets,
    blocks,
    places,
    PAGES: gl.constexpr,
    L: gl.constexpr,
    SCALES: gl.constexpr,
):
    """The same of values: of even tokens, of odd ones, and the scales of both; a row's one scale comes for all tokens."""
    rows = blocks * (PAGES[0] // 4) + places * (PAGES[1] // 4)
    of_pair = _rows_of_values(rows, L) + offsets
    even, odd = gl.load(words + of_pair), gl.load(words + of_pair + PAGES[1] // 4)
    own, own_odd = even, odd
    if SCALES is not None:
        rows = blocks * (PAGES[0] // SCALES[1]) + places * (SCALES[0] // SCALES[1])
        if SCALES[2] is None:
            own = gl.load(scales + (rows[:, None] + scale_offsets))
            own_odd = own
        else:
            of_pair = _rows_of_values(rows, SCALES[2]) + scale_offsets
            own = gl.load(scales + of_pair)
            own_odd = gl.load(scales + of_pair + SCALES[0] // SCALES[1])
    return even, odd, own, own_odd


@gluon.jit
def _rows_of_keys(rows, L: gl.constexpr):
    """A number of each warp for all that it has of a tile of keys."""
    WARP: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, L))))
    return gl.convert_layout(rows, WARP)[None, :, None, None, None]


@gluon.jit
def _rows_of_values(rows, L: gl.constexpr):
    """The same of a tile of values."""
    INNER: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(4, gl.SliceLayout(5, L)))
    WARP: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, INNER))
    return gl.convert_layout(rows, WARP)[None, None, :, None, None, None]


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
