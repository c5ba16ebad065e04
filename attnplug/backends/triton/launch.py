"""Tile sizes, warps and stages of the kernels, by what they are launched for."""

from __future__ import annotations

import dataclasses

__all__ = ["DecodeLaunch", "PrefillLaunch", "decode_launch", "power_of_two", "prefill_launch"]


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeLaunch:
    """How decode is launched.

    Args:
        block_n: keys per tile.
        num_warps: warps of a program.
        num_stages: tiles in flight.
        waves: programs per multiprocessor that the keys are split for.
        min_keys: fewest keys of a split, a multiple of `block_n`.
    """

    block_n: int
    num_warps: int
    num_stages: int
    waves: int
    min_keys: int


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillLaunch:
    """How prefill is launched: `block_m` rows of queries, `block_n` keys per tile."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def power_of_two(size: int, least: int = 16) -> int:
    """The smallest power of two that holds `size`, at least `least`: what a tile's side must be."""
    return max(1 << (size - 1).bit_length(), least)


def decode_launch(head_size: int, itemsize: int) -> DecodeLaunch:
    """For heads of `head_size` (the larger of K and V), computed in elements of `itemsize` bytes."""
    wide = power_of_two(head_size) * itemsize
    if wide <= 128:
        return DecodeLaunch(128, 4, 3, 4, 256)
    if wide <= 256:
        return DecodeLaunch(64, 4, 3, 4, 256)
    if wide <= 512:
        return DecodeLaunch(64, 4, 3, 4, 256)
    return DecodeLaunch(32, 4, 2, 4, 256)


def prefill_launch(head_size: int, itemsize: int, rows: int) -> PrefillLaunch:
    """For tiles of at most `rows` rows: queries of the longest request times heads of a group."""
    wide = power_of_two(head_size) * itemsize
    if wide > 512:
        return PrefillLaunch(min(power_of_two(rows), 32), 16, 4, 1)
    if rows <= 64:
        return PrefillLaunch(power_of_two(rows), 64 if wide <= 256 else 32, 4, 2)
    if wide <= 128:
        return PrefillLaunch(128, 64, 4, 3)
    if wide <= 256:
        return PrefillLaunch(128, 64, 8, 3)
    return PrefillLaunch(128, 64, 8, 2)
