"""Builds a step's metadata for FLASH_ATTN; chunks become virtual requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any, ClassVar

import numpy as np
import torch

from attnplug.backends.flash_attn.metadata import FlashAttnMetadata, Requests
from attnplug.backends.impl import own_slots
from attnplug.core.batch.host import IntArray, query_spans
from attnplug.core.batch.local_attention import make_local_attention_virtual_batches
from attnplug.core.config import BuilderConfig
from attnplug.core.errors import BatchError
from attnplug.core.kv_cache_spec import ChunkedLocalAttentionSpec, KVCacheSpec
from attnplug.core.metadata import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata
from attnplug.ops.checks import check_step_sizes, check_table_width


class FlashAttnMetadataBuilder(AttentionMetadataBuilder[FlashAttnMetadata]):
    """Builds FlashAttnMetadata without reading anything back from the device."""

    supports_update_block_table: ClassVar[bool] = True
    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        spec = self.kv_cache_spec
        self._chunk = spec.chunk if isinstance(spec, ChunkedLocalAttentionSpec) else 0
        if self._chunk:
            # Lengths decide where requests are cut. Set on this builder, because only chunks need it.
            self.needs_host_seq_lens = "exact"  # type: ignore[misc]

    @property
    def build_key(self) -> Hashable:
        """Groups without chunks share builds: what calls need of a layer, such as schedules, is made by its impl."""
        return self._chunk, self.kv_cache_spec.block_size if self._chunk else 0, self.reorder_batch_threshold

    @classmethod
    def get_cudagraph_support(cls, config: BuilderConfig, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """Uniform batches; none with chunks, whose virtual requests differ from step to step."""
        if isinstance(kv_cache_spec, ChunkedLocalAttentionSpec):
            return AttentionCGSupport.NEVER
        return cls.cudagraph_support

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashAttnMetadata:
        """The metadata of one step.

        Raises:
            BatchError: start locations that decrease or pass `num_actual_tokens`, or, with chunks, lengths that
                the host does not know exactly.
        """
        return self._build(common_attn_metadata, captured=False)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> FlashAttnMetadata:
        """As `build`, for calls that plan inside the graph."""
        return self._build(common_attn_metadata, captured=True)

    def update_block_table(
        self, metadata: FlashAttnMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> FlashAttnMetadata:
        """`metadata` with another KV group's table and slots."""
        slot_mapping = own_slots(self.kv_cache_spec, slot_mapping, metadata.num_actual_tokens)
        everything = metadata.all_requests
        if everything is None:
            return dataclasses.replace(metadata, slot_mapping=slot_mapping)
        table = blk_table if metadata.virtual_table is None else metadata.virtual_table(blk_table)
        # The schedules depend on lengths and page size, so they stay.
        moved = dataclasses.replace(everything, block_table=table[: everything.seq_lens.shape[0]])
        calls, row = [], 0
        for each in metadata.calls:
            end = row + each.seq_lens.shape[0]
            calls.append(
                moved if each is everything else dataclasses.replace(each, block_table=table[row:end])
            )
            row = end
        return dataclasses.replace(
            metadata, slot_mapping=slot_mapping, all_requests=moved, calls=tuple(calls)
        )

    def _build(self, common: CommonAttentionMetadata, *, captured: bool) -> FlashAttnMetadata:
        self.check_cut(common)
        check_step_sizes(common)
        if self.reads_pages and common.key_start_loc is None:
            check_table_width(common, self.kv_cache_spec.block_size)
        spans = query_spans(common)
        tokens = common.num_actual_tokens
        known = _known(common, captured)
        calls: tuple[Requests, ...] = ()
        everything = pages = None
        if common.num_reqs and spans[1].any():
            cut, cut_spans = common, spans
            if self._chunk:
                block_size = self.kv_cache_spec.block_size
                cut, pages = make_local_attention_virtual_batches(self._chunk, common, block_size)
                cut_spans = query_spans(cut)
            everything, calls = self._requests(cut, cut_spans, captured)
        return FlashAttnMetadata(
            slot_mapping=own_slots(self.kv_cache_spec, common.slot_mapping, tokens),
            num_actual_tokens=tokens,
            key_tokens=tokens if common.key_start_loc is None else _last_key(common),
            all_requests=everything,
            calls=calls,
            all_new=known is not None and bool((known == spans[1]).all()),
            causal=common.causal,
            chunk=self._chunk,
            virtual_table=pages,
        )

    def _requests(
        self, common: CommonAttentionMetadata, spans: tuple[IntArray, IntArray], captured: bool
    ) -> tuple[Requests, tuple[Requests, ...]]:
        """All requests, and the same split into decodes and others if there are both; `spans` of `query_spans`."""
        starts, lens = spans
        known = _known(common, captured)
        keys = common.query_start_loc if common.key_start_loc is None else common.key_start_loc
        decode_len = self.reorder_batch_threshold or 1

        def some(first: int, end: int, end_token: int) -> Requests:
            own, begin = lens[first:end], int(starts[first])
            longest = max(int(own.max(initial=0)), 1)
            num_keys, mean_queries = 0, 0.0
            if known is None:
                # In a graph any request may become a padding request of length 1.
                may_lack_keys, queries_before_keys = True, longest - 1 if captured else 0
            else:
                held = known[first:end]
                may_lack_keys = bool((held[own > 0] == 0).any())
                queries_before_keys = max(int((own - np.maximum(held, 1)).max(initial=0)), 0)
                if longest > decode_len and held.any():
                    num_keys = int(held.sum(dtype=np.int64))
                    mean_queries = int(np.dot(own.astype(np.int64), held)) / num_keys
            return Requests(
                query_start_loc=common.query_start_loc[first : end + 1],
                seq_lens=common.seq_lens[first:end],
                block_table=common.block_table_tensor[first:end],
                key_start_loc=keys[first : end + 1],
                first_token=begin,
                end_token=end_token,
                max_query_len=longest,
                max_seq_len=common.max_seq_len,
                single=end_token - begin == end - first and bool((own == 1).all()),
                captured=captured,
                may_lack_keys=may_lack_keys,
                queries_before_keys=queries_before_keys,
                num_keys=num_keys,
                mean_queries=mean_queries,
            )

        reqs, tokens = common.num_reqs, common.num_actual_tokens
        everything = some(0, reqs, tokens)
        long = lens > decode_len
        decodes = int(long.argmax()) if long.any() else reqs
        if decodes in (0, reqs) or not lens[:decodes].any():
            return everything, (everything,)
        return everything, (some(0, decodes, int(starts[decodes])), some(decodes, reqs, tokens))


def _known(common: CommonAttentionMetadata, captured: bool) -> IntArray | None:
    """Exact sequence lengths `[R]` on the host; None in a capture, because replays have other lengths."""
    if common.seq_lens_host is None or not common.seq_lens_host_exact or captured:
        return None
    return common.seq_lens_host[: common.num_reqs]


def _last_key(common: CommonAttentionMetadata) -> int:
    """The number of keys that come with the call; BatchError if only the device knows it."""
    if common.key_start_loc_cpu is None:
        # Rows after the last key may be NaN, and the kernels load whole tiles.
        remedy = "give the locations of key_start_loc on the host too"
        raise BatchError("key_start_loc_cpu", None, "is required with key_start_loc", remedy)
    return int(common.key_start_loc_cpu[-1])
