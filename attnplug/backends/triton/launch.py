"""Tile sizes, warps and stages of prefill, and the properties of GPUs that decide launches."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from triton.runtime import driver

from attnplug.backends.triton.layout import (
    FEW_KEYS,
    SHORT_WINDOW,
    WIDE_COLUMNS,
    WIDEST_WHOLE,
    head_tiles,
    tile_memory,
)
from attnplug.backends.triton.layout import tile_parts as tile_parts
from attnplug.backends.triton.layout import tile_side as tile_side
from attnplug.ops.reach import Reach

if TYPE_CHECKING:
    from attnplug.backends.triton.share_launch import ShareLaunch


class Gpu(NamedTuple):
    """The properties of a GPU that decide launches."""

    multiprocessors: int
    shared_memory: int
    """Bytes that a program may use."""
    has_tensor_memory: bool = False
    """Whether products of 64 rows run asynchronously: compute capability 10.x and 11.x."""
    has_warp_groups: bool = False
    """Whether four warps multiply together: compute capability 9.x."""

    @property
    def has_async_products(self) -> bool:
        """Whether products of 64 rows read their operands from shared memory, and take no registers for them."""
        return self.has_tensor_memory or self.has_warp_groups


@functools.lru_cache
def gpu_of(device: torch.device) -> Gpu:
    """The properties of a device; for a CPU, where kernels are interpreted, small ones."""
    if device.type != "cuda":
        return Gpu(4, 1 << 18)
    index = torch.cuda.current_device() if device.index is None else device.index
    active: Any = driver.active
    found = active.utils.get_device_properties(index)
    nvidia = torch.version.hip is None
    major = torch.cuda.get_device_capability(device)[0] if nvidia else 0
    return Gpu(found["multiprocessor_count"], found["max_shared_mem"], major in (10, 11), major == 9)


def runs_gluon(device: torch.device) -> bool:
    """Whether the kernels in Gluon run on a device: of compute capability 9.0, with Gluon as it is since Triton 3.6."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0) and has_gluon()


@functools.cache
def has_gluon() -> bool:
    """Whether Gluon is there, as it is since Triton 3.6."""
    try:
        from triton.experimental.gluon import language
    except ImportError:
        return False
    # Before 3.6, this function was there with other parameters.
    specialize = getattr(language, "warp_specialize", None)
    return specialize is not None and "functions_and_args" in inspect.signature(specialize).parameters


class Specialized(NamedTuple):
    """Launch parameters of the prefill kernel for Hopper.

    Args:
        block_n: keys per tile.
        num_stages: tiles of keys, and of values, in flight.
        groups: the groups of warps that attend 64 rows each: 2 or 3.
        pace: the time of a tile beside that of a tile of the launch for fewer rows.
        by_blocks: whether whole tiles of keys that come with the call are copied as blocks of a matrix.
        in_turn: whether the groups begin their products one after the other.
        held: whether each group holds its queries in registers.
    """

    block_n: int
    num_stages: int
    groups: int
    pace: float = 1.0
    by_blocks: bool = True
    in_turn: bool = False
    held: bool = False

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return 64 * self.groups


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillLaunch:
    """Launch parameters of prefill.

    Args:
        block_m: rows of queries per tile.
        block_n: keys per tile.
        num_warps: warps of a program.
        num_stages: tiles in flight.
        specialized: the launch of the kernel with specialised warps, which then serves where it can; None: it does not,
            because it is slower.
        fewer_rows: the same for steps whose tiles would leave multiprocessors without one; None for the same launch.
        columns: most columns of the values of a program; None for all that a head has.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    specialized: Specialized | None = None
    fewer_rows: Specialized | None = None
    columns: int | None = None


def limit_switches(reach: Reach) -> dict[str, bool]:
    """The kernels' switches for window, chunk and spans: one that is off is not compiled in."""
    limits = {"HAS_LEFT": reach.left >= 0, "HAS_RIGHT": reach.right >= 0, "HAS_CHUNK": reach.chunk > 0}
    return {**limits, "HAS_SPANS": reach.spans}


