"""The requests in flight: their numbers and block tables in arrays, which each call changes by one assignment."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from attnplug._system.one_commit import OneCommit
from attnplug.core.errors import BatchError
from attnplug.runtime.batch.engine_values import Ints, block_numbers
from attnplug.runtime.batch.kv_groups import KVGroups
from attnplug.runtime.batch.placeholders import Placeholder, Span, spans_of
from attnplug.runtime.batch.staging import DeviceTables
from attnplug.runtime.caches.block_pool import BlockHolders, Held


class Members(NamedTuple):
    """The names of the requests in flight, and a number that each change of them or of their order raises."""

    names: list[str]
    order: int


class Pages(NamedTuple):
    """The new pages of a request in one KV group, and the numbers of requests that hold them."""

    start: int
    end: int
    """One past their last column."""
    blocks: Ints
    held: Held
    null_end: int
    """One past the last null page; 0 without any."""


_Move: TypeAlias = tuple[Ints, Ints, npt.NDArray[np.int32], Members]


class RequestRows(OneCommit):
    """The requests in flight, one row of the tables and one column of numbers each.

    Rows and columns that no request uses may have been written by a call that was interrupted. Nobody reads them.

    Args:
        groups: the KV groups.
        max_num_seqs: most requests.
        width: most pages of a request.
        pool: the number of its blocks; see `BlockHolders`.
        one_pool: see `BlockHolders`.
        device: of the batches.
    """

    stepped: tuple[str, ...] | None = None
    """The requests of the step that is not finished, in its order."""

    def __init__(
        self,
        groups: KVGroups,
        max_num_seqs: int,
        width: int,
        pool: int | None,
        one_pool: bool,
        device: torch.device,
    ) -> None:
        count = len(groups.block_sizes)
        self.groups, self._pool = groups, pool
        self.tables = np.zeros((count, max_num_seqs, width), dtype=np.int32)
        # All numbers of a request are a column, so one assignment changes them together.
        self.numbers = np.zeros((7 + 2 * count, max_num_seqs), dtype=np.int64)
        self.computed, self.scheduled, self.capacity = self.numbers[:3]
        # Queries of this position and later ones need no page that was freed; earlier ones may.
        self.first_served = self.numbers[3]
        self.encoder_lens, self.encoder_written, self.placeholder_end = self.numbers[4:7]
        self.num_blocks = self.numbers[7 : 7 + count]
        # One past the last null page of each request, 0 without any.
        self.null_ends = self.numbers[7 + count :]
        self.holders = BlockHolders(self.tables, pool, one_pool, self._holder)
        # Without null pages, the flag spares each step a pass over its slots.
        self.has_null_pages = False
        # Both may have names that are not in flight, from a call that was interrupted.
        self.placeholders: dict[str, tuple[Placeholder, ...]] = {}
        self.index: dict[str, int] = {}
        self._members = Members([], 0)
        # On the CPU steps read the builder's own tables.
        self.device_tables = None if device.type == "cpu" else DeviceTables(self.tables, device)

    @property
    def members(self) -> Members:
        """The requests in flight, in order. A later change makes another list of names."""
        self._settle()
        return self._members

    def find(self, req_id: str) -> int | None:
        """The row of a request; None if it is not in flight."""
        # The names come first: reading them writes the last change.
        names, index = self.members.names, self.index.get(req_id)
        return index if index is not None and index < len(names) and names[index] == req_id else None

    def row_of(self, req_id: str) -> int:
        """The row of a request; BatchError if it is not in flight."""
        index = self.find(req_id) if isinstance(req_id, str) else None
        if index is None:
            raise BatchError("req_id", req_id, "is not in flight")
        return index

    def pages(
        self,
        block_ids: Sequence[Sequence[int]],
        index: int,
        computed: int,
        fresh: bool = False,
        encoder_computed: bool = False,
    ) -> list[Pages]:
        """The new pages of each group, none for `()` if fresh; changes nothing.

        Raises:
            BatchError: not one sequence of blocks of the pool for each group, or blocks that the request must not have.
        """
        groups = len(self.groups.block_sizes)
        limit = f"must have one sequence for each of {groups} KV groups"
        try:
            given = len(block_ids)
        except Exception:  # noqa: BLE001  (`__len__` is code of the caller, and tensors have limits of their own)
            raise BatchError("block_ids", block_ids, limit) from None
        if isinstance(block_ids, (str, bytes, Mapping)):
            raise BatchError("block_ids", block_ids, limit)
        if given == 0 and fresh:
            return []
        if given != groups:
            raise BatchError("block_ids", given, limit)
        found: list[tuple[int, Ints]] = []
        for group, ids in enumerate(block_ids):
            field = f"block_ids[{group}]"
            blocks = block_numbers(field, ids, self._pool)
            start = 0 if fresh else int(self.num_blocks[group, index])
            if start + blocks.size > self.tables.shape[2]:
                limit = f"pages are past the table's {self.tables.shape[2]}"
                raise BatchError(field, start + blocks.size, limit)
            found.append((start, blocks))
        pages: list[Pages] = []
        for group, (start, blocks) in enumerate(found):
            read = computed // self.groups.tokens_per_block[group] - start
            if group in self.groups.cross:
                # Encoder tokens are written by the first step of a request, so all their pages are.
                read = blocks.size if encoder_computed else 0
            held = self.holders.given(group, index, start, blocks, max(read, 0))
            null_end = 0
            if np.count_nonzero(blocks) < blocks.size:
                null_end = start + int(np.flatnonzero(blocks == 0)[-1]) + 1
            pages.append(Pages(start, start + blocks.size, blocks, held, null_end))
        if self.holders.has_one_pool:
            self.holders.look_for_crossed([blocks for _, blocks in found])
        return pages

    def with_placeholders(self, scheduled: Ints) -> list[int]:
        """The rows of requests that may have placeholders among their scheduled tokens."""
        reqs = scheduled.size
        ahead = (self.placeholder_end[:reqs] > self.computed[:reqs]) & (scheduled > 0)
        rows: list[int] = np.flatnonzero(ahead).tolist()
        return rows

    def spans(self, scheduled: Ints) -> list[Span]:
        """The placeholders among the scheduled tokens, in order of tokens."""
        spans, starts, names = list[Span](), scheduled.cumsum() - scheduled, self.members.names
        for row in self.with_placeholders(scheduled):
            tokens = int(self.computed[row]), int(scheduled[row]), int(starts[row])
            spans += spans_of(names[row], self.placeholders[names[row]], *tokens)
        return spans

    def ordered(self, scheduled: Ints, thresholds: Sequence[int]) -> tuple[Ints, Ints] | None:
        """The order with decodes in front, as every threshold has it, then extends, then prefills.

        Requests whose place is right stay there, so the fewest possible move. Returns the index that each request has
        now, int64 `[R]`, and the places of those that move; None if no request moves.
        """
        if not thresholds:
            return None
        # A decode is a short query, of a new request too. A query past a threshold comes after all within it.
        rank = np.searchsorted(thresholds, scheduled)
        rank[(rank == len(thresholds)) & (self.computed[: scheduled.size] == 0)] += 1
        misplaced = np.flatnonzero(rank != np.sort(rank))
        if not misplaced.size:
            return None
        order = np.arange(scheduled.size)
        # Stable, so that requests of one kind keep their order.
        order[misplaced] = misplaced[np.argsort(rank[misplaced], kind="stable")]
        return order, misplaced

    # Each method from here to `finish` prepares a change, and its last statement makes it.

    def add(
        self,
        req_id: str,
        computed: int,
        encoder: tuple[int, bool],
        items: tuple[Placeholder, ...],
        pages: Sequence[Pages],
        longest: int,
    ) -> int:
        """Add a request, and return its row.

        `encoder` has its encoder tokens, and whether they are computed. Without decoder groups it may be `longest`.
        """
        members = self.members
        index = len(members.names)
        end = items[-1].offset + items[-1].length if items else 0
        self.numbers[:, index] = 0
        self.numbers[:7, index] = computed, 0, 0, 0, *encoder, end
        self.index[req_id] = index
        if items:
            self.placeholders[req_id] = items
        else:
            self.placeholders.pop(req_id, None)
        members = Members([*members.names, req_id], members.order + 1)
        # Without decoder pages, as in models of cross attention only, no page limits the length.
        capacity = self._put(pages, index, longest) if pages or not self.groups.decoder else 0
        change = functools.partial(self._take, members, index, pages, capacity)
        # On one line, so that an interrupt is before both.
        self._change = change; return index  # fmt: skip  # noqa: E702

    def append(self, index: int, pages: Sequence[Pages], longest: int) -> None:
        """Give the request of a row more pages."""
        capacity = self._put(pages, index, longest)
        self._change = functools.partial(self._take, self._members, index, pages, capacity)

    def free(self, index: int, group: int, count: int) -> None:
        """Replace the first pages of a request in a KV group by the null block."""
        # `has_null_pages` stays as it is: steps write after computed tokens only, never to these pages.
        freed, numbers = self.tables[group, index, :count].copy(), self.numbers[:, index].copy()
        if freed.any():
            numbers[3] = self.computed[index]
        at = 7 + len(self.groups.block_sizes) + group
        numbers[at] = max(count, numbers[at])
        holders = self.holders.taken(group, freed)
        self._change = functools.partial(self._free, index, group, freed, holders, numbers)

    def remove(self, req_id: str, index: int) -> None:
        """Remove a request; the last one moves to its row."""
        names, held = self.members.names, []
        for group, size in enumerate(self.num_blocks[:, index].tolist()):
            blocks = self.tables[group, index, :size].copy()
            held.append((blocks, self.holders.taken(group, blocks)))
        move, left = None, names[:-1]
        if index < len(left):
            left[index] = names[-1]
            move = self._moved(np.array([len(left)]), np.array([index]))
        members = Members(left, self._members.order + 1)
        self._change = functools.partial(self._leave, req_id, held, move, members)

    def swap(self, i: int, j: int) -> None:
        """Exchange two requests."""
        names = self.members.names.copy()
        names[i], names[j] = names[j], names[i]
        move = *self._moved(np.array([j, i]), np.array([i, j])), Members(names, self._members.order + 1)
        self._change = functools.partial(self._move, *move)

    def begin(self, scheduled: Ints, ordered: tuple[Ints, Ints] | None) -> tuple[str, ...]:
        """Begin a step of scheduled tokens, and return its requests.

        `ordered` is None, or a new order of the requests and the places of those that move. Unlike other changes, this
        one is written at once, because the step's buffers are filled from the rows.
        """
        move, names = None, tuple(self.members.names)
        if ordered is not None:
            order, misplaced = ordered
            names = tuple(names[row] for row in order.tolist())
            move = *self._moved(order[misplaced], misplaced), Members(list(names), self._members.order + 1)
        self._change = functools.partial(self._begin, names, scheduled, move)
        self._settle()
        return names

    def finish(self, counts: Ints) -> None:
        """Count so many tokens of each request of the step as computed."""
        reqs = counts.size
        # Set here and not in `begin`: a step that was not finished writes the encoder again.
        written = self.encoder_written[:reqs] | (self.scheduled[:reqs] > 0)
        self._change = functools.partial(self._finish, self.computed[:reqs] + counts, written)

    def changed(self, groups: int | slice, rows: int | slice | Ints, first: int, last: int) -> None:
        """The columns `first .. last` of these tables changed, so the device's copy needs them."""
        if self.device_tables is not None:
            self.device_tables.changed(groups, rows, first, last)

    def _put(self, pages: Sequence[Pages], index: int, longest: int) -> int:
        """Write pages past those that a request uses, and return the tokens that it then has room for."""
        for group, (start, end, blocks, _, _) in enumerate(pages):
            self.tables[group, index, start:end] = blocks
            self.changed(group, index, start, end)
        tokens = [pages[g].end * self.groups.tokens_per_block[g] for g in self.groups.decoder]
        return min(tokens, default=longest)

    def _holder(self, group: int, block: int) -> str:
        """The name of a request that has a block of a KV group."""
        names = self.members.names
        tables, held = self.tables[group, : len(names)], self.num_blocks[group, : len(names), None]
        is_held = (tables == block) & (np.arange(tables.shape[1]) < held)
        return names[int(is_held.any(1).argmax())]

    def _moved(self, sources: Ints, targets: Ints) -> tuple[Ints, Ints, npt.NDArray[np.int32]]:
        """The arguments for `_move`, so that the requests at `sources` move to `targets`; changes nothing."""
        numbers = self.numbers[:, sources]
        # Entries past a request's blocks are never followed, so they need not move.
        width = int(numbers[7 : 7 + self.num_blocks.shape[0]].max())
        return targets, numbers, self.tables[:, sources, :width]

    # The methods from here write a change. Each may begin again after an interrupt.

    def _take(self, members: Members, index: int, pages: Sequence[Pages], capacity: int) -> None:
        for group, (_, end, blocks, held, null_end) in enumerate(pages):
            self.holders.set(group, blocks, held)
            self.num_blocks[group, index] = end
            if null_end:
                self.has_null_pages = True
                self.null_ends[group, index] = null_end
                self.first_served[index] = self.computed[index]
        self.capacity[index] = capacity
        self._members = members

    def _free(
        self, index: int, group: int, freed: npt.NDArray[np.int32], holders: Held, numbers: Ints
    ) -> None:
        self.holders.set(group, freed, holders)
        self.changed(group, index, 0, freed.size)
        self.tables[group, index, : freed.size] = 0
        self.numbers[:, index] = numbers

    def _leave(
        self,
        req_id: str,
        held: Sequence[tuple[npt.NDArray[np.int32], Held]],
        move: tuple[Ints, Ints, npt.NDArray[np.int32]] | None,
        members: Members,
    ) -> None:
        for group, (blocks, holders) in enumerate(held):
            self.holders.set(group, blocks, holders)
        self.index.pop(req_id, None)
        self.placeholders.pop(req_id, None)
        if move is None:
            self._members = members
        else:
            self._move(*move, members)

    def _move(self, targets: Ints, numbers: Ints, tables: npt.NDArray[np.int32], members: Members) -> None:
        self.numbers[:, targets] = numbers
        width = tables.shape[2]
        self.changed(slice(None), targets, 0, width)
        self.tables[:, targets, :width] = tables
        self.index.update((members.names[target], target) for target in targets.tolist())
        self._members = members

    def _begin(self, names: tuple[str, ...], scheduled: Ints, move: _Move | None) -> None:
        if move is not None:
            self._move(*move)
        self.scheduled[: scheduled.size] = scheduled
        self.stepped = names

    def _finish(self, computed: Ints, written: Ints) -> None:
        self.computed[: computed.size] = computed
        self.encoder_written[: written.size] = written
        self.stepped = None
