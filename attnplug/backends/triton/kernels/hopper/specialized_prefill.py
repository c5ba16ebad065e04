"""Prefill and extend on Hopper with specialised warps: two or three groups attend 64 rows of a tile each, one copies.

Queries, keys and values are copied while the tiles before them are attended. Each group multiplies the weights of one tile
with its values, and the queries with the keys of the next, during the softmax of another group and its own.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from attnplug.backends.triton.kernels.hopper.number_rows import shared_matrix
from attnplug.backends.triton.kernels.hopper.prefill_attend import attend_tiles
from attnplug.backends.triton.kernels.hopper.prefill_loads import copy_tiles


# Values that differ between steps must not compile another kernel.
@gluon.jit(
    do_not_specialize=[
        "first_token",
        "num_reqs",
        "num_tiles",
        "request_tiles",
        "is_next",
        "left",
        "right",
        "chunk",
        "stride_table",
        "stride_lse",
    ],
    do_not_specialize_on_alignment=[
        "lse",
        "query_start_loc",
        "seq_lens",
        "block_table",
        "key_start_loc",
        "mm_spans",
        "powers",
    ],
)
def specialized_prefill_kernel(
    query,
    k_cache,
    v_cache,
    output,
    lse,
    query_start_loc,
    seq_lens,
    block_table,
    key_start_loc,
    sinks,
    alibi_slopes,
    mm_spans,
    first_token,
    num_reqs,
    num_tiles,
    request_tiles,
    is_next,
    matrix,
    powers,
    k_tiles,
    v_tiles,
    k_tail_tiles,
    v_tail_tiles,
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
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_table,
    stride_lse,
    KV_HEADS: gl.constexpr,
    PAGED: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    BLOCK_D: gl.constexpr,
    TAIL: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    HAS_CHUNK: gl.constexpr,
    HAS_CAP: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    HAS_LSE: gl.constexpr,
    FIXED: gl.constexpr,
    EVEN: gl.constexpr,
    NUMBERS: gl.constexpr,
    IN_TURN: gl.constexpr,
    HELD: gl.constexpr,
    PDL: gl.constexpr,
):
    """As prefill_kernel, for queries and keys of 16 bits, heads of equal size, and strides of whole 32 bytes.

    Tiles have BLOCK_D columns and a second part of TAIL columns, powers of two; those past D are zeros.

    With NUMBERS queries are bfloat16, and keys and values float16, with factors `powers`, float32 `[2, num_reqs, KV_HEADS]`.
    With 2 the kernel turns the queries, and the outputs back, by `matrix`, bfloat16 `[BLOCK_D, BLOCK_D]` of -1, 0 and 1. The
    matrix still needs a factor, which both scales have.

    Without `k_tiles` and the like, which are None then, all keys and values are copied by rows. With IN_TURN the groups begin
    the products of a step one after the other, and with HELD they hold their queries in registers.

    Each program takes tiles in turn, those late in their requests first; `tile_of` says whose they are. BLOCK_M is
    64 for each group of warps that attends: two or three.

    With PDL it is launched while the kernel before it runs. It waits for that at its end where it `is_next` to a decode of
    the same step, whose results it does not read, and at its beginning after all others.
    """
    if PDL:
        if is_next == 0:
            gdc_wait()
    dtype: gl.constexpr = k_cache.dtype.element_ty
    asked: gl.constexpr = query.dtype.element_ty
    HALF: gl.constexpr = 64
    GROUPS: gl.constexpr = BLOCK_M // HALF
    QUERIES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, BLOCK_D], asked)
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_D], dtype)
    q = gl.allocate_shared_memory(asked, [GROUPS, HALF, BLOCK_D], QUERIES)
    k = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], KEYS)
    v = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], KEYS)
    # Without a tail these are never read.
    q_tail, k_tail, v_tail = q, k, v
    if TAIL:
        QUERIES_TAIL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, TAIL], asked)
        KEYS_TAIL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, TAIL], dtype)
        q_tail = gl.allocate_shared_memory(asked, [GROUPS, HALF, TAIL], QUERIES_TAIL)
        k_tail = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, TAIL], KEYS_TAIL)
        v_tail = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, TAIL], KEYS_TAIL)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    signs = k
    if NUMBERS == 2:
        signs = shared_matrix(matrix, dtype, BLOCK_D)
    turns = full
    if IN_TURN:
        turns = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
        for group in gl.static_range(GROUPS):
            mbarrier.init(turns.index(group), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    # A multiprocessor has 65,536 registers: each thread of a group that attends has what the group that copies leaves it.
    # Triton forgets what is known when it compiles in a tuple with a name.
    if GROUPS == 3:
        gl.warp_specialize(
            [
                (attend_tiles, (
                    output, lse, query_start_loc, seq_lens, key_start_loc, sinks, first_token, num_reqs, num_tiles, request_tiles,
                    left, right, chunk, scale, value_scale, cap, stride_ot, stride_oh, stride_lse,
                    powers, signs, q, k, v, q_tail, k_tail, v_tail, full, empty, turns,
                    KV_HEADS, PAGED, GROUP, BLOCK_M, BLOCK_N, D, BLOCK_D, TAIL, STAGES,
                    HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, HAS_SINKS, HAS_LSE, FIXED, EVEN, NUMBERS, IN_TURN, HELD, gl.constexpr(0),
                )),
                (attend_tiles, (
                    output, lse, query_start_loc, seq_lens, key_start_loc, sinks, first_token, num_reqs, num_tiles, request_tiles,
                    left, right, chunk, scale, value_scale, cap, stride_ot, stride_oh, stride_lse,
                    powers, signs, q, k, v, q_tail, k_tail, v_tail, full, empty, turns,
                    KV_HEADS, PAGED, GROUP, BLOCK_M, BLOCK_N, D, BLOCK_D, TAIL, STAGES,
                    HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, HAS_SINKS, HAS_LSE, FIXED, EVEN, NUMBERS, IN_TURN, HELD, gl.constexpr(1),
                )),
                (attend_tiles, (
                    output, lse, query_start_loc, seq_lens, key_start_loc, sinks, first_token, num_reqs, num_tiles, request_tiles,
                    left, right, chunk, scale, value_scale, cap, stride_ot, stride_oh, stride_lse,
                    powers, signs, q, k, v, q_tail, k_tail, v_tail, full, empty, turns,
                    KV_HEADS, PAGED, GROUP, BLOCK_M, BLOCK_N, D, BLOCK_D, TAIL, STAGES,
                    HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, HAS_SINKS, HAS_LSE, FIXED, EVEN, NUMBERS, IN_TURN, HELD, gl.constexpr(2),
                )),
                (copy_tiles, (
                    query, k_cache, v_cache, k_tiles, v_tiles, k_tail_tiles, v_tail_tiles,
                    query_start_loc, seq_lens, block_table, key_start_loc, first_token, num_reqs, num_tiles, request_tiles, left, right, chunk, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
                    stride_table, q, k, v, q_tail, k_tail, v_tail, full, empty, KV_HEADS, PAGED, BLOCK_SIZE, GROUP, BLOCK_M, BLOCK_N,
                    D, BLOCK_D, TAIL, STAGES, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, FIXED,
                )),
            ],
            [4, 4, 4],
            [160, 160, 32] if BLOCK_N == 128 else [152, 152, 32],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (attend_tiles, (
                    output, lse, query_start_loc, seq_lens, key_start_loc, sinks, first_token, num_reqs, num_tiles, request_tiles,
                    left, right, chunk, scale, value_scale, cap, stride_ot, stride_oh, stride_lse,
                    powers, signs, q, k, v, q_tail, k_tail, v_tail, full, empty, turns,
                    KV_HEADS, PAGED, GROUP, BLOCK_M, BLOCK_N, D, BLOCK_D, TAIL, STAGES,
                    HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, HAS_SINKS, HAS_LSE, FIXED, EVEN, NUMBERS, IN_TURN, HELD, gl.constexpr(0),
                )),
                (attend_tiles, (
                    output, lse, query_start_loc, seq_lens, key_start_loc, sinks, first_token, num_reqs, num_tiles, request_tiles,
                    left, right, chunk, scale, value_scale, cap, stride_ot, stride_oh, stride_lse,
                    powers, signs, q, k, v, q_tail, k_tail, v_tail, full, empty, turns,
                    KV_HEADS, PAGED, GROUP, BLOCK_M, BLOCK_N, D, BLOCK_D, TAIL, STAGES,
                    HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, HAS_SINKS, HAS_LSE, FIXED, EVEN, NUMBERS, IN_TURN, HELD, gl.constexpr(1),
                )),
                (copy_tiles, (
                    query, k_cache, v_cache, k_tiles, v_tiles, k_tail_tiles, v_tail_tiles,
                    query_start_loc, seq_lens, block_table, key_start_loc, first_token, num_reqs, num_tiles, request_tiles, left, right, chunk, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
                    stride_table, q, k, v, q_tail, k_tail, v_tail, full, empty, KV_HEADS, PAGED, BLOCK_SIZE, GROUP, BLOCK_M, BLOCK_N,
                    D, BLOCK_D, TAIL, STAGES, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, FIXED,
                )),
            ],
            [4, 4],
            [224, 56] if FIXED or HELD else [208, 72],
        )  # fmt: skip
    if PDL:
        # What comes next must not begin before the decode has ended.
        if is_next != 0:
            gdc_wait()
