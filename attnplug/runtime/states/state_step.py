"""One step of the layers that keep a state: where each request starts, and which page gets the state after each token."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from attnplug.core.arguments import instance
from attnplug.core.errors import BatchError
from attnplug.core.metadata import PAD_SLOT_ID, CommonAttentionMetadata
from attnplug.runtime.batch.step_batch import Stamp, StepBatch, check_current
from attnplug.runtime.caches.block_pool import BlockPool


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StateStep:
    """The pages of a step.

    Args:
        common: the step's batch, with `state_pages` and with slots that are pages.
        overwrites: whether a page that a request starts from is also written, so that a layer can run once only.
        ran: the layers that ran.
        stamps: the step of the table that it belongs to; a runtime refuses it once the table gave its pages away. Empty
            for padding.
        pool: that has the pages; None for padding.
    """

    common: CommonAttentionMetadata
    overwrites: bool
    ran: set[str] = dataclasses.field(default_factory=set)
    stamps: tuple[Stamp, ...] = ()
    pool: BlockPool | None = None

    @classmethod
    def of(
        cls,
        common: CommonAttentionMetadata,
        reads: Sequence[int],
        slots: Sequence[int],
        stamps: tuple[Stamp, ...] = (),
        pool: BlockPool | None = None,
    ) -> StateStep:
        """The step of a batch.

        Args:
            common: the batch.
            reads: by request, the page that it starts from; -1 starts from zeros.
            slots: by token, the page that gets the state after it, or -1.
            stamps: of the table.
            pool: of the table.
        """
        device = common.query_start_loc.device
        pages = torch.tensor(reads, dtype=torch.int32, device="cpu")
        stored = torch.tensor(slots, dtype=torch.int64, device="cpu")
        written = common.changed(
            causal=None,
            state_pages=pages.to(device, non_blocking=True),
            state_pages_cpu=pages,
            slot_mapping=stored.to(device, non_blocking=True),
            state_slots_cpu=stored,
        )
        overwrites = not {*reads, PAD_SLOT_ID}.isdisjoint({*slots} - {PAD_SLOT_ID})
        return cls(written, overwrites, stamps=stamps, pool=pool)

    @classmethod
    def padding(cls, common: CommonAttentionMetadata) -> StateStep:
        """The step of a dummy batch, for profiles and warm-ups: it reads and writes no page of a request."""
        return cls.of(common, [PAD_SLOT_ID] * common.num_reqs, [PAD_SLOT_ID] * common.num_actual_tokens)


def batch_of(
    names: Sequence[str], scheduled: Sequence[int], computed: Sequence[int]
) -> CommonAttentionMetadata:
    """The batch of a model without attention layers, on the host: requests, their new tokens and those before."""
    starts = np.concatenate([[0], np.cumsum(scheduled)]).astype(np.int32)
    lengths = (np.asarray(scheduled) + np.asarray(computed)).astype(np.int32)
    locations, tokens = torch.from_numpy(starts), int(starts[-1])
    return CommonAttentionMetadata(
        query_start_loc=locations,
        query_start_loc_cpu=locations,
        seq_lens=torch.from_numpy(lengths),
        num_reqs=len(names),
        num_actual_tokens=tokens,
        max_query_len=max(scheduled, default=0),
        max_seq_len=int(lengths.max(initial=0)),
        block_table_tensor=torch.zeros(len(names), 0, dtype=torch.int32),
        slot_mapping=torch.full((tokens,), PAD_SLOT_ID, dtype=torch.int64),
        seq_lens_host=lengths,
    )


def check_state_step(states: object, batch: StepBatch | None, pool: BlockPool, device: torch.device) -> None:
    """BatchError unless these are the pages of a step of `batch`, on its device and in this pool."""
    step = instance("states", states, StateStep, remedy="make it by StateTable.step")
    check_current("states", step.stamps)
    common, num_states = step.common, pool.num_blocks
    if step.pool is not None and step.pool is not pool:
        limit = "has pages of another pool"
        raise BatchError(
            "states", f"{common.num_reqs} requests", limit, "make it by the table of this runtime"
        )
    if batch is not None and common.query_start_loc is not batch.common.query_start_loc:
        limit = "is of another batch"
        raise BatchError("states", f"{common.num_reqs} requests", limit, "make it by StateTable.step(batch)")
    if common.query_start_loc.device != device:
        found = str(common.query_start_loc.device)
        raise BatchError("states.common.device", found, f"must be {device}, the runtime's")
    for field in ("state_pages_cpu", "state_slots_cpu"):
        pages = getattr(common, field)
        if not isinstance(pages, torch.Tensor):
            raise BatchError(f"states.common.{field}", pages, "must be a tensor of pages on the host")
        if pages.numel() and not -1 <= int(pages.min()) <= int(pages.max()) < num_states:
            worst = int(pages.max()) if int(pages.max()) >= num_states else int(pages.min())
            raise BatchError(
                f"states.common.{field}", worst, f"must be in -1 .. {num_states - 1}, pages of the pool"
            )
        if bool((pages == 0).any()):
            raise BatchError(f"states.common.{field}", 0, "is the null page, which no request has")
