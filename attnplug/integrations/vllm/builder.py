"""Metadata for a group of vLLM's layers: one builder of attnplug for each backend and kind of layer in it."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Hashable
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder

from attnplug.core.interface.impl_and_builder import checked_metadata, make_builder
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.core.metadata import AttentionMetadataBuilder as Inner
from attnplug.core.metadata import CommonAttentionMetadata, own_build_key
from attnplug.core.spec import AttentionType, LayerSpec
from attnplug.integrations.vllm.impl import Bound, Layer
from attnplug.integrations.vllm.rank_layers import RankBuilder, RankImpl
from attnplug.integrations.vllm.ranks import ranks_of
from attnplug.integrations.vllm.steps import (
    SeenLayer,
    builder_config,
    check_cache,
    check_spans,
    drafts_of,
    for_layer,
    is_of_group,
    is_same_batch,
    translate,
)
from attnplug.integrations.vllm.warm_up import warm_up


class Batch:
    """One batch of vLLM, and what its groups of layers share: each is built once for all groups that it serves."""

    def __init__(self, given: Any, how: str, *, exact: bool, has_ranks: bool = False) -> None:
        self.given, self.how, self._has_ranks = given, how, has_ranks
        self.common = translate(given, exact=exact, has_ranks=has_ranks)
        self.causal: bool = given.causal
        """Whether decoder layers are causal in this step, which decides the impl of each."""
        self.builders: list[Builder] = []
        """The builders with a step of it. One that builds again has another batch, in the same tensors."""
        self.built: dict[Hashable, Any] = {}
        """Metadata by `Builder.shared_key`."""

    @functools.cached_property
    def exact(self) -> CommonAttentionMetadata:
        """`common` with exact lengths on the host; with drafts in flight the host waits for the device's."""
        if self.common.seq_lens_host_exact:
            return self.common
        lengths = self.given.seq_lens.cpu().numpy()
        return translate(self.given, exact=True, lengths=lengths, has_ranks=self._has_ranks)


