"""A backend as an engine calls it: a class whose layers run through the engine's client, for the kit's checks."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from attnplug.core.backend import AttentionBackend, subclass_attention_backend_with_overrides
from attnplug.core.device import Device
from attnplug.core.errors import BatchError, PolicyError
from attnplug.core.impl import AttentionImpl, LayerTensors
from attnplug.core.metadata import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata
from attnplug.core.reasons import Reason
from attnplug.core.spec import LayerSpec, Phase
from attnplug.ops.checks import check_keys, refuse_output_scales
from attnplug.registry.default import get_registry
from attnplug.registry.selection.policy import use
from attnplug.testing.conformance.cases.cases import single_cases
from attnplug.testing.conformance.check import Check, CheckSkipped, SkipKind
from attnplug.testing.conformance.harness import make_impl
from attnplug.testing.conformance.numbers import correctness
from attnplug.testing.conformance.target import Target


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One layer's step, as the kit gives it to an impl; rows past the T tokens of `common` are padding.

    `kv_cache` is the logical cache, in which the computed tokens are stored and the new ones are not. The engine
    writes those, attends, and fills the first T rows of `output` and of `lse`, which only layers with `needs_lse`
    have. `layer` has the engine's scales, if the layer has them.
    """

    backend: type[AttentionBackend]
    spec: LayerSpec
    tensors: LayerTensors
    common: CommonAttentionMetadata
    layer: Any
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    kv_cache: torch.Tensor | None
    output: torch.Tensor
    lse: torch.Tensor | None

    def new_lens(self) -> list[int]:
        """The new tokens of each request."""
        return self.common.query_start_loc_cpu.diff().tolist()

    def by_request(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The T rows of packed tokens, one tensor for each request."""
        return torch.split(rows[: self.common.num_actual_tokens], self.new_lens())

    def pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the cache's keys and values, `[N, block_size, Hkv, D]`."""
        if self.kv_cache is None:
            raise BatchError("kv_cache", None, "is required: the engine reads pages of this layer")
        return self.backend.for_layer(self.spec).split_kv(self.kv_cache, self.spec)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """An engine, and how a layer's step is given to its client.

    Args:
        name: as `attnplug conformance --engine` takes it.
        refusals: why its calls cannot ask for a layer, each a sentence without the layer's values.
        asked: the layers that its client asks a backend for in place of a layer that is not refused.
        attend: runs a step through the client.
        orders: whether it orders requests by the threshold of a backend's builder.
    """

    name: str
    refusals: Callable[[LayerSpec], Iterator[str]]
    asked: Callable[[LayerSpec], Iterator[LayerSpec]]
    attend: Callable[[Call], None]
    orders: bool = False

    def through(self, backend: type[AttentionBackend]) -> type[AttentionBackend]:
        """`backend` behind the client: it serves what the engine can ask for and the backend serves.

        PolicyError: no plugin of the registry offers the class, so that a client cannot select it.
        """
        name, rule = f"{backend.get_name()} through {self.name}", rule_for(backend)

        def validate_configuration(
            cls: type[AttentionBackend], spec: LayerSpec, device: Device, phase: Phase | None = None
        ) -> list[Reason]:
            if found := backend.validate_configuration(spec, device, phase):
                return found
            found = [Reason(f"{self.name}: {why}", code="combination") for why in self.refusals(spec)]
            asked = (each for each in self.asked(spec) if each != spec) if not found else ()
            others = (why for each in asked for why in backend.validate_configuration(each, device, None))
            return found or [
                Reason(f"{self.name} asks for another layer: {why}", code=why.code) for why in others
            ]

        overrides: dict[str, Any] = {
            "get_name": lambda: name,
            "engine": staticmethod(lambda: (self, backend, rule)),
            "validate_configuration": classmethod(validate_configuration),
            "for_layer": classmethod(lambda cls, spec: cls),
            "get_impl_cls": lambda: Impl,
            "get_builder_cls": lambda: Builder,
        }
        wrapped = subclass_attention_backend_with_overrides("", backend, overrides)
        wrapped.__qualname__ = f"{backend.__qualname__} through {self.name}"
        return wrapped

    def checks(self, target: Target) -> list[Check]:
        """The kit's numeric checks of the target's backend behind the client.

        A check for each single value that the backend serves and the engine cannot ask for is skipped, with the reason.
        """
        wrapped = dataclasses.replace(target, backend=self.through(target.backend))
        refused = [case for case in single_cases(target) if wrapped.reasons(case.spec)]
        found = list(correctness.checks(wrapped)) if len(refused) < len(single_cases(target)) else []
        found = [check for check in found if not check.id.startswith("correct/untried-")]
        for case in refused:
            why = "; ".join(wrapped.reasons(case.spec))
            check_id = f"correct/{case.id}"
            found.append(Check.of(check_id, f"{self.name} cannot ask for the layer", _skip, why))
        return list({check.id: check for check in found}.values())


def _skip(why: str) -> None:
    raise CheckSkipped(why, SkipKind.LAYER)


def rule_for(backend: type[AttentionBackend]) -> str:
    """The name by which a rule chooses exactly this class.

    PolicyError: the registry does not have it.
    """
    plugins = get_registry().plugins
    for offer in plugins.every_offer:
        if offer.backend is backend:
            return offer.full_name
    name = backend.get_name()
    if any(offer.backend is backend for offer in plugins.find(name)):
        return name  # a composite
    raise PolicyError(
        "backend", name, "is not in the registry", "install or register the plugin that offers it"
    )


@dataclasses.dataclass(eq=False)
class Step(AttentionMetadata):
    """The step as the kit gave it."""

    common: CommonAttentionMetadata
    slot_mapping: torch.Tensor


class Builder(AttentionMetadataBuilder[Step]):
    """Keeps the step, because the client builds the metadata itself."""

    def __init__(self, kv_cache_spec: Any, layer_names: Any, config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, config, device)
        [impl] = [each.impl for each in config.layers.values()]
        engine, backend, _ = impl.backend.engine()
        if engine.orders:
            serving = backend.for_layer(impl.spec)
            own = make_impl(serving, impl.spec, impl.tensors, options=impl.options)
            layers = dict.fromkeys(layer_names, types.SimpleNamespace(impl=own))
            settings = dataclasses.replace(config, layers=layers)
            inner = serving.get_builder_cls()(kv_cache_spec, layer_names, settings, device)
            self.reorder_batch_threshold = inner.reorder_batch_threshold

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Step:
        """The step."""
        return Step(common_attn_metadata, common_attn_metadata.slot_mapping)


class Impl(AttentionImpl[Step]):
    """Gives each step to the engine's client, with the backend chosen by a rule."""

    def update_kv_cache(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: Any
    ) -> None:
        """Nothing: `attend` writes too, in the engine's order."""

    def attend(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        attn_metadata: Step,
        output: torch.Tensor,
        *,
        output_lse: torch.Tensor | None = None,
        use_sinks: bool = True,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the step through the client."""
        refuse_output_scales(output_scale=output_scale, output_block_scale=output_block_scale)
        if self.spec.has_sinks and not use_sinks:
            raise BatchError("use_sinks", False, "must be True: no engine's call leaves out a layer's sinks")
        key, value = check_keys(key, value, 0, self.spec)
        wrapped: Any = self.backend
        engine, backend, rule = wrapped.engine()
        given = query, key, value, kv_cache, output, output_lse
        call = Call(backend, self.spec, self.tensors, attn_metadata.common, layer, *given)
        with use(rule, options=self.options):
            engine.attend(call)
        return output
