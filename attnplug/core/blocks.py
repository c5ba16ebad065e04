"""Sets of allowed sizes, open-ended where a kernel takes every multiple of something."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from attnplug.core.errors import SpecError

__all__ = ["MultipleOf"]


@dataclasses.dataclass(frozen=True, slots=True)
class MultipleOf:
    """Every positive multiple of `base`, where a plain list of sizes would have no end."""

    base: int

    def __post_init__(self) -> None:
        if type(self.base) is not int or self.base < 1:
            raise SpecError("MultipleOf.base", self.base, "must be an integer of at least 1")

    def __contains__(self, size: int) -> bool:
        return size > 0 and size % self.base == 0

    def __str__(self) -> str:
        return "any size" if self.base == 1 else f"multiples of {self.base}"

    @staticmethod
    def allows(sizes: Sequence[int | MultipleOf], size: int) -> bool:
        """Whether one of `sizes` is, or contains, `size`."""
        return any(size in item if isinstance(item, MultipleOf) else size == item for item in sizes)

    @staticmethod
    def nearest(sizes: Sequence[int | MultipleOf], wanted: int) -> int:
        """The smallest allowed size of at least `wanted`, or the largest below it."""
        least = max(wanted, 1)
        found = [
            -(-least // item.base) * item.base if isinstance(item, MultipleOf) else item for item in sizes
        ]
        if not found:
            raise SpecError("sizes", list(sizes), "must name at least one size")
        above = [size for size in found if size >= wanted]
        return min(above) if above else max(found)
