"""The base of builders of latent attention: it splits a step and plans the chunks of its prefills."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.batch.host import is_one_each, query_spans
from attnplug.core.composite.member_layers import MemberLayers
from attnplug.core.composite.step_split import StepSplit, split_at
from attnplug.core.config import CONTEXT_CHUNK_ROWS, BuilderConfig
from attnplug.core.errors import BatchError, PluginError
from attnplug.core.interface.impl_and_builder import checked_metadata, make_builder
from attnplug.core.kv_cache_spec import KVCacheSpec, kv_cache_spec_for
from attnplug.core.metadata import AttentionMetadataBuilder, CommonAttentionMetadata
from attnplug.core.mla.backend import MLADecodeBackend, QueryLens
from attnplug.core.spec import Phase
from attnplug.mla.chunks import ContextChunk, plan_context_chunks, prefill_workspace_bytes
from attnplug.mla.impl import MLADecodeImpl
from attnplug.mla.metadata import ChunkMetadata, MLAMetadata, MLAPrefillMetadata
from attnplug.mla.selected import SelectedMetadata, SelectedSteps

_Ints = npt.NDArray[np.int64]
_OnBoth: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""The same values on the host and on the device."""


class MLADecodeBuilder(AttentionMetadataBuilder[MLAMetadata]):
    """Builds MLAMetadata; a subclass may override `build_decode`.

    Decodes are the requests at the front whose queries are no longer than the backend's `decode_threshold`, and whose
    lengths its `query_lens` allows. The others are prefilled. In a step of sparse layers each query is a decode, and
    `build_decode` gets it as a request whose pages have one token.
    """

    # The host plans the chunks of computed tokens; an upper bound would expand tokens that no page has.
    needs_host_seq_lens: ClassVar[Literal["none", "upper_bound", "exact"]] = "exact"
    decode_needs_host_seq_lens: ClassVar[bool] = True
    """Whether `build_decode` reads exact lengths on the host; a step of a captured graph has none."""
    decodes_drafts: ClassVar[bool] = False
    """Whether the drafts of an engine are decoded even if they are longer than the backend's `decode_threshold`."""

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: Sequence[str],
        config: BuilderConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, config, device)
        impl = getattr(config.layers.get(layer_names[0]) if layer_names else None, "impl", None)
        if not isinstance(impl, MLADecodeImpl):
            limit = "make the layers' impls first, of subclasses of MLADecodeImpl, and give them in BuilderConfig.layers"
            raise PluginError(f"MLADecodeBuilder cannot read the layer of {list(layer_names)}: {limit}")
        self.backend: type[MLADecodeBackend] = impl.backend
        self.query_lens = QueryLens(self.backend.query_lens)
        several = self.query_lens is not QueryLens.SINGLE
        # A decode of one query for each request takes no drafts, so a declared threshold means nothing to it.
        threshold = self.backend.decode_threshold if several else 1
        self._selected = _selected_steps(config, layer_names, device)
        # Sparse layers decode every query, so the order of requests does not matter to them.
        if self._selected is None:
            self._init_reorder_batch_threshold(threshold, several and self.decodes_drafts)
        else:
            # Nor does the host know how many keys an indexer picks.
            self.needs_host_seq_lens = "none"  # type: ignore[misc]
        self.prefill: AttentionMetadataBuilder[Any] | None = None
        if self.backend.prefill is not None:
            # The expanded layer has no pages, but builders read the heads of a layer from a page spec.
            pages = cast(KVCacheSpec, kv_cache_spec_for(impl.spec.expanded().replace(direct_kv=False), 1))
            # The builder of the prefill half must read its own half of each layer, not the impl of the latents.
            own = dataclasses.replace(config, layers=MemberLayers(config.layers, Phase.PREFILL))
            self.prefill = make_builder(self.backend.prefill, pages, layer_names, own, device)
        rows = CONTEXT_CHUNK_ROWS if config.context_chunk_rows is None else config.context_chunk_rows
        # A chunk has at least one page, because requests are cut at pages only.
        self.context_chunk_rows = max(rows, kv_cache_spec.block_size)
        self._expanded_bytes = prefill_workspace_bytes(impl.spec, self.context_chunk_rows)
        self._workspace: torch.Tensor | None = None

    @property
    def workspace_bytes(self) -> int:
        """Bytes for the expansion of a chunk of context, and those of the prefill half; 0 if nothing is expanded."""
        if self.prefill is None or self._selected is not None:
            return 0
        return self._aligned_bytes + getattr(self.prefill, "workspace_bytes", 0)

    @property
    def _aligned_bytes(self) -> int:
        # Kernel libraries align their scratch by up to 256 bytes.
        return -(-self._expanded_bytes // 256) * 256

    def get_workspace_buffer(self) -> torch.Tensor:
        """The workspace, uint8, allocated at the first call."""
        if self._workspace is None:
            workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=self.device)
            self.set_workspace_buffer(workspace)
            return workspace
        return self._workspace

    def set_workspace_buffer(self, buffer: torch.Tensor) -> None:
        """Use another builder's workspace; BatchError if it is too small."""
        size = buffer.numel() * buffer.element_size()
        if size < self.workspace_bytes:
            limit = f"bytes are less than the {self.workspace_bytes} that these layers need"
            raise BatchError("workspace", size, limit, "share the largest of the builders' workspaces")
        self._workspace = buffer
        share = getattr(self.prefill, "set_workspace_buffer", None)
        if share is not None:
            # Both parts are in use at once.
            share(buffer.view(torch.uint8)[self._aligned_bytes :])

    def build_decode(self, common: CommonAttentionMetadata) -> Any:
        """The metadata that `decode` gets, from the step of the decodes; by default that step itself.

        A step of sparse layers has its lengths and page table on the device alone, and a layer writes them just
        before its `decode`.
        """
        return common

    def build_selected(self, common: CommonAttentionMetadata, selected: SelectedMetadata) -> Any:
        """As `build_decode` for a step of sparse layers, where every query is a request; by default the same.

        No layer chooses more keys of a query than `selected.ends`, which `selected.write_ends()` writes. So a plan
        for these numbers serves all layers of the step.
        """
        return self.build_decode(common)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> MLAMetadata:
        """The metadata of one step; a common prefix is ignored.

        Raises:
            BatchError: start locations that decrease or pass `num_actual_tokens`; a batch that is not causal; prefills
                without a backend for them; prefills without exact host lengths, or decodes that need these.
        """
        common = self.for_own_layers(common_attn_metadata)
        starts, lens = query_spans(common)
        tokens = common.num_actual_tokens
        slots = common.slot_mapping
        slots = slots if slots.shape[0] == tokens else slots[:tokens]
        if self._selected is not None:
            queries = int(starts[-1])
            selected, each = self._selected.step(common, queries)
            decode = self.build_selected(each, selected) if queries else None
            return MLAMetadata(slots, tokens, queries, decode, None, selected)
        cut = self._cut(common, starts, lens)
        known = common.seq_lens_host if common.seq_lens_host_exact else None
        if known is None and (cut.prefill is not None or self.decode_needs_host_seq_lens):
            found = "none" if common.seq_lens_host is None else "an upper bound"
            raise BatchError("seq_lens_host", found, "must be the exact lengths of the requests")
        decode = None
        if cut.decode is not None and cut.num_tokens:
            decode = self.build_decode(self._without_idle(cut.decode, lens[: cut.num_reqs]))
        prefill = None
        if cut.prefill is not None and known is not None:
            own = slice(cut.num_reqs, lens.size)
            prefill = self._prefill_metadata(
                cut.prefill, *(each[own].astype(np.int64) for each in (lens, known))
            )
        return MLAMetadata(slots, tokens, cut.num_tokens, decode, prefill)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> MLAMetadata:
        """As AttentionMetadataBuilder.build_for_cudagraph_capture; BatchError if the queries are no decodes."""
        longest, most = common_attn_metadata.max_query_len, self.reorder_batch_threshold
        if most is not None and longest > most:
            limit = f"is past the {most} that {self.backend.get_name()} decodes, and no graph has prefills"
            raise BatchError("max_query_len", longest, limit, "run such steps without a graph")
        return super().build_for_cudagraph_capture(common_attn_metadata)

    def _cut(self, common: CommonAttentionMetadata, starts: _Ints, lens: _Ints) -> StepSplit:
        threshold, reqs = self.reorder_batch_threshold or 1, lens.size
        if self.query_lens is QueryLens.UNIFORM:
            lengths = lens[lens > 0]
            # Requests without queries are left out before the decode.
            others = (lens > threshold) | ((lens > 0) & (lens != (lengths[0] if lengths.size else 0)))
            reqs = int(others.argmax()) if others.any() else reqs
        # Most steps decode one token of each request, and need no search for a longer query.
        elif reqs and not is_one_each(lens) and np.maximum.reduce(lens) > threshold:
            reqs = int((lens > threshold).argmax())
        tokens = int(starts[reqs])
        if reqs == lens.size:
            if tokens != common.num_actual_tokens:
                common = dataclasses.replace(common, num_actual_tokens=tokens)
            return StepSplit(reqs, tokens, common, None)
        return split_at(common, reqs, tokens) if tokens else StepSplit(0, 0, None, common)

    def _without_idle(self, common: CommonAttentionMetadata, lens: _Ints) -> CommonAttentionMetadata:
        if self.query_lens is QueryLens.ANY or lens.all():
            return common
        # Kernels of one query length for all requests have no place for a request without queries.
        kept = np.flatnonzero(lens)
        on_device = torch.from_numpy(kept).to(common.seq_lens.device, non_blocking=True)
        starts_cpu, starts = self._starts(lens[kept])
        host = common.seq_lens_host
        return dataclasses.replace(
            common,
            num_reqs=kept.size,
            query_start_loc_cpu=starts_cpu,
            query_start_loc=starts,
            seq_lens=common.seq_lens[on_device],
            block_table_tensor=common.block_table_tensor[on_device],
            seq_lens_host=None if host is None else host[kept],
            _seq_lens_cpu=None,
            _num_computed_tokens_cpu=None,
        )

    def _prefill_metadata(
        self, common: CommonAttentionMetadata, lens: _Ints, seq_lens: _Ints
    ) -> MLAPrefillMetadata:
        prefill = self.prefill
        if prefill is None:
            limit = f"is past the {self.reorder_batch_threshold} of a decode, and {self.backend.get_name()}"
            remedy = "plan the layer, or bind a prefill backend by with_prefill"
            raise BatchError("max_query_len", int(lens.max()), f"{limit} decodes only", remedy)
        # Padding requests have more queries than tokens, so some of their queries are no keys.
        keys = np.minimum(lens, seq_lens)
        tokens = int(lens.sum())
        # Requests without queries need no context.
        context = np.where(lens > 0, np.maximum(seq_lens - lens, 0), 0)
        key_rows = None
        if (keys < lens).any():
            ends = np.cumsum(lens)
            rows = [np.arange(end - count, end) for end, count in zip(ends, keys, strict=True)]
            key_rows = torch.from_numpy(np.concatenate(rows)).to(self.device, non_blocking=True)
        # Keys that are packed like the queries need no start locations of their own.
        packed = bool((lens == keys).all())
        new = self._step(
            common, slice(0, lens.size), lens, keys, None if packed else self._starts(keys), causal=True
        )
        block_size = self.kv_cache_spec.block_size
        chunks = plan_context_chunks(context.tolist(), self.context_chunk_rows, block_size)
        return MLAPrefillMetadata(
            tokens,
            self._built_by(prefill, new),
            key_rows,
            common.slot_mapping[:tokens],
            tuple(self._chunk(prefill, common, chunk, lens) for chunk in chunks),
            self._workspace,
        )

    def _chunk(
        self,
        prefill: AttentionMetadataBuilder[Any],
        common: CommonAttentionMetadata,
        chunk: ContextChunk,
        lens: _Ints,
    ) -> ChunkMetadata:
        requests = slice(chunk.first, chunk.first + len(chunk.lengths))
        counts, own = np.array(chunk.lengths, dtype=np.int64), lens[requests]
        key_starts = self._starts(counts)
        # Keys are the last tokens of a sequence: here the queries come after them.
        step = self._step(common, requests, own, counts + own, key_starts, causal=False)
        first = int(lens[: chunk.first].sum())
        return ChunkMetadata(
            slice(first, first + int(own.sum())),
            chunk.rows,
            common.block_table_tensor[requests],
            key_starts[1],
            self._on_device(np.array(chunk.starts)),
            self._built_by(prefill, step),
        )

    def _built_by(self, prefill: AttentionMetadataBuilder[Any], step: CommonAttentionMetadata) -> Any:
        return checked_metadata(self.backend.prefill or self.backend, "build", prefill.build(0, step))

    def _step(
        self,
        common: CommonAttentionMetadata,
        requests: slice,
        lens: _Ints,
        seq_lens: _Ints,
        key_starts: _OnBoth | None,
        *,
        causal: bool,
    ) -> CommonAttentionMetadata:
        """A step of the prefill backend for some requests; without `key_starts`, keys are packed like the queries."""
        host = seq_lens.astype(np.int32)
        starts_cpu, starts = self._starts(lens)
        key_starts_cpu, on_device = key_starts or (None, None)
        tokens = int(lens.sum())
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts_cpu,
            seq_lens=self._on_device(host),
            num_reqs=lens.size,
            num_actual_tokens=tokens,
            max_query_len=int(lens.max(initial=0)),
            max_seq_len=int(host.max(initial=0)),
            block_table_tensor=common.block_table_tensor[requests],
            slot_mapping=common.slot_mapping[:tokens],
            causal=causal,
            key_start_loc=on_device,
            key_start_loc_cpu=key_starts_cpu,
            seq_lens_host=host,
        )

    def _starts(self, lengths: _Ints) -> _OnBoth:
        """Where each of some packed parts starts, then the end of the last."""
        host = torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32))
        return host, host.to(self.device, non_blocking=True)

    def _on_device(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int32)).to(self.device, non_blocking=True)


def _selected_steps(
    config: BuilderConfig, layer_names: Sequence[str], device: torch.device
) -> SelectedSteps | None:
    """The steps of sparse layers; None for others, which another builder serves."""
    specs = (config.layers[name].impl.spec for name in layer_names if name in config.layers)
    chosen = [spec.sparse.topk * spec.sparse.block for spec in specs if spec.sparse is not None]
    # Steps of decodes, then those with prefills: outgrown tables stay in memory for graphs.
    decodes = config.max_num_seqs * (1 + config.num_speculative_tokens)
    sizes = sorted((decodes, max(config.max_num_batched_tokens, decodes)))
    return SelectedSteps(max(chosen), device, sizes) if chosen else None
