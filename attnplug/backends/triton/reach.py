"""Which keys a query sees, as the kernels are told it."""

from __future__ import annotations

from attnplug.ops.reach import Reach

__all__ = ["switches"]


def switches(reach: Reach) -> dict[str, bool]:
    """The kernels' switches: what is no limit costs nothing."""
    return {"HAS_LEFT": reach.left >= 0, "HAS_RIGHT": reach.right >= 0, "HAS_CHUNK": reach.chunk > 0}
