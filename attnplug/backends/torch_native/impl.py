"""Runs a layer on TORCH: writes its pages, attends short queries in batches and long ones one by one."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from attnplug.backends.impl import BuiltinImpl
from attnplug.backends.torch_native.decode import SHORT_QUERY, attend_pages, attend_short, plan_page_decodes
from attnplug.backends.torch_native.dense import Scoring, attend_request, attend_shared, shared_prefix_len
from attnplug.backends.torch_native.metadata import TorchMetadata
from attnplug.backends.torch_native.selected import attend_selected
from attnplug.backends.torch_native.source import KeySource, PackedKeys, PagedKeys
from attnplug.core.errors import BatchError
from attnplug.core.impl import AttentionLayer
from attnplug.core.kv_format import kv_format
from attnplug.ops.checks import check_cache_given, check_keys, check_queries, check_spans_given
from attnplug.ops.merging import merge
from attnplug.ops.reach import Reach
from attnplug.ops.storage import FP8_OUTPUTS, check_output_scale, quantise_output, storage_dtype


class TorchImpl(BuiltinImpl[TorchMetadata]):
    """Attention in plain PyTorch."""

    can_return_lse_for_decode = True

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """fp8 with one scale."""
        return quant_key in FP8_OUTPUTS

    @torch.no_grad()
    def attend(
        self,
        layer: AttentionLayer | None,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        attn_metadata: TorchMetadata,
        output: torch.Tensor,
        *,
        output_lse: torch.Tensor | None = None,
        use_sinks: bool = True,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As AttentionImpl.attend; an output of fp8 needs `output_scale`, and block scales are refused."""
        meta = attn_metadata
        scales = {"output_scale": output_scale, "output_block_scale": output_block_scale}
        if output_scale is not None and output_block_scale is None:
            check_output_scale(output, output_scale)
            # Only the shape is left to check, by a tensor without memory.
            plain = torch.empty_like(output, dtype=self._dtype, device="meta")
            check_queries(query, plain, output_lse, meta.num_actual_tokens, self.spec)
            # By way of the layer's dtype, outputs would be rounded twice.
            wide = torch.empty_like(output, dtype=torch.float32)
            self._attend_call(layer, query, key, value, kv_cache, meta, wide, output_lse, use_sinks)
            written = slice(int(meta.query_starts[0]), int(meta.query_starts[-1]))
            quantise_output(wide[written], output_scale, output[written])
            return output
        check_queries(query, output, output_lse, meta.num_actual_tokens, self.spec, **scales)
        self._attend_call(layer, query, key, value, kv_cache, meta, output, output_lse, use_sinks)
        return output

    def _attend_call(
        self,
        layer: AttentionLayer | None,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        attn_metadata: TorchMetadata,
        output: torch.Tensor,
        output_lse: torch.Tensor | None,
        use_sinks: bool,
    ) -> None:
        """Attend into `output`, of the layer's dtype or float32."""
        meta = attn_metadata
        if "batch" not in self.spec.invariance:
            self._attend_step(layer, query, key, value, kv_cache, meta, output, output_lse, use_sinks)
            return
        # Sums of several requests have shapes of them all, and bits depend on shapes and on where memory begins.
        with_call = kv_cache is None or self._attends_own_keys
        for rows, own, alone in meta.alone():
            into = torch.empty_like(output[rows])
            lse = None if output_lse is None else torch.empty_like(output_lse[rows])
            k, v = (_copy(each, own) if with_call and each is not None else None for each in (key, value))
            self._attend_step(layer, _copy(query, rows), k, v, kv_cache, alone, into, lse, use_sinks)
            output[rows] = into
            if output_lse is not None and lse is not None:
                output_lse[rows] = lse

    def _attend_step(
        self,
        layer: AttentionLayer | None,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        attn_metadata: TorchMetadata,
        output: torch.Tensor,
        output_lse: torch.Tensor | None,
        use_sinks: bool,
    ) -> None:
        check_spans_given(attn_metadata.spans is not None, self.spec)
        reach = Reach.of(self.spec, attn_metadata.causal)
        source = self._decoded(layer, self._source(key, value, kv_cache, attn_metadata))
        scoring = self._scoring(layer, query.device, use_sinks, source.k.dtype)
        if self.spec.sparse is not None:
            sparse = self.spec.sparse
            causal = self.spec.causal_in(attn_metadata.causal)
            attend_selected(query, source, sparse, attn_metadata, reach, causal, scoring, output, output_lse)
            return
        shared = shared_prefix_len(attn_metadata, source, reach)
        if shared and isinstance(source, PagedKeys):
            rest = dataclasses.replace(source, start=shared)
            self._attend_cascade(query, source, rest, attn_metadata, reach, scoring, output, output_lse)
            return
        given = self._given(key, value, attn_metadata) if isinstance(source, PagedKeys) else None
        self._attend(query, source, given, attn_metadata, reach, scoring, output, output_lse)

    def _attend_cascade(
        self,
        query: torch.Tensor,
        source: PagedKeys,
        rest: PagedKeys,
        metadata: TorchMetadata,
        reach: Reach,
        scoring: Scoring,
        output: torch.Tensor,
        output_lse: torch.Tensor | None,
    ) -> None:
        """Attend the shared prefix by all queries, `rest` request by request, and merge the two."""
        prefix = attend_shared(query, source, metadata, scoring, self._wide(source.k.dtype))
        parts = torch.empty_like(prefix[0]), torch.empty_like(prefix[1])
        self._attend(query, rest, None, metadata, reach, scoring, *parts)
        rows = slice(int(metadata.query_starts[0]), int(metadata.query_starts[-1]))
        merged, lse = merge([prefix[0][rows], parts[0][rows]], [prefix[1][rows], parts[1][rows]])
        output[rows] = merged
        if output_lse is not None:
            output_lse[rows] = lse

    def _attend(
        self,
        query: torch.Tensor,
        source: KeySource,
        given: PackedKeys | None,
        metadata: TorchMetadata,
        reach: Reach,
        scoring: Scoring,
        output: torch.Tensor,
        output_lse: torch.Tensor | None,
    ) -> None:
        """Attend the keys of `source`; requests without computed tokens attend those of `given`, if it is given."""
        lens = metadata.query_lens
        is_short = (lens > 0) & (lens <= SHORT_QUERY)
        plan = plan_page_decodes(query, source, metadata, reach, scoring)
        if plan is not None and output_lse is None:
            attend_pages(query, source, plan, scoring, output)
            # Requests with little to read stay for `attend_short`, where a share of a tile costs less.
            is_short &= ~plan.chosen
        short = np.flatnonzero(is_short)
        if short.size:
            attend_short(query, short, source, metadata, reach, scoring, output, output_lse)
        for request in np.flatnonzero(lens > SHORT_QUERY).tolist():
            is_new = lens[request] == metadata.seq_lens[request]
            keys = given if given is not None and is_new else source
            self._attend_long(request, query, keys, metadata, reach, scoring, output, output_lse)

    def _attend_long(
        self,
        request: int,
        query: torch.Tensor,
        source: KeySource,
        metadata: TorchMetadata,
        reach: Reach,
        scoring: Scoring,
        output: torch.Tensor,
        output_lse: torch.Tensor | None,
    ) -> None:
        start, stop = metadata.query_starts[request : request + 2].tolist()
        first, end = source.first[request], source.end[request]
        position = int(metadata.seq_lens[request]) - (stop - start)
        positions = np.arange(position, position + stop - start)
        spans = None if metadata.spans is None else metadata.spans[start:stop]
        low, high = reach.bounds(positions, first, end, spans)
        lowest, highest = int(low[0]), max(int(high[-1]), int(low[0]))
        key, value = source.of_request(request, lowest, highest)
        computed = self._wide(key.dtype)
        attend_request(
            query[start:stop],
            key.to(computed),
            value.to(computed),
            (low - lowest, high - lowest),
            positions - lowest,
            scoring,
            output[start:stop],
            None if output_lse is None else output_lse[start:stop],
        )

    def _wide(self, stored: torch.dtype) -> torch.dtype:
        """The dtype to compute with: fp8 widens exactly to the layer's dtype, other floats to float32."""
        return self._dtype if stored == self._dtype or stored.itemsize == 1 else torch.float32

    def _decoded(self, layer: AttentionLayer | None, source: KeySource) -> KeySource:
        """The keys as elements of torch, which those of a format with a codec are not."""
        if isinstance(source, PagedKeys) and kv_format(self.spec.resolved_kv_cache_dtype).codec is not None:
            return source.decoded(self.spec, self._scales(layer, source.k.dtype))
        return source

    def _source(
        self,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        metadata: TorchMetadata,
    ) -> KeySource:
        check_cache_given(kv_cache, self.spec)
        if kv_cache is not None:
            pages = self._pages_of(kv_cache)
            return PagedKeys(pages.k, pages.v, metadata.block_table, metadata.seq_lens)
        starts = metadata.query_starts if metadata.key_starts is None else metadata.key_starts
        key, value = check_keys(key, value, int(starts[-1]), self.spec)
        source = PackedKeys(key, value, starts, metadata.seq_lens)
        if (source.first < 0).any():
            worst = int(source.first.argmin())
            limit = f"request {worst} has more keys than its {source.end[worst]} tokens"
            raise BatchError("key_start_loc", starts.tolist(), limit)
        return source

    def _given(
        self, key: torch.Tensor | None, value: torch.Tensor | None, metadata: TorchMetadata
    ) -> PackedKeys | None:
        """The new tokens' keys, if requests without computed tokens may attend them."""
        if key is None or value is None or not self._attends_own_keys:
            return None
        if storage_dtype(self.spec) != self._dtype:
            return None
        check_keys(key, value, int(metadata.query_starts[-1]), self.spec)
        return PackedKeys(key, value, metadata.query_starts, metadata.seq_lens)

    def _scoring(
        self, layer: AttentionLayer | None, device: torch.device, use_sinks: bool, stored: torch.dtype
    ) -> Scoring:
        spec, tensors = self.spec, self.tensors
        grouped = (spec.num_kv_heads, spec.num_heads // spec.num_kv_heads)
        slopes = None if tensors.alibi_slopes is None else tensors.alibi_slopes.to(device).view(grouped)
        sinks = None
        if use_sinks and tensors.sinks is not None:
            sinks = tensors.sinks.to(device).view(grouped)
        k_scale, v_scale = self._on_device(self._scales(layer, stored), device)
        if isinstance(k_scale, torch.Tensor):
            k_scale = k_scale.repeat_interleave(grouped[1])[:, None]
            v_scale = v_scale.view(-1, 1, 1, 1)
        return Scoring(spec.scale * k_scale, v_scale, spec.logits_soft_cap, slopes, sinks)


def _copy(tensor: torch.Tensor, rows: slice) -> torch.Tensor:
    return tensor[rows].clone(memory_format=torch.contiguous_format)
