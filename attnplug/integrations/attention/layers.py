"""The backend of one attention module: decision, impl and builder, stored on the module itself."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Hashable
from typing import Any

import torch
from transformers import PreTrainedModel

from attnplug.core.spec import LayerSpec, Phase
from attnplug.integrations.attention.packing import Packing
from attnplug.integrations.attention.step_mask import StepMask
from attnplug.integrations.binding import Binding, version_of
from attnplug.registry.default import select
from attnplug.registry.selection.decision import Decision
from attnplug.registry.selection.policy import phase_rule_for, rule_sets

_log = logging.getLogger("attnplug")
_ATTRIBUTE = "_attnplug"


class LayerState:
    """The decision and bindings of one module; copies and pickles of it keep the name alone.

    `is_own` says that the module computes attention by itself. `one_sequence` says that its running forward was
    given one sequence of hidden states, and `calls_before` how many calls attnplug had served before it.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.decision: Decision | None = None
        self.owner: weakref.ref[PreTrainedModel] | None = None
        self.is_own = False
        self.one_sequence = False
        self.calls_before = 0
        self._bindings: dict[Hashable, _Binding] = {}

    def get_owner(self) -> PreTrainedModel | None:
        """The innermost model that contains the module; None if it runs alone."""
        return None if self.owner is None else self.owner()

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerState:
        return LayerState(self.name)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return LayerState, (self.name,)

    def binding(
        self, spec: LayerSpec, device: torch.device, sinks: torch.Tensor | None, query_len: int
    ) -> _Binding:
        """The impl and builder for `spec` under the current selection rules; made on first use.

        All requests of a call have `query_len` new tokens, so a call is of one phase, as rules for a phase need.

        Raises:
            NoBackendError, BackendUnavailableError, PolicyError: see `attnplug.select`.
            SpecError: sinks that are not one number per head.
        """
        phase = None
        if phase_rule_for(rule_sets(), spec, self.name):
            phase = Phase.DECODE if query_len == 1 and not spec.is_encoder else Phase.PREFILL
        decision = select(spec, device, phase, layer_name=self.name)
        backend = decision.get_backend_cls()
        # Rules such as attnplug.use may choose another backend for the next call of the same module.
        key = (backend, spec, device, decision.options)
        found = self._bindings.get(key)
        version = version_of(sinks)
        if found is None or found.sinks_version != version:
            found = _Binding(decision, self.name, device, sinks)
            self._bindings[key] = found
        elif sinks is not None:
            found.read({"sinks": sinks})
        if decision is not self.decision:
            if self.decision is None or self.decision.backend != decision.backend:
                _log.info("%s is served by %s", self.name, decision.backend)
            self.decision = decision
        return found


def layer_state(module: torch.nn.Module) -> LayerState | None:
    """The state of `module`; None if it has never called attnplug."""
    found = module.__dict__.get(_ATTRIBUTE)
    return found if isinstance(found, LayerState) else None


def set_state(module: torch.nn.Module, state: LayerState) -> LayerState:
    """Store `state` on `module` and return it."""
    object.__setattr__(module, _ATTRIBUTE, state)
    return state


def name_in_model(module: torch.nn.Module, model: PreTrainedModel | None) -> str:
    """The path of `module` in `model`, such as "model.layers.0.self_attn".

    A module that runs outside of a watched model is named by its class and `layer_idx`.
    """
    if model is not None:
        for name, part in model.named_modules():
            if part is module:
                return str(name)
    index = getattr(module, "layer_idx", None)
    name = type(module).__name__
    return name if index is None else f"{name}.{index}"


class _Binding(Binding):
    """The impl and builder that serve one spec of a module on one device; its layer has no pages."""

    def __init__(
        self, decision: Decision, name: str, device: torch.device, sinks: torch.Tensor | None
    ) -> None:
        super().__init__(decision, name, device, {"sinks": sinks})
        self.sinks_version = version_of(sinks)
        self._unmasked: tuple[Hashable, Any] | None = None

    def metadata(self, step: StepMask, packing: Packing, is_shared: bool) -> Any:
        """The backend's metadata for the step.

        Layers that share a mask, backend and spec share it (`is_shared`). A layer without a mask builds
        one for each shape.
        """
        if not is_shared:
            shape = (step.batch, step.q_length, step.kv_length)
            if self._unmasked is None or self._unmasked[0] != shape:
                # The former step's tensors are freed before new ones are made.
                self._unmasked = None
                self._unmasked = (shape, self.build(packing.common))
            return self._unmasked[1]
        key = (self.decision.backend_cls, self.decision.spec, self.decision.options, self.device)
        if key not in step.metadata:
            self._unmasked = None
            step.metadata[key] = self.build(packing.common)
        return step.metadata[key]
