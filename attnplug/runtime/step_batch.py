"""The requests in flight, in persistent buffers, and the batch of each step made from them in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.errors import BatchError
from attnplug.core.metadata import PAD_SLOT_ID, CommonAttentionMetadata
from attnplug.runtime.buffers import CpuGpuBuffer, StagingRing
from attnplug.runtime.requests import RequestTable

__all__ = ["StepBatch", "StepBatchBuilder"]

_Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(slots=True, eq=False)
class StepBatch:
    """One step's batch over all KV groups. Its tensors are the builder's and last until the next step.

    Args:
        common: the batch as KV group `common_group` sees it, the first of decoder tokens.
        block_tables: int32 `[G, R, max_blocks]`, the tables of the G KV groups.
        slot_mappings: int64 `[G, S]`; of each group the first `num_slots` hold.
        num_slots: the batch's tokens; for a cross group the encoder tokens written in this step,
            request after request.
        cross_groups: the KV groups that hold encoder tokens.
        req_ids: the requests in order.
    """

    common: CommonAttentionMetadata
    common_group: int
    block_tables: torch.Tensor
    slot_mappings: torch.Tensor
    num_slots: tuple[int, ...]
    cross_groups: frozenset[int]
    req_ids: tuple[str, ...]

    def of_group(self, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Block table `[R, max_blocks]` and slots of one KV group."""
        return self.block_tables[group], self.slot_mappings[group, : self.num_slots[group]]


class _Staging:
    """What is filled anew each step: small, and copied to the device without waiting."""

    def __init__(
        self, seqs: int, slots: int, groups: int, table: tuple[int, ...], device: torch.device
    ) -> None:
        self.query_start_loc = CpuGpuBuffer(seqs + 1, dtype=torch.int32, device=device)
        self.seq_lens = CpuGpuBuffer(seqs, dtype=torch.int32, device=device)
        self.encoder_seq_lens = CpuGpuBuffer(seqs, dtype=torch.int32, device=device)
        self.slots = CpuGpuBuffer(groups, slots, dtype=torch.int64, device=device, fill=PAD_SLOT_ID)
        # On the CPU the table itself is the device's copy.
        shape = table if device.type != "cpu" else (0,)
        self.tables = CpuGpuBuffer(*shape, dtype=torch.int32, device=device)


