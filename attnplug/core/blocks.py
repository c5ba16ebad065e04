"""Sets of allowed sizes, for kernels that take every multiple of a size."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from attnplug.core.checks import MOST, check_size
from attnplug.core.errors import SpecError

_MOST_SIZES = 100_000


@dataclasses.dataclass(frozen=True, slots=True)
class MultipleOf:
    """Every positive multiple of `base`.

    Args:
        base: the number whose multiples are allowed.
        but: multiples that are not allowed.
    """

    base: int
    but: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # bool is a subclass of int, so isinstance would accept True.
        if type(self.base) is not int or self.base < 1:
            raise SpecError("MultipleOf.base", self.base, "must be an integer of at least 1")
        if not isinstance(self.but, Sequence) or not all(type(size) is int for size in self.but):
            raise SpecError("MultipleOf.but", self.but, "must be integers")
        # A caller may pass a list, with which this frozen value could not be hashed.
        object.__setattr__(self, "but", tuple(self.but))

    def __contains__(self, size: int) -> bool:
        return size > 0 and size % self.base == 0 and size not in self.but

    def __str__(self) -> str:
        words = "any size" if self.base == 1 else f"multiples of {self.base}"
        return f"{words} other than {' and '.join(map(str, self.but))}" if self.but else words

    def from_on(self, least: int) -> int:
        """The smallest allowed size of at least `least`."""
        least = check_size("least", least, -MOST)
        size = -(-max(least, 1) // self.base) * self.base
        while size in self.but:
            size += self.base
        return size

    @staticmethod
    def allows(sizes: Sequence[int | MultipleOf], size: int) -> bool:
        """Whether one of `sizes` is, or contains, `size`. SpecError for more than 100,000 sizes."""
        if not isinstance(sizes, Sequence) or len(sizes) > _MOST_SIZES:
            limit, remedy = (
                f"must be a sequence of at most {_MOST_SIZES} sizes",
                "declare MultipleOf(n) for every multiple of n",
            )
            raise SpecError("sizes", type(sizes).__name__, limit, remedy)
        if type(size) is not int:
            check_size("size", size, -MOST)
        try:
            return any(size in item if isinstance(item, MultipleOf) else size == item for item in sizes)
        except Exception:  # noqa: BLE001  (a comparison with an item may be code of the caller)
            raise SpecError("sizes", sizes, "must be integers or MultipleOf") from None

    @staticmethod
    def dividing(number: int, sizes: Sequence[int | MultipleOf]) -> tuple[int, ...]:
        """The divisors of `number` that `sizes` allow, ascending."""
        number = check_size("number", number)
        return tuple(size for size in _divisors(number) if MultipleOf.allows(sizes, size))

    @staticmethod
    def nearest(sizes: Sequence[int | MultipleOf], wanted: int) -> int:
        """The smallest allowed size of at least `wanted`, or the largest below it."""
        wanted = check_size("wanted", wanted, -MOST)
        _check_sizes("sizes", sizes)
        found = [item.from_on(wanted) if isinstance(item, MultipleOf) else item for item in sizes]
        if not found:
            raise SpecError("sizes", list(sizes), "must name at least one size")
        above = [size for size in found if size >= wanted]
        return min(above) if above else max(found)

    @staticmethod
    def common(
        one: Sequence[int | MultipleOf], other: Sequence[int | MultipleOf]
    ) -> tuple[int | MultipleOf, ...]:
        """The sizes that are in both sets, those of `one` first; empty if there are none."""
        _check_sizes("one", one)
        _check_sizes("other", other)
        multiples = [
            MultipleOf(math.lcm(left.base, right.base), (*left.but, *right.but))
            for left in one
            for right in other
            if isinstance(left, MultipleOf) and isinstance(right, MultipleOf)
        ]
        listed = [
            size
            for size in (*one, *other)
            if isinstance(size, int) and MultipleOf.allows(one, size) and MultipleOf.allows(other, size)
        ]
        return tuple(dict.fromkeys((*listed, *multiples)))


# Each divisor below the root has its partner above it, so a number of 31 bits takes 46,341 steps once.
@functools.lru_cache(maxsize=64)
def _divisors(number: int) -> tuple[int, ...]:
    below = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return tuple(sorted({*below, *(number // size for size in below)}))


def _check_sizes(field: str, sizes: Sequence[int | MultipleOf]) -> None:
    is_listed = isinstance(sizes, Sequence) and not isinstance(sizes, (str, bytes))
    if not is_listed or not all(isinstance(size, MultipleOf) or type(size) is int for size in sizes):
        raise SpecError(field, sizes, "must be a sequence of integers and MultipleOf")
