"""Checks of the arguments of a Reach, which computes with numpy arrays of the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from attnplug.core.errors import BatchError

_Ints = npt.NDArray[np.int64]


def check_reach(left: int, right: int, chunk: int, spans: bool) -> None:
    """BatchError unless the sides are at least -1 and the chunk at least 0, as ints, and `spans` is a bool."""
    for name, found, least in (("left", left, -1), ("right", right, -1), ("chunk", chunk, 0)):
        if type(found) is not int or found < least:
            raise BatchError(name, found, f"must be an int of at least {least}")
    if type(spans) is not bool:
        raise BatchError("spans", spans, "must be True or False")


def broadcast_bounds(positions: _Ints, first: _Ints, end: _Ints, spans: _Ints | None) -> tuple[_Ints, _Ints]:
    """`first` and `end` in the shape of `positions`; BatchError unless all are integers that fit it."""
    arguments: dict[str, object] = {"positions": positions, "first": first, "end": end, "spans": spans}
    for name, argument in arguments.items():
        if (argument is None and name == "spans") or (type(argument) is int and name in ("first", "end")):
            continue
        if not isinstance(argument, (np.ndarray, np.generic)) or argument.dtype.kind not in "iu":
            raise BatchError(name, argument, "must be a numpy array of integers")
    shape = positions.shape
    if spans is not None and spans.shape != (*shape, 2):
        raise BatchError("spans", spans.shape, f"must have the shape {(*shape, 2)}")
    made = []
    for name, given in (("first", first), ("end", end)):
        try:
            made.append(np.broadcast_to(given, shape))
        except ValueError:
            raise BatchError(
                name, np.shape(given), f"must broadcast to {shape}, the shape of positions"
            ) from None
    return made[0], made[1]
