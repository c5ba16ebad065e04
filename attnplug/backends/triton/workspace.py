"""Device buffers that a builder's steps share: plans of shares, partial results and opened pages."""

from __future__ import annotations

import torch

from attnplug._system.one_commit import NotCopied
from attnplug.backends.triton.metadata import TritonMetadata
from attnplug.backends.triton.shares import Shares


class Workspace(NotCopied):
    """The buffers of one builder, for `max_num_seqs` requests; they grow with larger batches."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.shares = Shares(max_num_seqs, device)
        self.most_reqs = max_num_seqs
        """The requests that buffers were made for."""
        self._device = device
        self._steps = 0
        self._opened = torch.empty(0, dtype=torch.uint8, device=device)
        self._opened_table = torch.empty(0, dtype=torch.int32, device=device)

    def begin_step(self, metadata: TritonMetadata) -> None:
        """Number the step, and make the plans that layers used in steps of equally many and long requests."""
        self._steps += 1
        metadata.step = metadata.decode_shares.number = metadata.other_shares.number = self._steps
        self.shares.begin_step(metadata.decode_shares)
        self.shares.begin_step(metadata.other_shares)

    def opened(self, elements: int, entries: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Flat buffers for the opened keys and values of a layer, so many elements of each, and for their block tables.

        Layers run one after another, so each writes over what the last one opened.
        """
        size = 2 * elements * dtype.itemsize
        if self._opened.numel() < size:
            self._opened = torch.empty(size, dtype=torch.uint8, device=self._device)
        if self._opened_table.numel() < entries:
            self._opened_table = torch.zeros(entries, dtype=torch.int32, device=self._device)
        return self._opened[:size].view(dtype), self._opened_table[:entries]
