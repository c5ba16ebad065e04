"""Tile sizes, warps and stages of the decode over latents."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from attnplug.backends.triton.launch import Gpu, tile_side


class LatentLaunch(NamedTuple):
    """Launch parameters of the decode over latents.

    Args:
        block_m: rows of queries, tokens times heads, of a program.
        block_n: latents per tile.
        num_warps: warps of a program.
        num_stages: tiles in flight.
        waves: programs per multiprocessor.
        least: fewest tiles of a program.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    waves: int
    least: int


HOPPER = LatentLaunch(64, 64, 4, 2, 1, 1)
"""Of latent_decode_hopper_kernel, whose tiles of 64 rows need two groups of four warps, and a third that copies."""


@functools.cache
def can_serve_hopper(
    rank: int, rope: int, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether latent_decode_hopper_kernel serves latents of `rank` elements and a rope part on a device."""
    if (
        device.type != "cuda"
        or torch.cuda.get_device_capability(device) != (9, 0)
        or torch.version.hip is not None
    ):
        return False
    sizes = rank in (128, 256, 512) and rope in (0, 16, 32, 64)
    return sizes and dtype == cache_dtype and dtype.itemsize == 2 and hopper_kernel() is not None


@functools.cache
def hopper_kernel() -> Any:
    """The kernel in Gluon; None where this version of Triton has not what it needs."""
    try:
        from attnplug.backends.triton.kernels.latent_hopper import latent_decode_hopper_kernel
    except ImportError:
        return None
    return latent_decode_hopper_kernel


# Each layer asks in each step.
@functools.cache
def latent_launch(rows: int, size: int, itemsize: int, gpu: Gpu) -> LatentLaunch:
    """The launch for requests of at most `rows` rows over latents of `size` elements and a rope part.

    Args:
        rows: queries of the longest request times heads.
        size: elements of a latent without its rope part.
        itemsize: bytes of an element as it is computed.
        gpu: the device.
    """
    launch = LatentLaunch(16, 16, 4, 2, 1, 2) if itemsize > 2 else _LAUNCHES[min(tile_side(rows), 64)]
    width = tile_side(size) * itemsize
    # Queries and tiles need an eighth more for the rope part.
    while (launch.block_m + launch.block_n * launch.num_stages) * width * 9 // 8 > gpu.shared_memory:
        if launch.num_stages > 1:
            launch = launch._replace(num_stages=launch.num_stages - 1)
        elif launch.block_n > 16:
            launch = launch._replace(block_n=launch.block_n // 2)
        else:
            break
    return launch


# The fastest on an H200 by rows of a tile, see benchmarks/results/mla-h200.json.
_LAUNCHES = {
    16: LatentLaunch(16, 32, 4, 3, 2, 2),
    32: LatentLaunch(32, 64, 4, 2, 2, 2),
    64: LatentLaunch(64, 64, 8, 2, 1, 1),
}
