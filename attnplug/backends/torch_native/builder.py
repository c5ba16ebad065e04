"""Builds a step's metadata for TORCH: lengths on the host, pages and slots on the device."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from attnplug.backends.impl import own_slots
from attnplug.backends.torch_native.metadata import TorchMetadata
from attnplug.core.errors import BatchError
from attnplug.core.metadata import AttentionMetadataBuilder, CommonAttentionMetadata

_Ints = npt.NDArray[np.int64]


class TorchMetadataBuilder(AttentionMetadataBuilder[TorchMetadata]):
    """Builds TorchMetadata; it takes batches in any order, without a reorder threshold."""

    supports_update_block_table: ClassVar[bool] = True

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TorchMetadata:
        """The metadata of one step; lengths unknown to the host are copied from the device.

        Raises:
            BatchError: start locations that decrease or pass `num_actual_tokens`, negative lengths.
        """
        common = common_attn_metadata
        reqs = common.num_reqs
        query_starts = _starts("query_start_loc_cpu", common.query_start_loc_cpu, reqs)
        if query_starts[-1] > common.num_actual_tokens:
            limit = f"must end at or before num_actual_tokens={common.num_actual_tokens}"
            raise BatchError("query_start_loc_cpu", int(query_starts[-1]), limit)
        keys = common.key_start_loc if common.key_start_loc_cpu is None else common.key_start_loc_cpu
        return TorchMetadata(
            slot_mapping=own_slots(self.kv_cache_spec, common.slot_mapping, common.num_actual_tokens),
            block_table=common.block_table_tensor[:reqs],
            num_actual_tokens=common.num_actual_tokens,
            query_starts=query_starts,
            seq_lens=_seq_lens(common),
            key_starts=None if keys is None else _starts("key_start_loc_cpu", keys, reqs),
            causal=common.causal,
        )

    def update_block_table(
        self, metadata: TorchMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> TorchMetadata:
        """`metadata` with another KV group's table and slots."""
        return dataclasses.replace(
            metadata,
            block_table=blk_table[: metadata.seq_lens.size],
            slot_mapping=own_slots(self.kv_cache_spec, slot_mapping, metadata.num_actual_tokens),
            plans={},
        )


def _starts(name: str, locations: torch.Tensor, reqs: int) -> _Ints:
    starts = locations[: reqs + 1].cpu().numpy().astype(np.int64)
    if starts.size != reqs + 1:
        raise BatchError(name, starts.size, f"must have num_reqs + 1 = {reqs + 1} entries")
    if starts[0] < 0 or (np.diff(starts) < 0).any():
        raise BatchError(name, starts.tolist(), "must not decrease")
    return starts


def _seq_lens(common: CommonAttentionMetadata) -> _Ints:
    reqs = common.num_reqs
    if common.seq_lens_host is not None and common.seq_lens_host_exact:
        lengths = np.asarray(common.seq_lens_host[:reqs]).astype(np.int64)
    else:
        lengths = common.seq_lens[:reqs].cpu().numpy().astype(np.int64)
    if lengths.size != reqs or (lengths < 0).any():
        raise BatchError("seq_lens", lengths.tolist(), f"must be {reqs} lengths of at least 0")
    return lengths
