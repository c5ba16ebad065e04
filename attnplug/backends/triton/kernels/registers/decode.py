"""Decode of equal shares over pages of 8 and 4 bits, on NVIDIA GPUs: tiles stay in registers, and each warp has its own tokens.

It does what share_decode_kernel does, from the same plan and for the same merge. Keys are the left operand of the product,
and queries the right one, so that 8 rows of queries waste nothing. Warps exchange nothing within the loop, whose next tile is
loaded one turn ahead.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug.backends.triton.kernels.formats import ROW_SCALES, SHIFT, STEP
from attnplug.backends.triton.kernels.ranges import common_range, key_range
from attnplug.backends.triton.kernels.registers.loop import scan_tiles
from attnplug.backends.triton.kernels.registers.operands import load_query
from attnplug.backends.triton.kernels.scan import LN2, LOG2E
from attnplug.backends.triton.kernels.shares import first_key, place_of, request_range


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
        gdc_wait()
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
    # As in share_decode.py, loads come before the branches that wait for others.
    entry = gl.load(tiles + num_reqs + 3 + share)
    begin = share * size
    end = gl.minimum(begin + size, gl.load(tiles + num_reqs + 1))
    if begin >= end:
        return
    k_head = k_cache + kv_head.to(gl.int64) * PAGES[2]
    v_head = v_cache + kv_head.to(gl.int64) * PAGES[2]
    if scale.dtype.is_ptr():
        scale = gl.load(scale + kv_head)
    if value_scale.dtype.is_ptr():
        value_scale = gl.load(value_scale + kv_head)
    tile = begin
    while tile < end:
        entry_begin = gl.load(tiles + entry)
        entry_end = gl.load(tiles + entry + 1)
        first = gl.load(query_start_loc + entry)
        tokens = gl.load(query_start_loc + entry + 1) - first
        length = gl.load(seq_lens + entry)
        if entry_end > tile:
            num_rows = tokens * GROUP
            count = (entry_end - entry_begin) // gl.cdiv(num_rows, BLOCK_M)
            block = (tile - entry_begin) // count
            stream = entry_begin + block * count
            stop = gl.minimum(stream + count, end)
            computed = length - tokens
            first_pos = computed + block * BLOCK_M // GROUP
            last_pos = computed + (gl.minimum((block + 1) * BLOCK_M, num_rows) - 1) // GROUP
            base, past = request_range(
                first, tokens, length, mm_spans, left, right, chunk, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, False
            )
            origin = first_key(base, past, count, ahead, 0, BLOCK_N) - stream
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
            acc, acc_high, top, total = scan_tiles(
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
    EVEN_FIRST: gl.constexpr = PACKED != 0
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
