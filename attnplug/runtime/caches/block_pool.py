"""The blocks of a KV pool: allocated, shared by requests with a common prefix, and freed.

The requests that hold each block: no request writes into a block of another one.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from attnplug._system.one_commit import NotCopied, OneCommit
from attnplug.core.arguments import integer, listed
from attnplug.core.checks import short_number
from attnplug.core.errors import BatchError

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


Blocks: TypeAlias = npt.NDArray[Any]
Held: TypeAlias = int | list[int] | npt.NDArray[np.int32] | None
"""The number of requests that have each of some blocks, or one number for all; None if nobody counts."""

# Counts of all KV groups are int32, so these are 256 MiB on the host.
_MOST_COUNTS = 1 << 26
# Python reads the counts of so few blocks sooner than numpy does.
_FEW = 8
_REMEDY = "share only blocks whose tokens are computed; remove a request before its blocks are reused"


class BlockHolders(NotCopied):
    """Counts the requests that hold each block of the pool, in each KV group; the null block has no holder.

    Requests share blocks that they only read, such as those of a common prefix.

    Args:
        tables: int32 `[G, max_num_seqs, max_blocks]`, the blocks of each request.
        num_blocks: blocks of the pool. Without it, or with a very large pool, only blocks that one request has
            twice are refused.
        one_pool: whether a block number is the same memory in all KV groups.
        holder: gives the name of a request that has a block of a KV group.
    """

    def __init__(
        self,
        tables: npt.NDArray[np.int32],
        num_blocks: int | None,
        one_pool: bool,
        holder: Callable[[int, int], str],
    ) -> None:
        self._tables, self._holder = tables, holder
        groups = tables.shape[0]
        self.is_known = num_blocks is not None and groups * num_blocks <= _MOST_COUNTS
        self._counts = np.zeros((groups, num_blocks if self.is_known and num_blocks else 0), dtype=np.int32)
        # Views of the same counts: Python reads one element of a memoryview sooner than one of an array.
        self._few: list[memoryview[int]] = [row.data for row in self._counts]
        self.has_one_pool = one_pool and groups > 1 and self.is_known
        self.may_cross = False
        """Whether a block may have been given to two KV groups of one pool."""

    def given(self, group: int, index: int, start: int, blocks: Blocks, first_written: int) -> Held:
        """The counts of `blocks` with one more request, for `set`. It changes nothing.

        Args:
            group: the KV group.
            index: of the request.
            start: the number of blocks that it has.
            blocks: new blocks of the request.
            first_written: the first of `blocks` that it may write to.

        Raises:
            BatchError: the request has a block twice, or may write to one that another request has.
        """
        size = blocks.size
        if size > 1:
            check_once(f"block_ids[{group}]", blocks)
        if not self.is_known:
            self._check_new(group, index, start, blocks)
            return None
        if size == 1:
            count: int = self._few[group][blocks[0]]
            if count:
                self._check_held(group, index, start, blocks, first_written)
            return count + 1
        if size:
            counts: npt.NDArray[np.int32] = self._counts[group].take(blocks)
            if np.count_nonzero(counts):
                self._check_held(group, index, start, blocks, first_written)
                counts += 1
                return counts
            return 1
        return None

    def look_for_crossed(self, blocks: Sequence[Blocks]) -> None:
        """Set `may_cross` if one of a request's new blocks, given by KV group, is in another group too."""
        for group, own in enumerate(blocks):
            if own.size:
                counts = self._counts.take(own, axis=1)
                if np.count_nonzero(counts) > np.count_nonzero(counts[group]):
                    self.may_cross = True
        every = np.concatenate(blocks)
        if np.unique(every).size < every.size:
            self.may_cross = True

    def taken(self, group: int, blocks: Blocks) -> Held:
        """The counts of `blocks` with one request less, for `set`. It changes nothing."""
        if not self.is_known:
            return None
        if blocks.size <= _FEW:
            few = self._few[group]
            return [few[block] - 1 for block in blocks.tolist()]
        counts: Held = self._counts[group].take(blocks) - 1
        return counts

    def set(self, group: int, blocks: Blocks, held: Held) -> None:
        """Write counts that `given` or `taken` made."""
        if held is None:
            return
        few = self._few[group]
        if blocks.size == 1 and isinstance(held, int):
            few[blocks[0]] = held
        elif isinstance(held, list):
            for block, count in zip(blocks.tolist(), held, strict=True):
                few[block] = count
        else:
            self._counts[group][blocks] = held
        # Any number of requests may have the null block.
        few[0] = 0

    def is_shared(self, group: int, blocks: Blocks) -> npt.NDArray[np.bool_]:
        """Whether more than one request has each of `blocks`."""
        if not self.is_known:
            return np.zeros(blocks.size, dtype=bool)
        is_shared: npt.NDArray[np.bool_] = self._counts[group].take(blocks) > 1
        return is_shared

    def _check_held(self, group: int, index: int, start: int, blocks: Blocks, first_written: int) -> None:
        """Refuse blocks that somebody has, unless they are shared and only read."""
        self._check_new(group, index, start, blocks)
        written = blocks[first_written:]
        held = written[self._counts[group].take(written) > 0]
        if held.size:
            block = int(held[0])
            limit = (
                f"is a block of request {self._holder(group, block)}, and this request writes tokens to it"
            )
            raise BatchError(f"block_ids[{group}]", block, limit, _REMEDY)

    def _check_new(self, group: int, index: int, start: int, blocks: Blocks) -> None:
        """Refuse blocks that the request has already."""
        if not start or not blocks.size:
            return
        own = self._tables[group, index, :start]
        is_own = np.isin(blocks, own) if blocks.size > 1 else (own == blocks).any(keepdims=True)
        again = blocks[is_own & (blocks != 0)]
        if again.size:
            raise _twice(f"block_ids[{group}]", int(again[0]))


def check_once(field: str, blocks: Blocks) -> None:
    """Refuse a block that comes twice; the null block may.

    Raises:
        BatchError: names the block.
    """
    # Pools give out most blocks in ascending order, which takes less time to see than to sort.
    if np.count_nonzero(blocks[1:] > blocks[:-1]) == blocks.size - 1:
        return
    found, times = np.unique(blocks[blocks != 0], return_counts=True)
    if (times > 1).any():
        raise _twice(field, int(found[times > 1][0]))


def _twice(field: str, block: int) -> BatchError:
    limit = "is given to two pages of one request"
    return BatchError(field, block, limit, "give each page a block of its own")
