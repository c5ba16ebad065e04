"""The keys that a query sees: causality, windows, chunks and spans together give one range of positions."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from attnplug.core.spec import LayerSpec
from attnplug.ops.reach_checks import check_reach, exact_arguments

_Ints = npt.NDArray[np.int64]
_WIDE = 1 << 30
"""A side from which sums with int32 positions may pass int32."""
_FURTHEST = (1 << 63) - (1 << 32)
"""A side past every request, which leaves int64 room for positions before 0."""


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
            # `positions + right + 1` may wrap; this is no larger than `end`.
            right = min(self.right, _FURTHEST) + 1
            high = np.minimum(high - right, positions) + right
        if self.spans and spans is not None:
            start, stop = spans[..., 0], spans[..., 1]
            inside = stop > start
            low = np.where(inside, np.maximum(np.minimum(low, start), first), low)
            high = np.where(inside, np.minimum(np.maximum(high, stop), end), high)
        return low, np.maximum(low, high)
