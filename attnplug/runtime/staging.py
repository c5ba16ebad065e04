"""The buffers of each step: small, packed, and copied to the device without waiting."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attnplug._system.one_commit import NotCopied
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
    With `mm_prefix`, each token has a multimodal span. With `is_sharded`, each request has a number of keys on this
    rank, and with `has_rows` each token too.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        groups: int,
        slots: int,
        device: torch.device,
        tables: CpuGpuBuffer | None,
        mm_prefix: bool = False,
        is_sharded: bool = False,
        has_rows: bool = False,
    ) -> None:
        self.fields = StepFields(max_num_seqs, groups, slots, device)
        self.tables = tables
        self.encoder_seq_lens = CpuGpuBuffer(max_num_seqs, dtype=torch.int32, device=device)
        self.logits_indices = CpuGpuBuffer(max_num_batched_tokens, dtype=torch.int32, device=device)
        self.placeholders = PackedBuffer(2, max_num_batched_tokens, dtype=torch.int64, device=device)
        spans = max_num_batched_tokens if mm_prefix else 0
        self.mm_prefix_spans = CpuGpuBuffer(spans, 2, dtype=torch.int32, device=device)
        reqs, rows = max_num_seqs if is_sharded else 0, max_num_batched_tokens if has_rows else 0
        self.local_lens = CpuGpuBuffer(reqs, dtype=torch.int32, device=device)
        self.row_lens = CpuGpuBuffer(rows, dtype=torch.int32, device=device)
        self.row_requests = CpuGpuBuffer(rows, dtype=torch.int64, device=device)
