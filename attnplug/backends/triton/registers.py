"""When decodes over pages of 8 and 4 bits run in registers alone, and with which launch."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from attnplug.backends.impl import Pages
from attnplug.backends.triton.formats import format_values
from attnplug.backends.triton.launch import has_gluon
from attnplug.backends.triton.share_launch import ShareLaunch
from attnplug.core.spec import LayerSpec

_PAGES_OF = 16
"""Pages have a multiple of so many tokens, and rows one of so many bytes: a warp's tokens are in one page."""
_MOST_ROWS = 16
"""Rows of queries: with more of them, reading keys takes less time than the products."""


class _Tile(NamedTuple):
    """A launch.

    Args:
        tokens: of a warp in one tile.
        waves: programs per multiprocessor.
        max_registers: limit per thread; None without.
        warps: of a program.
        pinned: whether the next tile is loaded into the registers of this one as soon as they are read, and a fence keeps the
            assembler from moving these loads behind. Else it has registers of its own, and the assembler chooses.
    """

    tokens: int
    waves: int
    max_registers: int | None = None
    warps: int = 4
    pinned: bool = False


# Measured on an H200 by decodes of 8k keys. Keys are formats, head sizes and rows; the first tile is for pages of a multiple of 32
# tokens, the second for others. Nothing spills within the loop, as Triton 3.6 compiles it. Three waves of nvfp4 with 128 elements
# take 212 us for 64 x 8k and 118 for ragged requests, two take 200 and 126. Pinned int8 takes 267 us and not 270.
_BYTES_64 = _Tile(32, 3, 168), _Tile(16, 4, 128)
_WIDE = _Tile(16, 4, None, 2), _Tile(16, 4, None, 2)
_TILES: dict[tuple[str, int, int], tuple[_Tile, _Tile]] = {
    ("fp8_e4m3", 64, 8): _BYTES_64,
    ("fp8_e4m3", 128, 8): (_Tile(32, 2), _Tile(16, 4, 128)),
    ("fp8_e4m3", 256, 8): _WIDE,
    ("fp8_e5m2", 64, 8): _BYTES_64,
    ("fp8_e5m2", 128, 8): (_Tile(32, 2), _Tile(16, 3, 168)),
    ("fp8_e5m2", 256, 8): _WIDE,
    ("int8_token_head", 64, 8): _BYTES_64,
    ("int8_token_head", 128, 8): (_Tile(32, 2, pinned=True), _Tile(16, 3, 168)),
    ("int8_token_head", 256, 8): _WIDE,
    ("nvfp4", 64, 8): (_Tile(32, 3, 168, pinned=True), _Tile(16, 3, 168, pinned=True)),
    ("nvfp4", 128, 8): (_Tile(32, 3, 168, pinned=True), _Tile(16, 3, 168, pinned=True)),
    ("nvfp4", 256, 8): (_Tile(16, 4, None, 2, pinned=True), _Tile(16, 4, None, 2, pinned=True)),
    ("rotated4", 64, 8): (_Tile(32, 8, 128, 2), _Tile(16, 4, 128)),
    ("rotated4", 128, 8): (_Tile(32, 6, 168, 2), _Tile(16, 4, 128)),
    ("rotated4", 256, 8): _WIDE,
}
for _name in ("fp8_e4m3", "fp8_e5m2", "int8_token_head", "nvfp4", "rotated4"):
    _TILES[_name, 64, 16] = _Tile(16, 3, 168), _Tile(16, 3, 168)
    _TILES[_name, 128, 16] = _Tile(16, 2), _Tile(16, 2)


class RegisterLaunch(NamedTuple):
    """A launch of register_decode_kernel, and the arguments that it alone has."""

    launch: ShareLaunch
    values: dict[str, Any]


def row_tile(rows: int) -> int:
    """Columns of the products that hold so many rows of queries; 0 for too many."""
    return 0 if rows > _MOST_ROWS else 8 if rows <= 8 else _MOST_ROWS


def register_launch(spec: LayerSpec, pages: Pages, rows: int, device: torch.device) -> RegisterLaunch | None:
    """The launch of register_decode_kernel; None where share_decode_kernel decodes.

    Args:
        spec: the layer.
        pages: its cache.
        rows: queries of the longest request times heads of a group.
        device: of the cache.
    """
    name = spec.resolved_kv_cache_dtype
    tiles = _TILES.get((name, spec.head_size, row_tile(rows)))
    if tiles is None or not _serves(spec) or not runs_registers(device, name):
        return None
    values = format_values(spec, pages.k, pages.v)
    strides = [pages.k.stride()[:3], pages.v.stride()[:3]]
    if values:
        strides = [tuple(values[f"stride_{each}{axis}"] for axis in "bth") for each in "kv"]
    block_size = pages.k.shape[1]
    places = pages.k.data_ptr(), pages.v.data_ptr(), *strides[0]
    if strides[0] != strides[1] or block_size % _PAGES_OF or any(place % 16 for place in places):
        return None
    if values and not _has_whole_scales(values["FORMAT"], spec.head_size):
        return None
    tile = tiles[block_size % tiles[0].tokens != 0]
    warps = tile.warps
    launch = ShareLaunch(row_tile(rows), tile.tokens * warps, warps, 1, tile.waves, 4, 4, tile.max_registers)
    own = {
        "PAGES": tuple(strides[0]),
        "WARPS": warps,
        "PINNED": tile.pinned,
        "NAME": name,
        "FORMAT": values.get("FORMAT"),
    }
    return RegisterLaunch(launch, own)


def _serves(spec: LayerSpec) -> bool:
    """Whether the kernel has all that a layer asks for."""
    plain = not spec.has_alibi and not spec.mm_prefix and not spec.invariance
    return plain and spec.dtype != "float32" and spec.head_size_v == spec.head_size


def _has_whole_scales(form: tuple[Any, ...], head_size: int) -> bool:
    """Whether a thread's scales are whole integers at multiples of their size."""
    name, *places = form[:4]
    if name != "nvfp4":
        return bool(form[4])
    # A thread has the scales of a quarter of a row of keys as one integer.
    return not any(place % (head_size // 64) for place in places)


def runs_registers(device: torch.device, name: str) -> bool:
    """Whether a GPU has the instructions: NVIDIA's from compute capability 8.0 on, and from 8.9 on for fp8_e4m3."""
    if device.type != "cuda" or torch.version.hip is not None or not has_gluon():
        return False
    return torch.cuda.get_device_capability(device) >= ((8, 9) if name == "fp8_e4m3" else (8, 0))


@functools.cache
def register_kernel() -> Any:
    """The kernel, imported with Gluon on first use."""
    from attnplug.backends.triton.kernels.registers.decode import register_decode_kernel

    return register_decode_kernel
