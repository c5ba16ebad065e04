"""Attention of rows over a few slots each: all heads of some KV heads of one row per program."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["starts", "slots", "sinks"])
def paths_kernel(
    query,
    k_cache,
    v_cache,
    starts,
    slots,
    sinks,
    output,
    output_lse,
    stride_qt,
    stride_qh,
    stride_ot,
    stride_oh,
    stride_lse,
    scale,
    key_scale,
    value_scale,
    cap,
    K_PAGES: tl.constexpr,
    V_PAGES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    HEADS: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Row t attends the slots `slots[starts[t] : starts[t + 1]]`, at least one.

    K_PAGES and V_PAGES are the strides of a cache by block, token, head and dimension. A program has HEADS KV heads; MEMBERS,
    BLOCK_D and BLOCK_DV are powers of two for their group, D and DV. The scales of keys and values are numbers, or pointers to
    one for each KV head.
    """
    row = tl.program_id(0).to(tl.int64)
    kv_heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    members = tl.arange(0, MEMBERS)
    heads = kv_heads[:, None] * GROUP + members[None, :]
    known = (kv_heads[:, None] < KV_HEADS) & (members[None, :] < GROUP)
    dims, dims_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    is_k = (kv_heads[:, None] < KV_HEADS) & (dims[None, :] < D)
    is_v = (kv_heads[:, None] < KV_HEADS) & (dims_v[None, :] < DV)
    at = query + row * stride_qt + heads[:, :, None].to(tl.int64) * stride_qh + dims[None, None, :]
    q = tl.load(at, mask=known[:, :, None] & (dims[None, None, :] < D), other=0.0).to(tl.float32) * scale
    # The interpreter passes numbers as those of Python, which have no dtype.
    if isinstance(key_scale, tl.tensor) and key_scale.dtype.is_ptr():
        q *= tl.load(key_scale + kv_heads, mask=kv_heads < KV_HEADS, other=0.0)[:, None, None]

    top = tl.full([HEADS, MEMBERS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS, MEMBERS], tl.float32)
    if HAS_SINKS:
        top = tl.load(sinks + heads, mask=known, other=0.0).to(tl.float32)
        total += 1.0
    result = tl.zeros([HEADS, MEMBERS, BLOCK_DV], tl.float32)
    for place in range(tl.load(starts + row), tl.load(starts + row + 1)):
        slot = tl.load(slots + place).to(tl.int64)
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        from_k = block * K_PAGES[0] + offset * K_PAGES[1] + kv_heads[:, None].to(tl.int64) * K_PAGES[2]
        from_v = block * V_PAGES[0] + offset * V_PAGES[1] + kv_heads[:, None].to(tl.int64) * V_PAGES[2]
        k = tl.load(k_cache + from_k + dims[None, :] * K_PAGES[3], mask=is_k, other=0.0).to(tl.float32)
        v = tl.load(v_cache + from_v + dims_v[None, :] * V_PAGES[3], mask=is_v, other=0.0).to(tl.float32)
        logit = tl.sum(q * k[:, None, :], 2)
        if HAS_CAP:
            fade = tl.exp(tl.abs(logit) * (-2.0 / cap))
            capped = cap * (1.0 - fade) / (1.0 + fade)
            logit = tl.where(logit < 0, -capped, capped)
        higher = tl.maximum(top, logit)
        before, weight = tl.exp(top - higher), tl.exp(logit - higher)
        result = result * before[:, :, None] + weight[:, :, None] * v[:, None, :]
        total = total * before + weight
        top = higher
    if isinstance(value_scale, tl.tensor) and value_scale.dtype.is_ptr():
        value_scale = tl.load(value_scale + kv_heads, mask=kv_heads < KV_HEADS, other=0.0)[:, None]
    result = result * (value_scale / total)[:, :, None]
    to = row * stride_ot + heads[:, :, None].to(tl.int64) * stride_oh + dims_v[None, None, :]
    shown = known[:, :, None] & (dims_v[None, None, :] < DV)
    tl.store(output + to, result.to(output.dtype.element_ty), mask=shown)
    tl.store(output_lse + row * stride_lse + heads, top + tl.log(total), mask=known)
