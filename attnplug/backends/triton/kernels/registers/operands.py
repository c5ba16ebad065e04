"""The operands of the register loop: places of words in pages, and queries in the order in which words are opened.

A tile of keys has BLOCK_N / WARPS tokens for each warp. A product sums over its columns in any order, so a thread takes
those that are neighbours in its row: one load gives it all the elements that its lanes of the operand need. The queries'
elements, and the rows of the result, have the same order.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def key_offsets(L: gl.constexpr, WARPS: gl.constexpr, ROW: gl.constexpr, ITEMS: gl.constexpr):
    """From the first token of a warp to each item of its first 8 keys, `[1, WARPS, 8, 4, ITEMS]`; tokens are ROW items apart.

    Those of a thread's next keys are constants behind them, so that one address serves all its loads.
    """
    A: gl.constexpr = gl.AutoLayout()
    none, warp, group = gl.arange(0, 1, A), gl.arange(0, WARPS, A), gl.arange(0, 8, A)
    thread, item = gl.arange(0, 4, A), gl.arange(0, ITEMS, A)
    token = none[:, None, None, None, None] + group[None, None, :, None, None]
    inner = thread[None, None, None, :, None] * ITEMS + item[None, None, None, None, :]
    return gl.set_auto_layout(token * ROW + inner + warp[None, :, None, None, None] * 0, L)


@gluon.jit
def value_offsets(
    L: gl.constexpr,
    WARPS: gl.constexpr,
    ROW: gl.constexpr,
    ITEMS: gl.constexpr,
    THREADS: gl.constexpr,
):
    """The same of values `[1, 1, WARPS, 8, 4, ITEMS]`, for the even one of two tokens; THREADS share an item."""
    A: gl.constexpr = gl.AutoLayout()
    none, warp = gl.arange(0, 1, A), gl.arange(0, WARPS, A)
    group, thread, item = gl.arange(0, 8, A), gl.arange(0, 4, A), gl.arange(0, ITEMS, A)
    token = none[:, None, None, None, None, None] + thread[None, None, None, None, :, None] * 2
    inner = group[None, None, None, :, None, None] // THREADS * ITEMS + item[None, None, None, None, None, :]
    return gl.set_auto_layout(token * ROW + inner + warp[None, None, :, None, None, None] * 0, L)


@gluon.jit
def even_tokens(L: gl.constexpr, T: gl.constexpr, WARPS: gl.constexpr):
    """The token in a tile of each word of values, the even one of two."""
    A: gl.constexpr = gl.AutoLayout()
    tile, half, warp = gl.arange(0, T // 16, A), gl.arange(0, 2, A), gl.arange(0, WARPS, A)
    thread = gl.arange(0, 4, A)
    token = (
        warp[None, None, :, None, None, None] * T
        + tile[:, None, None, None, None, None] * 16
        + half[None, :, None, None, None, None] * 8
        + thread[None, None, None, None, :, None] * 2
    )
    return gl.set_auto_layout(token, L)


@gluon.jit
def load_query(
    query,
    first,
    first_row,
    num_rows,
    kv_head,
    stride_qt,
    stride_qh,
    SHIFT: gl.constexpr,
    L: gl.constexpr,
    GROUP: gl.constexpr,
    N: gl.constexpr,
    W: gl.constexpr,
    WARPS: gl.constexpr,
    STEP: gl.constexpr,
    EVEN_FIRST: gl.constexpr,
):
    """Queries `[WARPS, W, N]`, alike for all warps: element `byte * STEP + SHIFT` of each byte of W in a stored row.

    Column c of the product is the byte that open_keys gives its lane; with EVEN_FIRST those of a word are 0, 2, 1, 3.
    """
    A: gl.constexpr = gl.AutoLayout()
    row, column, warp = gl.arange(0, N, A), gl.arange(0, W, A), gl.arange(0, WARPS, A)
    high, low = (column >> 3) & 1, column & 1
    if EVEN_FIRST:
        in_word = low * 2 + high
    else:
        in_word = high * 2 + low
    byte = ((column >> 1) & 3) * (W // 4) + (column >> 4) * 4 + in_word
    row = first_row + row
    token = first + gl.minimum(row, num_rows - 1) // GROUP
    head = kv_head * GROUP + row % GROUP
    start = token.to(gl.int64) * stride_qt + head.to(gl.int64) * stride_qh
    offset = start[None, None, :] + (byte * STEP + SHIFT)[None, :, None] + (warp * 0)[:, None, None]
    there = row[None, None, :] + (byte * 0)[None, :, None] + (warp * 0)[:, None, None]
    mask = gl.set_auto_layout(there, L) < num_rows
    return gl.load(query + gl.set_auto_layout(offset, L), mask=mask, other=0.0)


@gluon.jit
def keys_operand(a, b, c, d, OPERAND: gl.constexpr, T: gl.constexpr, W: gl.constexpr, WARPS: gl.constexpr):
    """The four halves of each word as the left operand `[WARPS, T, W]`."""
    x = gl.join(gl.join(a, b), gl.join(c, d))
    return gl.convert_layout(x.permute([1, 0, 2, 4, 6, 3, 5]).reshape([WARPS, T, W]), OPERAND)


@gluon.jit
def values_operand(
    a, b, c, d, e, f, g, h, OPERAND: gl.constexpr, T: gl.constexpr, W: gl.constexpr, WARPS: gl.constexpr
):
    """Pairs of tokens of four bytes as the left operand `[WARPS, W, T]`; row `8 * i + j` is byte `j * W / 8 + i`."""
    x = gl.join(gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h)))
    return gl.convert_layout(x.permute([2, 5, 8, 7, 3, 0, 1, 4, 6]).reshape([WARPS, W, T]), OPERAND)
