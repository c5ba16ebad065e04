"""Memory for the host arrays of steps, many from one allocation."""

from __future__ import annotations

import numpy as np

from attnplug._system.one_commit import NotCopied
from attnplug.backends.flashinfer.step import Ints

_BLOCK = 1 << 14
"""Elements of a block: 64 KiB, which malloc reuses."""


class HostArrays(NotCopied):
    """Gives new int32 arrays, which stay the caller's: many share a block, and the last one frees it.

    FlashInfer's planner of latents frees a thousand small chunks in each call. glibc merges them all when the process
    next allocates a KiB or more, such as 256 lengths: 9 us and more, which the planner's own next call pays otherwise.
    """

    def __init__(self) -> None:
        self._block: Ints = np.empty(_BLOCK, dtype=np.int32)
        self._used = 0

    def empty(self, count: int) -> Ints:
        """An array of `count` elements, without values."""
        if self._used + count > self._block.size:
            self._block, self._used = np.empty(max(_BLOCK, 4 * count), dtype=np.int32), 0
        begin = self._used
        self._used += count
        return self._block[begin : self._used]

    def copy(self, values: Ints) -> Ints:
        """An array with these values."""
        made = self.empty(values.size)
        made[:] = values
        return made
