"""Builds a step's metadata for state layers on TORCH: the runs of its requests, on the host."""

from __future__ import annotations

import dataclasses

import torch

from attnplug.core.metadata import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata
from attnplug.core.state.runs import StateRun, state_runs


@dataclasses.dataclass(eq=False)
class TorchStateMetadata(AttentionMetadata):
    """One step of state layers: single tokens, which run together, and longer queries, which run one by one.

    Args:
        slot_mapping: int64 `[T]`, as in the batch.
        singles: the runs of one token.
        longer: the runs of several tokens.
    """

    slot_mapping: torch.Tensor
    singles: list[StateRun]
    longer: list[StateRun]


class TorchStateBuilder(AttentionMetadataBuilder[TorchStateMetadata]):
    """Builds TorchStateMetadata; it takes batches in any order."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TorchStateMetadata:
        """The metadata of one step; pages that the host does not know are copied from the device.

        Raises:
            BatchError: the step has no state pages.
        """
        runs = state_runs(common_attn_metadata)
        return TorchStateMetadata(
            slot_mapping=common_attn_metadata.slot_mapping,
            singles=[run for run in runs if run.end - run.begin == 1],
            longer=[run for run in runs if run.end - run.begin > 1],
        )
