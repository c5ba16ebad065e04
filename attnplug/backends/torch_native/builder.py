"""Builds a step's metadata for TORCH: lengths on the host, pages and slots on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from attnplug.backends.impl import check_prefix, own_slots
from attnplug.backends.torch_native.decode import SHORT_QUERY
from attnplug.backends.torch_native.metadata import TorchMetadata
from attnplug.core.errors import BatchError
from attnplug.core.metadata import AttentionMetadataBuilder, CommonAttentionMetadata
from attnplug.ops.checks import check_spans, check_step_sizes

_Ints = npt.NDArray[np.int64]

# Both are measured on a CPU: over so many keys of single heads, of all
# requests, the gathers that a cascade spares cost more than its merge.
_SHARED_KEYS = 256
"""The shortest prefix worth a cascade."""
_SPARED_KEYS = 3 << 13


class TorchMetadataBuilder(AttentionMetadataBuilder[TorchMetadata]):
    """Builds TorchMetadata; it takes batches in any order, without a reorder threshold."""

    supports_update_block_table: ClassVar[bool] = True

    @property
    def build_key(self) -> Hashable:
        """Equal for all layers: plans are made later, from the layer's own spec."""
        return ()

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TorchMetadata:
        """The metadata of one step; lengths unknown to the host are copied from the device.

        Raises:
            BatchError: start locations that decrease or pass `num_actual_tokens`, negative lengths, a prefix of
                tokens that a request has not computed, or fewer multimodal spans than tokens.
        """
        common = common_attn_metadata
        self.check_cut(common)
        check_step_sizes(common)
        reqs = common.num_reqs
        query_starts = _starts("query_start_loc_cpu", common.query_start_loc_cpu, reqs)
        if query_starts[-1] > common.num_actual_tokens:
            limit = f"must end at or before num_actual_tokens={common.num_actual_tokens}"
            raise BatchError("query_start_loc_cpu", int(query_starts[-1]), limit)
        keys = common.key_start_loc if common.key_start_loc_cpu is None else common.key_start_loc_cpu
        lengths = _seq_lens(common)
        check_prefix(common_prefix_len, lengths, np.diff(query_starts))
        return TorchMetadata(
            slot_mapping=own_slots(self.kv_cache_spec, common.slot_mapping, common.num_actual_tokens),
            block_table=common.block_table_tensor[:reqs],
            num_actual_tokens=common.num_actual_tokens,
            query_starts=query_starts,
            seq_lens=lengths,
            key_starts=None if keys is None else _starts("key_start_loc_cpu", keys, reqs),
            causal=common.causal,
            common_prefix_len=common_prefix_len,
            spans=_spans(common),
            selection=common.selection,
        )

    def use_cascade_attention(
        self,
        common_prefix_len: int,
        query_lens: npt.NDArray[np.int32],
        num_query_heads: int,
        num_kv_heads: int,
        use_alibi: bool,
        use_sliding_window: bool,
        use_local_attention: bool,
        num_sms: int,
        dcp_world_size: int,
    ) -> bool:
        """Whether so many short queries share so many keys that one gather for all costs less than the merge."""
        # Long queries gain nothing: one fused call attends the keys of a request.
        # Under context parallelism a rank has a part of the prefix only.
        queries = query_lens[query_lens > 0]
        is_short = bool((queries <= SHORT_QUERY).all())
        spared = common_prefix_len * (queries.size - 1) * num_kv_heads
        is_large = common_prefix_len >= _SHARED_KEYS and spared >= _SPARED_KEYS
        return dcp_world_size == 1 and is_short and is_large

    def update_block_table(
        self, metadata: TorchMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> TorchMetadata:
        """`metadata` with another KV group's table and slots."""
        return dataclasses.replace(
            metadata,
            block_table=blk_table[: metadata.seq_lens.size],
            slot_mapping=own_slots(self.kv_cache_spec, slot_mapping, metadata.num_actual_tokens),
            # Gather plans have places of the former table.
            plans={},
        )


def _starts(name: str, locations: torch.Tensor, reqs: int) -> _Ints:
    starts = locations[: reqs + 1].cpu().numpy().astype(np.int64)
    if starts.size != reqs + 1:
        raise BatchError(name, starts.size, f"must have num_reqs + 1 = {reqs + 1} entries")
    if starts[0] < 0 or (np.diff(starts) < 0).any():
        raise BatchError(name, starts.tolist(), "must not decrease")
    return starts


def _spans(common: CommonAttentionMetadata) -> _Ints | None:
    if common.mm_prefix_spans is None:
        return None
    check_spans(common.mm_prefix_spans, common.num_actual_tokens)
    host = common.host_mm_prefix_spans()
    spans = common.mm_prefix_spans.cpu() if host is None else host
    return spans.numpy().astype(np.int64)


def _seq_lens(common: CommonAttentionMetadata) -> _Ints:
    reqs = common.num_reqs
    if common.seq_lens_host is not None and common.seq_lens_host_exact:
        lengths = np.asarray(common.seq_lens_host[:reqs]).astype(np.int64)
    else:
        lengths = common.seq_lens[:reqs].cpu().numpy().astype(np.int64)
    if lengths.size != reqs or (lengths < 0).any():
        raise BatchError("seq_lens", lengths.tolist(), f"must be {reqs} lengths of at least 0")
    return lengths
