"""The block tables on a device: kept between steps, each of which sends the changes only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from attnplug._system.one_commit import NotCopied
from attnplug.ops.buffers import CpuGpuBuffer

_Ints = npt.NDArray[np.int64]

_ENTRIES_PER_ROW = 16
"""Changed entries, on average over all rows, up to which a step sends them one by one; each has its place with it."""


class DeviceTables(NotCopied):
    """The device's copy of the block tables of a builder.

    The copy changes on the device's current stream, after the work of earlier steps there.

    Args:
        host: int32 `[G, max_num_seqs, max_blocks]`; whoever changes it calls `changed`.
        device: of the copy.
    """

    def __init__(self, host: npt.NDArray[np.int32], device: torch.device) -> None:
        self._host, self._device = host, device
        groups, rows, width = host.shape
        self.tables = torch.zeros(host.shape, dtype=torch.int32, device=device)
        self._step = torch.empty(host.size, dtype=torch.int32, device=device)
        self._received: torch.Tensor | None = None
        # The changed columns of each row; none if the first is not before the last.
        self._first = np.full((groups, rows), width, dtype=np.int64)
        self._last = np.zeros((groups, rows), dtype=np.int64)
        self._few = min(host.size, max(_ENTRIES_PER_ROW * groups * rows, 1 << 12))
        self._counter = np.arange(self._few, dtype=np.int64)

    def staging(self) -> CpuGpuBuffer:
        """A buffer for the changes of a step, int32, large enough for all rows."""
        groups, rows, width = self._host.shape
        size = max(3 * self._few, 2 * rows + groups * rows * width)
        made = CpuGpuBuffer(size, dtype=torch.int32, device=self._device)
        if made.gpu is not made.cpu:
            # Each step reads what it received before the next one sends, so one device buffer is enough.
            made.gpu = self._received = made.gpu if self._received is None else self._received
        return made

    def changed(self, group: int | slice, rows: int | _Ints | slice, first: int, last: int) -> None:
        """Columns `first .. last` of these rows changed on the host."""
        if isinstance(group, int) and isinstance(rows, int):
            # Of two numbers alone, Python knows the smaller one sooner than numpy.
            if first < self._first[group, rows]:
                self._first[group, rows] = first
            if last > self._last[group, rows]:
                self._last[group, rows] = last
            return
        self._first[group, rows] = np.minimum(self._first[group, rows], first)
        self._last[group, rows] = np.maximum(self._last[group, rows], last)

    def send(self, staging: CpuGpuBuffer, reqs: int, width: int) -> torch.Tensor:
        """Send the changes of the first `reqs` requests, without waiting.

        Returns:
            Their tables, int32 `[G, reqs, width]` in one piece, because kernels may refuse a part of a wider table. They
            are valid until the next call.
        """
        self._update(staging, reqs)
        groups = self._host.shape[0]
        made = self._step[: groups * reqs * width].view(groups, reqs, width)
        return made.copy_(self.tables[:, :reqs, :width])

    def _update(self, staging: CpuGpuBuffer, reqs: int) -> None:
        groups, rows, width = self._host.shape
        first, last = self._first[:, :reqs], self._last[:, :reqs]
        counts = np.maximum(last - first, 0)
        total = int(counts.sum())
        if not total:
            return
        if total <= self._few:
            parts = np.flatnonzero(counts)
            lengths = counts.reshape(-1)[parts]
            group, row = np.divmod(parts, reqs)
            begins = (group * rows + row) * width + first[group, row]
            places, entries = _packed(staging, total, total)
            np.add(
                self._counter[:total], np.repeat(begins - (lengths.cumsum() - lengths), lengths), out=places
            )
            # In this mode numpy writes to the buffer itself.
            np.take(self._host.reshape(-1), places, out=entries, mode="clip")
            self.tables.view(-1).index_copy_(0, *_sent(staging, total, total))
        else:
            some, most = np.flatnonzero(counts.any(0)), int(last.max())
            size = groups * some.size * most
            places, entries = _packed(staging, some.size, size)
            places[...] = some
            entries.reshape(groups, some.size, most)[...] = self._host[:, some, :most]
            sent_places, sent = _sent(staging, some.size, size)
            self.tables[:, :, :most].index_copy_(1, sent_places, sent.view(groups, some.size, most))
        # Set last, so that changes that were not sent stay marked.
        first[...], last[...] = width, 0


def _packed(staging: CpuGpuBuffer, places: int, entries: int) -> tuple[_Ints, npt.NDArray[np.int32]]:
    """Room for int64 places and, behind them, int32 entries: one copy sends both."""
    return staging.np[: 2 * places].view(np.int64), staging.np[2 * places : 2 * places + entries]


def _sent(staging: CpuGpuBuffer, places: int, entries: int) -> tuple[torch.Tensor, torch.Tensor]:
    sent = staging.copy_to_gpu(2 * places + entries)
    return sent[: 2 * places].view(torch.int64), sent[2 * places :]
