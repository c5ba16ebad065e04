"""Loads of the register loop: words of keys and values, and their scales, for the tokens that each warp has of a tile."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def warp_rows(
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
def load_keys(
    words,
    scales,
    offsets,
    scale_offsets,
    blocks,
    places,
    PAGES: gl.constexpr,
    L: gl.constexpr,
    T: gl.constexpr,
    SCALES: gl.constexpr,
):
    """Words of a tile's keys, and their scales, as each warp's block and place have them.

    SCALES is None without scales. Else it has the bytes from token to token, those of an item, and the layout of the scales of
    blocks, or None where a row has one scale.
    """
    rows = blocks * (PAGES[0] // 4) + places * (PAGES[1] // 4)
    found = gl.load(words + (_rows_of_keys(rows, L) + offsets) + _keys_after(L, T, PAGES[1] // 4))
    own = found
    if SCALES is not None:
        rows = blocks * (PAGES[0] // SCALES[1]) + places * (SCALES[0] // SCALES[1])
        if SCALES[2] is None:
            own = gl.load(scales + (rows[:, None] + scale_offsets))
        else:
            after = _keys_after(SCALES[2], T, SCALES[0] // SCALES[1])
            own = gl.load(scales + (_rows_of_keys(rows, SCALES[2]) + scale_offsets) + after)
    return found, own


@gluon.jit
def load_values(
    words,
    scales,
    offsets,
    scale_offsets,
    blocks,
    places,
    PAGES: gl.constexpr,
    L: gl.constexpr,
    T: gl.constexpr,
    SCALES: gl.constexpr,
):
    """The same of values: of even tokens, of odd ones, and the scales of both; a row's one scale comes for all tokens."""
    rows = blocks * (PAGES[0] // 4) + places * (PAGES[1] // 4)
    of_pair = words + (_rows_of_values(rows, L) + offsets) + _values_after(L, T, PAGES[1] // 4)
    even, odd = gl.load(of_pair), gl.load(of_pair + PAGES[1] // 4)
    own, own_odd = even, odd
    if SCALES is not None:
        rows = blocks * (PAGES[0] // SCALES[1]) + places * (SCALES[0] // SCALES[1])
        if SCALES[2] is None:
            own = gl.load(scales + (rows[:, None] + scale_offsets))
            own_odd = own
        else:
            after = _values_after(SCALES[2], T, SCALES[0] // SCALES[1])
            of_pair = scales + (_rows_of_values(rows, SCALES[2]) + scale_offsets) + after
            own, own_odd = gl.load(of_pair), gl.load(of_pair + SCALES[0] // SCALES[1])
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
def _keys_after(L: gl.constexpr, T: gl.constexpr, ROW: gl.constexpr):
    """From each thread's first key to its others, constants; tokens are ROW items apart."""
    TILE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, L))))
    return gl.arange(0, T // 8, layout=TILE)[:, None, None, None, None] * (8 * ROW)


@gluon.jit
def _values_after(L: gl.constexpr, T: gl.constexpr, ROW: gl.constexpr):
    """The same of values, each the even one of two tokens."""
    INNER: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, gl.SliceLayout(5, L))))
    tile = gl.arange(0, T // 16, layout=gl.SliceLayout(1, INNER))[:, None, None, None, None, None]
    half = gl.arange(0, 2, layout=gl.SliceLayout(0, INNER))[None, :, None, None, None, None]
    return (tile * 2 + half) * (8 * ROW)
