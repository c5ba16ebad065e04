"""The blocks of a KV pool: allocated, shared by requests with a common prefix, and freed."""

from __future__ import annotations

import functools
import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from attnplug._system.one_commit import OneCommit
from attnplug.core.checks import short_number
from attnplug.core.errors import BatchError
from attnplug.runtime.arguments import integer, listed

_MOST_BLOCKS = 1 << 24


class BlockPool(OneCommit):
    """Counts the users of each block. Block 0 is the null block and is never allocated.

    Unused blocks go to the back of a queue, and `allocate` takes from the front. A prefix cache can thus reuse
    their contents for as long as possible. A call that raises, or is interrupted, changes nothing.

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
        self._settle()
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks with one user each, all or none.

        Raises:
            BatchError: fewer are free. Free some, or preempt a request.
        """
        self._settle()
        count = integer("count", count)
        if not 0 <= count <= len(self._free):
            limit = f"must be in 0 .. {len(self._free)}, the free blocks of {self.num_blocks}"
            raise BatchError("count", count, limit, "free blocks of another request first")
        blocks = list(itertools.islice(self._free, count))
        change = functools.partial(self._set, blocks, [1] * count)
        # On one line: an interrupt between the two would leave blocks with a user who never got them.
        self._change = change; return blocks  # fmt: skip  # noqa: E702

    def share(self, blocks: Iterable[int]) -> None:
        """Add a user to each block; unused blocks leave the queue.

        Null blocks are skipped: a prefix has them for pages that its window has passed.

        Raises:
            BatchError: a number is not a block of the pool.
        """
        self._settle()
        added = self._checked(blocks)
        times = dict.fromkeys(added, 1) if len(set(added)) == len(added) else Counter(added)
        users = [self._users[block] + count for block, count in times.items()]
        self._change = functools.partial(self._set, list(times), users)

    def free(self, blocks: Iterable[int]) -> None:
        """Remove a user from each block; null blocks are skipped.

        Raises:
            BatchError: a number is not a block of the pool, or the block has no users.
        """
        self._settle()
        taken = self._checked(blocks)
        # Each block once, where it is freed last: it goes to the queue then.
        order = taken if len(set(taken)) == len(taken) else list(dict.fromkeys(reversed(taken)))[::-1]
        times = dict.fromkeys(order, 1) if order is taken else Counter(taken)
        users = [self._users[block] - times[block] for block in order]
        if users and min(users) < 0:
            block = next(block for block in taken if times[block] > self._users[block])
            limit = f"is freed {times[block]} times and has {self._users[block]} users"
            raise BatchError("blocks", block, limit)
        self._change = functools.partial(self._set, order, users)

    def users(self, block: int) -> int:
        """The number of requests that use a block; 0 for the null block.

        Raises:
            BatchError: the number is not a block of the pool.
        """
        self._settle()
        return sum(self._users[number] for number in self._checked([block], "block"))

    def _set(self, blocks: Sequence[int], users: Sequence[int]) -> None:
        for block, count in zip(blocks, users, strict=True):
            self._users[block] = count
            if count:
                self._free.pop(block, None)
            else:
                self._free[block] = None

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
