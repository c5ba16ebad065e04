"""Which keys a query sees: causality, windows and chunks all leave one run of positions."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
from attnplug.core import LayerSpec
from attnplug.errors import BatchError

__all__ = ["Ints", "Reach"]

Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class Reach:
    """A query at position p sees `p - left .. p + right` within its chunk; -1 is no limit."""

    left: int
    right: int
    chunk: int | None

    @classmethod
    def of(cls, spec: LayerSpec, causal: bool) -> Reach:
        """The reach of a layer in a batch; BatchError where a batch would widen it."""
        if spec.causal and not causal:
            remedy = "declare the layer with causal=False"
            raise BatchError("causal", causal, "cannot widen a causal layer", remedy)
        left, right = spec.window
        return cls(left, 0 if causal else right, spec.chunk_size)

    def bounds(self, positions: Ints, first: Ints, end: Ints) -> tuple[Ints, Ints]:
        """The first position seen from each of `positions` and the one after the last, of keys `[first, end)`.

        They are equal where nothing is seen, and never decrease from one query of a request to the next.
        """
        low, high = first, end
        if self.left >= 0:
            low = np.maximum(low, positions - self.left)
        if self.chunk is not None:
            low = np.maximum(low, positions // self.chunk * self.chunk)
        if self.right >= 0:
            high = np.minimum(high, positions + self.right + 1)
        return low, np.maximum(low, high)
