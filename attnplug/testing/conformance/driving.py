"""A backend's parts put together by hand: a builder, its layers, and a batch through them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch

from attnplug.core.config import BuilderConfig
from attnplug.core.impl import AttentionImpl
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.core.metadata import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.target import Target

__all__ = ["Answer", "Build", "DrivenLayer", "Driver"]

Build: TypeAlias = Callable[[AttentionMetadataBuilder[Any], CommonAttentionMetadata], AttentionMetadata]
"""A way of making a step's metadata."""


class Answer(NamedTuple):
    """What a backend gave for a batch's T tokens: output `[T, H, Dv]`, and LSE `[T, H]` where it is asked."""

    output: torch.Tensor
    lse: torch.Tensor | None


class DrivenLayer:
    """A layer as its impl sees it: the AttentionLayer protocol.

    Args:
        target: the backend.
        name: the layer's.
        batch: has its spec, tensors and device.
    """

    def __init__(self, target: Target, name: str, batch: Batch) -> None:
        self._q_scale_float = self._prob_scale_float = 1.0
        self._k_scale_float, self._v_scale_float = float(batch.tensors.k_scale), float(batch.tensors.v_scale)
        self._q_scale = self._prob_scale = torch.ones((), device=batch.query.device)
        self._k_scale = torch.tensor(self._k_scale_float, device=batch.query.device)
        self._v_scale = torch.tensor(self._v_scale_float, device=batch.query.device)
        options = target.backend.Options
        self.impl: AttentionImpl[Any] = target.backend.get_impl_cls().from_spec(
            batch.spec,
            backend=target.backend,
            layer_name=name,
            tensors=batch.tensors,
            options=None if options is None else options(),
        )
        self.impl.process_weights_after_loading(getattr(torch, batch.spec.dtype))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Driver:
    """A builder, and the layers that it serves: they share pages of one kind.

    Args:
        layers: in order.
        builder: knows them by its `config.layers`.
    """

    layers: tuple[DrivenLayer, ...]
    builder: AttentionMetadataBuilder[Any]

    @classmethod
    def of(cls, target: Target, *batches: Batch, **config: Any) -> Driver:
        """A builder for one layer of each batch, which must be over pages of a size that its spec says; `config` is BuilderConfig's."""
        named = {f"layers.{i}": DrivenLayer(target, f"layers.{i}", batch) for i, batch in enumerate(batches)}
        first = batches[0]
        cache: Any = kv_cache_spec_for(first.spec, first.spec.block_size or 1)
        made = BuilderConfig(layers=named, **config)
        builder = target.backend.get_builder_cls()(cache, list(named), made, first.query.device)
        return cls(tuple(named.values()), builder)

    def run(
        self,
        batch: Batch,
        metadata: AttentionMetadata,
        *,
        layer: int = 0,
        use_sinks: bool = True,
        writes: bool = True,
    ) -> Answer:
        """One layer's forward into poisoned outputs; `writes=False` brings no key: the pages hold all."""
        spec, query, tokens = batch.spec, batch.query, batch.common.num_actual_tokens
        output = query.new_full((query.shape[0], spec.num_heads, spec.head_size_v), torch.nan)
        lse = torch.full(output.shape[:2], torch.nan, device=query.device) if spec.needs_lse else None
        self.layers[layer].impl.forward(
            self.layers[layer],
            query,
            batch.key if writes else None,
            batch.value if writes else None,
            batch.kv_cache,
            metadata,
            output,
            output_lse=lse,
            use_sinks=use_sinks,
        )
        return Answer(output[:tokens], None if lse is None else lse[:tokens])
