"""Metadata for a group of vLLM's layers: one builder of attnplug for each backend and kind of layer in it."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder

from attnplug.core.config import BuilderConfig
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.core.metadata import AttentionMetadataBuilder as Inner
from attnplug.core.metadata import CommonAttentionMetadata
from attnplug.core.parts import make_builder
from attnplug.integrations.vllm.impl import Bound, Layer
from attnplug.integrations.vllm.steps import for_layer, translate


class Step(AttentionMetadata):  # type: ignore[misc]
    """A step of the group: metadata for each kind of layer, made before the layers run."""

    def __init__(self, builder: Builder, common: CommonAttentionMetadata, how: str) -> None:
        self.builder, self.common, self.how = builder, common, how
        self.slot_mapping = common.slot_mapping
        self.made: dict[Any, Any] = {}

    def of(self, layer: Any) -> tuple[Any, Bound]:
        """The layer's metadata and impl."""
        bound = layer.bound(self.builder.block_size, self.builder.device, self.common.causal)
        return self.for_bound(bound), bound

    def for_bound(self, bound: Bound) -> Any:
        """The metadata for a bound layer; a layer that the group did not name is built for now."""
        key = bound.kind
        if key not in self.made:
            inner = self.builder.inner(bound)
            common = for_layer(self.common, bound.decision.spec)
            if self.how == "capture":
                self.made[key] = inner.build_for_cudagraph_capture(common)
            else:
                self.made[key] = inner.build(0, common, self.how == "fast")
        return self.made[key]


class Builder(AttentionMetadataBuilder):  # type: ignore[misc]
    """What vLLM constructs for each group of layers with one KV cache spec."""

    backend: str | None = None
    layer_class: type[Any] = Layer
    step_class: type[Step] = Step

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size = int(kv_cache_spec.block_size)
        known = vllm_config.compilation_config.static_forward_context
        self.layers = {
            name: known[name]
            for name in layer_names
            if isinstance(getattr(known.get(name), "impl", None), self.layer_class)
        }
        speculation = vllm_config.speculative_config
        self.drafts = 0 if speculation is None else int(speculation.num_speculative_tokens or 0)
        # With drafts in flight the scheduler counts on all of them; else its lengths are exact.
        self.exact = not self.drafts
        self._inner: dict[Any, Inner[Any]] = {}
        self._kinds: dict[bool, tuple[Bound, ...]] = {}
        thresholds = [self.inner(bound).reorder_batch_threshold for bound in self.kinds()]
        given = [threshold for threshold in thresholds if threshold is not None]
        self.reorder_batch_threshold = min(given) if given else None

    def bound(self, causal: bool = True) -> list[Bound]:
        """The group's layers, as steps that are causal or not run them."""
        return [layer.impl.bound(self.block_size, self.device, causal) for layer in self.layers.values()]

    def kinds(self, causal: bool = True) -> tuple[Bound, ...]:
        """One layer of each kind in the group: steps build for these alone."""
        if causal not in self._kinds:
            self._kinds[causal] = tuple({bound.kind: bound for bound in self.bound(causal)}.values())
        return self._kinds[causal]

    def inner(self, bound: Bound) -> Inner[Any]:
        """The builder for layers like this one; made on first use."""
        spec = bound.decision.spec
        key = bound.kind
        if key not in self._inner:
            scheduler = self.vllm_config.scheduler_config
            alike = {
                name: _SeenLayer(layer, found.inner)
                for (name, layer), found in zip(self.layers.items(), self.bound(spec.causal), strict=True)
                if found.kind == key
            }
            config = BuilderConfig(
                layers=alike or {"layer": _SeenLayer(None, bound.inner)},
                num_speculative_tokens=self.drafts,
                max_num_seqs=scheduler.max_num_seqs,
                max_num_batched_tokens=scheduler.max_num_batched_tokens,
                max_model_len=self.vllm_config.model_config.max_model_len,
            )
            cache: Any = kv_cache_spec_for(spec, self.block_size)
            self._inner[key] = make_builder(bound.backend, cache, [*config.layers], config, self.device)
        return self._inner[key]

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Step:
        """The step's metadata for all layers of the group."""
        return self._step(common_attn_metadata, "fast" if fast_build else "full")

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Step:
        """The metadata that a captured graph reads; later steps fill the same tensors."""
        return self._step(common_attn_metadata, "capture")

    def _step(self, given: Any, how: str) -> Step:
        step = self.step_class(self, translate(given, exact=self.exact), how)
        for bound in self.kinds(step.common.causal):
            step.for_bound(bound)
        return step

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """The least that a backend of the model's layers supports."""
        size = int(kv_cache_spec.block_size)
        layers = vllm_config.compilation_config.static_forward_context.values()
        impls = [
            impl for layer in layers if isinstance(impl := getattr(layer, "impl", None), cls.layer_class)
        ]
        builders = [impl.decide(size).get_backend_cls().get_builder_cls() for impl in impls]
        levels = [int(builder.cudagraph_support) for builder in builders]
        # vLLM would capture mixed batches for the longest prompt that fits: graphs are for decodes here.
        return AttentionCGSupport(min([*levels, AttentionCGSupport.UNIFORM_BATCH.value]))


class _SeenLayer:
    """vLLM's layer as attnplug's builders read it: its scales, with the inner impl."""

    def __init__(self, layer: Any, impl: Any) -> None:
        self._layer, self.impl = layer, impl

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)
