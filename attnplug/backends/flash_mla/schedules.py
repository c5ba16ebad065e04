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
        max_num_seqs: requests that tables have room for at first.
    """

    def __init__(self, library: Library, is_8bit: bool, device: torch.device, max_num_seqs: int) -> None:
        self.library, self.is_8bit, self._device = library, is_8bit, device
        self._reqs = max_num_seqs
        self._kept: dict[tuple[int, ...], Schedule] = {}
        self._tables: dict[int, torch.Tensor] = {}
        self.one = torch.ones(1, dtype=torch.float32, device=device)
        """The scale of stored 8-bit latents, which attnplug multiplies by itself."""
        self.table_step = -1
        """The step whose table was written last, where schedules share the memory for tables."""

    def of(self, step: DenseStep, heads: int) -> Schedule:
        """The schedule of a step for layers of `heads` heads; it is made unless it is the latest."""
        reqs, width = step.block_table.shape
        key = reqs, step.queries, heads, width if self.is_8bit else 0
        kept = self._kept.get(key)
        if kept is None:
            made = EightBitSchedule if self.is_8bit else Schedule
            kept = self._kept[key] = made(self, step, heads)
        # A step may run after another one was built. In a capture this becomes part of the graph.
        if not kept.is_of(step):
            kept.make(step)
        return kept

    def table(self, reqs: int, width: int) -> torch.Tensor:
        """int32 `[reqs, width]`, in memory that all tables of this width share."""
        buffer = self._tables.get(width)
        if buffer is None or buffer.shape[0] < reqs:
            # Views keep an outgrown buffer alive, as graphs read it.
            buffer = self._tables[width] = self.ints(max(reqs, self._reqs), width)
        return buffer[:reqs]

    def ints(self, *shape: int) -> torch.Tensor:
        """Zeros in int32 for many steps."""
        # A tensor made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=torch.int32, device=self._device)


class Schedule:
    """The schedule of one shape of steps, and the tensors that its kernel reads.

    Args:
        owner: makes it.
        step: the first step.
        heads: of the layers.
    """

    scheduled: Any
    """What calls of FlashMLA take."""
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    blind: torch.Tensor | None = None
    """bool `[R, q]`, queries that see no key, if the kernel does not serve them."""

    def __init__(self, owner: Schedules, step: DenseStep, heads: int) -> None:
        self._owner, self._rows = owner, step.queries * heads
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None
        self._number = -1

    def is_of(self, step: DenseStep) -> bool:
        """Whether it was made for this step, and still is."""
        return self._number == step.number

    def make(self, step: DenseStep) -> None:
        """Fill the schedule for a step of the same shape; nothing waits for the device."""
        self._read(step)
        found = self._owner.library.schedule(self.seq_lens, self._rows, self._owner.is_8bit)
        if self._kept is None:
            self._kept = self._owner.ints(*found[0].shape), self._owner.ints(*found[1].shape)
            self.scheduled = self._owner.library.scheduled(*self._kept)
        # Graphs read the schedule at one address.
        for kept, new in zip(self._kept, found, strict=True):
            kept.copy_(new)
        self._number = step.number

    def _read(self, step: DenseStep) -> None:
        self.seq_lens, self.block_table = step.seq_lens, step.block_table


class EightBitSchedule(Schedule):
    """A schedule for latents in e4m3, whose kernel reads the page before a table's row if a request has no key."""

    def __init__(self, owner: Schedules, step: DenseStep, heads: int) -> None:
        super().__init__(owner, step, heads)
        reqs, width = step.block_table.shape
        self.seq_lens, self.block_table = owner.ints(reqs), owner.table(reqs, width)
        self._later = torch.arange(step.queries - 1, -1, -1, device=self.seq_lens.device)
        with torch.inference_mode(False):
            self._blind = torch.zeros(reqs, step.queries, dtype=torch.bool, device=self.seq_lens.device)
        self.blind = self._blind

    def is_of(self, step: DenseStep) -> bool:
        """As Schedule.is_of: the table is shared with other schedules."""
        return super().is_of(step) and self._owner.table_step == step.number

    def _read(self, step: DenseStep) -> None:
        lens = step.seq_lens[:, None]
        torch.le(lens, self._later, out=self._blind)
        # Such a request gets one key of page 0, and its output is replaced.
        torch.clamp(step.seq_lens, min=1, out=self.seq_lens)
        self.block_table.copy_(step.block_table)
        self.block_table.masked_fill_(lens <= 0, 0)
        self._owner.table_step = step.number
