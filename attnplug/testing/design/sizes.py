"""Sizes to try with a backend that allows every multiple of one."""

from __future__ import annotations

from collections.abc import Sequence

from attnplug.core.blocks import MultipleOf

HEAD_SIZES: tuple[int, ...] = (128, 64, 16, 32, 72, 20, 80, 96, 112, 192, 256, 320)
"""The head sizes of models, the least and the largest of most kernels, and sizes that fill no tile."""
BLOCK_SIZES: tuple[int, ...] = (16, 32, 64, 128, 256, 8, 1, 24, 48)
"""Tokens per page."""


def sizes_to_try(allowed: Sequence[int | MultipleOf], samples: Sequence[int]) -> list[int]:
    """The allowed samples, the sizes listed, and the least of the multiples that allow no sample.

    Entries that are neither a positive int nor a MultipleOf are left out.
    """
    listed = [size for size in allowed if type(size) is int and size > 0]
    multiples = [item for item in allowed if isinstance(item, MultipleOf)]
    sampled = [size for size in samples if MultipleOf.allows([*listed, *multiples], size)]
    least = [item.from_on(1) for item in multiples if not any(size in item for size in samples)]
    return list(dict.fromkeys([*sampled, *listed, *least]))


def spread(values: Sequence[int], count: int) -> list[int]:
    """At most `count` values: the first, the extremes, two that are no powers of 2, then others."""
    ordered = sorted(values)
    middle = [value for value in values if value & (value - 1)]
    return list(dict.fromkeys([values[0], ordered[0], ordered[-1], *middle[:2], *values]))[:count]
