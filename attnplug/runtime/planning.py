"""Plans all layers of a model at once: backends, pages, layouts, what fits."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from attnplug.core.blocks import MultipleOf
from attnplug.core.errors import LayoutError, NoBackendError, PolicyError
from attnplug.core.kv_cache_spec import KVCacheSpec, kv_cache_spec_for
from attnplug.core.spec import LayerSpec, Phase
from attnplug.registry.decision import Decision
from attnplug.registry.default import get_registry
from attnplug.registry.devices import DeviceLike, resolve_device
from attnplug.registry.policy import parse_rules
from attnplug.registry.registry import Rules
from attnplug.runtime.budget import fit_kv_cache, parse_memory
from attnplug.runtime.grouping import unify_page_sizes
from attnplug.runtime.layout import get_kv_cache_layout
from attnplug.runtime.model_plan import ModelPlan

__all__ = ["HasLayers", "plan"]

_log = logging.getLogger("attnplug")


@runtime_checkable
class HasLayers(Protocol):
    """A model that was read: its layers by name, and which of them share pages."""

    @property
    def layers(self) -> Mapping[str, LayerSpec]:
        """What each layer needs."""
        ...

    @property
    def kv_sharing(self) -> Mapping[str, str]:
        """Layers that read another layer's pages, to that layer."""
        ...


def plan(
    specs: Mapping[str, LayerSpec] | HasLayers,
    device: DeviceLike = None,
    *,
    backend: Rules = None,
    options: Any = None,
    per_phase: bool = False,
    uniform: bool = False,
    kv_sharing: Mapping[str, str] | None = None,
    num_blocks: int | None = None,
    memory: int | str | None = None,
) -> ModelPlan:
    """Decide for all layers at once, so that backends, block sizes and layouts fit each other.

    Args:
        specs: layers by name in order, or a ModelSpec as `read_config` gives it.
        device: as `attnplug.select` takes it.
        backend: a name or rules, as `attnplug.select` takes them.
        options: likewise.
        per_phase: also ask each phase alone; where the answers differ the plan notes it and serves
            the layer by the one backend that does both.
        uniform: one backend throughout: the highest-ranked that serves every layer.
        kv_sharing: layers that read another layer's pages; by default what the ModelSpec says.
        num_blocks: blocks of the KV pool, the null block included.
        memory: bytes for the KV caches instead ("80GiB"): as many blocks as fit.

    Raises:
        NoBackendError: layers that no backend serves; it lists each kind with its reasons.
        LayoutError: block sizes or layouts that cannot be agreed on; it names layer and backend.
        PolicyError: as `attnplug.select_layers`; both num_blocks and memory; a phase rule that would
            serve a layer by two backends.
    """
    if isinstance(specs, HasLayers):
        kv_sharing = specs.kv_sharing if kv_sharing is None else kv_sharing
        specs = specs.layers
    if num_blocks is not None and memory is not None:
        raise PolicyError(
            "num_blocks", num_blocks, f"cannot stand with memory={memory!r}", "give one of the two"
        )
    where = resolve_device(device)
    registry = get_registry()
    asked = {"backend": backend, "options": options}
    phase_rules = [rule for rule in parse_rules(backend) if rule.scope == "phase"]
    phases: tuple[Phase | None, ...] = (None, *Phase) if per_phase or phase_rules else (None,)
    found = registry.judge_layers(specs, where, phases, **asked)
    decisions = found[None]
    by_phase = {n: {p: found[p][n] for p in Phase} for n in specs} if len(phases) > 1 else {}
    if phase_rules:
        decisions = {n: _one_backend(n, by_phase[n]) for n in specs}
    elif uniform:
        decisions = _uniform(specs, where, decisions, options)
    _check_served(decisions)
    decisions = _with_layout(_with_equal_pages(decisions))
    notes = () if phase_rules else tuple(_phase_notes(decisions, by_phase))
    made = ModelPlan(decisions, where, dict(kv_sharing or {}), num_blocks, None, by_phase, notes)
    if memory is not None:
        made = dataclasses.replace(made, memory=parse_memory(memory))
        budget = fit_kv_cache(made.kv_cache_config, made.memory or 0)
        made = dataclasses.replace(made, num_blocks=budget.num_blocks or None)
    _log.info("%s", made)
    return made


