"""One layer with its parts apart, so that each call can be made alone and what it touches be seen."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from attnplug.core.config import BuilderConfig
from attnplug.core.impl import AttentionImpl
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.core.metadata import AttentionMetadata, AttentionMetadataBuilder
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.check import ConformanceError
from attnplug.testing.conformance.driving import Answer, DrivenLayer
from attnplug.testing.conformance.target import Target
from attnplug.testing.conformance.verdicts import compare, during

__all__ = ["SingleLayer", "blank", "default_options", "matches_oracle", "raw_bytes"]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SingleLayer:
    """A layer, its impl and its builder, whether K and V are in pages or come with the call.

    Args:
        layer: holds the impl and the scales.
        builder: serves this layer only.
    """

    layer: DrivenLayer
    builder: AttentionMetadataBuilder[Any]

    @classmethod
    def of(cls, target: Target, batch: Batch) -> SingleLayer:
        """Fresh parts for the layer of `batch`; ConformanceError where making them raises."""
        spec = batch.spec
        size = spec.block_size or 1
        if batch.kv_cache is not None:
            size = target.backend.split_kv(batch.kv_cache, spec)[0].shape[1]
        cache: Any = kv_cache_spec_for(spec, size)
        with during("from_spec, of a layer that validate_configuration accepts"):
            layer = DrivenLayer(target, "layer", batch)
        with during("making the builder"):
            config = BuilderConfig(layers={"layer": layer})
            builder = target.backend.get_builder_cls()(cache, ["layer"], config, batch.query.device)
        return cls(layer, builder)

    @property
    def impl(self) -> AttentionImpl[Any]:
        """The layer's impl."""
        return self.layer.impl

    def build(self, batch: Batch) -> AttentionMetadata:
        """The metadata of the batch's step."""
        with during("build"):
            metadata: AttentionMetadata = self.builder.build(0, batch.common)
        return metadata

    def write(self, batch: Batch) -> None:
        """`update_kv_cache` with the batch's new keys and values."""
        assert batch.kv_cache is not None  # noqa: S101 - asked only of batches over pages
        slots = self.build(batch).slot_mapping
        with during("update_kv_cache"):
            self.impl.update_kv_cache(self.layer, batch.key, batch.value, batch.kv_cache, slots)

    def forward(self, batch: Batch, into: Answer | None = None, what: str = "forward") -> Answer:
        """`build` and `forward`; gives all rows of `into`, by default of NaN, padding included.

        `what` says how it was asked for, where the backend raises.
        """
        into = into or blank(batch)
        with during(what):
            self.impl.forward(
                self.layer,
                batch.query,
                batch.key,
                batch.value,
                batch.kv_cache,
                self.builder.build(0, batch.common),
                into.output,
                output_lse=into.lse,
            )
        return into

    def attend(self, batch: Batch, *, with_keys: bool = True) -> Answer:
        """`build` and `attend` into rows of NaN; without keys where the pages hold them all."""
        into = blank(batch)
        with during("attend" if with_keys else "attend without key and value, which the pages hold"):
            self.impl.attend(
                self.layer,
                batch.query,
                batch.key if with_keys else None,
                batch.value if with_keys else None,
                batch.kv_cache,
                self.builder.build(0, batch.common),
                into.output,
                output_lse=into.lse,
            )
        return into


def default_options(target: Target) -> Any:
    """The backend's Options as they are where the user sets none; None where it has none."""
    options = target.backend.Options
    return None if options is None else options()


def blank(batch: Batch, fill: float = torch.nan) -> Answer:
    """Output `[T + padding, H, Dv]` and, where the spec needs it, LSE `[T + padding, H]`, all `fill`."""
    spec, query = batch.spec, batch.query
    output = query.new_full((query.shape[0], spec.num_heads, spec.head_size_v), fill)
    lse = torch.full(output.shape[:2], fill, device=query.device) if spec.needs_lse else None
    return Answer(output, lse)


def matches_oracle(batch: Batch, found: Answer, what: str) -> None:
    """ConformanceError, opening with `what`, unless the batch's own rows of `found` are the oracle's."""
    tokens = batch.common.num_actual_tokens
    try:
        compare(batch, Answer(found.output[:tokens], None if found.lse is None else found.lse[:tokens]))
    except AssertionError as problem:
        raise ConformanceError(f"{what}: {problem}") from None


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor of any strides holds, in logical order, on the host: uint8, 1-D. NaN equals NaN in it."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).clone()
