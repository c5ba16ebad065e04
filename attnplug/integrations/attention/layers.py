"""What serves one attention module: its decision, impl and builder, kept on the module itself."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Hashable
from typing import Any

import torch

from attnplug.core.config import BuilderConfig
from attnplug.core.impl import AttentionImpl, LayerTensors
from attnplug.core.metadata import AttentionMetadataBuilder
from attnplug.core.spec import LayerSpec
from attnplug.integrations.attention.packing import Packing
from attnplug.integrations.attention.step_mask import StepMask
from attnplug.registry.decision import Decision
from attnplug.registry.default import select

__all__ = ["ServedLayer", "serve", "served"]

_log = logging.getLogger("attnplug")
_ATTRIBUTE = "_attnplug"


class ServedLayer:
    """The state of one module; a copied or pickled module starts without any."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.decision: Decision | None = None
        self._bindings: dict[Hashable, _Binding] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> ServedLayer:
        return ServedLayer(self.name)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return ServedLayer, (self.name,)

    def binding(self, spec: LayerSpec, device: torch.device, sinks: torch.Tensor | None) -> _Binding:
        """The impl and builder for `spec` under the rules that hold now; made when first needed.

        Raises:
            NoBackendError, BackendUnavailableError, PolicyError: as `attnplug.select`.
            SpecError: sinks that are not one number per head.
        """
        decision = select(spec, device, layer_name=self.name)
        backend = decision.get_backend_cls()
        key = (backend, spec, device, decision.options)
        found = self._bindings.get(key)
        version = _version(sinks)
        if found is None or found.sinks_version != version:
            found = _Binding.make(decision, self.name, device, sinks)
            self._bindings[key] = found
        if decision is not self.decision:
            if self.decision is None or self.decision.backend != decision.backend:
                _log.info("%s is served by %s", self.name, decision.backend)
            self.decision = decision
        return found


def served(module: torch.nn.Module) -> ServedLayer | None:
    """The state of `module`, or None where it has never called attnplug."""
    found = module.__dict__.get(_ATTRIBUTE)
    return found if isinstance(found, ServedLayer) else None


def serve(module: torch.nn.Module, name: str) -> ServedLayer:
    """A state for `module`, kept on it."""
    layer = ServedLayer(name)
    object.__setattr__(module, _ATTRIBUTE, layer)
    return layer


@dataclasses.dataclass(eq=False, slots=True)
class _EngineLayer:
    """What an impl may ask of the engine's layer: nothing is quantised here, so all scales are 1."""

    impl: Any
    _q_scale: torch.Tensor
    _k_scale: torch.Tensor
    _v_scale: torch.Tensor
    _prob_scale: torch.Tensor
    _q_scale_float: float = 1.0
    _k_scale_float: float = 1.0
    _v_scale_float: float = 1.0


@dataclasses.dataclass(eq=False, slots=True)
class _Binding:
    decision: Decision
    name: str
    device: torch.device
    impl: AttentionImpl[Any]
    layer: _EngineLayer
    sinks_version: Hashable
    builder: AttentionMetadataBuilder[Any] | None = None
    _unmasked: tuple[Hashable, Any] | None = None

    @classmethod
    def make(
        cls, decision: Decision, name: str, device: torch.device, sinks: torch.Tensor | None
    ) -> _Binding:
        tensors = LayerTensors(sinks=None if sinks is None else sinks.detach().reshape(-1).float())
        backend = decision.get_backend_cls()
        impl = backend.get_impl_cls().from_spec(
            decision.spec, layer_name=name, tensors=tensors, options=decision.get_options()
        )
        impl.process_weights_after_loading(getattr(torch, decision.spec.dtype))
        one = torch.ones((), device=device)
        return cls(decision, name, device, impl, _EngineLayer(impl, one, one, one, one), _version(sinks))

    def metadata(self, step: StepMask, packing: Packing, is_shared: bool) -> Any:
        """What the backend makes of the step.

        Built once for all layers that share the mask, the backend and the spec (`is_shared`); for a
        layer that is given no mask, once for each shape.
        """
        if not is_shared:
            shape = (step.batch, step.q_length, step.kv_length)
            if self._unmasked is None or self._unmasked[0] != shape:
                self._unmasked = (shape, self._build(packing))
            return self._unmasked[1]
        key = (self.decision.backend_cls, self.decision.spec, self.decision.options, self.device)
        if key not in step.metadata:
            step.metadata[key] = self._build(packing)
        return step.metadata[key]

    def _build(self, packing: Packing) -> Any:
        common = packing.common
        builder = self.builder
        self._unmasked = None
        if builder is None or not _holds(builder.config, common.num_reqs, common.num_actual_tokens):
            builder = self.builder = self._make_builder(common.num_reqs, common.num_actual_tokens)
        return builder.build(0, common)

    def _make_builder(self, reqs: int, tokens: int) -> AttentionMetadataBuilder[Any]:
        default = BuilderConfig()
        config = BuilderConfig(
            layers={self.name: self.layer},
            max_num_seqs=max(default.max_num_seqs, _power_of_two(reqs)),
            max_num_batched_tokens=max(default.max_num_batched_tokens, _power_of_two(tokens)),
        )
        no_cache: Any = None  # direct K and V are in no pages
        cls = self.decision.get_backend_cls().get_builder_cls()
        return cls(no_cache, [self.name], config, self.device)


def _holds(config: BuilderConfig, reqs: int, tokens: int) -> bool:
    return reqs <= config.max_num_seqs and tokens <= config.max_num_batched_tokens


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


def _version(sinks: torch.Tensor | None) -> Hashable:
    """Differs once the sinks are replaced, moved or written to."""
    if sinks is None:
        return None
    return (sinks.data_ptr(), sinks.dtype, None if sinks.is_inference() else sinks._version)
