"""Attends the new tokens of a step in sharded layers: their K and V come with the call, and no page is read.

Layers of latent attention whose own prefill half attends the new tokens of a step, beside the computed ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from attnplug.core.backend import AttentionBackend
from attnplug.core.errors import BatchError
from attnplug.core.impl import LayerTensors
from attnplug.core.interface.impl_and_builder import checked_metadata
from attnplug.core.metadata import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata
from attnplug.core.spec import LayerSpec
from attnplug.mla.builder import MLADecodeBuilder
from attnplug.mla.impl import MLADecodeImpl
from attnplug.registry.selection.decision import Decision
from attnplug.runtime.batch.sharded_step import ShardedStep, SplitQueries, pays_to_split
from attnplug.runtime.steps.attention_groups import AttentionGroup, build_step
from attnplug.runtime.steps.runtime_layer import RuntimeLayer

LEAST_QUERIES = 17
"""New tokens of the longest request from which latents are expanded: shorter steps decode drafts."""


class NewLatents:
    """The sharded layers of latent attention on one rank, if all of them have a prefill half of their own.

    Args:
        groups: the builders of the layers with pages.
        layers: all layers by name.
        specs: of the sharded layers.
    """

    def __init__(
        self,
        groups: Sequence[AttentionGroup],
        layers: Mapping[str, RuntimeLayer],
        specs: Mapping[str, LayerSpec],
    ) -> None:
        self._builders: list[
            tuple[type[AttentionBackend], AttentionMetadataBuilder[Any], tuple[str, ...]]
        ] = []
        self._impls: dict[str, MLADecodeImpl] = {}
        wanted = {name for name, spec in specs.items() if spec.mla is not None}
        for group in groups:
            names = tuple(name for name in group.layer_names if name in wanted)
            found = {name: layers[name].impl for name in names}
            prefill = group.builder.prefill if isinstance(group.builder, MLADecodeBuilder) else None
            if names and prefill is not None:
                self._builders.append((group.backend, prefill, names))
                self._impls |= {n: impl for n, impl in found.items() if isinstance(impl, MLADecodeImpl)}
        # A step has one kind of batch for all of them.
        self.names: Collection[str] = wanted if set(self._impls) == wanted else ()

    def build(self, common: CommonAttentionMetadata) -> dict[str, AttentionMetadata]:
        """The metadata of each layer for new tokens with keys in the call."""
        made: dict[str, Any] = {}
        for backend, builder, names in self._builders:
            narrowed = dataclasses.replace(common, causal=True)
            step = checked_metadata(backend, "build", builder.build(0, narrowed))
            made |= dict.fromkeys(names, step)
        return made

    def attend(
        self,
        name: str,
        query: torch.Tensor,
        latent: torch.Tensor,
        metadata: AttentionMetadata,
        output: torch.Tensor,
        output_lse: torch.Tensor | None,
    ) -> None:
        """Attend the latents `[S, 1, L + R]` of new tokens causally."""
        self._impls[name].attend_new(query, latent[:, 0], metadata, output, output_lse)


_Keys = tuple[torch.Tensor, torch.Tensor]


class NewTokens:
    """The layers of `plan.new_tokens` on one rank.

    Args:
        decisions: by sharded layer; empty for layers of latent attention.
        tensors: of all layers.
        readers: the layers that are read by others: their K and V of a step are kept.
        device: of the layers.
        make_groups: builders for layers with direct K and V, by decision.
        latents: the layers of latent attention.
    """

    def __init__(
        self,
        decisions: Mapping[str, Decision],
        tensors: Mapping[str, LayerTensors],
        readers: Collection[str],
        device: torch.device,
        make_groups: Callable[[Mapping[str, Decision]], list[AttentionGroup]],
        latents: NewLatents,
    ) -> None:
        self._latents = latents
        self._layers = {
            # K and V of the call are as computed: the scales are those of stored ones.
            name: RuntimeLayer(
                name, decision, dataclasses.replace(tensors[name], k_scale=1.0, v_scale=1.0), device
            )
            for name, decision in decisions.items()
        }
        self.groups = make_groups(decisions)
        """The builders for the new tokens of a step."""
        # A row that sees later tokens would need the keys of all pieces.
        self._sees_no_later_rows = all(spec.causal for group in self.groups for spec in group.specs)
        self.split: SplitQueries | None = None
        """The rows of this rank, in a step whose rows the ranks share."""
        self._readers, self._device = frozenset(readers), device
        self._metadata: dict[str, AttentionMetadata] = {}
        # Kept for a step, because layers that read the pages of another one get no K and V in their call.
        self._keys: dict[str, _Keys] = {}

    def begin(self, step: ShardedStep, common: CommonAttentionMetadata, draft_index: int | None) -> None:
        """Build the metadata of a step that is not a decode."""
        lens = common.query_start_loc_cpu.diff().numpy()
        is_served = self._sees_no_later_rows and (bool(self.groups) or step.apart)
        if is_served and not step.in_graph and pays_to_split(lens, self._device):
            self.split = SplitQueries.of(common, step.place)
        batch = step.new_tokens(common) if self.split is None else self.split.pieces
        for group in self.groups if batch.num_reqs else ():
            own = batch.for_layers(group.specs)
            if step.for_capture:
                made = group.builder.build_for_cudagraph_capture(own)
                made = checked_metadata(group.backend, "build_for_cudagraph_capture", made)
            else:
                made = build_step(group, own, draft_index)
            self._metadata.update(dict.fromkeys(group.layer_names, made))
        if step.apart and batch.num_reqs:
            self._metadata.update(self._latents.build(batch))

    def end(self) -> None:
        """Forget the step."""
        self.split = None
        self._metadata.clear()
        self._keys.clear()

    def keys_of(self, layer: RuntimeLayer, key: torch.Tensor | None, value: torch.Tensor | None) -> _Keys:
        """K and V of the new tokens: of the call, or of the layer whose pages this one reads; latents are both."""
        value = key if layer.spec.mla is not None else value
        if key is not None and value is not None:
            if layer.name in self._readers:
                self._keys[layer.name] = key, value
            return key, value
        found = self._keys.get(layer.target or "")
        if found is None:
            limit = f"reads the pages of {layer.target}, whose new keys are not known in this step"
            raise BatchError("layer_name", layer.name, limit, f"call forward of {layer.target} first")
        return found

    def attend(
        self,
        name: str,
        query: torch.Tensor,
        keys: _Keys,
        output: torch.Tensor,
        output_lse: torch.Tensor | None,
    ) -> None:
        """Attend causally, with the sinks: all rows of the step, or in a split step those of this rank."""
        split, is_latent = self.split, name in self._latents.names
        if split is not None:
            if not split.pieces.num_reqs:
                return
            query, key = query.index_select(0, split.rows), keys[0].index_select(0, split.key_rows)
            keys = key, key if is_latent else keys[1].index_select(0, split.key_rows)
        made = self._metadata[name]
        if is_latent:
            self._latents.attend(name, query, keys[0], made, output, output_lse)
            return
        layer = self._layers[name]
        layer.impl.attend(layer, query, *keys, None, made, output, output_lse=output_lse, use_sinks=True)
