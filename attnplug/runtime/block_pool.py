"""The blocks of a KV pool: handed out, shared by requests with a common prefix, taken back."""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict
from collections.abc import Iterable

from attnplug.core.errors import BatchError

__all__ = ["BlockPool"]


class BlockPool:
    """Counts the users of each block. Block 0 is the null block and is never handed out.

    Blocks that nobody uses go to the back of the queue, so that what they hold stays readable for a
    prefix cache as long as possible; `allocate` takes from the front. A call that raises changes nothing.

    Args:
        num_blocks: blocks of the pool, the null block included.

    Raises:
        BatchError: fewer than one block.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise BatchError("num_blocks", num_blocks, "must be at least 1: block 0 is the null block")
        self.num_blocks = num_blocks
        self._users = [0] * num_blocks
        # Ordered, and not a deque, so that a block which is shared leaves its place in the queue.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one user each; all of them or none.

        Raises:
            BatchError: fewer are free; free some, or preempt a request.
        """
        if not 0 <= count <= len(self._free):
            limit = f"must lie in 0 .. {len(self._free)}, the free blocks of {self.num_blocks}"
            raise BatchError("count", count, limit, "free blocks of another request first")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._users[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a user to each block; one that nobody uses any more is taken back into use.

        Null blocks are passed over: a prefix may have pages that its window has passed.

        Raises:
            BatchError: no block of the pool.
        """
        for block in self._checked(blocks):
            if self._users[block] == 0:
                del self._free[block]
            self._users[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Take a user from each block; null blocks are passed over.

        Raises:
            BatchError: no block of the pool, or one without users.
        """
        taken = self._checked(blocks)
        for block, times in Counter(taken).items():
            if times > self._users[block]:
                limit = f"is freed {times} times and has {self._users[block]} users"
                raise BatchError("blocks", block, limit)
        for block in taken:
            self._users[block] -= 1
            if self._users[block] == 0:
                self._free[block] = None

    def users(self, block: int) -> int:
        """How many requests use a block; 0 for the null block.

        Raises:
            BatchError: no block of the pool.
        """
        return sum(self._users[number] for number in self._checked([block]))

    def _checked(self, blocks: Iterable[int]) -> list[int]:
        """The blocks but null ones, as ints."""
        given = []
        for block in blocks:
            try:
                number = operator.index(block)
            except TypeError:
                number = -1
            if not 0 <= number < self.num_blocks:
                raise BatchError("blocks", block, f"must be integers in 0 .. {self.num_blocks - 1}")
            if number:
                given.append(number)
        return given
