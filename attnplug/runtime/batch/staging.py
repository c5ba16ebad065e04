"""The buffers of each step: small, packed, and copied to the device without waiting.

The block tables on a device are kept between steps, and a step sends their changes only.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attnplug._system.one_commit import NotCopied
from attnplug.core.metadata import STEP_INPUTS
from attnplug.ops.buffers import CpuGpuBuffer as CpuGpuBuffer
from attnplug.ops.buffers import StagingRing as StagingRing


class PackedBuffer(NotCopied):
    """A buffer whose first bytes are viewed in each step's shape, so that one contiguous copy sends them.

    Torch copies between strided views through pageable memory, for which the host waits if it is large.
    """

    def __init__(self, *shape: int, dtype: torch.dtype, device: torch.device) -> None:
        self._buffer = CpuGpuBuffer(math.prod(shape), dtype=dtype, device=device)

    def np(self, *shape: int) -> npt.NDArray[Any]:
        """The host side, for the caller to fill."""
        return self._buffer.np[: math.prod(shape)].reshape(shape)

    def copy_to_gpu(self, *shape: int) -> torch.Tensor:
        """Copy the host side to the device side, and return that."""
        return self._buffer.copy_to_gpu(math.prod(shape)).view(shape)


class StepFields(NotCopied):
    """Start locations, lengths and slots of a step, in one buffer that one copy sends.

    Args:
        max_num_seqs: most requests.
        groups: KV groups.
        slots: the most slots of a group.
        device: of the copy.
    """

    def __init__(self, max_num_seqs: int, groups: int, slots: int, device: torch.device) -> None:
        # Kernels load vectors of 16 bytes, so each field begins at a multiple.
        starts, lens = (-(-size // 4) * 4 for size in (max_num_seqs + 1, max_num_seqs))
        self._lens, self._fixed = starts, starts + lens
        # A slot is int64, which takes two elements of the buffer.
        self._buffer = CpuGpuBuffer(self._fixed + 2 * groups * slots, dtype=torch.int32, device=device)
        self.query_start_loc: npt.NDArray[np.int32] = self._buffer.np[:starts]
        self.seq_lens: npt.NDArray[np.int32] = self._buffer.np[starts : self._fixed]
        self._slots: npt.NDArray[np.int64] = self._buffer.np[self._fixed :].view(np.int64)
        self._sent_slots = self._buffer.gpu[self._fixed :].view(torch.int64)

    def slots(self, *shape: int) -> npt.NDArray[np.int64]:
        """The slots on the host, for the caller to fill: int64 `[G, S]`."""
        return self._slots[: math.prod(shape)].reshape(shape)

    def query_start_loc_cpu(self, reqs: int) -> torch.Tensor:
        """int32 `[reqs + 1]` on the host."""
        return self._buffer.cpu[: reqs + 1]

    def send(self, reqs: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Start locations `[reqs + 1]`, lengths `[reqs]` and slots `[G, S]` on the device."""
        size = math.prod(shape)
        sent = self._buffer.copy_to_gpu(self._fixed + 2 * size)
        lens = sent[self._lens : self._lens + reqs]
        return sent[: reqs + 1], lens, self._sent_slots[:size].view(shape)


class StepStaging(NotCopied):
    """One step's fields, on the host and on the device.

    `slots` is the most slots of one of `groups` KV groups, and `tables` a buffer for changes of the block tables.
    `inputs` are the names of the optional inputs. With `is_sharded`, each request has a number of keys on this rank,
    and with `has_rows` each token too.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        groups: int,
        slots: int,
        device: torch.device,
        tables: CpuGpuBuffer | None,
        inputs: Collection[str] = (),
        is_sharded: bool = False,
        has_rows: bool = False,
    ) -> None:
        self.fields = StepFields(max_num_seqs, groups, slots, device)
        self.tables = tables
        most = max_num_seqs, max_num_batched_tokens
        self.inputs = {
            each.name: CpuGpuBuffer(each.count(*most), *(each.width or ()), dtype=torch.int32, device=device)
            for each in STEP_INPUTS
            if each.name in inputs
        }
        self.placeholders = PackedBuffer(2, max_num_batched_tokens, dtype=torch.int64, device=device)
        reqs, rows = max_num_seqs if is_sharded else 0, max_num_batched_tokens if has_rows else 0
        self.local_lens = CpuGpuBuffer(reqs, dtype=torch.int32, device=device)
        self.row_lens = CpuGpuBuffer(rows, dtype=torch.int32, device=device)
        self.row_requests = CpuGpuBuffer(rows, dtype=torch.int64, device=device)

    def send(self, filled: Mapping[str, int]) -> dict[str, Any]:
        """The fields of a batch for the inputs that were filled, by name the number of their rows."""
        fields: dict[str, Any] = {}
        for each in STEP_INPUTS:
            if (rows := filled.get(each.name)) is not None:
                buffer = self.inputs[each.name]
                fields[each.name] = buffer.copy_to_gpu(rows)
                if each.host is not None:
                    fields[each.host] = (buffer.np if each.is_array else buffer.cpu)[:rows]
        return fields


_Ints = npt.NDArray[np.int64]

# Changed entries, on average over all rows, up to which a step sends them one by one, each with its int64 place. To send
# whole tables took most of the host's time at 512 requests and six KV groups.
_ENTRIES_PER_ROW = 16


class DeviceTables(NotCopied):
    """The device's copy of the block tables of a builder.

    The copy changes on the device's current stream, after the work of earlier steps there.

    Args:
        host: int32 `[G, max_num_seqs, max_blocks]`; call `changed` after each change.
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
            # Python compares two numbers sooner than numpy does.
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
    """Room for int64 places and, behind them, int32 entries."""
    # In one buffer, so that one copy sends both.
    return staging.np[: 2 * places].view(np.int64), staging.np[2 * places : 2 * places + entries]


def _sent(staging: CpuGpuBuffer, places: int, entries: int) -> tuple[torch.Tensor, torch.Tensor]:
    sent = staging.copy_to_gpu(2 * places + entries)
    return sent[: 2 * places].view(torch.int64), sent[2 * places :]