class StepBatchBuilder(RequestTable):
    """Holds the requests in flight and makes each step's batch without a Python loop over them.

    Args:
        max_num_seqs: most requests at once.
        max_num_batched_tokens: most tokens in a step.
        max_model_len: longest sequence.
        block_sizes: tokens per page of each KV group.
        device: where the batch goes.
        cross_groups: the KV groups that hold encoder tokens.
        max_encoder_len: longest encoder sequence, where there are cross groups.

    Raises:
        BatchError: a size below 1, no KV group, a cross group that is none.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_sizes: Sequence[int],
        device: torch.device | str = "cpu",
        cross_groups: Sequence[int] = (),
        max_encoder_len: int = 0,
    ) -> None:
        super().__init__(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            block_sizes=block_sizes,
            device=device,
            cross_groups=cross_groups,
            max_encoder_len=max_encoder_len,
        )
        slots = max(max_num_batched_tokens, max_num_seqs * max_encoder_len if self.cross_groups else 0)
        shape = self._tables.shape
        staging = [_Staging(max_num_seqs, slots, shape[0], shape, self.device) for _ in range(2)]
        self._ring = StagingRing(staging, self.device)
        self._rows = np.arange(max(max_num_seqs + 1, slots), dtype=np.int64)
        self._shared_size = len({self.block_sizes[g] for g in self._self_groups}) == 1

    def step(
        self, num_scheduled_tokens: Mapping[str, int] | Sequence[int] | npt.NDArray[Any] | int = 1
    ) -> StepBatch:
        """The batch in which every request runs its scheduled tokens.

        Args:
            num_scheduled_tokens: new tokens by request, in the order of the requests, or for all.

        Raises:
            BatchError: unlike numbers of requests, negative counts, too many tokens, a sequence past
                max_model_len, or a request without pages for its tokens.
        """
        reqs = self.num_reqs
        scheduled = self._counts(num_scheduled_tokens)
        computed = self._computed[:reqs]
        lengths = computed + scheduled
        longest = int(lengths.max(initial=0))
        self._check(scheduled, lengths, longest)
        staging: _Staging = self._ring.acquire()
        starts = staging.query_start_loc.np
        np.cumsum(scheduled, out=starts[1 : reqs + 1])
        tokens = int(starts[reqs])
        staging.seq_lens.np[:reqs] = lengths
        max_query = int(scheduled.max(initial=0))
        self._fill_slots(staging, scheduled, computed, tokens, max_query)
        return self._batch(staging, tokens, max_query, longest)

    def finish_step(self, accepted: Sequence[int] | npt.NDArray[Any] | None = None) -> None:
        """Count the last step's tokens as computed: all, or only those accepted of a speculation.

        Raises:
            BatchError: other numbers of requests than in the step, or more accepted than scheduled.
        """
        counts = self._scheduled if accepted is None else np.asarray(accepted, dtype=np.int64)
        if counts.shape != self._scheduled.shape or counts.size != self.num_reqs:
            raise BatchError(
                "accepted", counts.size, f"must be {self._scheduled.size}, the requests of the step"
            )
        if (counts > self._scheduled).any() or (counts < 0).any():
            raise BatchError(
                "accepted", counts.tolist(), f"must lie within the scheduled {self._scheduled.tolist()}"
            )
        self._computed[: counts.size] += counts
        self._encoder_written[: counts.size] = True
        self._scheduled = counts[:0]

    def profile_step(self, num_reqs: int, num_tokens: int) -> StepBatch:
        """A batch of made-up requests for memory profiling: every slot -1, the null block for pages.

        Raises:
            BatchError: requests in flight, or more than the builder's limits.
        """
        if self.num_reqs:
            raise BatchError("num_reqs", self.num_reqs, "requests are in flight; profile before adding any")
        if not 1 <= num_reqs <= min(self.max_num_seqs, num_tokens):
            raise BatchError("num_reqs", num_reqs, f"must lie in 1 .. {min(self.max_num_seqs, num_tokens)}")
        if num_tokens > min(self.max_num_batched_tokens, num_reqs * self.max_model_len):
            raise BatchError("num_tokens", num_tokens, "is past what a step may hold")
        counts = np.full(num_reqs, num_tokens // num_reqs, dtype=np.int64)
        counts[: num_tokens % num_reqs] += 1
        staging: _Staging = self._ring.acquire()
        np.cumsum(counts, out=staging.query_start_loc.np[1 : num_reqs + 1])
        staging.seq_lens.np[:num_reqs] = counts
        staging.slots.np[:, :num_tokens] = PAD_SLOT_ID
        self._tables[:, :num_reqs] = 0
        self.req_ids = [f"profile-{index}" for index in range(num_reqs)]
        try:
            return self._batch(staging, num_tokens, int(counts[0]), int(counts[0]))
        finally:
            self.req_ids = []

    def _counts(self, given: Mapping[str, int] | Sequence[int] | npt.NDArray[Any] | int) -> _Ints:
        if isinstance(given, int):
            counts = np.full(self.num_reqs, given, dtype=np.int64)
        elif isinstance(given, Mapping):
            try:
                counts = np.fromiter(map(given.__getitem__, self.req_ids), np.int64, self.num_reqs)
            except KeyError as missing:
                raise BatchError("num_scheduled_tokens", missing.args[0], "has no count") from None
        else:
            counts = np.asarray(given, dtype=np.int64)
        if counts.shape != (self.num_reqs,):
            raise BatchError(
                "num_scheduled_tokens", counts.size, f"must be one count for each of {self.num_reqs} requests"
            )
        self._scheduled = counts
        return counts

    def _check(self, scheduled: _Ints, lengths: _Ints, longest: int) -> None:
        if scheduled.size == 0:
            return
        if scheduled.min() < 0:
            worst = int(scheduled.argmin())
            raise BatchError(
                "num_scheduled_tokens",
                int(scheduled[worst]),
                f"must not be negative (request {self.req_ids[worst]})",
            )
        if (total := int(scheduled.sum())) > self.max_num_batched_tokens:
            limit = f"must not pass max_num_batched_tokens={self.max_num_batched_tokens}"
            raise BatchError("num_scheduled_tokens", total, limit)
        if longest > self.max_model_len:
            name = self.req_ids[int(lengths.argmax())]
            raise BatchError(
                "seq_len", longest, f"of request {name} is past max_model_len={self.max_model_len}"
            )
        if (lengths > self._capacity[: lengths.size]).any():
            self._refuse_short(lengths, self._self_groups)
        if self.cross_groups:
            self._refuse_short(self._encoder_lens[: lengths.size], self.cross_groups)

    def _refuse_short(self, needed: npt.NDArray[Any], groups: Iterable[int]) -> None:
        for group in groups:
            held = self._num_blocks[group, : needed.size] * self.block_sizes[group]
            if (needed > held).any():
                worst = int((needed > held).argmax())
                limit = f"is past the {held[worst]} tokens of request {self.req_ids[worst]}'s pages in KV group {group}"
                raise BatchError("seq_len", int(needed[worst]), limit, "append_blocks first")

    def _fill_slots(
        self, staging: _Staging, scheduled: _Ints, computed: _Ints, tokens: int, max_query: int
    ) -> None:
        reqs = scheduled.size
        if tokens == reqs and max_query == 1:
            rows, positions = self._rows[:reqs], computed
        else:
            rows = np.repeat(self._rows[:reqs], scheduled)
            shift = computed - staging.query_start_loc.np[:reqs]
            positions = self._rows[:tokens] + np.repeat(shift, scheduled)
        if self._shared_size and not self.cross_groups:
            page, offset = np.divmod(positions, self.block_sizes[0])
            page += rows * self._tables.shape[2]
            slots = staging.slots.np[:, :tokens]
            np.multiply(self._flat_tables.take(page, axis=1), self.block_sizes[0], out=slots)
            slots += offset
        else:
            for group in self._self_groups:
                slots = self._slots(group, self.block_sizes[group], rows, positions)
                staging.slots.np[group, :tokens] = slots

    def _slots(self, group: int, size: int, rows: _Ints, positions: _Ints) -> _Ints:
        page, offset = np.divmod(positions, size)
        blocks = self._tables[group, rows, page]
        slots: _Ints = np.multiply(blocks, size, dtype=np.int64)
        slots += offset
        return slots

    def _encoder_slots(self, staging: _Staging, group: int) -> int:
        """Fill the slots of the encoder tokens written in this step; how many there are."""
        reqs = self.num_reqs
        new = np.where(self._encoder_written[:reqs], 0, self._encoder_lens[:reqs]).astype(np.int64)
        count = int(new.sum())
        if count:
            starts = np.cumsum(new) - new
            rows = np.repeat(self._rows[:reqs], new)
            positions = self._rows[:count] - np.repeat(starts, new)
            staging.slots.np[group, :count] = self._slots(group, self.block_sizes[group], rows, positions)
        return count

    def _batch(self, staging: _Staging, tokens: int, max_query: int, longest: int) -> StepBatch:
        reqs = self.num_reqs
        counts = [tokens] * len(self.block_sizes)
        for group in self.cross_groups:
            counts[group] = self._encoder_slots(staging, group)
        tables, slots = self._device_tables(staging), staging.slots.gpu[:, : max(counts)]
        if slots.device.type != "cpu":
            slots.copy_(staging.slots.cpu[:, : max(counts)], non_blocking=True)
        encoder: dict[str, Any] = {}
        if self.cross_groups:
            staging.encoder_seq_lens.np[:reqs] = self._encoder_lens[:reqs]
            encoder["encoder_seq_lens"] = staging.encoder_seq_lens.copy_to_gpu(reqs)
            encoder["encoder_seq_lens_cpu"] = staging.encoder_seq_lens.np[:reqs]
        first = self._self_groups[0] if self._self_groups else 0
        common = CommonAttentionMetadata(
            query_start_loc=staging.query_start_loc.copy_to_gpu(reqs + 1),
            query_start_loc_cpu=staging.query_start_loc.cpu[: reqs + 1],
            seq_lens=staging.seq_lens.copy_to_gpu(reqs),
            num_reqs=reqs,
            num_actual_tokens=tokens,
            max_query_len=max_query,
            max_seq_len=longest,
            block_table_tensor=tables[first],
            slot_mapping=slots[first, : counts[first]],
            seq_lens_host=staging.seq_lens.np[:reqs],
            **encoder,
        )
        self._ring.release()
        return StepBatch(common, first, tables, slots, tuple(counts), self.cross_groups, tuple(self.req_ids))

    def _device_tables(self, staging: _Staging) -> torch.Tensor:
        reqs = self.num_reqs
        if self.device.type == "cpu":
            return self._tables_cpu[:, :reqs]
        width = int(self._num_blocks[:, :reqs].max(initial=1))
        staging.tables.np[:, :reqs, :width] = self._tables[:, :reqs, :width]
        device = staging.tables.gpu
        device[:, :reqs, :width].copy_(staging.tables.cpu[:, :reqs, :width], non_blocking=True)
        return device[:, :reqs]
