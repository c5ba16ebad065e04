"""Short convolutions: a program has some channels of a request, and runs its tokens a block at a time."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["starts", "pages", "slots"])
def convolution_kernel(
    inputs,
    weight,
    bias,
    states,
    output,
    starts,
    pages,
    slots,
    channels,
    stride_it,
    stride_ic,
    stride_wc,
    stride_ww,
    stride_bias,
    stride_page,
    stride_sc,
    stride_sw,
    stride_ot,
    stride_oc,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    """The outputs of BLOCK_C channels for all tokens of one request, and their last WIDTH - 1 inputs where slots say.

    BLOCK_T is at least WIDTH - 1, so that only the first block of tokens has inputs of the page that the request starts from.
    """
    blocks = tl.cdiv(channels, BLOCK_C)
    request = tl.program_id(0) // blocks
    begin, end = tl.load(starts + request), tl.load(starts + request + 1)
    page = tl.load(pages + request).to(tl.int64)
    channel = (tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    is_live = channel < channels
    inputs += channel * stride_ic
    states += channel * stride_sc
    for first in range(begin, end, BLOCK_T):
        tokens = first + tl.arange(0, BLOCK_T)[:, None]
        is_token = (tokens < end) & is_live
        total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
        if BIAS:
            total += tl.load(bias + channel * stride_bias, mask=is_live, other=0.0).to(tl.float32)
        for tap in tl.static_range(WIDTH):
            w = tl.load(weight + channel * stride_wc + tap * stride_ww, mask=is_live, other=0.0)
            found = _inputs(
                tokens + (tap + 1 - WIDTH), inputs, states, page, begin, end, is_live,
                stride_it, stride_page, stride_sw, WIDTH,
            )  # fmt: skip
            total += w.to(tl.float32) * found
        if SILU:
            total = total / (1.0 + tl.exp(-total))
        places = output + tokens.to(tl.int64) * stride_ot + channel * stride_oc
        tl.store(places, total.to(output.dtype.element_ty), mask=is_token)
        slot = tl.load(slots + tokens, mask=tokens < end, other=-1)
        if tl.max(tl.max(slot, axis=1), axis=0) >= 0:
            # All reads of the page come before it is written: threads may have read what another one writes.
            tl.debug_barrier()
            for place in tl.static_range(WIDTH - 1):
                # It reads places of the page behind this one alone, so no place is read after it was written.
                found = _inputs(
                    tokens + (place + 2 - WIDTH), inputs, states, page, begin, end, is_live,
                    stride_it, stride_page, stride_sw, WIDTH,
                )  # fmt: skip
                into = states + slot * stride_page + place * stride_sw
                tl.store(into, found.to(states.dtype.element_ty), mask=is_live & (slot >= 0))


@triton.jit
def _inputs(
    tokens,
    inputs,
    states,
    page,
    begin,
    end,
    is_live,
    stride_it,
    stride_page,
    stride_sw,
    WIDTH: tl.constexpr,
):
    """The inputs at these rows `[BLOCK_T, BLOCK_C]`; those before `begin` are in the page, or zeros."""
    is_old = tokens < begin
    places = states + page * stride_page + (tokens - begin + (WIDTH - 1)) * stride_sw
    old = tl.load(places, mask=is_old & is_live & (page >= 0), other=0.0).to(tl.float32)
    places = inputs + tokens.to(tl.int64) * stride_it
    new = tl.load(places, mask=(tokens >= begin) & (tokens < end) & is_live, other=0.0)
    return tl.where(is_old, old, new.to(tl.float32))
