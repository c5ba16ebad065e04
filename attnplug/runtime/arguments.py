"""Checks of arguments that an engine gives: each returns the value in its plain type, or names what is wrong."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import torch

from attnplug.core.errors import BatchError, LayoutError, SpecError

_T = TypeVar("_T")
_Error = type[BatchError] | type[LayoutError] | type[SpecError]


def integer(field: str, value: object, limit: str = "must be an integer") -> int:
    """`value` as an int; BatchError for a bool, a float and any other type, which numpy would round in silence."""
    if type(value) is int:
        return value
    # numpy and torch read True as 1.
    is_bool = isinstance(value, bool) or getattr(value, "dtype", None) in (torch.bool, np.dtype(bool))
    try:
        if is_bool:
            raise TypeError("a bool is not a number here")
        return operator.index(value)  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001  (`__index__` is code of the caller)
        raise BatchError(field, value, limit) from None


def listed(field: str, value: Any, what: str) -> list[Any]:
    """The items of `value`; BatchError for text, a mapping, and anything that has no items."""
    try:
        if isinstance(value, (str, bytes, Mapping)):
            raise TypeError("its items would be letters or keys")
        return list(value)
    except Exception:  # noqa: BLE001  (`__iter__` is code of the caller)
        raise BatchError(field, value, f"must be a sequence of {what}") from None


def integers(field: str, value: object) -> list[int]:
    """The items of `value` as ints; BatchError for anything else."""
    return [integer(field, item) for item in listed(field, value, "integers")]


def instance(
    field: str, value: object, kind: type[_T], error: _Error = BatchError, remedy: str | None = None
) -> _T:
    """`value`, if it is a `kind`.

    Raises:
        BatchError: it is not, or another `error`.
    """
    if not isinstance(value, kind):
        raise error(field, value, f"must be a {kind.__name__}", remedy)
    return value


def torch_device(field: str, value: object, error: _Error = BatchError) -> torch.device:
    """`value` as a torch.device on which a tensor can be made.

    Raises:
        BatchError: it names no device, or torch cannot use it here; or another `error`.
    """
    try:
        if not isinstance(value, (str, torch.device)):
            raise TypeError("a number would be the index of a GPU")
        where = torch.device(value)
        torch.empty(0, device=where)
    except (RuntimeError, TypeError, AssertionError) as raised:
        # torch explains some of these over many lines.
        reason = (str(raised).splitlines() or [""])[0]
        found = str(value) if isinstance(value, torch.device) else value
        raise error(field, found, f"is not a device that torch can use here: {reason}") from None
    return where
