"""The widths of the tiles that hold heads, and the memory that tiles take: kernels and declarations ask the same functions.

It imports neither torch nor Triton, because declarations are read without them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from attnplug.core.spec import LayerSpec

_LEAST = 16
"""The least side of a tile of a matrix product."""
# Triton 3.6 compiles narrower ones to reads outside of shared memory, on Hopper
# with 16-bit queries: second tiles of 16 and 32 columns gave illegal addresses,
# or numbers that were wrong by thousands. Tiles of 64 gave right ones.
_LEAST_OF_BYTES = 64
"""Columns of the narrowest tile of 8-bit elements that may have a wider tile beside it."""


WIDEST_WHOLE = 256
"""Elements of the widest head whose sums one program has for any number of rows; wider ones are called wide."""
WIDE_COLUMNS = 128
"""Columns of the values of wide heads that a program of prefill has on every GPU."""


class HeadTiles(NamedTuple):
    """The columns of the tiles of a key and of a value: a first tile, and a second one or 0."""

    keys: tuple[int, int]
    values: tuple[int, int]

    @property
    def columns(self) -> int:
        """The columns of the wider head of both."""
        return max(sum(self.keys), sum(self.values))


def tile_side(size: int) -> int:
    """The least side of a tile that holds `size`: a power of two, for matrix products at least 16."""
    return max(1 << (size - 1).bit_length(), _LEAST)


def tile_parts(size: int, least: int = _LEAST) -> tuple[int, int]:
    """The widths of the two tiles that hold `size` elements of a head; the second is 0 where one is as narrow.

    Sides of tiles are powers of two: 96 elements take 64 and 32, instead of 128.

    Args:
        size: elements of a head.
        least: columns of the narrowest tile.
    """
    whole = max(tile_side(size), least)
    first = whole // 2
    if not least <= first < size:
        return whole, 0
    rest = max(tile_side(size - first), least)
    return (first, rest) if first + rest < whole else (whole, 0)


def head_tiles(head_size: int, head_size_v: int, stored: int, *, whole: bool = False) -> HeadTiles:
    """The tiles of a layer's keys and values.

    Over elements of 8 bits no tile is narrower than 64 columns beside a wider one: narrow ones are widened.

    Args:
        head_size: elements of a key, or of a latent without its rope part.
        head_size_v: elements of a value, or of the rope part.
        stored: bytes of a stored element.
        whole: whether the kernel holds each head in one tile.
    """
    least = _LEAST
    if stored == 1:
        least = min(max(tile_side(head_size), tile_side(head_size_v)), _LEAST_OF_BYTES)
    keys, values = (
        (max(tile_side(size), least), 0) if whole else tile_parts(size, least)
        for size in (head_size, head_size_v)
    )
    return HeadTiles(keys, values)


def value_parts(head_size_v: int, most: int | None, step: int = 8) -> int:
    """The programs that share the columns of a value: a power of two.

    Args:
        head_size_v: elements of a value.
        most: columns that a program has at most, if more programs can share them; None for any number.
        step: elements that stay together.
    """
    parts = 1
    while most is not None and head_size_v > most * parts and head_size_v % (2 * parts * step) == 0:
        parts *= 2
    return parts


def fixed_tile(head_size: int, itemsize: int) -> int:
    """Keys of every tile of a layer whose sums have one order: decodes and prompts round at the same keys.

    Args:
        head_size: elements of a head, the larger of K and V.
        itemsize: bytes of an element, as it is computed.
    """
    if itemsize == 4:
        return 32 if head_size <= 128 else 16
    return 64 if head_size <= 128 else 32


def head_bytes(head_size: int, itemsize: int) -> int:
    """Bytes of a head in one tile, the key of the tables of launches."""
    return min(max(tile_side(head_size) * itemsize, 128), 1024)


def tile_memory(block_m: int, block_n: int, num_stages: int, width: int, width_v: int | None = None) -> int:
    """Bytes of the queries, keys and values of a program, whose rows have `width` bytes; of values `width_v`, if not None."""
    return block_m * width + block_n * num_stages * (width + (width if width_v is None else width_v))


def least_memory(spec: LayerSpec) -> int:
    """Bytes that the smallest tiles of prefill take, which have all heads of a group."""
    widest = max(spec.head_size, spec.head_size_v)
    rows = tile_side(spec.num_heads // spec.num_kv_heads)
    itemsize = 4 if spec.dtype == "float32" else 2
    keys = fixed_tile(widest, itemsize) if spec.invariance else _LEAST
    if itemsize == 4 or widest <= WIDEST_WHOLE:
        return tile_memory(rows, keys, 1, tile_side(widest) * itemsize)
    width = head_tiles(spec.head_size, spec.head_size_v, 1 if spec.has_quantized_kv_cache else 2).columns * 2
    return tile_memory(rows, keys, 1, width, WIDE_COLUMNS * 2)


SHORT_WINDOW = 256
"""Keys before a query's own, below which a window has tiles of fewer rows in the kernel with specialised warps."""
_WINDOWS = (64, 128, SHORT_WINDOW, 512)
"""Keys before a query's own, below which windows are compiled otherwise in some launch: two or four tiles of keys."""
_MOST_CAP = 1024.0
"""The largest soft cap of that kernel: capped logits are within 1e-7 of it, which queries of 16 bits do not show."""


def window_class(left: int) -> int:
    """Windows of one class share all kernels that limit keys; `left` are before a query's own, negative without limit."""
    return sum(0 <= left < most for most in _WINDOWS)


FEW_KEYS = 4096
"""Tokens of new prompts that have as fast tiles of 64 keys as of more, and leave out a limit that hides none."""
SEEN_PROMPT = 1024
"""Tokens of a prompt that each warm-up runs; the kernels of prompts of more tokens than half as many are the same."""


def limit_width(left: int, chunk: int) -> int:
    """The most keys that a query sees by its window and its chunk; 0 without both.

    Args:
        left: keys that a query sees before its own; negative without a window.
        chunk: keys of a chunk; 0 without.
    """
    return min((width for width in (max(left + 1, 0), chunk) if width), default=0)


def limit_class(width: int) -> int:
    """Layers of one class leave out their window or chunk for the same prompts, because it hides none of their keys.

    It is the longest of these prompts, at most FEW_KEYS; 0 for a `limit_width` that is never left out. A prompt without
    a limit is as one within it.
    """
    return min(width, FEW_KEYS) if width >= SEEN_PROMPT else 0


def specialized_tiles(spec: LayerSpec, numbers: int) -> tuple[int, int]:
    """The columns of both parts of a head in the prefill kernel with specialised warps; the second is 0 for one part.

    Args:
        spec: the layer.
        numbers: NUMBERS of the kernel.
    """
    # Sums that have one order were measured in whole tiles, and the kernel turns whole rows.
    is_whole = bool(spec.invariance) or numbers == 2
    return (tile_side(spec.head_size), 0) if is_whole else tile_parts(spec.head_size)


def has_specialized_prefill(spec: LayerSpec) -> bool:
    """Whether the prefill kernel with specialised warps, which is for compute capability 9.0, can serve a layer."""
    plain = not spec.has_alibi and not spec.mm_prefix and (spec.logits_soft_cap or 0.0) <= _MOST_CAP
    has_16_bits = spec.dtype != "float32" and not spec.has_quantized_kv_cache
    size = spec.head_size
    return plain and has_16_bits and spec.head_size_v == size and size % 16 == 0 and 64 <= size <= 256
