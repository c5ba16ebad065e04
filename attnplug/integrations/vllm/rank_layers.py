"""The layers whose tokens vLLM's ranks share: their keys in pages, the new tokens of a step, and the merge of both."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from attnplug.core.backend import AttentionBackend
from attnplug.core.batch.context_parallel import local_lengths
from attnplug.core.batch.host import to_device
from attnplug.core.config import BuilderConfig
from attnplug.core.errors import BatchError, LayoutError
from attnplug.core.impl import AttentionImpl, LayerTensors
from attnplug.core.interface.impl_and_builder import checked_metadata, make_builder, make_impl
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.core.metadata import AttentionMetadata, CommonAttentionMetadata
from attnplug.core.spec import LayerSpec
from attnplug.integrations.vllm.ranks import Ranks
from attnplug.integrations.vllm.steps import SeenLayer
from attnplug.mla.builder import MLADecodeBuilder
from attnplug.mla.impl import MLADecodeImpl
from attnplug.ops.merging import merge_into
from attnplug.registry.selection.decision import Decision
from attnplug.runtime.batch.sharded_step import ShardedStep
from attnplug.runtime.ranks.new_tokens import LEAST_QUERIES


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RankStep(AttentionMetadata):
    """A step on one rank.

    Args:
        slot_mapping: int64 `[T]`, -1 for tokens of other ranks.
        num_actual_tokens: tokens of the step, T.
        pages: metadata for the keys of this rank; None if no rank has any.
        paged_tokens: the tokens that attend pages, which are the first of the step.
        new: metadata for the new tokens with keys in the call; None if all are attended in pages.
    """

    slot_mapping: torch.Tensor
    num_actual_tokens: int
    pages: Any
    paged_tokens: int
    new: Any


def make_rank_impl(
    ranks: Ranks, spec: LayerSpec, decision: Decision, new: Decision, tensors: LayerTensors, layer_name: str
) -> RankImpl:
    """The impl of a layer on one rank.

    Args:
        ranks: that share the tokens.
        spec: the layer, with the heads of this rank.
        decision: for `gathered_spec(spec, ranks.place.size)`.
        new: for the layer's new tokens; for latents, for the layer itself.
        tensors: of this rank's heads.
        layer_name: in errors.
    """

    def impl(decision: Decision, tensors: LayerTensors) -> AttentionImpl[Any]:
        return make_impl(
            decision.get_backend_cls(),
            decision.spec,
            layer_name=layer_name,
            tensors=tensors,
            options=decision.get_options(),
        )

    own = impl(new, tensors)
    if isinstance(own, MLADecodeImpl):
        # Pages are attended in the space of latents, so the weights of other ranks' heads are not needed.
        pages = impl(decision, LayerTensors(kv_b_proj=own.projection))
        return RankLatentImpl(ranks, spec, decision, new, pages, own, tensors)
    return RankImpl(ranks, spec, decision, new, impl(decision, LayerTensors()), own, tensors)


class RankImpl:
    """A layer on one rank: `pages` has the heads of all ranks, and `new` those of this one."""

    def __init__(
        self,
        ranks: Ranks,
        spec: LayerSpec,
        decision: Decision,
        new_decision: Decision,
        pages: AttentionImpl[Any],
        new: AttentionImpl[Any],
        tensors: LayerTensors,
    ) -> None:
        self.ranks, self.spec, self.decision, self.new_decision = ranks, spec, decision, new_decision
        self.pages, self.new, self.tensors = pages, new, tensors

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """As AttentionImpl.process_weights_after_loading, of both parts."""
        self.pages.process_weights_after_loading(act_dtype)
        self.new.process_weights_after_loading(act_dtype)

    def update_kv_cache(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the tokens of this rank; others have the slot -1."""
        self.pages.update_kv_cache(layer, key, value, kv_cache, slot_mapping)

    @torch.no_grad()
    def attend(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        attn_metadata: RankStep,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """Attend `query [T, H, D]` of this rank's heads over the keys of all ranks, and write `output`."""
        if kv_cache is None:
            raise LayoutError("kv_cache", None, "is required: the ranks share the tokens of pages")
        step, rows = attn_metadata, attn_metadata.num_actual_tokens
        query, result, paged = query[:rows], output[:rows], slice(step.paged_tokens)
        if step.new is None:
            _, lse = self._attend_pages(layer, query[paged], kv_cache, step.pages, result[paged])
            self._count_sinks(result[paged], lse)
            return output
        if key is None:
            raise BatchError("key", None, "is required: ranks attend new tokens from the call")
        new_lse = _new_lse(result) if step.paged_tokens else None
        value = None if value is None else value[:rows]
        self._attend_new(query, key[:rows], value, step.new, result, new_lse)
        if new_lse is not None:
            # Every rank has computed tokens of some request, or none has, so all of them exchange.
            context, context_lse = self._attend_pages(layer, query[paged], kv_cache, step.pages)
            parts = (result[paged], context), (new_lse[paged], context_lse)
            merge_into(*parts, result[paged], new_lse[paged])
        return output

    def _attend_pages(
        self, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, output: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The results and LSE of this rank's heads over the keys in the pages of all ranks."""
        every = self.ranks.gather_heads(query)
        part = every.new_empty(*every.shape[:2], self.spec.output_size)
        lse = _new_lse(part)
        self.pages.attend(layer, every, None, None, kv_cache, metadata, part, output_lse=lse)
        return self.ranks.combine(part, lse, output)

    def _attend_new(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        metadata: Any,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        # Without the engine's layer, because its scales are those of stored keys and values.
        self.new.attend(None, query, key, value, None, metadata, output, output_lse=lse)

    def _count_sinks(self, output: torch.Tensor, lse: torch.Tensor) -> None:
        """Scale the merged results by the share that sinks leave to the keys."""
        if self.tensors.sinks is not None:
            output.mul_(torch.sigmoid(lse - self.tensors.sinks)[..., None])


class RankLatentImpl(RankImpl):
    """A layer of latent attention on one rank: ranks exchange absorbed queries and attended latents."""

    pages: MLADecodeImpl
    new: MLADecodeImpl

    def _attend_pages(
        self, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, output: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own = self.new
        nope = own.dims.qk_nope_head_dim
        absorbed = torch.cat((own.projection.absorb(query[..., :nope]), query[..., nope:]), dim=-1)
        every = self.ranks.gather_heads(absorbed)
        part, lse = self.pages.forward_mqa(every, kv_cache, metadata, layer, wants_lse=True)
        if lse is None:
            raise BatchError("output_lse", None, f"is required of {self.decision.backend}: ranks merge by it")
        latent, lse = self.ranks.combine(part, lse)
        result = own.projection.project(latent)
        return (result if output is None else output.copy_(result)), lse

    def _attend_new(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        metadata: Any,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        self.new.attend_new(query, key[:, 0], metadata, output, lse)


class RankBuilder:
    """The metadata of such layers, by a builder of attnplug for each part.

    Args:
        impl: of a layer; all layers of `config` have impls like it.
        config: the settings for builders, with the layers.
        block_size: of vLLM's pages.
        device: of the metadata.

    Raises:
        LayoutError: a block would cut a run of tokens.
    """

    # The share of a rank is planned on the host.
    needs_host_seq_lens = "exact"
    decode_needs_host_seq_lens = True
    supports_update_block_table = False
    reorder_batch_threshold = 1

    def __init__(self, impl: RankImpl, config: BuilderConfig, block_size: int, device: torch.device) -> None:
        self.place, self.config, self.is_latent = impl.ranks.place, config, isinstance(impl, RankLatentImpl)
        if block_size % self.place.interleave:
            limit = f"must divide {block_size}, the tokens of a page that the backend reads"
            remedy = "choose another, such as 1"
            raise LayoutError("cp_kv_cache_interleave_size", self.place.interleave, limit, remedy)
        self.pages = self._builder(impl.decision, "pages", block_size, device)
        new: Any = self._builder(impl.new_decision, "new", block_size, device)
        # Latents without a backend that prefills are attended row by row.
        self.new: Any = new.prefill if isinstance(new, MLADecodeBuilder) else new
        self._backends: tuple[type[AttentionBackend], type[AttentionBackend]] = (
            impl.decision.get_backend_cls(),
            impl.new_decision.get_backend_cls(),
        )
        self._lens = torch.zeros(config.max_num_seqs, dtype=torch.int32, device=device)

    def _builder(self, decision: Decision, part: str, block_size: int, device: torch.device) -> Any:
        # Layers without pages too: builders read the heads of a layer from a page spec.
        spec = decision.spec.replace(direct_kv=False, block_size=block_size)
        layers = {name: _part(layer, part) for name, layer in self.config.layers.items()}
        config = dataclasses.replace(self.config, layers=layers)
        cache: Any = kv_cache_spec_for(spec, block_size)
        return make_builder(decision.get_backend_cls(), cache, [*layers], config, device)

    def use_cascade_attention(self, **given: Any) -> bool:
        """False, because a rank has only some tokens of a prefix."""
        return False

    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False
    ) -> RankStep:
        """The metadata of a step; without a common prefix."""
        return self._decode(common, "build") if common.max_query_len <= 1 else self._mixed(common)

    def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> RankStep:
        """The metadata of decodes that a graph reads. BatchError: the requests have several tokens."""
        if common.max_query_len > 1:
            limit = "must be 1 in a graph: ranks attend longer queries outside of graphs"
            raise BatchError("max_query_len", common.max_query_len, limit)
        return self._decode(common, "build_for_cudagraph_capture")

    def _decode(self, common: CommonAttentionMetadata, method: str) -> RankStep:
        """A step whose tokens are all written before they are attended, so they count as keys of their rank."""
        reqs, host = common.num_reqs, _exact(common)
        lens = common.dcp_local_seq_lens
        if lens is None:
            # Graphs keep the address.
            lens = self._lens[:reqs].copy_(local_lengths(common.seq_lens[:reqs], self.place))
        step = ShardedStep(self.place, frozenset(), True, True, lens[:reqs], local_lengths(host, self.place))
        pages = common.block_table_tensor, common.slot_mapping
        own = step.rows(common, *pages, 0) if self.is_latent else step.context(common, *pages)
        given = (own,) if method == "build_for_cudagraph_capture" else (0, own)
        made = self._checked(0, method, getattr(self.pages, method)(*given))
        return RankStep(common.slot_mapping, common.num_actual_tokens, made, common.num_actual_tokens, None)

    def _mixed(self, common: CommonAttentionMetadata) -> RankStep:
        tokens, starts = common.num_actual_tokens, common.query_start_loc_cpu.numpy()
        lens, host = np.diff(starts), _exact(common)
        computed = np.maximum(host - lens, 0)
        # In short steps of latents each new token attends the pages up to itself.
        apart = self.new is not None and (not self.is_latent or common.max_query_len >= LEAST_QUERIES)
        new: Any = None
        reqs = common.num_reqs
        if apart:
            # Requests without computed tokens, which vLLM has at the end, exchange nothing.
            found = np.flatnonzero(computed)
            reqs = int(found[-1]) + 1 if found.size else 0
        cut = int(starts[reqs])
        longest = int(lens[:reqs].max(initial=0))
        own = common.unpadded(cut, reqs).changed(max_query_len=longest)
        requests = np.repeat(np.arange(reqs), lens[:reqs])
        ends = (computed[requests] + 1 + np.arange(cut) - starts[requests]).astype(np.int32)
        device = common.seq_lens.device
        rows, local = (local_lengths(each, self.place) for each in (ends, computed[:reqs].astype(np.int32)))
        step = ShardedStep(
            self.place,
            frozenset(),
            is_decode=False,
            has_context=bool(reqs),
            local_lens=to_device(local, device),
            local_lens_host=local,
            row_lens=to_device(rows, device) if self.is_latent else None,
            row_lens_host=rows,
            row_requests=to_device(requests, device) if self.is_latent else None,
            row_requests_host=requests,
            apart=apart,
        )
        if apart:
            narrowed = dataclasses.replace(step.new_tokens(common), causal=True)
            new = self._checked(1, "build", self.new.build(0, narrowed))
        made: Any = None
        if cut:
            pages = own.block_table_tensor, own.slot_mapping
            context = step.rows(own, *pages, 0) if self.is_latent else step.context(own, *pages)
            made = self._checked(0, "build", self.pages.build(0, context))
        return RankStep(common.slot_mapping, tokens, made, cut, new)

    def _checked(self, part: int, method: str, made: Any) -> Any:
        return checked_metadata(self._backends[part], method, made)


def _part(layer: Any, part: str) -> SeenLayer:
    return SeenLayer(layer, getattr(layer.impl, part))


def _exact(common: CommonAttentionMetadata) -> Any:
    """The lengths of the requests on the host. BatchError: the host does not know them."""
    lens = common.seq_lens_host
    if lens is None or not common.seq_lens_host_exact:
        found = "none" if lens is None else "an upper bound"
        raise BatchError("seq_lens_host", found, "must be the exact lengths, which give each rank its share")
    return lens[: common.num_reqs]


def _new_lse(output: torch.Tensor) -> torch.Tensor:
    return torch.empty(output.shape[:2], dtype=torch.float32, device=output.device)
