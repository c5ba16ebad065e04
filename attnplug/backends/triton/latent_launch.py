"""Tile sizes, warps and stages of the decode over latents."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from attnplug.backends.triton.launch import Gpu, gpu_of, runs_gluon
from attnplug.backends.triton.layout import head_tiles, tile_side


class LatentLaunch(NamedTuple):
    """Launch parameters of the decode over latents.

    Args:
        block_m: rows of queries, tokens times heads, of a program.
        block_n: latents per tile.
        num_warps: warps of a program.
        num_stages: tiles in flight.
        waves: programs per multiprocessor.
        least: fewest tiles of a program.
        max_registers: limit per thread, so that `waves` programs fit at once; None without limit.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    waves: int
    least: int
    max_registers: int | None = None


def hopper_launch(rows: int, itemsize: int, sides: Iterable[int]) -> LatentLaunch:
    """The launch of a kernel of hopper_kernels.

    Args:
        rows: queries of the longest request times heads.
        itemsize: bytes of a stored element.
        sides: rows of a tile, for which there are kernels.
    """
    side = min(each for each in sides if each >= min(rows, 64))
    # Tiles of 8 bits take half of the memory, unless they are converted there: room for two programs, or more tiles.
    if itemsize == 1 and side == 16:
        return LatentLaunch(side, 64, 4, 2, 2, 1, 128)
    return LatentLaunch(side, 64, 4, 4 if itemsize == 1 and side < 64 else 2, 1, 1)


@functools.cache
def hopper_kernels(
    rank: int, rope: int, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device
) -> Mapping[int, Any]:
    """The kernels for Hopper that serve such latents on a device, by rows of a tile; none elsewhere.

    They are written in Gluon, which a version of Triton may lack or change.
    """
    if not runs_gluon(device) or gpu_of(device).shared_memory < _SHARED_MEMORY:
        return {}
    if rank not in (128, 256, 512) or rope not in (0, 16, 32, 64) or dtype.itemsize != 2:
        return {}
    if cache_dtype not in (dtype, torch.float8_e4m3fn, torch.float8_e5m2):
        return {}
    # Elements of 8 bits are multiplied 128 at once, of one half.
    if cache_dtype.itemsize == 1 and rank < 256:
        return {}
    try:
        from attnplug.backends.triton.kernels.hopper.latent_narrow import latent_narrow_kernel
        from attnplug.backends.triton.kernels.hopper.latent_wide import latent_wide_kernel
    except ImportError:
        return {}
    kernels = {16: latent_narrow_kernel, 32: latent_narrow_kernel, 64: latent_wide_kernel}
    # The narrow kernel multiplies 32 elements of 8 bits at once, with queries as precise as bfloat16.
    is_narrow = cache_dtype.itemsize == 2 or (dtype == torch.bfloat16 and rope % 32 == 0)
    return kernels if is_narrow else {64: latent_wide_kernel}


_SHARED_MEMORY = 230_400
"""Bytes that 64 rows of queries, two tiles of latents, and weights take."""


def latent_tiles(size: int, rope: int, stored: int) -> tuple[int, int]:
    """The columns of the tiles of a latent without its rope part, and of the rope part.

    Args:
        size: elements of a latent without its rope part.
        rope: elements of the rope part; without any, nothing reads its tile.
        stored: bytes of a stored element.
    """
    if not rope:
        return tile_side(size), tile_side(1)
    (side, _), (rope_side, _) = head_tiles(size, rope, stored, whole=True)
    return side, rope_side


# Each layer asks in each step.
@functools.cache
def latent_launch(rows: int, size: int, rope: int, itemsize: int, gpu: Gpu, stored: int = 2) -> LatentLaunch:
    """The launch for requests of at most `rows` rows.

    Args:
        rows: queries of the longest request times heads.
        size: elements of a latent without its rope part.
        rope: elements of the rope part.
        itemsize: bytes of an element as it is computed.
        gpu: the device.
        stored: bytes of an element as it is stored.
    """
    launch = LatentLaunch(16, 16, 4, 2, 1, 2) if itemsize > 2 else _LAUNCHES[min(tile_side(rows), 64)]
    side, rope_side = latent_tiles(size, rope, stored)
    # Without a rope part, what Triton exchanges between warps takes as much.
    width = (side + max(rope_side, side // 8)) * itemsize
    while (launch.block_m + launch.block_n * _tiles_held(launch, gpu)) * width > gpu.shared_memory:
        if launch.num_stages > 1:
            launch = launch._replace(num_stages=launch.num_stages - 1)
        elif launch.block_n > 16:
            launch = launch._replace(block_n=launch.block_n // 2)
        elif launch.block_m > 16:
            launch = launch._replace(block_m=launch.block_m // 2)
        else:
            break
    return launch


def _tiles_held(launch: LatentLaunch, gpu: Gpu) -> int:
    """Tiles of latents in shared memory at the same time."""
    # Asynchronous products read a tile as keys and as values, and still do when the next one comes.
    is_late = gpu.has_tensor_memory and launch.block_m >= 64 and launch.num_stages > 1
    return launch.num_stages + is_late


# The fastest on an H200 by rows of a tile, see benchmarks/results/mla-h200.json.
_LAUNCHES = {
    16: LatentLaunch(16, 32, 4, 3, 2, 2),
    32: LatentLaunch(32, 64, 4, 2, 2, 2),
    64: LatentLaunch(64, 64, 8, 2, 1, 1),
}