def _one_backend(name: str, phases: Mapping[Phase, Decision]) -> Decision:
    decode, prefill = phases[Phase.DECODE], phases[Phase.PREFILL]
    if decode.backend != prefill.backend:
        limit = f"serves layer {name} by {decode.backend} and {prefill.backend}"
        remedy = "one layer has one backend as yet: give both phases the same"
        raise PolicyError("backend", f"decode={decode.backend},prefill={prefill.backend}", limit, remedy)
    rule = decode if decode.rule is not None else prefill
    return dataclasses.replace(rule, phase=None)


def _uniform(
    specs: Mapping[str, LayerSpec],
    device: Any,
    decisions: Mapping[str, Decision],
    options: Any,
) -> dict[str, Decision]:
    """The highest-ranked backend that serves every layer, in the first layer's ranking."""
    first = next(iter(decisions.values()), None)
    names = [] if first is None else [c.name for c in first.candidates if c.accepted]
    culprits = []
    for name in names:
        trial = get_registry().judge_layers(specs, device, backend=name, options=options)[None]
        refused = [layer for layer, decision in trial.items() if not decision]
        if not refused:
            return trial
        reasons = next(c.reasons for c in trial[refused[0]].candidates if c.name == name)
        culprits.append(f"{name} refuses layer {refused[0]}: {'; '.join(reasons)}")
    if first is None:
        return {}
    raise NoBackendError("no one backend serves every layer\n  " + "\n  ".join(culprits), first)


def _check_served(decisions: Mapping[str, Decision]) -> None:
    lacking: dict[LayerSpec, list[str]] = {}
    for name, decision in decisions.items():
        if not decision:
            lacking.setdefault(decision.spec, []).append(name)
    if not lacking:
        return
    parts = []
    for names in lacking.values():
        reasons = decisions[names[0]].explanation().replace("\n", "\n    ")
        more = f" and {len(names) - 1} like it" if len(names) > 1 else ""
        parts.append(f"layer {names[0]}{more}\n    {reasons}")
    first = decisions[next(iter(lacking.values()))[0]]
    raise NoBackendError(f"no backend on {first.device} serves\n  " + "\n  ".join(parts), first)


def _with_equal_pages(decisions: Mapping[str, Decision]) -> dict[str, Decision]:
    """Larger blocks where a hybrid model's kinds would have pages of unlike bytes."""
    caches: dict[str, KVCacheSpec] = {}
    for name, decision in decisions.items():
        cache = kv_cache_spec_for(decision.spec, decision.block_size or 1)
        if cache is not None:
            caches[name] = cache
    if len({cache.page_size_bytes for cache in caches.values()}) <= 1:
        return dict(decisions)
    settled = dict(decisions)
    for name, cache in unify_page_sizes(caches).items():
        decision, size = decisions[name], cache.block_size
        if size == decision.block_size:
            continue
        allowed = decision.get_backend_cls().get_supported_kernel_block_sizes(decision.spec, decision.device)
        if decision.spec.block_size is not None or not MultipleOf.allows(allowed, size):
            limit = (
                f"is what equal pages ask of layer {name}, and {decision.backend} takes "
                f"{decision.spec.block_size or ', '.join(map(str, allowed))}"
            )
            raise LayoutError("block_size", size, limit, "give layers block sizes with equal page bytes")
        settled[name] = dataclasses.replace(decision, block_size=size)
    return settled


def _with_layout(decisions: Mapping[str, Decision]) -> dict[str, Decision]:
    """The layout that the user fixed, or each decision's own, which its backend prefers."""
    settled = dict(decisions)
    for name, decision in decisions.items():
        if decision.kv_cache_layout is None:
            continue
        layout = get_kv_cache_layout(decision.kv_cache_layout)
        readable = decision.get_backend_cls().supported_kv_cache_layouts()
        if layout not in readable:
            limit = f"cannot be read by {decision.backend} (layer {name}), which takes {', '.join(readable)}"
            raise LayoutError("kv_cache_layout", layout, limit)
        settled[name] = dataclasses.replace(decision, kv_cache_layout=layout)
    return settled


def _phase_notes(
    decisions: Mapping[str, Decision], by_phase: Mapping[str, Mapping[Phase, Decision]]
) -> list[str]:
    split: dict[tuple[str, ...], list[str]] = {}
    for name, phases in by_phase.items():
        chosen = tuple(str(phases[phase].backend) for phase in Phase)
        if len(set(chosen)) > 1:
            split.setdefault((*chosen, str(decisions[name].backend)), []).append(name)
    return [
        f"{len(names)} layers would decode on {decode} and prefill on {prefill}; one layer has one backend "
        f"as yet, so {served} serves both"
        for (decode, prefill, served), names in split.items()
    ]
