"""The keys that a query sees: causality, windows and chunks together give one range of positions."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from attnplug.core.errors import BatchError
from attnplug.core.spec import LayerSpec

_Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class Reach:
    """A query at position p sees `p - left .. p + right`, within its chunk.

    Args:
        left: keys before the query's own position; -1 without limit.
        right: keys after it; -1 without limit.
        chunk: positions of a chunk; 0 without chunks.
    """

    left: int
    right: int
    chunk: int

    @classmethod
    def of(cls, spec: LayerSpec, causal: bool) -> Reach:
        """The reach of a layer in a batch.

        Raises:
            BatchError: a batch that is not causal, for a layer that is.
        """
        left, right = spec.window
        if spec.causal and not causal:
            remedy = "declare the layer with causal=False"
            raise BatchError("causal", causal, "cannot widen a causal layer", remedy)
        return cls(left, 0 if causal else right, spec.chunk_size or 0)

    def bounds(self, positions: _Ints, first: _Ints, end: _Ints) -> tuple[_Ints, _Ints]:
        """`[low, high)`, the keys among `[first, end)` that queries at `positions` see; arguments broadcast.

        `low == high` for queries that see nothing. Neither decreases over the queries of a request.
        """
        low, high = np.broadcast_to(first, positions.shape), np.broadcast_to(end, positions.shape)
        if self.left >= 0:
            low = np.maximum(low, positions - self.left)
        if self.chunk:
            low = np.maximum(low, positions // self.chunk * self.chunk)
        if self.right >= 0:
            high = np.minimum(high, positions + self.right + 1)
        return low, np.maximum(low, high)
