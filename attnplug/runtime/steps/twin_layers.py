"""The layers of the parts of a step with shared prefixes: twins of a runtime's own, on the same backend and cache."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from attnplug.core.config import BuilderConfig
from attnplug.core.impl import AttentionImpl
from attnplug.core.interface.impl_and_builder import checked_metadata, make_builder, make_impl
from attnplug.core.kv_cache_spec import CrossAttentionSpec, FullAttentionSpec, KVCacheSpec
from attnplug.core.metadata import PAD_SLOT_ID, AttentionMetadata
from attnplug.core.prefix_sharing import piece_spec, rest_spec
from attnplug.core.spec import AttentionType, LayerSpec
from attnplug.registry.selection.decision import Decision
from attnplug.runtime.steps.attention_groups import AttentionGroup, share_workspace
from attnplug.runtime.steps.forest_parts import CutTable, Rows
from attnplug.runtime.steps.runtime_layer import RuntimeLayer


class Twins:
    """One impl for each layer, and the builder of them all.

    Args:
        group: the layers.
        names: those of its layers that are served here.
        layers: all layers of the runtime.
        decisions: of all layers.
        spec_of: the spec of a layer's twin.
        cache: the pages that the builder is told of.
        config: the limits of the twins' steps; its layers are replaced.
        device: of the layers.
    """

    def __init__(
        self,
        group: AttentionGroup,
        names: tuple[str, ...],
        layers: Mapping[str, RuntimeLayer],
        decisions: Mapping[str, Decision],
        spec_of: Callable[[LayerSpec], LayerSpec],
        cache: KVCacheSpec,
        config: BuilderConfig,
        device: torch.device,
    ) -> None:
        self.backend = group.backend
        self.builds = 0
        """Calls of the builder, each of which may write to memory that graphs read."""
        self.impls: dict[str, AttentionImpl[Any]] = {}
        for name in names:
            layer, spec = layers[name], spec_of(layers[name].spec)
            tensors = layer.impl.tensors
            if not spec.has_sinks:
                tensors = dataclasses.replace(tensors, sinks=None)
            options = decisions[name].get_options()
            made = make_impl(group.backend, spec, layer_name=name, tensors=tensors, options=options)
            made.process_weights_after_loading(getattr(torch, spec.dtype))
            self.impls[name] = made
        self.is_causal = all(impl.spec.causal for impl in self.impls.values())
        served: Any = {name: types.SimpleNamespace(impl=impl) for name, impl in self.impls.items()}
        limits = dataclasses.replace(config, layers=served, cudagraph_batch_sizes=())
        self.builder = make_builder(group.backend, cache, list(names), limits, device)
        self._size = group.kv_cache_spec.block_size
        self._no_slots = torch.full(
            (limits.max_num_batched_tokens,), PAD_SLOT_ID, dtype=torch.int64, device=device
        )

    def build(
        self,
        rows: Rows,
        sent: Sequence[torch.Tensor],
        step_table: torch.Tensor,
        cut: CutTable | None = None,
        longest: int | None = None,
    ) -> AttentionMetadata:
        """The metadata of one part of a step, or with `longest` of its capture; arguments as `Rows.common`."""
        # Counted first, because a builder that raises may have written to its memory.
        self.builds += 1
        form = self._size, step_table, self.is_causal, cut, longest
        common = rows.common(sent, self._no_slots, *form)
        method = "build" if longest is None else "build_for_cudagraph_capture"
        found = (
            self.builder.build(0, common)
            if longest is None
            else self.builder.build_for_cudagraph_capture(common)
        )
        made: AttentionMetadata = checked_metadata(self.backend, method, found)
        return made


class TwinLayers:
    """The twins of layers with one window in an attention group, which are made when a step first needs them.

    Args: as `Twins`.
    """

    def __init__(
        self,
        group: AttentionGroup,
        names: tuple[str, ...],
        layers: Mapping[str, RuntimeLayer],
        decisions: Mapping[str, Decision],
        config: BuilderConfig,
        device: torch.device,
    ) -> None:
        self._given = group, names, layers, decisions
        self._config, self._device = config, device
        self._made: dict[str, Twins] = {}

    def rest(self) -> Twins:
        """Of requests without their shared blocks."""
        return self._twins("rest", rest_spec, self._given[0].kv_cache_spec)

    def pieces(self) -> Twins:
        """Of shared blocks."""
        if "pieces" in self._made:
            return self._made["pieces"]
        group, names, layers, decisions = self._given
        cache, device = group.kv_cache_spec, decisions[names[0]].device

        def spec_of(spec: LayerSpec) -> LayerSpec:
            made = piece_spec(group.backend, spec, device, cache.block_size)
            return spec if made is None else made

        is_cross = spec_of(layers[names[0]].spec).attn_type is AttentionType.ENCODER_DECODER
        kind = CrossAttentionSpec if is_cross else FullAttentionSpec
        fields = {field.name: getattr(cache, field.name) for field in dataclasses.fields(KVCacheSpec)}
        # A row may be in several pieces, and a tree's context is one more.
        most = 2 * self._config.max_num_seqs, 5 * self._config.max_num_batched_tokens
        return self._twins("pieces", spec_of, kind(**fields), *most)

    def _twins(
        self,
        kind: str,
        spec_of: Callable[[LayerSpec], LayerSpec],
        cache: KVCacheSpec,
        most_requests: int = 0,
        most_tokens: int = 0,
    ) -> Twins:
        if kind not in self._made:
            most = {"max_num_seqs": most_requests, "max_num_batched_tokens": most_tokens}
            changes: Any = {name: value for name, value in most.items() if value}
            config = dataclasses.replace(self._config, **changes)
            self._made[kind] = Twins(*self._given, spec_of, cache, config, self._device)
            # Layers run one after another, so all builders can use one workspace.
            share_workspace(twins.builder for twins in self._made.values())
        return self._made[kind]
