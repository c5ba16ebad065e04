"""A step's batch as the impl reads it: made once, for all the layers whose caches are alike."""

from __future__ import annotations

import dataclasses

import torch
from attnplug.core import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata
from attnplug.errors import BatchError


@dataclasses.dataclass(eq=False)
class AcmeMetadata(AttentionMetadata):
    """One step of R requests.

    Args:
        slot_mapping: int64 `[T]` on the device, where the K and V of each new token go.
        block_table: int32 `[R, max_blocks]` on the device, the pages of each request.
        query_starts: where the rows of each request start, and where the last ones end.
        seq_lens: tokens of each request, cached and new.
    """

    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    query_starts: list[int]
    seq_lens: list[int]


class AcmeMetadataBuilder(AttentionMetadataBuilder[AcmeMetadata]):
    """Builds the metadata of a step."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> AcmeMetadata:
        """The metadata of one step.

        Raises:
            BatchError: a step that is not causal, which no layer served here may be.
        """
        common = common_attn_metadata
        if not common.causal:
            raise BatchError("causal", common.causal, "must be True: only causal layers are served")
        reqs = common.num_reqs
        if common.seq_lens_host is not None and common.seq_lens_host_exact:
            seq_lens = common.seq_lens_host[:reqs].tolist()
        else:
            # On a GPU this waits for the device, as a backend that declares `step_safe` never may.
            seq_lens = common.seq_lens[:reqs].tolist()
        return AcmeMetadata(
            # An engine may pad its batches: rows and requests past the actual ones are not ours to touch.
            slot_mapping=common.slot_mapping[: common.num_actual_tokens],
            block_table=common.block_table_tensor[:reqs],
            query_starts=common.query_start_loc_cpu[: reqs + 1].tolist(),
            seq_lens=seq_lens,
        )
