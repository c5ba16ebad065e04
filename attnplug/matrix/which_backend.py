"""Which backend serves a model on a GPU with a KV dtype: the selector's answer, and one sentence that tells it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from attnplug.core.features import Feature
from attnplug.core.kv_format import common_kv_cache_dtypes, kv_format
from attnplug.core.reasons import Reason
from attnplug.core.spec import AttentionType, LayerSpec
from attnplug.planning import decide_model, phases_alone
from attnplug.runtime.plan.grouping import planned_caches

if TYPE_CHECKING:
    from attnplug.core.device import Device
    from attnplug.matrix.model_page import ExampleModel
    from attnplug.registry.registry import Registry, SelectKwargs
    from attnplug.registry.selection.decision import Decision

_STORED = common_kv_cache_dtypes()
KV_CHOICES: dict[str, tuple[str, ...]] = {
    choice: tuple(name for name in _STORED if kv_format(name).family == choice) or (choice,)
    for choice in common_kv_cache_dtypes(aliases=True)
}
"""The KV dtypes to choose from, and those that each may mean, the preferred one first."""
GPU = "{gpu}"
"""The place of the GPU's name, such as "an A100", in a sentence."""

_ASKED: SelectKwargs = {"assume_installed": "all"}


@dataclasses.dataclass(frozen=True, slots=True)
class LayerGroup:
    """The layers of a model with one spec, and the selector's decisions for them.

    Args:
        words: what they ask for: "sliding window 128, sinks".
        name: short: "sliding".
        layers: their names.
        joint: the decision for both phases.
        alone: the decision of each phase alone, where the selector makes them.
    """

    words: str
    name: str
    layers: tuple[str, ...]
    joint: Decision
    alone: tuple[Decision, ...] = ()

    @property
    def backends(self) -> tuple[str, ...]:
        """The backend, or those of prefill and decode; empty if none serves the layers."""
        return tuple(dict.fromkeys(self.joint.members.values())) if self.joint else ()

    @property
    def reference(self) -> str | None:
        """The reference, the one backend of priority 0, if it serves them in a phase."""
        candidates = (each for decision in (self.joint, *self.alone) for each in decision.candidates)
        names = (each.name for each in candidates if each.accepted and each.priority == 0)
        return next((name for name in names if name in self.backends), None)

    @property
    def is_served(self) -> bool:
        """Whether other backends than the reference serve them."""
        return bool(self.joint) and self.reference is None

    def reasons_of(self, backend: str) -> tuple[Reason, ...]:
        """The reasons against a backend; empty if it was accepted, or serves them in a phase."""
        if backend in self.backends:
            return ()
        found = (c.reasons for d in (self.joint, *self.alone) for c in d.refused if c.name == backend)
        return next(iter(found), ())


@dataclasses.dataclass(frozen=True, slots=True)
class ModelDecision:
    """The selector's answer for a model on a device with a KV dtype.

    Args:
        kv_cache_dtype: one of `KV_CHOICES`' values.
        kinds: in the order of the model's layers.
        bytes_per_token: of the KV cache of all layers; None if a layer has no backend.
        notes: of the decisions.
    """

    kv_cache_dtype: str
    kinds: tuple[LayerGroup, ...]
    bytes_per_token: int | None
    notes: tuple[str, ...]

    @property
    def is_served(self) -> bool:
        """Whether a backend other than the reference serves each layer."""
        return all(kind.is_served for kind in self.kinds)


@dataclasses.dataclass(frozen=True, slots=True)
class BackendAnswer:
    """The answer to "which backend for this model?".

    Args:
        sentence: with `GPU` for the name of the device.
        outcome: of the KV dtype that the sentence recommends.
    """

    sentence: str
    outcome: ModelDecision


