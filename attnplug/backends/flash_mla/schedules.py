"""FlashMLA's schedules: one for a step of dense layers, in memory that CUDA graphs read again."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from attnplug._system.one_commit import NotCopied
from attnplug.backends.flash_mla.library import Library


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DenseStep:
    """The decodes of a step, all with the same number of queries.

    Args:
        queries: of each request.
        seq_lens: int32 `[R]` on the device.
        block_table: int32 `[R, max_blocks]`.
        number: of the step.
        schedules: makes the schedule.
    """

    queries: int
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    number: int
    schedules: Schedules


class Schedules(NotCopied):
    """The schedules of one builder; steps of the same shape share one, which is made again for each step.

    Args:
        library: FlashMLA.
        is_8bit: whether latents are in e4m3.
        device: of the steps.
    """

    def __init__(self, library: Library, is_8bit: bool, device: torch.device) -> None:
        self.library, self.is_8bit, self._device = library, is_8bit, device
        self._kept: dict[tuple[int, ...], Schedule] = {}
        self.one = torch.ones(1, dtype=torch.float32, device=device)
        """The scale of stored 8-bit latents, which attnplug multiplies by itself."""

    def of(self, step: DenseStep, heads: int) -> Schedule:
        """The schedule of a step for layers of `heads` heads; it is made unless it is the latest."""
        key = (*step.block_table.shape, step.queries, heads)
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = Schedule(self, step, heads)
        if kept.number != step.number:
            # A step may run after another one was built. In a capture this becomes part of the graph.
            kept.make(step)
        return kept


class Schedule:
    """The schedule of one shape of steps, and what its kernel reads in place of the step's own tensors.

    Args:
        owner: makes it.
        step: the first step.
        heads: of the layers.
    """

    number: int = -1
    scheduled: Any
    """What calls of FlashMLA take."""
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    blind: torch.Tensor | None = None
    """bool `[R, q]`, queries that see no key, which the kernel for 8-bit latents does not serve; None for 16 bits."""

    def __init__(self, owner: Schedules, step: DenseStep, heads: int) -> None:
        self._owner, self._rows = owner, step.queries * heads
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None
        if owner.is_8bit:
            # A tensor made in inference mode could not be written outside of it.
            with torch.inference_mode(False):
                device = step.seq_lens.device
                self.seq_lens = torch.ones(step.seq_lens.shape, dtype=torch.int32, device=device)
                self.block_table = torch.zeros(step.block_table.shape, dtype=torch.int32, device=device)
                self.blind = torch.zeros(
                    (*step.seq_lens.shape, step.queries), dtype=torch.bool, device=device
                )
                self._later = torch.arange(step.queries - 1, -1, -1, dtype=torch.int32, device=device)

    def make(self, step: DenseStep) -> None:
        """Fill the schedule for a step of the same shape; nothing waits for the device."""
        if self.blind is None:
            self.seq_lens, self.block_table = step.seq_lens, step.block_table
        else:
            # For a request without keys the kernel would read the page before the table's row.
            lens = step.seq_lens[:, None]
            torch.le(lens, self._later, out=self.blind)
            torch.clamp(step.seq_lens, min=1, out=self.seq_lens)
            self.block_table.copy_(step.block_table)
            self.block_table.masked_fill_(lens <= 0, 0)
        found = self._owner.library.schedule(self.seq_lens, self._rows, self._owner.is_8bit)
        if self._kept is None:
            with torch.inference_mode(False):
                self._kept = torch.empty_like(found[0]), torch.empty_like(found[1])
            self.scheduled = self._owner.library.scheduled(*self._kept)
        # Graphs read the schedule at one address.
        for kept, new in zip(self._kept, found, strict=True):
            kept.copy_(new)
        self.number = step.number
