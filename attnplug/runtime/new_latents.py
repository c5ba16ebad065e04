"""Layers of latent attention whose own prefill half attends the new tokens of a step, beside the computed ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from attnplug.core.backend import AttentionBackend
from attnplug.core.interface.impl_and_builder import checked_metadata
from attnplug.core.metadata import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata
from attnplug.core.spec import LayerSpec
from attnplug.mla.builder import MLADecodeBuilder
from attnplug.mla.impl import MLADecodeImpl
from attnplug.runtime.attention_groups import AttentionGroup
from attnplug.runtime.runtime_layer import RuntimeLayer

LEAST_QUERIES = 17
"""New tokens of the longest request from which a step is no decode of drafts: its products are worth an expansion."""


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