@dataclasses.dataclass(eq=False)
class Step(AttentionMetadata):  # type: ignore[misc]
    """A step of the group: metadata for each kind of layer, made before the layers run.

    It is a dataclass because vLLM copies metadata field by field for layers that share KV.
    """

    builder: Builder
    batch: Batch
    common_prefix_len: int
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    made: dict[int, Any]
    """By the builder's number for the kind."""

    def of(self, layer: Any) -> tuple[Any, Bound]:
        """The layer's metadata and impl; a layer that the group did not name is built for now."""
        bound, kind = self.builder.seen(layer, self.batch.causal)
        metadata = self.made.get(kind)
        return (self.make(bound, kind) if metadata is None else metadata), bound

    def make(self, bound: Bound, kind: int) -> Any:
        """The metadata for layers of a kind: a copy of another group's with this group's pages, or a build."""
        builder, how, built = self.builder, self.batch.how, self.batch.built
        inner = builder.inner(bound)
        # A prefix is in blocks of its own group.
        key = None if self.common_prefix_len else builder.shared_key(bound, kind)
        if key in built and kind not in builder.captured:
            method = "update_block_table"
            made = inner.update_block_table(built[key], self.block_table, self.slot_mapping)
        else:
            spec = bound.spec
            common = self.batch.exact if builder.needs_exact(inner, self.batch.common) else self.batch.common
            common = builder.completed(for_layer(self._of_group(common), spec), bound).for_layers((spec,))
            if how == "capture":
                # The graph reads what this builder fills, so it builds the later steps too.
                builder.captured.add(kind)
                method = "build_for_cudagraph_capture"
                made = inner.build_for_cudagraph_capture(common)
            else:
                method = "build"
                made = inner.build(self.common_prefix_len, common, how == "fast")
            if key is not None:
                built[key] = made
        made = checked_metadata(bound.backend, method, made)
        self.made[kind] = made
        return made

    def _of_group(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """The batch with the group's own table and slots."""
        table, slots = self.block_table, self.slot_mapping
        if common.block_table_tensor is table and common.slot_mapping is slots:
            return common
        return dataclasses.replace(common, block_table_tensor=table, slot_mapping=slots)


class Builder(AttentionMetadataBuilder):  # type: ignore[misc]
    """The builder that vLLM constructs for each group of layers with one KV cache spec."""

    backend: str | None = None
    layer_class: type[Any] = Layer
    step_class: type[Step] = Step
    is_warm = False
    """Whether its kinds of steps have run once."""
    latest: ClassVar[weakref.ref[Batch] | None] = None
    """The batch that a builder of this process was last given, as long as a step of it is used."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        check_cache(kv_cache_spec)
        self.block_size = int(kv_cache_spec.block_size)
        known = vllm_config.compilation_config.static_forward_context
        self.layers = {
            name: known[name]
            for name in layer_names
            if isinstance(getattr(known.get(name), "impl", None), self.layer_class)
        }
        for name, layer in self.layers.items():
            check_spans(name, layer, kv_cache_spec)
        # With drafts in flight the scheduler counts on all of them; else its lengths are exact.
        self.exact = not drafts_of(vllm_config)
        self._has_ranks = ranks_of(vllm_config) is not None
        self._most_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self._no_spans: torch.Tensor | None = None
        self._inner: dict[int, Inner[Any] | RankBuilder] = {}
        self._numbers: dict[Any, int] = {}
        self._seen: dict[bool, dict[Any, tuple[Bound, int]]] = {True: {}, False: {}}
        self._kinds: dict[bool, dict[int, Bound]] = {}
        self._shared_keys: dict[int, Hashable] = {}
        self.captured: set[int] = set()
        """The kinds that this builder has built for a graph."""
        thresholds = [self.inner(bound).reorder_batch_threshold for bound in self.kinds().values()]
        given = [threshold for threshold in thresholds if threshold is not None]
        self.reorder_batch_threshold = min(given) if given else None

    def seen(self, layer: Any, causal: bool) -> tuple[Bound, int]:
        """The layer's impl for steps that are causal or not, and the number of its kind."""
        found = self._seen[causal].get(layer)
        if found is None:
            bound = layer.bound(self.block_size, self.device, causal)
            number = self._numbers.setdefault(bound.kind, len(self._numbers))
            found = self._seen[causal][layer] = bound, number
        return found

    def kinds(self, causal: bool = True) -> dict[int, Bound]:
        """One layer of each kind in the group, by its number: steps build for these alone."""
        if causal not in self._kinds:
            pairs = [self.seen(layer.impl, causal) for layer in self.layers.values()]
            self._kinds[causal] = {number: bound for bound, number in pairs}
        return self._kinds[causal]

    def inner(self, bound: Bound) -> Any:
        """The builder for layers like this one; made on first use."""
        number, spec = self._numbers[bound.kind], bound.spec
        if number not in self._inner:
            alike = {
                name: SeenLayer(layer, found.inner)
                for name, layer in self.layers.items()
                for found, of_layer in [self.seen(layer.impl, spec.causal)]
                if of_layer == number
            }
            layers = alike or {"layer": SeenLayer(None, bound.inner)}
            config = builder_config(self.vllm_config, self.kv_cache_spec, layers)
            if isinstance(bound.inner, RankImpl):
                self._inner[number] = RankBuilder(bound.inner, config, self.block_size, self.device)
                return self._inner[number]
            cache: Any = kv_cache_spec_for(spec, self.block_size)
            self._inner[number] = make_builder(bound.backend, cache, [*layers], config, self.device)
        return self._inner[number]

    def needs_exact(self, inner: Inner[Any] | RankBuilder, common: CommonAttentionMetadata) -> bool:
        """Whether the builder reads exact lengths on the host in this step."""
        if inner.needs_host_seq_lens != "exact":
            return False
        # Latent attention may need those of prefills alone.
        is_decode = common.max_query_len <= (inner.reorder_batch_threshold or 1)
        return not is_decode or bool(getattr(inner, "decode_needs_host_seq_lens", True))

    def completed(self, common: CommonAttentionMetadata, bound: Bound) -> CommonAttentionMetadata:
        """The step with what such layers need beside what vLLM gives."""
        return self.with_spans(common, bound.spec)

    def with_spans(self, common: CommonAttentionMetadata, spec: LayerSpec) -> CommonAttentionMetadata:
        """The step for such layers: one of text has spans of zeros, at one address, which graphs read."""
        if not spec.mm_prefix or common.mm_prefix_spans is not None:
            return common
        tokens = common.num_actual_tokens
        if self._no_spans is None:
            self._no_spans = torch.zeros(self._most_tokens, 2, dtype=torch.int32, device=self.device)
        zeros = self._no_spans[:tokens]
        if zeros.shape[0] < tokens:
            zeros = torch.zeros(tokens, 2, dtype=torch.int32, device=self.device)
        host = torch.zeros(tokens, 2, dtype=torch.int32, device="cpu")
        return dataclasses.replace(common, mm_prefix_spans=zeros, mm_prefix_spans_cpu=host)

    def shared_key(self, bound: Bound, kind: int) -> Hashable:
        """Equal for kinds whose metadata differ in table and slots only; None for a kind that is built by itself."""
        # It is as in `attnplug.runtime`: builders of one class with the same specs, or with the same `build_key`.
        if kind not in self._shared_keys:
            inner, spec = self.inner(bound), bound.spec
            key: Hashable = None
            if inner.supports_update_block_table and spec.attn_type is AttentionType.DECODER:
                own = own_build_key(inner)
                alike = bound.kind if own is None else (own, bound.decision.options)
                key = bound.backend, type(inner), alike
            self._shared_keys[kind] = key
        return self._shared_keys[kind]

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Step:
        """The step's metadata for all layers of the group."""
        return self._step(common_attn_metadata, "fast" if fast_build else "full", common_prefix_len)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Step:
        """The metadata that a captured graph reads; later steps fill the same tensors."""
        # vLLM has bound its pages by now, and no request has come.
        if not self.is_warm:
            self.is_warm = True
            warm_up(self)
        return self._step(common_attn_metadata, "capture", 0)

    def _step(self, given: Any, how: str, common_prefix_len: int) -> Step:
        batch = self._batch(given, how)
        batch.builders.append(self)
        pages = given.block_table_tensor, given.slot_mapping
        step = self.step_class(self, batch, common_prefix_len, *pages, {})
        for number, bound in self.kinds(batch.causal).items():
            step.make(bound, number)
        return step

    def _batch(self, given: Any, how: str) -> Batch:
        """The batch that another group has begun, or a new one."""
        # With drafts vLLM may change a batch's tensors between the builds of two groups.
        latest = Builder.latest and Builder.latest()
        if (
            latest
            and self.exact
            and latest.how == how
            and self not in latest.builders
            and is_same_batch(given, latest.given)
        ):
            return latest
        batch = Batch(given, how, exact=self.exact, has_ranks=self._has_ranks)
        Builder.latest = weakref.ref(batch)
        return batch

    def use_cascade_attention(
        self,
        common_prefix_len: int,
        query_lens: Any,
        num_query_heads: int,
        num_kv_heads: int,
        use_alibi: bool,
        use_sliding_window: bool,
        use_local_attention: bool,
        num_sms: int,
        dcp_world_size: int,
    ) -> bool:
        """Whether each builder of the group wants the prefix that vLLM found; versions without cascade do not ask."""
        # attnplug's builders get only prefixes that each query sees
        # whole, and vLLM does not say how far a window reaches.
        kinds = self.kinds()
        if use_sliding_window or use_local_attention or not kinds:
            return False
        for bound in kinds.values():
            spec = bound.spec
            if spec.attn_type is not AttentionType.DECODER or spec.is_windowed or spec.chunk_size is not None:
                return False
            wanted = self.inner(bound).use_cascade_attention(
                common_prefix_len=common_prefix_len,
                query_lens=query_lens,
                num_query_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                use_alibi=spec.has_alibi,
                use_sliding_window=False,
                use_local_attention=False,
                num_sms=num_sms,
                dcp_world_size=dcp_world_size,
            )
            if not wanted:
                return False
        return True

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """The least that a backend of the group's layers supports."""
        size = int(kv_cache_spec.block_size)
        layers = vllm_config.compilation_config.static_forward_context.values()
        impls = [
            impl for layer in layers if isinstance(impl := getattr(layer, "impl", None), cls.layer_class)
        ]
        # vLLM would capture mixed batches for the longest prompt that fits: graphs are for decodes here.
        level = AttentionCGSupport.UNIFORM_BATCH.value
        config = builder_config(vllm_config, kv_cache_spec, {})
        for impl in [impl for impl in impls if is_of_group(impl.spec, kv_cache_spec)] or impls:
            if impl.spec.direct_kv:
                # Their lengths are new tensors in each step.
                return AttentionCGSupport.NEVER
            if impl.ranks:
                level = min(level, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE.value)
            decision = impl.decide(size)
            cache: Any = kv_cache_spec_for(decision.spec, size)
            builder = decision.get_backend_cls().get_builder_cls()
            level = min(level, int(builder.get_cudagraph_support(config, cache)))
        return AttentionCGSupport(level)
