"""Checks of the arguments of a Reach, which computes with numpy arrays of the host."""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt

from attnplug.core.batch.host import exact_integers
from attnplug.core.errors import BatchError

_Ints = npt.NDArray[np.int64]
_END = 1 << 63


def check_reach(left: int, right: int, chunk: int, spans: bool) -> None:
    """BatchError unless the sides are at least -1 and the chunk at least 0, as ints, and `spans` is a bool."""
    for name, found, least in (("left", left, -1), ("right", right, -1), ("chunk", chunk, 0)):
        if type(found) is not int or not least <= found < _END:
            raise BatchError(name, found, f"must be an int of at least {least} and below 2**63")
    if type(spans) is not bool:
        raise BatchError("spans", spans, "must be True or False")


def exact_arguments(
    positions: _Ints, first: _Ints, end: _Ints, spans: _Ints | None, *, wide: bool
) -> tuple[_Ints, _Ints, _Ints, _Ints | None]:
    """The arguments of `Reach.bounds`, `first` and `end` in the shape of `positions`, in types that hold its sums.

    int32 arrays stay as they are unless `wide`: only a side of 2**30 and more can take their sums past int32.

    Raises:
        BatchError: other than integers that fit the shape and int64.
    """
    arguments: dict[str, object] = {"positions": positions, "first": first, "end": end, "spans": spans}
    for name, argument in arguments.items():
        # int32 and int64 come most often; nothing else of theirs needs a look.
        if not wide and type(argument) is np.ndarray and argument.dtype.char in "ilq":
            continue
        if argument is None and name == "spans":
            continue
        if type(argument) is int and name in ("first", "end"):
            if not -_END <= argument < _END:
                raise BatchError(name, argument, "must fit 64 bits")
            arguments[name] = np.int64(argument) if wide else argument
            continue
        if not isinstance(argument, (np.ndarray, np.generic)) or argument.dtype.kind not in "iu":
            raise BatchError(name, argument, "must be a numpy array of integers")
        exact = exact_integers(name, cast("_Ints", argument))
        arguments[name] = exact.astype(np.int64, copy=False) if wide else exact
    shape = positions.shape
    if spans is not None and spans.shape != (*shape, 2):
        raise BatchError("spans", spans.shape, f"must have the shape {(*shape, 2)}")
    made = []
    for name, given in (("first", first), ("end", end)):
        try:
            made.append(np.broadcast_to(cast("_Ints", arguments[name]), shape))
        except ValueError:
            raise BatchError(
                name, np.shape(given), f"must broadcast to {shape}, the shape of positions"
            ) from None
    return cast("_Ints", arguments["positions"]), made[0], made[1], cast("_Ints | None", arguments["spans"])
