"""Which keys a query sees, as the kernels are told it."""

from __future__ import annotations

import dataclasses

from attnplug.core.errors import BatchError
from attnplug.core.spec import LayerSpec

__all__ = ["Reach"]


@dataclasses.dataclass(frozen=True, slots=True)
class Reach:
    """A query at position p sees `p - left .. p + right`, within its chunk; -1, and a chunk of 0, is no limit."""

    left: int
    right: int
    chunk: int

    @classmethod
    def of(cls, spec: LayerSpec, causal: bool) -> Reach:
        """The reach of a layer in a batch that says `causal`.

        Raises:
            BatchError: a batch that is not causal, for a layer that is.
        """
        left, right = spec.window
        if spec.causal and not causal:
            raise BatchError(
                "causal", causal, "cannot widen a causal layer", "declare the layer with causal=False"
            )
        return cls(left, 0 if causal else right, spec.chunk_size or 0)

    @property
    def flags(self) -> dict[str, bool]:
        """The kernels' switches: what is no limit costs nothing."""
        return {"HAS_LEFT": self.left >= 0, "HAS_RIGHT": self.right >= 0, "HAS_CHUNK": self.chunk > 0}