def answers_for(registry: Registry, model: ExampleModel, device: Device) -> dict[str, BackendAnswer]:
    """The answer for each of `KV_CHOICES`. Every library that a backend requires counts as installed.

    Raises:
        PolicyError, PluginError: as `attnplug.select_layers`, for settings of the environment.
    """
    outcomes = {name: _outcome(registry, model, device, name) for name in _STORED}
    on_gpu = device.type != "cpu"
    return {choice: _answer(model, choice, outcomes, on_gpu) for choice in KV_CHOICES}


def _outcome(registry: Registry, model: ExampleModel, device: Device, kv_cache_dtype: str) -> ModelDecision:
    specs = model.with_kv_cache_dtype(kv_cache_dtype)
    decisions, by_phase, notes = decide_model(registry, specs, device, _ASKED)
    layers: dict[LayerSpec, list[str]] = {}
    for name, spec in specs.items():
        layers.setdefault(spec, []).append(name)
    kinds = tuple(
        LayerGroup(
            words_of(spec),
            spec.kinds[0],
            tuple(names),
            decisions[names[0]],
            phases_alone(decisions[names[0]], by_phase),
        )
        for spec, names in layers.items()
    )
    caches = planned_caches(decisions).values() if all(decisions.values()) else None
    size = None if caches is None else sum(each.page_size_bytes // each.block_size for each in caches)
    return ModelDecision(kv_cache_dtype, kinds, size, notes)


@functools.cache
def words_of(spec: LayerSpec) -> str:
    """The requests of a layer beyond sizes: "sliding 128, sinks"; "full" for nothing."""
    asked = spec.required_features() & ~Feature.FP8_KV
    if spec.attn_type is not AttentionType.DECODER:
        # Encoders and cross attention are non-causal by nature, encoders keep no cache.
        asked &= ~Feature.NON_CAUSAL & ~Feature.DIRECT_KV
    masks = Feature.SLIDING_WINDOW | Feature.CHUNKED_LOCAL | Feature.CROSS | Feature.ENCODER
    words = [flag.shown(spec) for flag in asked]
    return ", ".join(words if asked & masks or spec.mla or spec.state else ["full", *words])


def _answer(
    model: ExampleModel, choice: str, outcomes: Mapping[str, ModelDecision], on_gpu: bool
) -> BackendAnswer:
    meant = [outcomes[name] for name in KV_CHOICES[choice]]
    best = next((outcome for outcome in meant if outcome.is_served), meant[0])
    head = f"On {GPU}{_cache(model, choice)}, "
    if not on_gpu or best.is_served:
        text = f"{head}{model.name} {_runs_on(best)}"
        if len(meant) > 1 and _is_stored(model):
            text += f" with {_short(best)}{_beside(best, meant, on_gpu)}"
        return BackendAnswer(f"{text}.", best)
    others = [outcome for name, outcome in outcomes.items() if outcome.is_served and name != choice]
    lacking = [kind for kind in best.kinds if not kind.joint]
    if lacking:
        layers = model.name if len(lacking) == len(best.kinds) else f"{_count(lacking)} of {model.name}"
        text = f"{head}no backend serves {layers}"
    elif all(kind.backends == (kind.reference,) for kind in best.kinds):
        text = f"{head}only the reference {best.kinds[0].reference} serves {model.name}"
    else:
        text = f"{head}{model.name} {_runs_on(best)}"
    return BackendAnswer(f"{text}{_what_helps(model, best, others)}.", best)


def _cache(model: ExampleModel, choice: str) -> str:
    """The words for the cache, with a blank before them; empty for a model without one."""
    if not _is_stored(model):
        return ""
    stored = next(spec.dtype for spec in model.layers.values() if not spec.direct_kv)
    name = stored if choice == "auto" else choice
    return f" with {kv_format(name).article} {name} cache"


def _is_stored(model: ExampleModel) -> bool:
    return not all(spec.direct_kv for spec in model.layers.values())


def _short(outcome: ModelDecision) -> str:
    return kv_format(outcome.kv_cache_dtype).short_name


def _runs_on(outcome: ModelDecision) -> str:
    """Such as "runs on TRITON", or "runs on TRITON (24 sliding layers) and FLASH_ATTN_3 (24 full layers)"."""
    groups: dict[tuple[str, ...], list[LayerGroup]] = {}
    for kind in outcome.kinds:
        groups.setdefault(kind.backends, []).append(kind)
    if len(groups) > 1:
        parts = [f"{_names(kinds[0])} ({_count(kinds)})" for kinds in groups.values()]
        return f"runs on {_join(parts)}"
    return f"runs on {_names(outcome.kinds[0])}"


def _names(kind: LayerGroup) -> str:
    names = [f"the reference {name}" if name == kind.reference else name for name in kind.backends]
    return " in prefill and ".join(names) + (" in decode" if len(names) > 1 else "") or "no backend"


def _count(kinds: Sequence[LayerGroup]) -> str:
    return _join([f"{len(kind.layers)} {kind.name}" for kind in kinds]) + " layers"


def _join(parts: Sequence[str]) -> str:
    return ", ".join(parts[:-1]) + f" and {parts[-1]}" if len(parts) > 1 else parts[0]


def _beside(best: ModelDecision, meant: Sequence[ModelDecision], on_gpu: bool) -> str:
    """The outcome for the other storage types that the choice means."""
    for other in meant:
        if other is best:
            continue
        if other.is_served or not on_gpu:
            same = [kind.backends for kind in other.kinds] == [kind.backends for kind in best.kinds]
            return f" or {_short(other)}" if same else f"; with {_short(other)} it {_runs_on(other)}"
        return f"; {_short(other)} is refused{_cause(other, best)}"
    return ""


def _what_helps(model: ExampleModel, found: ModelDecision, others: Sequence[ModelDecision]) -> str:
    """The nearest KV dtype with which other backends serve the model, or the nearest refusal."""
    if others:
        # Another quantised type keeps the cache small, so it is offered before a cache of 16 bits.
        other = min(others, key=lambda each: not kv_format(each.kv_cache_dtype).is_quantized)
        helping = [
            name
            for kind, its in zip(found.kinds, other.kinds, strict=True)
            if not kind.is_served
            for name in its.backends
            if name not in kind.backends
        ]
        names = list(dict.fromkeys(helping))
        stored = _cache(model, "auto").removeprefix(" with ")
        dtype = other.kv_cache_dtype if other.kv_cache_dtype != "auto" else stored
        text = f"; {_join(names)} would serve {'it' if len(helping) == len(found.kinds) else 'them'} with {dtype}"
        return (
            f"{text}, and {'refuses' if len(names) == 1 else 'refuse'} {_short(found)}{_cause(found, other)}"
        )
    near = _nearest(found)
    return f"; {near}" if near else ""


def _cause(refused: ModelDecision, served: ModelDecision) -> str:
    """The reason of the backend that serves the other outcome against this one: ": fp8_e4m3 needs ..."."""
    for kind, other in zip(refused.kinds, served.kinds, strict=True):
        for name in () if kind.is_served else other.backends:
            if reasons := kind.reasons_of(name):
                return f": {short_reason(reasons[0])}"
    return ""


def _nearest(found: ModelDecision) -> str:
    """The refused backend with the fewest reasons, and the first of them, or that against a state."""
    for kind in found.kinds:
        if kind.is_served:
            continue
        refused = kind.joint.refused
        capability = [each for each in refused if {"compute_capability", "device_type"} & {*each.codes}]
        if refused and len(capability) == len(refused):
            return f"no other backend supports {kind.joint.device}"
        if refused:
            near = min(
                refused, key=lambda each: (each in capability, len(each.reasons), -(each.priority or 0))
            )
            # The sizes of a layer that keeps a state are no cause where the state itself is refused.
            first = next((each for each in near.reasons if each.startswith("state ")), near.reasons[0])
            return f"{near.name} refuses it: {short_reason(first)}"
    return ""


def short_reason(reason: str) -> str:
    """The fact of a reason without its remedy."""
    return reason.removeprefix("combination not supported: ").partition("; ")[0]