def partial_sums(block_n: int, block_m: int, num_warps: int, fixed: bool = False) -> int:
    """Partial sums of weights per row, so that the loop adds them without exchange between threads.

    With `fixed` each has two weights of a tile, which have one sum in either order.
    """
    if fixed:
        return block_n // 2
    # A row's weights are in four threads of each of its warps, two per thread.
    return min(8 * max(num_warps * 16 // block_m, 1), block_n)


def is_one_range(block_m: int, block_n: int, left: int, pairs: bool) -> bool:
    """Whether decodes read all keys in one masked range; else there are three, and only the edges are masked.

    Args:
        block_m: rows of a tile.
        block_n: keys of a tile.
        left: keys that a query sees before its own; negative without limit.
        pairs: whether values are read as pairs of 8 bits.
    """
    # Each range waits for its own first loads, and three need more registers: with
    # 16 rows an H200 took up to 12 % longer. With 8-bit pairs of values, or with
    # more rows, the masks take longer than that, unless a window has few tiles.
    return (block_m <= 16 and not pairs) or (block_m <= 64 and 0 <= left < 4 * block_n)


def most_rows(head_size: int, stored: int, gpu: Gpu, fixed: bool = False) -> int:
    """Most rows of a tile of decodes: sums of wide heads leave registers for few.

    Args:
        head_size: elements of a head, the larger of K and V.
        stored: bytes of an element of a key as it is stored; 4 if it is computed in float32.
        gpu: the device.
        fixed: whether a program holds the sums of earlier splits beside those of a split.
    """
    if head_size <= WIDEST_WHOLE:
        return 128
    if fixed or stored == 4:
        return 16
    return 64 if stored == 2 and gpu.has_async_products else 32


@functools.cache
def prefill_launch(
    head_size: int,
    itemsize: int,
    rows: int,
    gpu: Gpu,
    most_keys: int | None = None,
    stored: int = 2,
    tile: int | None = None,
    group: int = 1,
    left: int = -1,
    plain: bool = True,
) -> PrefillLaunch:
    """The launch for heads of `head_size` (the larger of K and V), computed in elements of `itemsize` bytes.

    Args:
        head_size: elements of a head.
        itemsize: bytes of an element.
        rows: queries of the longest request times heads of a group; tiles have no more.
        gpu: the device.
        most_keys: tokens of the longest request; None if the host does not know.
        stored: bytes of an element of a key as it is read.
        tile: keys per tile, if the layer needs so many; see fixed_tile.
        group: heads of a group, all of which are in one tile.
        left: keys that a query sees before its own; negative without limit.
        plain: whether keys have 16 bits, without soft caps and chunks: others need more registers, or mask more tiles.
    """
    wide = head_tiles(head_size, head_size, stored).columns * itemsize
    if wide > 512 and itemsize < 4:
        launch = _wide_prefill(rows, stored, gpu, group)
    elif rows > 64 or wide > 512:
        # Products in float32 have no tensor cores, and are tuned for whole tiles.
        least = tile_side(head_size) * itemsize if itemsize == 4 else wide
        launch = next(launch for most, launch in _PREFILL.items() if least <= most)
        if most_keys is not None and most_keys <= _SHORT_PROMPT and wide <= 256:
            launch = SHORT_PROMPT_LAUNCH
        elif 0 <= left < SHORT_WINDOW and wide <= 256:
            launch = dataclasses.replace(launch, specialized=SHORT_PROMPT_LAUNCH.specialized, fewer_rows=None)
        elif wide <= 128 and left < 0 and plain and (most_keys is None or most_keys > FEW_KEYS):
            launch = _MANY_KEYS_LAUNCH
        launch = dataclasses.replace(launch, block_m=min(launch.block_m, tile_side(rows)))
    else:
        launch = PrefillLaunch(tile_side(rows), 64 if wide <= 256 else 32, 4, 2)
    wide_v = wide if launch.columns is None else launch.columns * itemsize
    if tile is None:
        return _fitting(launch, wide, gpu, wide_v)
    # What is held of the splits before takes as many registers as the sums of a split.
    special = launch.specialized and Specialized(tile, 3 if wide <= 256 else 4, 2)
    block_m = min(launch.block_m, 128 if wide <= 256 else 64)
    warps = 8 if launch.columns is not None and gpu.has_async_products else launch.num_warps
    launch = dataclasses.replace(
        launch, block_m=block_m, block_n=tile, num_warps=warps, specialized=special, fewer_rows=None
    )
    while tile_memory(launch.block_m, tile, launch.num_stages, wide, wide_v) > gpu.shared_memory:
        if launch.num_stages > 1:
            launch = dataclasses.replace(launch, num_stages=launch.num_stages - 1)
        elif launch.block_m > 16:
            launch = dataclasses.replace(launch, block_m=launch.block_m // 2)
        else:
            break
    return launch


def _wide_prefill(rows: int, stored: int, gpu: Gpu, group: int) -> PrefillLaunch:
    """The launch for heads of more than 256 elements of 16 bits, whose values several programs share."""
    # Nothing spills within the loop over keys that all rows see, as Triton 3.7 compiles it; no GPU has measured it yet.
    if gpu.has_async_products:
        side = 128 if rows > 64 else 64 if rows > 16 else 16
        columns = 256 if stored == 2 else WIDE_COLUMNS
    else:
        side = min(tile_side(rows), max(64, tile_side(group)))
        columns = WIDE_COLUMNS
    return PrefillLaunch(side, 32, 8 if side == 128 else 4, 2, columns=columns)


def opened_launch(launch: PrefillLaunch, gpu: Gpu) -> PrefillLaunch:
    """A launch of prefill for tiles of keys and values that are opened in registers: more warps, and fewer keys."""
    # On Hopper products read the opened tiles from shared memory; others need all of them in registers.
    keys = launch.block_n if gpu.has_warp_groups else min(launch.block_n, 32)
    warps = max(launch.num_warps, 8 if launch.block_m >= 64 else 4)
    return dataclasses.replace(launch, block_n=keys, num_warps=warps, specialized=None, fewer_rows=None)


def _fitting(launch: PrefillLaunch, width: int, gpu: Gpu, width_v: int) -> PrefillLaunch:
    """`launch` with smaller and fewer tiles, so that queries, keys and values fit the GPU: see tile_memory."""
    while tile_memory(launch.block_m, launch.block_n, launch.num_stages, width, width_v) > gpu.shared_memory:
        if launch.block_n > 32 or (launch.num_stages < 3 and launch.block_n > 16):
            launch = dataclasses.replace(launch, block_n=launch.block_n // 2)
        elif launch.num_stages > 1:
            launch = dataclasses.replace(launch, num_stages=launch.num_stages - 1)
        else:
            break
    return launch


# Measured on an H200 by benchmarks/tune_triton.py; `_fitting` adapts them to other GPUs.

# Prompts of few tiles wait for memory most of the time, so several small programs share a multiprocessor. 64 prompts of 128
# tokens took 115 us with 64 keys in two stages, 85 with 32 keys in one, and 72 with specialised warps. With these in two groups, 8
# of 500 took 60 us, 64 with three and 70 with tiles of 128 keys; 6 of 700 took 72, 76 and 82.
# Nor do blocks gain anything there: 16 of 300 with heads of 64 took 78 us, and 83 with blocks.
_SHORT_PROMPT = 512
SHORT_PROMPT_LAUNCH = PrefillLaunch(64, 32, 4, 1, Specialized(64, 3, 2, by_blocks=False))
# In short windows too, tiles of fewer rows see fewer keys that others do not: with one of 128, two groups took 294 us and three
# 316; with 1024, 857 and 752.
# Keys are the most bytes of a head: in bfloat16, heads of 64 have 128, of 80 have 160, of 96 have 192, of 192 have 384. The
# kernel with specialised warps took 772 to 709 us for pages of heads of 64 (4 x 4k), 1680 to 1296 for 160, 1760 to 1364 for
# 192, and for one prompt of 16k 4341 to 3622 for heads of 128, and 4579 to 3340 for 256. Three groups have registers for
# heads of up to 128 elements: with heads of 96 they took 960 to 930 us. A tile of two takes less time: 512 more tokens of 32k
# took 424 us and not 612 with heads of 128, and 3 prompts of 5000 tokens 1057 and not 1032. Groups in turn, with queries in
# registers, took 749 and not 802 us for the keys of 4 calls of 4k with heads of 80, 799 and not 834 with 96, and 1344 and not
# 1436 with 192; with 128 three groups have no registers for their queries.
_ORDERED = {"in_turn": True, "held": True}
_PREFILL = {
    128: PrefillLaunch(128, 64, 8, 3, Specialized(64, 4, 3, 1.38), Specialized(128, 3, 2)),
    192: PrefillLaunch(
        128, 64, 8, 3, Specialized(64, 4, 3, 1.2, **_ORDERED), Specialized(64, 4, 2, **_ORDERED)
    ),
    256: PrefillLaunch(128, 64, 8, 3, Specialized(64, 3, 3, 1.42), Specialized(128, 2, 2)),
    384: PrefillLaunch(128, 64, 8, 3, Specialized(64, 3, 2, **_ORDERED)),
    512: PrefillLaunch(128, 32, 8, 3, Specialized(64, 2, 2)),
    1024: PrefillLaunch(32, 16, 4, 1),
    2048: PrefillLaunch(16, 16, 8, 1),
}
# Tiles of 128 keys have half as many steps, and more keys that only some rows see. With heads of 64, 3 x 1500 more of 9k took
# 671 us and not 725, a prompt of 16k 2210 and not 2373, 3 of 5000 910 and not 919, but 4 of 4k 676 and not 650.
_MANY_KEYS_LAUNCH = PrefillLaunch(128, 64, 8, 3, Specialized(128, 3, 3, 1.31), Specialized(128, 3, 2))


def compile_options(launch: PrefillLaunch | ShareLaunch) -> dict[str, int]:
    """The compiler's options for a launch."""
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    limit: int | None = getattr(launch, "max_registers", None)
    return options if limit is None else options | {"maxnreg": limit}
