"""The keys that a query sees: causality, windows, chunks and spans together give one range of positions.

Checks of the arguments of a Reach, which computes with numpy arrays of the host.
"""

from __future__ import annotations

import dataclasses
from typing import cast

import numpy as np
import numpy.typing as npt

from attnplug.core.batch.host import exact_integers
from attnplug.core.errors import BatchError
from attnplug.core.spec import LayerSpec

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


# Sums of such a side with int32 positions may pass int32.
_WIDE = 1 << 30
# A side past every request, which leaves int64 room for positions before 0.
_FURTHEST = (1 << 63) - (1 << 32)


@dataclasses.dataclass(frozen=True, slots=True)
class Reach:
    """A query at position p sees `p - left .. p + right`, within its chunk, and the whole of its span.

    Args:
        left: keys before the query's own position; -1 without limit.
        right: keys after it; -1 without limit.
        chunk: positions of a chunk; 0 without chunks.
        spans: whether multimodal spans are seen as a whole.
    """

    left: int
    right: int
    chunk: int
    spans: bool = False

    def __post_init__(self) -> None:
        check_reach(self.left, self.right, self.chunk, self.spans)

    @classmethod
    def of(cls, spec: LayerSpec, causal: bool | None) -> Reach:
        """The reach of a layer in a batch with this `causal`.

        Raises:
            BatchError: see `LayerSpec.causal_in`.
        """
        left, right = spec.window
        return cls(left, 0 if spec.causal_in(causal) else right, spec.chunk_size or 0, spec.mm_prefix)

    def bounds(
        self, positions: _Ints, first: _Ints, end: _Ints, spans: _Ints | None = None
    ) -> tuple[_Ints, _Ints]:
        """`[low, high)`, the keys among `[first, end)` that queries at `positions` see; arguments broadcast.

        `spans [*positions.shape, 2]` has the first position of each query's span and one past its last, (0, 0)
        without a span; it is read only if `self.spans`. A span and a window both contain the query's own position,
        so together they are one range.

        `low == high` for queries that see nothing. Neither decreases over the queries of a request.
        """
        wide = max(self.left, self.right, self.chunk) >= _WIDE
        positions, first, end, spans = exact_arguments(positions, first, end, spans, wide=wide)
        low, high = first, end
        if self.left >= 0:
            low = np.maximum(low, positions - min(self.left, _FURTHEST))
        if self.chunk:
            low = np.maximum(low, positions // self.chunk * self.chunk)
        if self.right >= 0:
            # `positions + right + 1` may wrap, and this sum is at most `end`.
            right = min(self.right, _FURTHEST) + 1
            high = np.minimum(high - right, positions) + right
        if self.spans and spans is not None:
            start, stop = spans[..., 0], spans[..., 1]
            inside = stop > start
            low = np.where(inside, np.maximum(np.minimum(low, start), first), low)
            high = np.where(inside, np.minimum(np.maximum(high, stop), end), high)
        return low, np.maximum(low, high)
