"""Builds a step's metadata for TRITON: the batch's tensors, and where its decodes end."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from attnplug.backends.impl import own_slots
from attnplug.backends.triton.metadata import TritonMetadata
from attnplug.backends.triton.workspace import Workspace
from attnplug.core.errors import BatchError
from attnplug.core.metadata import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata
from attnplug.ops.calls import check_spans


class TritonMetadataBuilder(AttentionMetadataBuilder[TritonMetadata]):
    """Builds TritonMetadata without reading anything back from the device."""

    supports_update_block_table: ClassVar[bool] = True
    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self._workspace = Workspace(self.config.max_num_seqs, self.device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TritonMetadata:
        """The metadata of one step; it needs no host lengths.

        Raises:
            BatchError: start locations that decrease or pass `num_actual_tokens`, or fewer multimodal spans than
                tokens.
        """
        common = common_attn_metadata
        reqs, tokens = common.num_reqs, common.num_actual_tokens
        starts = common.query_start_loc_cpu.numpy()[: reqs + 1]
        lens = starts[1:] - starts[:-1]
        if starts.size != reqs + 1 or starts[0] < 0 or starts[-1] > tokens or (reqs and lens.min() < 0):
            limit = f"must be {reqs + 1} ascending locations in 0 .. num_actual_tokens={tokens}"
            raise BatchError("query_start_loc_cpu", starts.tolist(), limit)
        decodes, max_decode_len, max_query_len = _decodes(lens, self.reorder_batch_threshold or 1)
        if common.key_start_loc is not None:
            decodes, max_decode_len, max_query_len = 0, 0, max(max_decode_len, max_query_len)
        if common.mm_prefix_spans is not None:
            check_spans(common.mm_prefix_spans, tokens)
        # Reading lengths from the device would make the host wait, so only lengths on the host count.
        known = common.seq_lens_host if common.seq_lens_host_exact and decodes < reqs else None
        metadata = TritonMetadata(
            slot_mapping=own_slots(self.kv_cache_spec, common.slot_mapping, tokens),
            block_table=common.block_table_tensor,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            key_start_loc=common.query_start_loc if common.key_start_loc is None else common.key_start_loc,
            num_reqs=reqs,
            num_actual_tokens=tokens,
            num_decodes=decodes,
            num_decode_tokens=int(starts[decodes]),
            max_decode_len=max_decode_len,
            max_query_len=max_query_len,
            all_new=known is not None and bool((known[decodes:reqs] == lens[decodes:]).all()),
            causal=common.causal,
            workspace=self._workspace,
            spans=common.mm_prefix_spans,
        )
        # Plans are made before any layer runs, because a captured graph must not contain them.
        self._workspace.begin_step(metadata)
        return metadata

    def update_block_table(
        self, metadata: TritonMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> TritonMetadata:
        """`metadata` with another KV group's table and slots."""
        slot_mapping = own_slots(self.kv_cache_spec, slot_mapping, metadata.num_actual_tokens)
        return dataclasses.replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)


def _decodes(lens: npt.NDArray[np.int32], threshold: int) -> tuple[int, int, int]:
    """The number of requests in front with at most `threshold` queries, and the longest query of both parts."""
    longest = int(lens.max(initial=0))
    if longest <= threshold:
        return lens.size, longest, 0
    decodes = int((lens > threshold).argmax())
    return decodes, int(lens[:decodes].max(initial=0)), int(lens[decodes:].max())
