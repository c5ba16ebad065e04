"""Tile sizes, warps and stages of the kernels, by what they are launched for."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, TypeVar

import torch
from triton.runtime import driver

from attnplug.ops.reach import Reach
from attnplug.ops.triton.launch import power_of_two

__all__ = [
    "DecodeLaunch",
    "Gpu",
    "PrefillLaunch",
    "decode_launch",
    "gpu_of",
    "limit_switches",
    "merging",
    "partial_sums",
    "prefill_launch",
    "tile_side",
]


def merging(rows: int, programs: int, gpu: Gpu) -> str:
    """How partial results of `rows` rows per request and KV head are merged; see decode_kernel.

    Few rows are merged by whoever finishes last, one by one. More go to a kernel of their own, where they
    are merged side by side; but where requests fill the GPU without splits, hardly any is there to merge.
    """
    if rows <= 4:
        return "by row"
    return "tile" if programs >= 2 * gpu.multiprocessors else "later"


class Gpu(NamedTuple):
    """What of a GPU decides how kernels are launched."""

    multiprocessors: int
    shared_memory: int
    """Bytes that a program may have."""


@functools.lru_cache
def gpu_of(device: torch.device) -> Gpu:
    """Of a GPU; of a CPU, where kernels are interpreted, something small."""
    if device.type != "cuda":
        return Gpu(4, 1 << 18)
    index = torch.cuda.current_device() if device.index is None else device.index
    active: Any = driver.active
    found = active.utils.get_device_properties(index)
    return Gpu(found["multiprocessor_count"], found["max_shared_mem"])


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeLaunch:
    """How decode is launched.

    Args:
        block_n: keys per tile.
        num_warps: warps of a program.
        num_stages: tiles in flight.
        waves: programs per multiprocessor that the keys are split for.
        min_keys: fewest keys of a split, a multiple of `block_n`.
        max_registers: of a thread, so that as many programs run at once as `waves` counts on; None is no limit.
    """

    block_n: int
    num_warps: int
    num_stages: int
    waves: int
    min_keys: int
    max_registers: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillLaunch:
    """How prefill is launched: `block_m` rows of queries, `block_n` keys per tile."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def limit_switches(reach: Reach) -> dict[str, bool]:
    """The kernels' switches for window and chunk: a limit that is off is not compiled in."""
    return {"HAS_LEFT": reach.left >= 0, "HAS_RIGHT": reach.right >= 0, "HAS_CHUNK": reach.chunk > 0}


def tile_side(size: int) -> int:
    """The least side of a tile that holds `size`: a power of two, for matrix products at least 16."""
    return max(power_of_two(size), 16)


def partial_sums(block_n: int, block_m: int, num_warps: int) -> int:
    """Partial sums of weights that a row keeps, so that its sum is taken without asking other threads.

    A row's weights lie in four threads of as many warps as stand side by side, two in each.
    """
    return min(8 * max(num_warps * 16 // block_m, 1), block_n)


def decode_launch(head_size: int, itemsize: int, rows: int, programs: int, gpu: Gpu) -> DecodeLaunch:
    """For heads of `head_size` (the larger of K and V), stored in elements of `itemsize` bytes.

    Args:
        head_size: elements of a head.
        itemsize: bytes of a stored element.
        rows: queries of the longest request times heads of a group.
        programs: those that there are without splitting: requests, KV heads and blocks of rows.
        gpu: where.
    """
    table = _DECODE_8_BIT if itemsize == 1 else _DECODE
    few, few_wide, many = table[_wide(head_size, max(itemsize, 2))]
    launch = many if programs >= 2 * gpu.multiprocessors else few if rows <= 4 else few_wide
    return _fitting(launch, min(tile_side(rows), 64), tile_side(head_size) * itemsize, gpu)


@functools.cache
def prefill_launch(head_size: int, itemsize: int, rows: int, gpu: Gpu) -> PrefillLaunch:
    """For tiles of at most `rows` rows: queries of the longest request times heads of a group."""
    wide = _wide(head_size, itemsize)
    if rows > 64 or wide > 512:
        launch = _PREFILL[wide]
        launch = dataclasses.replace(launch, block_m=min(launch.block_m, tile_side(rows)))
    else:
        launch = PrefillLaunch(tile_side(rows), 64 if wide <= 256 else 32, 4, 2)
    return _fitting(launch, launch.block_m, tile_side(head_size) * itemsize, gpu)


_Launch = TypeVar("_Launch", DecodeLaunch, PrefillLaunch)


def _fitting(launch: _Launch, block_m: int, width: int, gpu: Gpu) -> _Launch:
    """With smaller tiles, and fewer in flight, until queries, keys and values of `width` bytes fit the GPU."""
    while (block_m + 2 * launch.block_n * launch.num_stages) * width > gpu.shared_memory:
        if launch.block_n > 32 or (launch.num_stages < 3 and launch.block_n > 16):
            launch = dataclasses.replace(launch, block_n=launch.block_n // 2)
        elif launch.num_stages > 1:
            launch = dataclasses.replace(launch, num_stages=launch.num_stages - 1)
        else:
            break
    return launch


def _wide(head_size: int, itemsize: int) -> int:
    """Bytes of a head in a tile, as the tables below have them."""
    return min(max(tile_side(head_size) * itemsize, 128), 1024)


# Measured on an H200 by benchmarks/tune_triton.py, and fitted to other GPUs: 128 bytes are heads of 64 in bfloat16, 256 of 128, 512 of
# 256; float32 heads of 256 are guarded against running out of shared memory. Of decodes: where there are few
# programs, with at most 4 rows and with more; where there are many.
_FLOAT32 = (DecodeLaunch(32, 4, 2, 2, 256),) * 3
_DECODE = {
    128: (
        DecodeLaunch(64, 4, 3, 2, 128, 168),
        DecodeLaunch(64, 4, 3, 2, 128, 168),
        DecodeLaunch(64, 4, 3, 1, 128, 128),
    ),
    256: (
        DecodeLaunch(128, 4, 3, 1, 128),
        DecodeLaunch(64, 4, 3, 2, 128, 255),
        DecodeLaunch(64, 4, 2, 1, 128, 128),
    ),
    512: (DecodeLaunch(64, 4, 3, 1, 128), DecodeLaunch(64, 4, 3, 1, 128), DecodeLaunch(64, 4, 2, 1, 128)),
    1024: _FLOAT32,
}
_FEW_8_BIT = DecodeLaunch(64, 4, 3, 2, 128, 128)
_DECODE_8_BIT = {
    128: (_FEW_8_BIT, _FEW_8_BIT, DecodeLaunch(128, 4, 3, 1, 128, 255)),
    256: (_FEW_8_BIT, _FEW_8_BIT, DecodeLaunch(128, 4, 3, 1, 128, 255)),
    512: (DecodeLaunch(64, 4, 3, 1, 128), DecodeLaunch(64, 4, 3, 1, 128), DecodeLaunch(64, 4, 2, 1, 128)),
    1024: _FLOAT32,
}
_PREFILL = {
    128: PrefillLaunch(128, 64, 8, 3),
    256: PrefillLaunch(128, 64, 8, 3),
    512: PrefillLaunch(128, 32, 8, 3),
    1024: PrefillLaunch(32, 16, 4, 1),
}
