"""The numbers and block tables of requests in arrays, which each call changes by one assignment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from attnplug._system.one_commit import OneCommit
from attnplug.core.arguments import instance
from attnplug.runtime.batch.placeholders import Placeholder
from attnplug.runtime.batch.staging import DeviceTables
from attnplug.runtime.caches.block_pool import BlockHolders, Held

_Ints = npt.NDArray[np.int64]


class Members(NamedTuple):
    """The names of the requests in flight, and a number that each change of them or of their order raises."""

    names: list[str]
    order: int


Pages: TypeAlias = tuple[int, int, _Ints, Held, int]
"""The new pages of a request in one KV group: first column, one past the last, blocks, the numbers of requests that hold
them, and one past the last null page (0 without any)."""


class RequestRows(OneCommit):
    """The requests in flight, one row of the tables and one column of numbers each.

    Rows and columns that no request uses may have been written by a call that was interrupted. Nobody reads them.

    Args:
        shape: of the tables: KV groups, most requests, and most pages of a request.
        num_blocks: see `BlockHolders`.
        one_pool: see `BlockHolders`.
        device: of the batches.
    """

    def __init__(
        self, shape: tuple[int, int, int], num_blocks: int | None, one_pool: bool, device: torch.device
    ) -> None:
        groups, max_num_seqs, _ = shape
        self._tables = np.zeros(shape, dtype=np.int32)
        # On the CPU a batch gets a view of this tensor, so that a step copies no table.
        self._tables_cpu = torch.from_numpy(self._tables)
        # All numbers of a request are a column, so one assignment changes them together.
        self._numbers = np.zeros((7 + 2 * groups, max_num_seqs), dtype=np.int64)
        self._computed, self._scheduled, self._capacity = self._numbers[:3]
        # Queries of this position and later ones need no page that was freed; earlier ones may.
        self._first_served = self._numbers[3]
        self._encoder_lens, self._encoder_written, self._placeholder_end = self._numbers[4:7]
        self._num_blocks = self._numbers[7 : 7 + groups]
        # One past the last null page of each request, 0 without any.
        self._null_ends = self._numbers[7 + groups :]
        self._holders = BlockHolders(
            self._tables, num_blocks, instance("one_pool", one_pool, bool), self._holder
        )
        # Without null pages, the flag spares each step a pass over its slots.
        self._has_null_pages = False
        # Both may have names that are not in flight, from a call that was interrupted.
        self._placeholders: dict[str, tuple[Placeholder, ...]] = {}
        self._index: dict[str, int] = {}
        self._members = Members([], 0)
        # On the CPU steps read the builder's own tables.
        self._device_tables = None if device.type == "cpu" else DeviceTables(self._tables, device)

    @property
    def req_ids(self) -> list[str]:
        """The names of the requests in flight, in order. A later change makes another list."""
        self._settle()
        return self._members.names

    @property
    def num_reqs(self) -> int:
        """Requests in flight."""
        self._settle()
        return len(self._members.names)

    @property
    def _order(self) -> int:
        """Other than before if requests were added, removed or moved."""
        self._settle()
        return self._members.order

    def _find(self, req_id: str) -> int | None:
        """The index of a request; None if it is not in flight."""
        self._settle()
        index, names = self._index.get(req_id), self._members.names
        return index if index is not None and index < len(names) and names[index] == req_id else None

    def _holder(self, group: int, block: int) -> str:
        """The name of a request that has a block of a KV group."""
        tables, held = self._tables[group, : self.num_reqs], self._num_blocks[group, : self.num_reqs, None]
        is_held = (tables == block) & (np.arange(tables.shape[1]) < held)
        return self._members.names[int(is_held.any(1).argmax())]

    def _moved(self, sources: _Ints, targets: _Ints) -> tuple[_Ints, _Ints, npt.NDArray[np.int32]]:
        """What `_move` writes to `targets`, so that the requests at `sources` move there; changes nothing."""
        numbers = self._numbers[:, sources]
        # Entries past a request's blocks are never followed, so they need not move.
        width = int(numbers[7 : 7 + self._num_blocks.shape[0]].max())
        return targets, numbers, self._tables[:, sources, :width]

    # The methods from here to `_changed` write a change. Each may begin again after an interrupt.

    def _enter(self, members: Members, pages: Sequence[Pages]) -> None:
        self._hold(pages)
        self._members = members

    def _append(self, index: int, pages: Sequence[Pages], capacity: int) -> None:
        self._hold(pages)
        self._count_pages(index, pages, capacity)

    def _hold(self, pages: Sequence[Pages]) -> None:
        if self._holders.is_known:
            for group, (_, _, blocks, held, _) in enumerate(pages):
                self._holders.set(group, blocks, held)

    def _count_pages(self, index: int, pages: Sequence[Pages], capacity: int) -> None:
        for group, (_, end, _, _, null_end) in enumerate(pages):
            self._num_blocks[group, index] = end
            if null_end:
                self._has_null_pages = True
                self._null_ends[group, index] = null_end
                self._first_served[index] = self._computed[index]
        self._capacity[index] = capacity

    def _free(
        self,
        index: int,
        group: int,
        freed: npt.NDArray[np.int32],
        holders: Held,
        numbers: _Ints,
    ) -> None:
        self._holders.set(group, freed, holders)
        self._changed(group, index, 0, freed.size)
        self._tables[group, index, : freed.size] = 0
        self._numbers[:, index] = numbers

    def _leave(
        self,
        req_id: str,
        held: Sequence[tuple[npt.NDArray[np.int32], Held]],
        move: tuple[_Ints, _Ints, npt.NDArray[np.int32]] | None,
        members: Members,
    ) -> None:
        for group, (blocks, holders) in enumerate(held):
            self._holders.set(group, blocks, holders)
        self._index.pop(req_id, None)
        self._placeholders.pop(req_id, None)
        if move is None:
            self._members = members
        else:
            self._move(*move, members)

    def _move(self, targets: _Ints, numbers: _Ints, tables: npt.NDArray[np.int32], members: Members) -> None:
        self._numbers[:, targets] = numbers
        width = tables.shape[2]
        self._changed(slice(None), targets, 0, width)
        self._tables[:, targets, :width] = tables
        self._index.update((members.names[target], target) for target in targets.tolist())
        self._members = members

    def _changed(self, groups: int | slice, rows: int | slice | _Ints, first: int, last: int) -> None:
        """The columns `first .. last` of these tables changed, so the device's copy needs them."""
        if self._device_tables is not None:
            self._device_tables.changed(groups, rows, first, last)
