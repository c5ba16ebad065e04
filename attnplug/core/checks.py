"""Checks of single values. Each returns the exact type that a frozen value keeps.

`attnplug.core.arguments` adds those that need torch; its errors are BatchErrors unless the caller gives another class.
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Sequence
from typing import TypeVar

from attnplug.core.errors import BatchError, SpecError

_E = TypeVar("_E", bound=enum.StrEnum)
_T = TypeVar("_T")

MOST = 2**31 - 1
"""The largest size or count."""
MOST_TOKENS = 2**30
"""The longest window or chunk: kernels add it to a position with 32 bits."""


def check_size(field: str, value: object, least: int = 1, most: int = MOST) -> int:
    """`value` as an int from `least` to `most`; SpecError for any other number, a bool or any other type."""
    try:
        number = index_of(value)
    except Exception:  # noqa: BLE001  (`__index__` is code of the caller)
        # A value that is not an integer gets the same error as one that is too small.
        number = least - 1
    if number < least:
        raise SpecError(field, value, f"must be an integer of at least {least}")
    if number > most:
        raise SpecError(field, short_number(number), f"must be an integer of at most {most}")
    return number


def check_positive(
    field: str, value: object, remedy: str | None = None, error: type[BatchError | SpecError] = SpecError
) -> float:
    """`value` as a float above 0; an `error` for anything else, infinity, nan and text included."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001  (`__float__` is code of the caller)
        number = math.nan
    # float() reads text, and reads True as 1.0, so these types are refused here.
    if not (math.isfinite(number) and number > 0) or isinstance(value, (bool, str, bytes)):
        raise error(field, value, "must be a finite number above 0", remedy)
    return number


def check_rank_group(field: str, value: _T, error: type[BatchError | SpecError] = SpecError) -> _T:
    """`value`, if it has the methods `size` and `rank` of a process group; an `error` otherwise."""
    methods = getattr(value, "size", None), getattr(value, "rank", None)
    if isinstance(value, type) or not all(map(callable, methods)):
        raise error(field, value, "must be a process group, with size() and rank()")
    return value


def check_flag(field: str, value: object) -> bool:
    """`value`, if it is True or False itself; SpecError for anything else."""
    if not isinstance(value, bool):
        raise SpecError(field, value, "must be True or False")
    return value


def check_member(kind: type[_E], field: str, value: str) -> _E:
    """The member of `kind` that `value` is or names; SpecError with the list of members."""
    try:
        return kind(value)
    except Exception:  # noqa: BLE001  (a comparison is code of the caller)
        raise SpecError(field, value, f"must be one of {', '.join(kind)}") from None


def check_window(window: Sequence[int], sliding_window: int | None, causal: bool) -> tuple[int, int]:
    """(left, right) from `window` or `sliding_window`; a causal window sees nothing to the right.

    Raises:
        SpecError: not two integers of at least -1, or both ways at once.
    """
    try:
        left, right = (index_of(side) for side in window)
    except Exception:  # noqa: BLE001  (`__iter__` and `__index__` are code of the caller)
        raise SpecError("window", window, "must be (left, right), two integers") from None
    if min(left, right) < -1:
        raise SpecError("window", (left, right), "must not go below -1, which means no limit")
    if max(left, right) > MOST_TOKENS:
        limit = f"must not exceed {MOST_TOKENS}"
        raise SpecError("window", (short_number(left), short_number(right)), limit, "-1 means no limit")
    if sliding_window is not None:
        if not causal:
            remedy = "state both sides: window=(left, right)"
            raise SpecError("sliding_window", sliding_window, "is for causal layers", remedy)
        # A right side of 0 changes nothing in a causal layer, so it does not conflict.
        if left >= 0 or right > 0:
            raise SpecError("sliding_window", sliding_window, f"cannot be given with window={(left, right)}")
        # sliding_window counts the query's own token, and window does not.
        left = check_size("sliding_window", sliding_window, most=MOST_TOKENS + 1) - 1
    return left, 0 if causal else right


def check_names(field: str, value: object) -> tuple[str, ...]:
    """`value` as a tuple of names; SpecError for text, and for anything else that is not a sequence of names."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        names = tuple(value)
        if all(isinstance(name, str) for name in names):
            return names
    raise SpecError(field, value, "must be a sequence of names")


def check_instances(field: str, value: object, kind: type[_T]) -> tuple[_T, ...]:
    """`value` as a tuple of `kind`; SpecError for anything else."""
    if not isinstance(value, Sequence) or not all(isinstance(each, kind) for each in value):
        raise SpecError(field, value, f"must be a sequence of {kind.__name__}")
    return tuple(value)


def short_number(number: int) -> object:
    """`number` for an error message: Python refuses to write out integers of thousands of digits."""
    return number if number.bit_length() < 256 else f"an integer of {number.bit_length()} bits"


def index_of(value: object) -> int:
    """`value` as an int; an exception for a bool, a float and any other type."""
    if isinstance(value, bool):
        raise TypeError("a bool is not a number here")
    # operator.index takes the integers of other libraries too, and refuses floats.
    return operator.index(value)  # type: ignore[arg-type]
