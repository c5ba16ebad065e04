"""Merging partial results: a tile of (token, head) rows per program, over all partials."""

from __future__ import annotations

import triton
import triton.language as tl


# The number of rows differs between steps, and must not compile another kernel.
@triton.jit(do_not_specialize=["num_rows"])
def merge_kernel(
    outputs,
    lses,
    output,
    output_lse,
    num_rows,
    strides,
    target_strides,
    COUNT: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """COUNT partials as one; `outputs` and `lses` are tuples of pointers.

    `strides` has five for each partial, and `target_strides` five for the result: of the output by
    token, head and dimension, and of the LSE by token and head.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    tokens = (rows // HEADS).to(tl.int64)
    heads = (rows % HEADS).to(tl.int64)
    dims = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]

    top = tl.full([ROWS], float("-inf"), tl.float32)
    for i in tl.static_range(COUNT):
        here = lses[i] + tokens * strides[5 * i + 3] + heads * strides[5 * i + 4]
        top = tl.maximum(top, tl.load(here, mask=inside, other=float("-inf")).to(tl.float32))
    # In rows without any key a finite pivot keeps -inf - pivot from becoming NaN.
    pivot = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([ROWS], tl.float32)
    for i in tl.static_range(COUNT):
        here = lses[i] + tokens * strides[5 * i + 3] + heads * strides[5 * i + 4]
        total += tl.exp(tl.load(here, mask=inside, other=float("-inf")).to(tl.float32) - pivot)
    divisor = tl.where(total == 0.0, 1.0, total)
    merged = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for i in tl.static_range(COUNT):
        here = lses[i] + tokens * strides[5 * i + 3] + heads * strides[5 * i + 4]
        weight = tl.exp(tl.load(here, mask=inside, other=float("-inf")).to(tl.float32) - pivot) / divisor
        place = (tokens * strides[5 * i] + heads * strides[5 * i + 1])[:, None] + dims * strides[5 * i + 2]
        # Rows with weight 0 are not read, because they may be NaN.
        part = tl.load(outputs[i] + place, mask=(weight > 0.0)[:, None] & (dims < D), other=0.0)
        merged += part.to(tl.float32) * weight[:, None]
    merged_lse = tl.where(total == 0.0, float("-inf"), pivot + tl.log(divisor))

    # The result may overwrite a partial: all warps must have read its LSEs and outputs first.
    tl.debug_barrier()
    place = (tokens * target_strides[0] + heads * target_strides[1])[:, None] + dims * target_strides[2]
    tl.store(output + place, merged.to(output.dtype.element_ty), mask=inside[:, None] & (dims < D))
    here = output_lse + tokens * target_strides[3] + heads * target_strides[4]
    tl.store(here, merged_lse.to(output_lse.dtype.element_ty), mask=inside)


@triton.jit
def merge_rows_kernel(
    outputs,
    lses,
    starts,
    entries,
    output,
    output_lse,
    part_token,
    part_head,
    lse_token,
    lse_head,
    out_token,
    out_head,
    out_lse_token,
    out_lse_head,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """ROWS heads of one token: its partial rows are `entries[starts[t] : starts[t + 1]]`."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = heads < HEADS
    dims = tl.arange(0, BLOCK_D)
    shown = inside[:, None] & (dims < D)[None, :]

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    merged = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for entry in range(tl.load(starts + token), tl.load(starts + token + 1)):
        row = tl.load(entries + entry).to(tl.int64)
        lse = tl.load(lses + row * lse_token + heads * lse_head, mask=inside, other=float("-inf"))
        higher = tl.maximum(top, lse)
        # In rows without any key a finite pivot keeps -inf - pivot from becoming NaN.
        pivot = tl.where(higher == float("-inf"), 0.0, higher)
        before, weight = tl.exp(top - pivot), tl.exp(lse - pivot)
        place = row * part_token + heads[:, None] * part_head + dims[None, :]
        # Rows with weight 0 are not read, because they may be NaN.
        part = tl.load(outputs + place, mask=shown & (weight > 0.0)[:, None], other=0.0).to(tl.float32)
        merged = merged * before[:, None] + part * weight[:, None]
        total = total * before + weight
        top = higher
    merged = merged / tl.where(total == 0.0, 1.0, total)[:, None]
    place = token * out_token + heads[:, None] * out_head + dims[None, :]
    tl.store(output + place, merged.to(output.dtype.element_ty), mask=shown)
    if HAS_LSE:
        lse = tl.where(total == 0.0, float("-inf"), top + tl.log(tl.where(total == 0.0, 1.0, total)))
        tl.store(output_lse + token * out_lse_token + heads * out_lse_head, lse, mask=inside)
