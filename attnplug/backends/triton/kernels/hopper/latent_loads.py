"""The groups of warps that load the queries and latents of a share, for the kernels that decode on Hopper.

Buffers `low` and `high` have the halves of the elements without rope, `rope` the others; those of latents have STAGES
tiles of BLOCK_N keys. A tile may be read after its `full`, and written after its `empty`. Past a request's last key
there are zeros, because NaN times a weight of 0 is NaN.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attnplug.backends.triton.kernels.hopper.latent_bytes import E4M3_TO_HALF, E5M2_TO_HALF, scaled


@gluon.jit
def buffers(
    own: gl.constexpr,
    dtype: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    LATENT: gl.constexpr,
    ROPE: gl.constexpr,
    STAGES: gl.constexpr,
    ARRIVALS: gl.constexpr,
    READERS: gl.constexpr,
):
    """Queries of type `own`, latents of `dtype`, and their barriers: ARRIVALS fill a tile, and READERS empty it."""
    HALF: gl.constexpr = LATENT // 2
    QUERIES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HALF], own)
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HALF], dtype)
    q_low = gl.allocate_shared_memory(own, [BLOCK_M, HALF], QUERIES)
    q_high = gl.allocate_shared_memory(own, [BLOCK_M, HALF], QUERIES)
    k_low = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HALF], WIDE)
    k_high = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HALF], WIDE)
    q_rope = q_low
    k_rope = k_low
    if ROPE:
        NARROW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, ROPE], dtype)
        Q_ROPE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, ROPE], own)
        q_rope = gl.allocate_shared_memory(own, [BLOCK_M, ROPE], Q_ROPE)
        k_rope = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, ROPE], NARROW)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # Each thread arrives by itself when its copies are there.
    mbarrier.init(q_full, count=128)
    mbarrier.init(q_empty, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=ARRIVALS)
        mbarrier.init(empty.index(stage), count=READERS)
    return q_low, q_high, q_rope, k_low, k_high, k_rope, q_full, q_empty, full, empty


@gluon.jit
def share_of(tiles, num_reqs):
    """The tiles of this program, `[begin, end)`, and the request of the first one."""
    share = gl.program_id(1)
    size = gl.load(tiles + num_reqs + 2)
    begin = share * size
    end = gl.minimum(begin + size, gl.load(tiles + num_reqs))
    request = gl.load(tiles + num_reqs + 3 + share, mask=begin < end, other=0)
    return begin, end, request


@gluon.jit
def request_of(query_start_loc, seq_lens, tiles, request, end):
    """A request: its first tile, the one behind its last, the same in this share, first token, queries, keys."""
    first = gl.load(tiles + request)
    stop = gl.load(tiles + request + 1)
    token = gl.load(query_start_loc + request)
    query_len = gl.load(query_start_loc + request + 1) - token
    return first, stop, gl.minimum(stop, end), token, query_len, gl.load(seq_lens + request)


@gluon.jit
def _latents(cache, table_row, keys, seq_len, stride_block, stride_token, BLOCK_SIZE: gl.constexpr):
    """Where the latents of `keys` begin; in the null block past the last one."""
    pages = gl.load(table_row + keys // BLOCK_SIZE, mask=keys < seq_len, other=0)
    return cache + pages.to(gl.int64) * stride_block + (keys % BLOCK_SIZE) * stride_token


@gluon.jit
def _copy(
    low, high, rope, places, pe_places, there, LATENT: gl.constexpr, ROPE: gl.constexpr, LAYOUT: gl.constexpr
):
    """Begin to copy rows, with zeros where nothing is there."""
    HALF: gl.constexpr = LATENT // 2
    dims = gl.arange(0, HALF, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    mask = there[:, None]
    async_copy.async_copy_global_to_shared(low, places[:, None] + dims, mask=mask)
    async_copy.async_copy_global_to_shared(high, places[:, None] + (dims + HALF), mask=mask)
    if ROPE:
        pe_dims = gl.arange(0, ROPE, layout=gl.SliceLayout(0, LAYOUT))[None, :]
        async_copy.async_copy_global_to_shared(rope, pe_places[:, None] + pe_dims, mask=mask)


@gluon.jit
def _copy_queries(
    q_nope,
    q_pe,
    low,
    high,
    rope,
    full,
    token,
    num_rows,
    HEADS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    LATENT: gl.constexpr,
    ROPE: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Begin to copy BLOCK_M rows of a request, its heads of one token after those of the one before."""
    rows = gl.program_id(0) * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LAYOUT))
    places = token.to(gl.int64) * HEADS + rows
    _copy(
        low, high, rope, q_nope + places * LATENT, q_pe + places * ROPE, rows < num_rows, LATENT, ROPE, LAYOUT
    )
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def copy_tiles(
    q_nope,
    q_pe,
    cache,
    query_start_loc,
    seq_lens,
    block_table,
    tiles,
    num_reqs,
    stride_table,
    stride_block,
    q_low,
    q_high,
    q_rope,
    k_low,
    k_high,
    k_rope,
    q_full,
    q_empty,
    full,
    empty,
    HEADS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    LATENT: gl.constexpr,
    ROPE: gl.constexpr,
    STAGES: gl.constexpr,
    stride_token: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):
    """Copy each request's queries and tiles, as soon as both other groups are done with what was in their place."""
    # Eight threads copy 128 bytes of a row.
    QUERIES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    VECTOR: gl.constexpr = 128 // cache.dtype.element_ty.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, VECTOR], [4, 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    lanes = gl.arange(0, BLOCK_N, layout=ROWS)
    row_block = gl.program_id(0)
    tile, end, request = share_of(tiles, num_reqs)
    streams = 0
    copied = 0
    while tile < end:
        first, _, last_tile, token, query_len, seq_len = request_of(
            query_start_loc, seq_lens, tiles, request, end
        )
        num_rows = query_len * HEADS
        if (row_block * BLOCK_M < num_rows) & (last_tile > tile):
            mbarrier.wait(q_empty, (streams & 1) ^ 1)
            _copy_queries(
                q_nope, q_pe, q_low, q_high, q_rope, q_full, token, num_rows, HEADS, BLOCK_M, LATENT, ROPE, QUERIES
            )  # fmt: skip
            streams += 1
            table_row = block_table + request.to(gl.int64) * stride_table
            lo = (tile - first) * BLOCK_N
            hi = gl.minimum((last_tile - first) * BLOCK_N, seq_len)
            # Pages are looked up a tile ahead, so that copies do not wait for the table.
            places = _latents(cache, table_row, lo + lanes, seq_len, stride_block, stride_token, BLOCK_SIZE)
            for start in range(lo, hi, BLOCK_N):
                keys = start + lanes
                stage = copied % STAGES
                mbarrier.wait(empty.index(stage), (copied // STAGES & 1) ^ 1)
                _copy(
                    k_low.index(stage), k_high.index(stage), k_rope.index(stage), places, places + LATENT,
                    keys < seq_len, LATENT, ROPE, LAYOUT,
                )  # fmt: skip
                async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
                copied += 1
                places = _latents(
                    cache, table_row, keys + BLOCK_N, seq_len, stride_block, stride_token, BLOCK_SIZE
                )
        tile = last_tile
        request += 1


@gluon.jit
def _words(places, there, FIRST: gl.constexpr, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """SIZE elements of 8 bits of each row from FIRST on, four in a word: as bytes they would take four registers."""
    dims = FIRST // 4 + gl.arange(0, SIZE // 4, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    words = places.to(gl.pointer_type(gl.int32), bitcast=True)
    return gl.load(words[:, None] + dims, mask=there[:, None], other=0)


@gluon.jit
def _store(target, words, STORED: gl.constexpr):
    """Write elements of 8 bits as float16."""
    rows: gl.constexpr = words.shape[0]
    pairs: gl.constexpr = 2 * words.shape[1]
    convert: gl.constexpr = E4M3_TO_HALF if STORED == gl.float8e4nv else E5M2_TO_HALF
    first, second = gl.inline_asm_elementwise(
        convert, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    values = gl.join(first, second).reshape([rows, pairs])
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, pairs], gl.int32)
    target._reinterpret(gl.int32, [rows, pairs], layout).store(values)


@gluon.jit
def _as_half(buffer, factor, LAYOUT: gl.constexpr):
    """Multiply the rows of `buffer`, in place; returns it as float16."""
    COUNT: gl.constexpr = buffer.shape[1]
    SIDE: gl.constexpr = min(COUNT, 64)
    target = buffer._reinterpret(gl.float16, buffer.shape, buffer.type.layout)
    for first in gl.static_range(0, COUNT, SIDE):
        part = buffer.slice(first, SIDE, dim=1).load(LAYOUT).to(gl.float32) * factor[:, None]
        target.slice(first, SIDE, dim=1).store(part.to(gl.float16))
    return target


@gluon.jit
def scaled_queries(low, high, rope, ROPE: gl.constexpr):
    """Queries as float16, in place, and what the products of each row are multiplied with.

    Each row is multiplied with a power of two, which rounds nothing, such that no bfloat16 query is too large for
    float16, and none that matters too small.
    """
    return scaled(low, high, rope, 14, _as_half, ROPE)


@gluon.jit
def convert_tiles(
    q_nope,
    q_pe,
    cache,
    query_start_loc,
    seq_lens,
    block_table,
    tiles,
    num_reqs,
    stride_table,
    stride_block,
    q_low,
    q_high,
    q_rope,
    k_low,
    k_high,
    k_rope,
    q_full,
    q_empty,
    full,
    empty,
    HEADS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    LATENT: gl.constexpr,
    ROPE: gl.constexpr,
    STAGES: gl.constexpr,
    stride_token: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):
    """As copy_tiles, for latents of 8 bits, which become float16 on the way."""
    HALF: gl.constexpr = LATENT // 2
    QUERIES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    # Threads that write at the same time have different banks.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    lanes = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LAYOUT))
    row_block = gl.program_id(0)
    STORED: gl.constexpr = cache.dtype.element_ty
    tile, end, request = share_of(tiles, num_reqs)
    streams = 0
    number = 0
    while tile < end:
        first, _, last_tile, token, query_len, seq_len = request_of(
            query_start_loc, seq_lens, tiles, request, end
        )
        num_rows = query_len * HEADS
        if (row_block * BLOCK_M < num_rows) & (last_tile > tile):
            mbarrier.wait(q_empty, (streams & 1) ^ 1)
            _copy_queries(
                q_nope, q_pe, q_low, q_high, q_rope, q_full, token, num_rows, HEADS, BLOCK_M, LATENT, ROPE, QUERIES
            )  # fmt: skip
            streams += 1
            table_row = block_table + request.to(gl.int64) * stride_table
            lo = (tile - first) * BLOCK_N
            hi = gl.minimum((last_tile - first) * BLOCK_N, seq_len)
            keys = lo + lanes
            places = _latents(cache, table_row, keys, hi, stride_block, stride_token, BLOCK_SIZE)
            low = _words(places, keys < hi, 0, HALF, LAYOUT)
            high = _words(places, keys < hi, HALF, HALF, LAYOUT)
            if ROPE:
                rope = _words(places, keys < hi, LATENT, ROPE, LAYOUT)
            keys += BLOCK_N
            places = _latents(cache, table_row, keys, hi, stride_block, stride_token, BLOCK_SIZE)
            for _ in range(lo, hi, BLOCK_N):
                stage = number % STAGES
                mbarrier.wait(empty.index(stage), (number // STAGES & 1) ^ 1)
                _store(k_low.index(stage), low, STORED)
                _store(k_high.index(stage), high, STORED)
                if ROPE:
                    _store(k_rope.index(stage), rope, STORED)
                fence_async_shared()
                mbarrier.arrive(full.index(stage), count=1)
                number += 1
                low = _words(places, keys < hi, 0, HALF, LAYOUT)
                high = _words(places, keys < hi, HALF, HALF, LAYOUT)
                if ROPE:
                    rope = _words(places, keys < hi, LATENT, ROPE, LAYOUT)
                keys += BLOCK_N
                places = _latents(cache, table_row, keys, hi, stride_block, stride_token, BLOCK_SIZE)
        tile = last_tile
        request += 1
