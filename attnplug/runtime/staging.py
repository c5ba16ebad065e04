"""The buffers of each step: small, packed, and copied to the device without waiting."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attnplug.ops.buffers import CpuGpuBuffer as CpuGpuBuffer
from attnplug.ops.buffers import StagingRing as StagingRing


class PackedBuffer:
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


class StepStaging:
    """One step's fields, on the host and on the device.

    `slots` is the most slots of a KV group, `tables` the shape `(G, max_num_seqs, max_blocks)` of the block tables.
    With `mm_prefix`, each token has a multimodal span. With `is_sharded`, each request has a number of keys on this
    rank, and with `has_rows` each token too.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        slots: int,
        tables: tuple[int, ...],
        device: torch.device,
        mm_prefix: bool = False,
        is_sharded: bool = False,
        has_rows: bool = False,
    ) -> None:
        self.query_start_loc = CpuGpuBuffer(max_num_seqs + 1, dtype=torch.int32, device=device)
        self.seq_lens = CpuGpuBuffer(max_num_seqs, dtype=torch.int32, device=device)
        self.encoder_seq_lens = CpuGpuBuffer(max_num_seqs, dtype=torch.int32, device=device)
        self.logits_indices = CpuGpuBuffer(max_num_batched_tokens, dtype=torch.int32, device=device)
        self.slots = PackedBuffer(tables[0], slots, dtype=torch.int64, device=device)
        self.placeholders = PackedBuffer(2, max_num_batched_tokens, dtype=torch.int64, device=device)
        spans = max_num_batched_tokens if mm_prefix else 0
        self.mm_prefix_spans = CpuGpuBuffer(spans, 2, dtype=torch.int32, device=device)
        reqs, rows = max_num_seqs if is_sharded else 0, max_num_batched_tokens if has_rows else 0
        self.local_lens = CpuGpuBuffer(reqs, dtype=torch.int32, device=device)
        self.row_lens = CpuGpuBuffer(rows, dtype=torch.int32, device=device)
        self.row_requests = CpuGpuBuffer(rows, dtype=torch.int64, device=device)
        # On the CPU steps read the builder's own tables, so the staging buffer is empty there.
        self._on_device = device.type != "cpu"
        self._tables = PackedBuffer(*tables if self._on_device else (0,), dtype=torch.int32, device=device)

    def send_tables(
        self, host: npt.NDArray[np.int32], shared: torch.Tensor, reqs: int, width: int
    ) -> torch.Tensor:
        """The tables, int32 `[G, reqs, at least width]`, on the device; on the CPU a view of `shared`."""
        if not self._on_device:
            return shared[:, :reqs]
        shape = (host.shape[0], reqs, width)
        self._tables.np(*shape)[...] = host[:, :reqs, :width]
        return self._tables.copy_to_gpu(*shape)
