"""Tile sizes, warps and stages of the kernel that attends equal shares of keys."""

from __future__ import annotations

import functools
from typing import NamedTuple

from attnplug.backends.triton.launch import Gpu
from attnplug.backends.triton.layout import head_bytes, tile_memory, tile_side


class ShareLaunch(NamedTuple):
    """Launch parameters of equal shares, of pages and of latents.

    Args:
        block_m: rows of a stream: queries times heads of a group.
        block_n: keys per tile.
        num_warps: warps of a program.
        num_stages: tiles in flight.
        waves: programs per multiprocessor; `share_launch` gives no more than run at once.
        least: fewest tiles of a share.
        ahead: tiles that a program could read while it begins a stream.
        max_registers: limit per thread, so that `waves` programs fit at once; None without limit.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    waves: int
    least: int
    ahead: int = 0
    max_registers: int | None = None


# Each layer asks in each step.
@functools.cache
def share_launch(head_size: int, itemsize: int, rows: int, gpu: Gpu, tile: int | None = None) -> ShareLaunch:
    """The launch for requests of at most `rows` rows.

    Args:
        head_size: elements of a head, the larger of K and V.
        itemsize: bytes of an element, as it is stored; 4 if it is computed in float32.
        rows: queries of the longest request times heads of a group.
        gpu: the device.
        tile: keys per tile, if the layer needs so many; see fixed_tile.
    """
    # It depends on no number of requests, so a warm-up with one request compiles for all.
    if itemsize == 4:
        # Products in float32 have no tensor cores: with more rows, all of a tile would be in registers.
        launch = _SHARES_FLOAT32[(head_size > 128) + (head_size > 256)]
    else:
        launches = (_LAUNCHES_8_BIT if itemsize == 1 else _LAUNCHES)[head_bytes(head_size, 2)]
        launch = launches[min(tile_side(rows), 128)]
    if tile is not None:
        if launch.block_m > 32 and itemsize < 4:
            # More rows are products that run while others begin, which the end of each split would wait for.
            launch = _FIXED_32_ROWS
        keys = launch.block_n
        launch = launch._replace(
            block_n=tile, least=-(-launch.least * keys // tile), ahead=-(-launch.ahead * keys // tile)
        )
    width = tile_side(head_size) * itemsize
    while (
        launch.waves * tile_memory(launch.block_m, launch.block_n, launch.num_stages, width)
        > gpu.shared_memory
    ):
        if launch.num_stages > 2:
            launch = launch._replace(num_stages=launch.num_stages - 1)
        elif launch.waves > 1:
            launch = launch._replace(waves=1, max_registers=None)
        elif launch.block_n > 16 and tile is None:
            launch = launch._replace(block_n=launch.block_n // 2)
        elif launch.num_stages > 1:
            launch = launch._replace(num_stages=1)
        elif launch.block_m > 16 and tile is not None:
            launch = launch._replace(block_m=launch.block_m // 2)
        else:
            break
    return launch


# By what an H200 measured for 16 rows; for more, by what Triton 3.6 compiles: nothing spills within the loop over keys,
# and `waves` programs fit at once. Keys are bytes of a head in the tables, then rows of a tile.
_LAUNCHES = {
    128: {
        16: ShareLaunch(16, 64, 4, 3, 3, 4, 3, 168),
        32: ShareLaunch(64, 64, 4, 3, 2, 2, 2),
        64: ShareLaunch(64, 64, 4, 3, 2, 2, 2),
        128: ShareLaunch(128, 64, 8, 3, 1, 2, 1),
    },
    256: {
        16: ShareLaunch(16, 64, 4, 3, 2, 1, 3),
        32: ShareLaunch(64, 32, 4, 3, 2, 2, 4),
        64: ShareLaunch(64, 32, 4, 3, 2, 2, 4),
        128: ShareLaunch(128, 64, 8, 3, 1, 2, 1),
    },
    512: {
        16: ShareLaunch(16, 32, 4, 3, 2, 4, 3),
        32: ShareLaunch(32, 64, 8, 3, 1, 2, 2),
        64: ShareLaunch(64, 32, 8, 3, 1, 4, 2),
        128: ShareLaunch(128, 32, 8, 2, 1, 4, 2),
    },
    1024: {
        16: ShareLaunch(16, 32, 8, 3, 1, 2, 2),
        32: ShareLaunch(32, 32, 8, 2, 1, 2, 2),
        64: ShareLaunch(64, 32, 8, 2, 1, 2, 2),
        128: ShareLaunch(64, 32, 8, 2, 1, 2, 2),
    },
}
_8_BIT = ShareLaunch(16, 64, 4, 3, 4, 4, 4, 128)
_LAUNCHES_8_BIT = {**_LAUNCHES, 128: _LAUNCHES[128] | {16: _8_BIT}, 256: _LAUNCHES[256] | {16: _8_BIT}}
_FIXED_32_ROWS = ShareLaunch(32, 64, 4, 3, 2, 2, 4)
_SHARES_FLOAT32 = (
    ShareLaunch(16, 32, 4, 2, 2, 4),
    ShareLaunch(16, 16, 4, 2, 1, 8),
    ShareLaunch(16, 16, 8, 2, 1, 8),
)
"""For heads of up to 128 elements, of up to 256, and of more."""
