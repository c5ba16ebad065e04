"""A step of a state layer, request by request: where each starts, and which tokens store a state."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from attnplug.core.errors import BatchError
from attnplug.core.metadata import CommonAttentionMetadata


class StateRun(NamedTuple):
    """The tokens of one request in a step."""

    begin: int
    """Its first row."""
    end: int
    """One past its last row."""
    read: int
    """The page with the state before `begin`; -1 for zeros."""
    stores: tuple[tuple[int, int], ...]
    """Rows and pages, in order of rows: the page gets the state after the row before that one."""

    def chunks(self) -> list[tuple[int, int, int]]:
        """The run in pieces that end at each stored token: first row, one past the last, and the page or -1."""
        found, begin = [], self.begin
        for end, page in self.stores:
            found.append((begin, end, page))
            begin = end
        return found if begin == self.end else [*found, (begin, self.end, -1)]


def state_runs(common: CommonAttentionMetadata) -> list[StateRun]:
    """The runs of a step, in order of rows; requests without tokens have none.

    The host reads its own copies of pages and slots, and copies those that it was not given from the device.

    Raises:
        BatchError: the step has no `state_pages`, or fewer pages or slots than requests and tokens.
    """
    starts: list[int] = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
    reads = _on_host("state_pages", common.state_pages, common.state_pages_cpu, common.num_reqs)
    slots = _on_host("slot_mapping", common.slot_mapping, common.state_slots_cpu, starts[-1])
    runs = []
    for read, (begin, end) in zip(reads, itertools.pairwise(starts), strict=True):
        if end > begin:
            stores = tuple((row + 1, slots[row]) for row in range(begin, end) if slots[row] >= 0)
            runs.append(StateRun(begin, end, read, stores))
    return runs


def _on_host(name: str, given: torch.Tensor | None, host: torch.Tensor | None, rows: int) -> list[int]:
    values = given if host is None else host
    if values is None:
        raise BatchError(name, None, "is required: the step of a layer that keeps a state")
    if values.shape[0] < rows:
        raise BatchError(name, tuple(values.shape), f"must have at least {rows} rows")
    found: list[int] = values[:rows].tolist()
    return found
