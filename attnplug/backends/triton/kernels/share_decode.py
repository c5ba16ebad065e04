"""Few queries over many keys: every program attends an equal share of all keys, across the borders of requests."""

from __future__ import annotations

import triton
import triton.language as tl

from attnplug.backends.triton.kernels.attend import attend
from attnplug.backends.triton.kernels.formats import add_sinks, columns, head_planes
from attnplug.backends.triton.kernels.ranges import key_range, load_spans
from attnplug.backends.triton.kernels.scan import LN2, LOG2E, finish, in_one_order, store_part
from attnplug.backends.triton.kernels.shares import first_key, place_of, request_range, wait_for_inputs
from attnplug.backends.triton.kernels.split_places import even_log, nearest_split, split_number
from attnplug.backends.triton.kernels.tiles import load_queries, of_head


# Values that differ between steps, or between a step and a graph's buffers, must not compile another kernel.
@triton.jit(
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
def share_decode_kernel(
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
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_table,
    stride_lse,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
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
    HAS_SINKS: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_LSE: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    ALIKE: tl.constexpr,
    SUMS: tl.constexpr,
    ONE: tl.constexpr,
    PAIRS: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
    FIXED: tl.constexpr,
    EVEN: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """One share of the plan for one KV head; see plan_shares_kernel for `tiles`, and for the streams.

    A stream that is in one share alone is written to `output`. Parts of others go to `partials [places, Hkv, BLOCK_M,
    DV]`, and their LSE, in base 2, to `partial_lses [places, Hkv, BLOCK_M]`, for merge_shares_kernel. So do all
    streams of a step whose requests share the `prefix` first keys: these are read once for all of them.

    With FIXED a share begins at the split of the keys that begins nearest to its first tile, see fixed_splits.py. Of a
    stream that an earlier share began, each split is a part for merge_splits_kernel. There is no prefix then.
    """
    if PDL:
        wait_for_inputs()
    kv_head = tl.program_id(0)
    share = tl.program_id(1)
    kv_heads = tl.num_programs(0)
    size = tl.load(tiles + num_reqs + 2)
    # Loads that need no other's result come before branches, so that memory answers all of them at the same time.
    entry = tl.load(tiles + num_reqs + 3 + share)
    begin = share * size
    end = tl.minimum(begin + size, tl.load(tiles + num_reqs + 1))
    if begin >= end:
        return
    shared = prefix // BLOCK_N
    scale = of_head(scale, kv_head)
    value_scale = of_head(value_scale, kv_head)
    lanes = tl.arange(0, BLOCK_M)
    if PAIRS:
        v_cache = v_cache.to(tl.pointer_type(tl.int16), bitcast=True)
    if FORMAT is None:
        dims = tl.arange(0, BLOCK_DV)
        k_head = k_cache + kv_head.to(tl.int64) * stride_kh
        v_head = v_cache + kv_head.to(tl.int64) * stride_vh
    else:
        dims = columns(BLOCK_DV, DV, FORMAT)
        k_head = head_planes(k_cache, kv_head, stride_kh, FORMAT)
        v_head = head_planes(v_cache, kv_head, stride_vh, FORMAT)
    tile = begin
    while tile < end:
        entry_begin = tl.load(tiles + entry)
        entry_end = tl.load(tiles + entry + 1)
        is_prefix = entry == num_reqs
        first_request = tl.where(is_prefix, 0, entry)
        past_request = tl.where(is_prefix, num_reqs, entry + 1)
        first = tl.load(query_start_loc + first_request)
        tokens = tl.load(query_start_loc + past_request) - first
        length = tl.load(seq_lens + first_request)
        if entry_end > tile:
            num_rows = tokens * GROUP
            count = (entry_end - entry_begin) // tl.cdiv(num_rows, BLOCK_M)
            block = (tile - entry_begin) // count
            stream = entry_begin + block * count
            stop = tl.minimum(stream + count, end)
            rows = block * BLOCK_M + lanes
            own = first + tl.minimum(rows, num_rows - 1) // GROUP

            request = first_request
            computed = length - tokens
            positions = computed - first + own
            first_pos = computed + block * BLOCK_M // GROUP
            last_pos = computed + (tl.minimum((block + 1) * BLOCK_M, num_rows) - 1) // GROUP
            if is_prefix:
                # The request of each row: the last one that begins at its token or before.
                requests = lanes * 0
                later = requests + num_reqs
                gap = num_reqs
                while gap > 1:
                    between = (requests + later) // 2
                    is_before = tl.load(query_start_loc + between) <= own
                    requests = tl.where(is_before, between, requests)
                    later = tl.where(is_before, later, between)
                    gap = (gap + 1) // 2
                ends = tl.load(query_start_loc + requests + 1)
                positions = tl.load(seq_lens + requests) - ends + own
                request = tl.min(requests, 0)
                first_pos = tl.min(positions, 0)
                last_pos = tl.max(positions, 0)
            limit = tl.where(is_prefix, shared * BLOCK_N, length)
            floor = tl.where(is_prefix, 0, shared * BLOCK_N)

            # All row blocks of a request have the same tiles, each with its own part of the keys.
            base, past = request_range(
                first, tokens, length, mm_spans, left, right, chunk,
                HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_SPANS,
            )  # fmt: skip
            origin = tl.where(is_prefix, 0, first_key(base, past, count, ahead, shared, BLOCK_N)) - stream
            lo, hi = key_range(
                first_pos, last_pos, 0, limit, left, right, chunk, HAS_LEFT, HAS_RIGHT, HAS_CHUNK
            )
            starts = positions
            stops = positions
            first_stop = 0
            last_start = 0
            if HAS_SPANS:
                starts, stops = load_spans(mm_spans, own.to(tl.int64))
                top_row = (first + block * BLOCK_M // GROUP).to(tl.int64)
                last_row = (first + (tl.minimum((block + 1) * BLOCK_M, num_rows) - 1) // GROUP).to(tl.int64)
                first_start, first_stop = load_spans(mm_spans, top_row)
                last_start, last_stop = load_spans(mm_spans, last_row)
                lo = tl.maximum(tl.minimum(lo, first_start), 0)
                hi = tl.minimum(tl.maximum(hi, last_stop), limit)
            begins = tile == stream
            is_whole = begins & (stream + count <= end) & (shared == 0)
            inside = rows < num_rows
            parts = None
            even = 0
            if FIXED:
                even = even_log(length, tokens, EVEN)
                # A stream that an earlier share began is summed split by split, for all keys that its request sees.
                cut = nearest_split((origin + begin) * BLOCK_N, base, even)
                next_cut = nearest_split((origin + end) * BLOCK_N, base, even)
                next_cut = tl.where(stream + count <= end, past, tl.minimum(next_cut, past))
                is_whole = begins & (next_cut >= past)
                lo = tl.where(begins, lo, tl.maximum(cut, base))
                hi = tl.where(begins, tl.minimum(hi, next_cut), next_cut)
                step = kv_heads * block_rows
                row = (stream // size * slots * kv_heads + kv_head).to(tl.int64) * block_rows + lanes
                parts = (
                    partials,
                    partial_lses,
                    row + step,
                    step,
                    split_number(base, even),
                    inside,
                    tile > stream,
                )
            else:
                lo = tl.maximum(tl.maximum(lo, floor), (origin + tile) * BLOCK_N)
                hi = tl.minimum(hi, (origin + stop) * BLOCK_N)

            heads = (kv_head * GROUP + rows % GROUP).to(INDEX)
            q, q_tail, own_scale = load_queries(
                query,
                rows,
                num_rows,
                first,
                heads,
                stride_qt,
                stride_qh,
                GROUP,
                D,
                BLOCK_D,
                0,
                scale,
                COMPUTE,
                FIXED and k_cache.dtype.element_ty.primitive_bitwidth == 8,
                FORMAT,
            )
            slopes = tl.zeros([BLOCK_M], tl.float32)
            if HAS_ALIBI:
                slopes = tl.load(alibi_slopes + heads)
            top = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            if HAS_SINKS:
                has_sink = (tile == stream) & (entry < num_reqs)
                if FORMAT is None:
                    top = tl.where(has_sink, tl.load(sinks + heads) * LOG2E, top)
                    total += tl.where(has_sink, 1.0, 0.0)
            table_row = block_table + request.to(tl.int64) * stride_table
            acc, top, total = attend(
                q, q_tail, own_scale, top, total, positions, slopes, starts, stops, first_pos, last_pos, first_stop,
                last_start, lo, hi, k_head, v_head, table_row, 0, parts, even,
                stride_kb, stride_kt, stride_vb, stride_vt, cap, left, right, chunk,
                True, BLOCK_SIZE, BLOCK_N, D, DV, BLOCK_D, BLOCK_DV,
                HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_SPANS, HAS_CAP, HAS_ALIBI, ALIKE, PAIRS, PTX, SUMS, ONE, FIXED, FORMAT,
            )  # fmt: skip
            if HAS_SINKS and FORMAT is not None:
                own_sinks = tl.where(has_sink, tl.load(sinks + heads) * LOG2E, float("-inf"))
                acc, _, top, total = add_sinks(acc, acc, top, total, own_sinks)

            mask = inside[:, None] & (dims < DV)[None, :]
            if is_whole:
                if FIXED:
                    whole_total = in_one_order(total)
                else:
                    whole_total = total
                out, out_lse = finish(acc, top, whole_total)
                places = own.to(tl.int64)
                out_rows = (places * stride_ot + heads * stride_oh)[:, None]
                result = (out * value_scale).to(output.dtype.element_ty)
                tl.store(output + out_rows + dims[None, :], result, mask=mask)
                if HAS_LSE:
                    tl.store(lse + places * stride_lse + heads, out_lse * LN2, mask=inside)
            elif FIXED:
                if begins:
                    store_part(partials, partial_lses, row, acc, top, total, inside, DV)
            else:
                out, out_lse = finish(acc, top, total)
                place = place_of(entry, block, share, begins, max_blocks, shared)
                here = (place * kv_heads + kv_head).to(tl.int64) * BLOCK_M + lanes
                tl.store(partials + here[:, None] * DV + dims[None, :], out, mask=mask)
                tl.store(partial_lses + here, out_lse, mask=inside)
            tile = stop
        entry += tl.where(tile >= entry_end, 1, 0)
