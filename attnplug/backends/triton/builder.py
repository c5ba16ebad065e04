"""Builds a step's metadata for TRITON: the batch's tensors, and where its decodes end."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from attnplug.backends.impl import check_prefix, own_slots
from attnplug.backends.triton.metadata import TritonMetadata
from attnplug.backends.triton.workspace import Workspace
from attnplug.core.errors import BatchError
from attnplug.core.metadata import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata
from attnplug.ops.checks import check_indices, check_spans, check_step_tensors, check_table_width
from attnplug.ops.triton.launch import prepare

# Queries up to which a request is a decode, whose keys are divided: reading them takes longer than the products.
_FEW_QUERIES = 16
# The shortest prefix worth a cascade. It is estimated and not measured yet.
_SHARED_KEYS = 512
# Keys of single heads, over all requests, that take longer to read than the merge of a cascade, from the L2 too. On an
# H200, 16 requests that share 2k keys over 8 heads, 245,760 keys, took 39.1 us with a cascade and 47.5 us without, and
# heads of 128 are read at 0.08 ns a key; so a cascade gains nothing below 135,000.
_SPARED_KEYS = 3 << 16


class TritonMetadataBuilder(AttentionMetadataBuilder[TritonMetadata]):
    """Builds TritonMetadata without reading anything back from the device."""

    supports_update_block_table: ClassVar[bool] = True
    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._init_reorder_batch_threshold(_FEW_QUERIES, supports_spec_as_decode=True)
        self._workspace = Workspace(self.config.max_num_seqs, self.device)
        prepare(self.device)

    @property
    def build_key(self) -> Hashable:
        """Groups with equal keys share plans too: the workspace has one for each reach and launch."""
        return self.reorder_batch_threshold

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TritonMetadata:
        """The metadata of one step; it needs no host lengths.

        Raises:
            BatchError: start locations that decrease or pass `num_actual_tokens`, a prefix that is negative or, as far
                as the host knows, not computed by every request, fewer multimodal spans than tokens, or tensors that
                are not int32 or whose rows have gaps.
        """
        common = common_attn_metadata
        self.check_cut(common)
        check_step_tensors(common)
        if self.reads_pages and common.key_start_loc is None:
            check_table_width(common, self.kv_cache_spec.block_size)
        reqs, tokens = common.num_reqs, common.num_actual_tokens
        starts = common.query_start_loc_cpu.numpy()[: reqs + 1]
        lens = starts[1:] - starts[:-1]
        if starts.size != reqs + 1 or starts[0] < 0 or starts[-1] > tokens or (reqs and lens.min() < 0):
            limit = f"must be {reqs + 1} ascending locations in 0 .. num_actual_tokens={tokens}"
            raise BatchError("query_start_loc_cpu", starts.tolist(), limit)
        decodes, max_decode_len, max_query_len = _decodes(lens, self.reorder_batch_threshold or 1)
        key_rows = tokens
        if common.key_start_loc is not None:
            decodes, max_decode_len, max_query_len = 0, 0, max(max_decode_len, max_query_len)
            check_indices("key_start_loc", common.key_start_loc)
            # 0 if only the device knows the keys.
            key_rows = 0 if common.key_start_loc_cpu is None else int(common.key_start_loc_cpu[reqs])
        if common.mm_prefix_spans is not None:
            check_spans(common.mm_prefix_spans, tokens)
            if not common.mm_prefix_spans.is_contiguous():
                limit = "must be (2, 1): kernels read adjacent elements"
                raise BatchError("mm_prefix_spans.stride()", common.mm_prefix_spans.stride(), limit)
        exact = common.seq_lens_host if common.seq_lens_host_exact else None
        check_prefix(common_prefix_len, None if exact is None else exact[:reqs], lens)
        # Reading lengths from the device would make the host wait, so only lengths on the host count.
        known = exact if decodes < reqs else None
        # A row of the prefix has no span: its tile has rows of several requests.
        has_prefix = decodes > 1 and common.mm_prefix_spans is None
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
            key_bounds=_key_bounds(common, decodes),
            spans=common.mm_prefix_spans,
            prefix_len=common_prefix_len if has_prefix else 0,
            key_rows=key_rows,
        )
        # Plans are made before any layer runs, because a captured graph must not contain them.
        self._workspace.begin_step(metadata)
        return metadata

    def update_block_table(
        self, metadata: TritonMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> TritonMetadata:
        """`metadata` with another KV group's table and slots."""
        check_indices("blk_table", blk_table)
        slot_mapping = own_slots(self.kv_cache_spec, slot_mapping, metadata.num_actual_tokens)
        if not metadata.prefix_len:
            return metadata.with_pages(blk_table, slot_mapping)
        # The other group's pages may share no prefix, so its plans are others, in this builder's workspace.
        changed = dataclasses.replace(
            metadata,
            block_table=blk_table,
            slot_mapping=slot_mapping,
            prefix_len=0,
            workspace=self._workspace,
        )
        self._workspace.begin_step(changed)
        return changed

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
        """Whether the decodes share so many keys that reading them once spares more than the merge costs."""
        # Under context parallelism a rank has a part of the prefix only.
        decodes, _, _ = _decodes(query_lens, self.reorder_batch_threshold or 1)
        sharing = int((query_lens[:decodes] > 0).sum())
        spared = common_prefix_len * (sharing - 1) * num_kv_heads
        return dcp_world_size == 1 and common_prefix_len >= _SHARED_KEYS and spared >= _SPARED_KEYS


def _key_bounds(common: CommonAttentionMetadata, first: int) -> npt.NDArray[np.int32]:
    """The most keys that each request from `first` on may have."""
    if common.seq_lens_host is not None:
        return common.seq_lens_host[first : common.num_reqs]
    return np.full(common.num_reqs - first, common.max_seq_len, np.int32)


def _decodes(lens: npt.NDArray[np.int32], threshold: int) -> tuple[int, int, int]:
    """The number of requests in front with at most `threshold` queries, and the longest query of both parts."""
    longest = int(lens.max(initial=0))
    if longest <= threshold:
        return lens.size, longest, 0
    decodes = int((lens > threshold).argmax())
    return decodes, int(lens[:decodes].max(initial=0)), int(lens[decodes:].max())
