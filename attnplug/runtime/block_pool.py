"""The blocks of a KV pool: allocated, shared by requests with a common prefix, and freed."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from attnplug.core.checks import short_number
from attnplug.core.errors import BatchError
from attnplug.runtime.arguments import integer, listed

_MOST_BLOCKS = 1 << 24


class BlockPool:
    """Counts the users of each block. Block 0 is the null block and is never allocated.

    Unused blocks go to the back of a queue, and `allocate` takes from the front. A prefix cache can thus reuse
    their contents for as long as possible. A call that raises changes nothing.

    Args:
        num_blocks: blocks of the pool, the null block included.

    Raises:
        BatchError: fewer than one block, or more than 2**24.
    """

    def __init__(self, num_blocks: int) -> None:
        num_blocks = integer("num_blocks", num_blocks)
        if num_blocks < 1:
            raise BatchError("num_blocks", num_blocks, "must be at least 1: block 0 is the null block")
        if num_blocks > _MOST_BLOCKS:
            # Each block has entries here, so a larger pool would take gigabytes of host memory.
            remedy = "use larger blocks, or several pools"
            raise BatchError(
                "num_blocks", short_number(num_blocks), f"must be at most {_MOST_BLOCKS}", remedy
            )
        self.num_blocks = num_blocks
        self._users = [0] * num_blocks
        # An ordered dict, because `share` removes blocks from the middle of the queue.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def num_free(self) -> int:
        """Number of unused blocks."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks with one user each, all or none.

        Raises:
            BatchError: fewer are free. Free some, or preempt a request.
        """
        count = integer("count", count)
        if not 0 <= count <= len(self._free):
            limit = f"must be in 0 .. {len(self._free)}, the free blocks of {self.num_blocks}"
            raise BatchError("count", count, limit, "free blocks of another request first")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._users[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a user to each block; unused blocks leave the queue.

        Null blocks are skipped: a prefix has them for pages that its window has passed.

        Raises:
            BatchError: a number is not a block of the pool.
        """
        for block in self._checked(blocks):
            if self._users[block] == 0:
                del self._free[block]
            self._users[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Remove a user from each block; null blocks are skipped.

        Raises:
            BatchError: a number is not a block of the pool, or the block has no users.
        """
        taken = self._checked(blocks)
        # All blocks are checked before any is freed, because a call that raises changes nothing.
        for block, times in Counter(taken).items():
            if times > self._users[block]:
                limit = f"is freed {times} times and has {self._users[block]} users"
                raise BatchError("blocks", block, limit)
        for block in taken:
            self._users[block] -= 1
            if self._users[block] == 0:
                self._free[block] = None

    def users(self, block: int) -> int:
        """The number of requests that use a block; 0 for the null block.

        Raises:
            BatchError: the number is not a block of the pool.
        """
        return sum(self._users[number] for number in self._checked([block], "block"))

    def _checked(self, blocks: Iterable[int], field: str = "blocks") -> list[int]:
        """The blocks as ints, without null blocks."""
        given, limit = [], f"must be integers in 0 .. {self.num_blocks - 1}"
        for block in listed(field, blocks, "block numbers"):
            number = integer(field, block, limit)
            if not 0 <= number < self.num_blocks:
                raise BatchError(field, block, limit)
            if number:
                given.append(number)
        return given
