"""A step's batch as FLEX reads it, and the plans that its layers share."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from attnplug.core import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    CrossAttentionSpec,
)
from attnplug.errors import BatchError
from attnplug.ops import Reach

from attnplug_flex.plan import Ints, Plan

__all__ = ["FlexMetadata", "FlexMetadataBuilder"]


@dataclasses.dataclass(eq=False)
class FlexMetadata(AttentionMetadata):
    """One step.

    Args:
        slot_mapping: int64, where new K and V go.
        block_table: int32 `[R, max_blocks]`.
        num_actual_tokens: rows of the batch.
        query_starts: host `[R + 1]`.
        seq_lens: host `[R]`.
        key_starts: host `[R + 1]`, where the keys of each request start if they come with the call.
        causal: what the batch says.
        plans: by reach, kind of keys and kind of call; filled as layers ask.
    """

    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    num_actual_tokens: int
    query_starts: Ints
    seq_lens: Ints
    key_starts: Ints
    causal: bool | None
    plans: dict[tuple[Reach, bool, bool], Plan] = dataclasses.field(default_factory=dict)

    def plan(self, reach: Reach, *, direct: bool, whole: bool) -> Plan:
        """The plan for layers of one reach, made once.

        Raises:
            BatchError: direct keys, if a request has more of them than it is long.
        """
        if (reach, direct, whole) not in self.plans:
            ends = self.seq_lens
            first = ends - np.diff(self.key_starts) if direct else np.zeros_like(ends)
            if (first < 0).any():
                worst = int(first.argmin())
                limit = f"request {worst} has more keys than its {ends[worst]} tokens"
                raise BatchError("key_start_loc", self.key_starts.tolist(), limit)
            origin = self.key_starts[1:] - ends if direct else first
            device = self.block_table.device
            self.plans[reach, direct, whole] = Plan.of(
                self.query_starts, ends, first, origin, reach, whole=whole, device=device
            )
        return self.plans[reach, direct, whole]


class FlexMetadataBuilder(AttentionMetadataBuilder[FlexMetadata]):
    """Reads a step's lengths; what depends on a layer's reach is planned when the first such layer runs."""

    supports_update_block_table = True

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlexMetadata:
        """The metadata of one step; lengths that the host does not know exactly are copied from the device.

        Raises:
            BatchError: start locations that decrease or pass `num_actual_tokens`, negative lengths.
        """
        common, reqs = common_attn_metadata, common_attn_metadata.num_reqs
        query_starts = _starts("query_start_loc_cpu", common.query_start_loc_cpu, reqs)
        if query_starts[-1] > common.num_actual_tokens:
            limit = f"must end at or before num_actual_tokens={common.num_actual_tokens}"
            raise BatchError("query_start_loc_cpu", int(query_starts[-1]), limit)
        known = common.seq_lens_host if common.seq_lens_host_exact else None
        lengths = np.asarray(common.seq_lens.cpu() if known is None else known)[:reqs].astype(np.int64)
        if lengths.size != reqs or (lengths < 0).any():
            raise BatchError("seq_lens", lengths.tolist(), f"must be {reqs} lengths of at least 0")
        key_start_loc = common.key_start_loc if common.key_start_loc_cpu is None else common.key_start_loc_cpu
        return FlexMetadata(
            slot_mapping=self._slots(common.slot_mapping, common.num_actual_tokens),
            block_table=common.block_table_tensor[:reqs],
            num_actual_tokens=common.num_actual_tokens,
            query_starts=query_starts,
            seq_lens=lengths,
            key_starts=query_starts
            if key_start_loc is None
            else _starts("key_start_loc", key_start_loc, reqs),
            causal=common.causal,
        )

    def update_block_table(
        self, metadata: FlexMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> FlexMetadata:
        """`metadata` with another group's table and slots; plans speak of positions, so they are shared."""
        return dataclasses.replace(
            metadata,
            block_table=blk_table[: metadata.seq_lens.size],
            slot_mapping=self._slots(slot_mapping, metadata.num_actual_tokens),
        )

    def _slots(self, slot_mapping: torch.Tensor, num_actual_tokens: int) -> torch.Tensor:
        # The slots of a cross layer are those of the encoder's tokens, not of the queries.
        is_cross = isinstance(self.kv_cache_spec, CrossAttentionSpec)
        return slot_mapping if is_cross else slot_mapping[:num_actual_tokens]


def _starts(name: str, locations: torch.Tensor, reqs: int) -> Ints:
    starts = locations[: reqs + 1].cpu().numpy().astype(np.int64)
    if starts.size != reqs + 1:
        raise BatchError(name, starts.size, f"must have num_reqs + 1 = {reqs + 1} entries")
    if starts[0] < 0 or (np.diff(starts) < 0).any():
        raise BatchError(name, starts.tolist(), "must not decrease")
    return starts
