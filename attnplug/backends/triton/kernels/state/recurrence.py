"""The recurrence of all families of state layers: a program has a part of a request's state in registers."""

from __future__ import annotations

import triton
import triton.language as tl


# The addresses of a step's indices differ from step to step, and must not compile another kernel.
@triton.jit(do_not_specialize_on_alignment=["starts", "pages", "slots"])
def recurrence_kernel(
    query,
    key,
    value,
    decay,
    beta,
    states,
    output,
    starts,
    pages,
    slots,
    scale,
    stride_qt,
    stride_qh,
    stride_qk,
    stride_kt,
    stride_kh,
    stride_kk,
    stride_vt,
    stride_vh,
    stride_vv,
    stride_gt,
    stride_gh,
    stride_gk,
    stride_bt,
    stride_bh,
    stride_page,
    stride_ot,
    stride_oh,
    stride_ov,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
    PARTS: tl.constexpr,
    DELTA: tl.constexpr,
    BY_ROW: tl.constexpr,
    SINGLE: tl.constexpr,
):
    """Advance BLOCK columns of the states of one request by its tokens; PARTS programs have all columns of a request.

    The columns are those of one value head, or with PACKED those of all heads one after another. GROUP value heads share a
    key head. With SINGLE a request has one token at most. PAGE has the strides of heads, rows and columns in a page: constants,
    so that all loads of a thread have one address.
    """
    # Parts of one page are neighbours, so that programs which run together read whole rows of memory.
    request, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    # Strides of tokens and pages are multiplied in 64 bits, as are those of heads, which may be parts of larger tensors.
    begin, end = tl.load(starts + request).to(tl.int64), tl.load(starts + request + 1).to(tl.int64)
    # Before the branch, so that a program waits once for its indices.
    page = tl.load(pages + request).to(tl.int64)
    if begin >= end:
        return
    lines = tl.arange(0, BLOCK_K)
    rows = lines[:, None]
    # In one dimension where columns have one key head: a tile of one column has a layout that the state would be moved to.
    if PACKED:
        lines = rows
    columns = tl.arange(0, BLOCK)[None, :]
    if PACKED:
        columns += part * BLOCK
        is_live = columns < HEADS * V
        head, column = tl.minimum(columns // V, HEADS - 1), columns % V
        is_whole: tl.constexpr = K == BLOCK_K and (HEADS * V) % BLOCK == 0
    else:
        blocks: tl.constexpr = (V + BLOCK - 1) // BLOCK
        head, column = part // blocks, part % blocks * BLOCK + columns
        is_live = column < V
        is_whole: tl.constexpr = K == BLOCK_K and V % BLOCK == 0
    # The place of each argument in token 0.
    head, key_head = head.to(tl.int64), (head // GROUP).to(tl.int64)
    query += key_head * stride_qh + lines * stride_qk
    key += key_head * stride_kh + lines * stride_kk
    value += head * stride_vh + column * stride_vv
    output += head * stride_oh + column * stride_ov
    decay += head * stride_gh
    if BY_ROW:
        decay += lines * stride_gk
    beta += head * stride_bh
    states += head * PAGE[0] + (rows * PAGE[1] + column * PAGE[2])
    # A whole tile needs no mask; masks of others are not constant, so their loads have fewer bytes.
    inside = page >= 0
    if not is_whole:
        inside = inside & is_live & (rows < K)
    # Page -1 is masked, so nothing is read for it. Pages of large pools are past 2**31 elements.
    state = tl.load(states + page * stride_page, mask=inside, other=0.0).to(tl.float32)
    if SINGLE:
        _token(
            begin, state, query, key, value, decay, beta, states, output, slots, scale, lines, rows, is_live,
            stride_qt, stride_kt, stride_vt, stride_gt, stride_bt, stride_ot, stride_page,
            K, BLOCK_K, PACKED, is_whole, DELTA, BY_ROW,
        )  # fmt: skip
    else:
        for token in range(begin, end):
            state = _token(
                token, state, query, key, value, decay, beta, states, output, slots, scale, lines, rows, is_live,
                stride_qt, stride_kt, stride_vt, stride_gt, stride_bt, stride_ot, stride_page,
                K, BLOCK_K, PACKED, is_whole, DELTA, BY_ROW,
            )  # fmt: skip


@triton.jit
def _token(
    token,
    state,
    query,
    key,
    value,
    decay,
    beta,
    states,
    output,
    slots,
    scale,
    lines,
    rows,
    is_live,
    stride_qt,
    stride_kt,
    stride_vt,
    stride_gt,
    stride_bt,
    stride_ot,
    stride_page,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PACKED: tl.constexpr,
    is_whole: tl.constexpr,
    DELTA: tl.constexpr,
    BY_ROW: tl.constexpr,
):
    """The state after one token, whose output is written, and whose state is if it has a slot."""
    slot = tl.load(slots + token)
    q = _rows(query + token * stride_qt, lines, K, BLOCK_K, PACKED) * scale
    k = _rows(key + token * stride_kt, lines, K, BLOCK_K, PACKED)
    v = tl.load(value + token * stride_vt, mask=is_live, other=0.0).to(tl.float32)
    if BY_ROW:
        g = _rows(decay + token * stride_gt, lines, K, BLOCK_K, PACKED)
    else:
        g = tl.load(decay + token * stride_gt)
    state *= tl.exp(g)
    if DELTA:
        b = tl.load(beta + token * stride_bt).to(tl.float32)
        v = b * (v - tl.sum(k * state, axis=0)[None, :])
    state += k * v
    found = tl.sum(q * state, axis=0)[None, :]
    tl.store(output + token * stride_ot, found.to(output.dtype.element_ty), mask=is_live)
    if slot >= 0:
        stored = state.to(states.dtype.element_ty)
        if is_whole:
            tl.store(states + slot * stride_page, stored)
        else:
            tl.store(states + slot * stride_page, stored, mask=is_live & (rows < K))
    return state


@triton.jit
def _rows(places, lines, K: tl.constexpr, BLOCK_K: tl.constexpr, PACKED: tl.constexpr):
    """One number for each row, `[BLOCK_K, 1]`, or with PACKED for each row of each column; zeros past K, which add nothing."""
    if K == BLOCK_K:
        found = tl.load(places).to(tl.float32)
    else:
        found = tl.load(places, mask=lines < K, other=0.0).to(tl.float32)
    return found if PACKED else found[:, None]
