"""Plans all layers of a model at once: backends, pages, layouts, what fits."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from attnplug.core.checks import check_size
from attnplug.core.errors import LayoutError, PolicyError, SpecError
from attnplug.core.spec import LayerSpec, Phase
from attnplug.registry.default import get_registry
from attnplug.registry.devices import DeviceLike, resolve_device
from attnplug.registry.negotiation import negotiated
from attnplug.registry.registry import Rules
from attnplug.runtime.budget import fit_kv_cache, parse_memory
from attnplug.runtime.model_plan import ModelPlan
from attnplug.runtime.plan_choice import (
    check_served,
    has_phase_rules,
    one_for_both_phases,
    phase_notes,
    uniform_choice,
)
from attnplug.runtime.plan_pages import with_equal_pages, with_layout

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
        backend: a name or rules, as `attnplug.select` takes them. A layer for which a phase rule speaks
            is decided phase by phase.
        options: likewise.
        per_phase: also ask each phase alone; where the answers differ the plan notes it and serves
            the layer by the one backend that does both.
        uniform: one backend throughout: the highest-ranked that serves every layer, and that all rules
            allow.
        kv_sharing: layers that read another layer's pages; by default what the ModelSpec says.
        num_blocks: blocks of the KV pool, the null block included; at least 2.
        memory: bytes for the KV caches instead ("80GiB"): as many blocks as fit.

    Raises:
        NoBackendError: layers that no backend serves, or no one backend with `uniform`; it lists each
            kind with its reasons.
        BackendUnavailableError: layers that the backends asked for do not serve.
        LayoutError: block sizes or layouts that cannot be agreed on, naming layer and backend; a
            `kv_sharing` that cannot be; too little memory for a token of every KV group.
        PolicyError: as `attnplug.select_layers`; both num_blocks and memory; a phase rule that would
            serve a layer by two backends.
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
    where, registry = resolve_device(device), get_registry()
    phases = (None, *Phase) if per_phase or has_phase_rules(backend) else (None,)
    found = registry.judge_layers(specs, where, phases, negotiate=False, backend=backend, options=options)
    by_phase = {n: {p: found[p][n] for p in Phase} for n in specs} if len(phases) > 1 else {}
    if uniform:
        decisions = uniform_choice(registry, specs, where, phases, found[None], backend, options)
    elif by_phase:
        decisions = one_for_both_phases(specs, found, backend)
    else:
        decisions = found[None]
    check_served(registry, decisions)
    decisions = with_layout(with_equal_pages(negotiated(decisions)))
    notes = phase_notes(decisions, by_phase)
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
