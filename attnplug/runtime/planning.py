"""Plans all layers of a model at once: backends, pages, layouts, what fits."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

from attnplug.core.checks import check_size
from attnplug.core.device import Device
from attnplug.core.errors import LayoutError, PolicyError, SpecError
from attnplug.core.spec import LayerSpec, Phase
from attnplug.registry.decision import Decision
from attnplug.registry.default import get_registry
from attnplug.registry.devices import DeviceLike, resolve_device
from attnplug.registry.evidence_gate import AllowRefuted
from attnplug.registry.installed import AssumeInstalled
from attnplug.registry.negotiation import negotiated
from attnplug.registry.registry import Rules, SelectKwargs
from attnplug.runtime.budget import fit_kv_cache, parse_memory
from attnplug.runtime.model_plan import ModelPlan
from attnplug.runtime.plan_choice import check_served, uniform_choice
from attnplug.runtime.plan_pages import with_equal_pages, with_layout
from attnplug.runtime.plan_phases import (
    Phased,
    has_phase_rules,
    phase_choice,
    phase_notes,
    without_composites,
)

__all__ = ["HasLayers", "choose_backends", "plan", "settled"]

ByPhase: TypeAlias = Mapping[str, Mapping[Phase, Decision]]

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
    assume_installed: AssumeInstalled = None,
    allow_refuted: AllowRefuted = None,
) -> ModelPlan:
    """Decide for all layers at once, so that backends, block sizes and layouts fit each other.

    Args:
        specs: layers by name in order, or a ModelSpec as `read_config` gives it.
        device: as `attnplug.select` takes it.
        backend: a name or rules, as `attnplug.select` takes them. A layer for which a phase rule speaks
            is decided phase by phase.
        options: likewise; of a composite's halves each by its own name.
        per_phase: ask each phase alone. Where the answers differ, the layer is served by both on one KV
            cache, as the composite "PREFILL+DECODE"; where they cannot share one, the plan notes why and
            one backend serves both phases.
        uniform: one backend throughout: the highest-ranked that serves every layer, and that all rules
            allow.
        kv_sharing: layers that read another layer's pages; by default what the ModelSpec says.
        num_blocks: blocks of the KV pool, the null block included; at least 2.
        memory: bytes for the KV caches instead ("80GiB"): as many blocks as fit.
        assume_installed: as `attnplug.select` takes it: what would be planned if these were installed.
        allow_refuted: as `attnplug.select` takes it.

    Raises:
        NoBackendError: layers that no backend serves, or no one backend with `uniform`; it lists each
            kind with its reasons.
        BackendUnavailableError: layers that the backends asked for do not serve; two backends that rules
            ask for in the phases of one layer and that share no KV cache.
        LayoutError: block sizes or layouts that cannot be agreed on, naming layer and backend; a
            `kv_sharing` that cannot be; too little memory for a token of every KV group.
        PolicyError: as `attnplug.select_layers`; both num_blocks and memory.
        SpecError: `specs` that are no layers, or a `num_blocks` below 2.
    """
    if isinstance(specs, HasLayers):
        kv_sharing = specs.kv_sharing if kv_sharing is None else kv_sharing
        specs = specs.layers
    if not isinstance(specs, Mapping):
        raise SpecError("specs", specs, "must be a mapping of layer names to LayerSpec, or a ModelSpec")
    if num_blocks is not None and memory is not None:
        raise PolicyError(
            "num_blocks", num_blocks, f"cannot stand with memory={memory!r}", "give one of the two"
        )
    if num_blocks is not None:
        # Block 0 is the null block: with it alone no request could be served.
        num_blocks = check_size("num_blocks", num_blocks, 2)
    asked: SelectKwargs = {
        "backend": backend,
        "options": options,
        "assume_installed": assume_installed,
        "allow_refuted": allow_refuted,
    }
    where = resolve_device(device)
    by_phase, phased = choose_backends(specs, where, asked, per_phase=per_phase, uniform=uniform)
    check_served(get_registry(), phased.decisions)
    decisions, notes = settled(by_phase, phased)
    made = ModelPlan(decisions, where, dict(kv_sharing or {}), num_blocks, None, by_phase, notes)
    # Made here, so that a sharing which cannot be is refused by the call that asks for it.
    config = made.kv_cache_config
    if memory is not None:
        given = parse_memory(memory)
        fitting = fit_kv_cache(config, given).num_blocks or None
        made = dataclasses.replace(made, memory=given, num_blocks=fitting)
    groups = len(config.kv_cache_groups)
    if made.num_blocks is not None and made.num_blocks <= groups:
        limit = f"must be at least {groups + 1}: the null block, and one for each of {groups} KV groups"
        raise LayoutError("num_blocks", made.num_blocks, limit)
    _log.info("%s", made)
    return made


def choose_backends(
    specs: Mapping[str, LayerSpec],
    device: Device,
    asked: SelectKwargs,
    *,
    per_phase: bool,
    uniform: bool = False,
) -> tuple[ByPhase, Phased]:
    """Who is to serve each layer: what each phase alone would choose, where that counts, and the decisions.

    Layers that nobody serves have decisions too. The decisions may not fit each other yet: see `settled`.

    Raises:
        NoBackendError, BackendUnavailableError, PolicyError, PluginError: as `plan`.
    """
    registry, backend = get_registry(), asked.get("backend")
    phases = (None, *Phase) if per_phase or has_phase_rules(backend) else (None,)
    found = registry.decide_layers(specs, device, phases, negotiate=False, **asked)
    by_phase = {n: {p: found[p][n] for p in Phase} for n in specs} if len(phases) > 1 else {}
    if uniform:
        decisions = uniform_choice(registry, specs, device, phases, found[None], asked)
        return by_phase, Phased(decisions, {}, dict.fromkeys(specs, "uniform=True asks for one backend"))
    if by_phase:
        return by_phase, phase_choice(registry, specs, device, found, asked, per_phase=per_phase)
    return by_phase, Phased(found[None], {}, {})


def settled(by_phase: ByPhase, phased: Phased) -> tuple[dict[str, Decision], tuple[str, ...]]:
    """The decisions with block sizes and layouts that fit each other, and what is to be said of them.

    Composites that nobody asked for give way where their pages do not fit those of other layers.

    Raises:
        LayoutError: sizes or layouts that cannot be agreed on, or were refuted here.
    """
    try:
        decisions = _with_pages(phased.decisions)
    except LayoutError as error:
        phased = without_composites(phased, error)
        decisions = _with_pages(phased.decisions)
    noted = (note for decision in decisions.values() for note in decision.notes)
    return decisions, tuple(dict.fromkeys((*phase_notes(decisions, by_phase, phased.why), *noted)))


def _with_pages(decisions: Mapping[str, Decision]) -> dict[str, Decision]:
    agreed = negotiated(decisions)
    settled = with_layout(with_equal_pages(agreed)) if all(agreed.values()) else agreed
    get_registry().check_pages(settled.values())
    return settled
