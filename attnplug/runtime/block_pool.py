"""The blocks of a KV pool: handed out, shared by requests with a common prefix, taken back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from attnplug.core.errors import BatchError

__all__ = ["BlockPool"]


class BlockPool:
    """Counts the users of each block. Block 0 is the null block and is never handed out.

    Blocks that nobody uses go to the back of the queue, so that what they hold stays readable for a
    prefix cache as long as possible; `allocate` takes from the front.

    Args:
        num_blocks: blocks of the pool, the null block included.

    Raises:
        BatchError: fewer than one block.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise BatchError("num_blocks", num_blocks, "must be at least 1: block 0 is the null block")
        self.num_blocks = num_blocks
        self._users = np.zeros(num_blocks, dtype=np.int64)
        # Lazily cleaned: a block taken back into use may stand here still, but with users.
        self._free = deque(range(1, num_blocks))
        self._num_free = num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses."""
        return self._num_free

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one user each; all of them or none.

        Raises:
            BatchError: fewer are free; free some, or preempt a request.
        """
        if not 0 <= count <= self._num_free:
            limit = f"must lie in 0 .. {self._num_free}, the free blocks of {self.num_blocks}"
            raise BatchError("count", count, limit, "free blocks of another request first")
        blocks: list[int] = []
        while len(blocks) < count:
            block = self._free.popleft()
            if self._users[block] == 0:
                self._users[block] = 1
                blocks.append(block)
        self._num_free -= count
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a user to each block; one that nobody uses any more is taken back into use.

        Raises:
            BatchError: no block of the pool.
        """
        for block in self._checked(blocks):
            self._num_free -= self._users[block] == 0
            self._users[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Take a user from each block; null blocks are passed over.

        Raises:
            BatchError: no block of the pool, or one without users; then none is freed.
        """
        taken = [block for block in blocks if block != 0]
        counts = np.bincount(self._checked(taken), minlength=self.num_blocks) if taken else self._users * 0
        if (counts > self._users).any():
            worst = int((counts > self._users).argmax())
            raise BatchError("blocks", worst, "is freed more often than it is used")
        for block in taken:
            self._users[block] -= 1
            if self._users[block] == 0:
                self._free.append(block)
                self._num_free += 1

    def users(self, block: int) -> int:
        """How many requests use a block."""
        return int(self._users[self._checked([block])[0]])

    def _checked(self, blocks: Iterable[int]) -> list[int]:
        given = list(blocks)
        for block in given:
            if not 0 < block < self.num_blocks:
                raise BatchError("blocks", block, f"must lie in 1 .. {self.num_blocks - 1}")
        return given
