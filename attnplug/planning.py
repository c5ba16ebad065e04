"""`attnplug.plan`: backends, pages and layouts for all layers of a model at once."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Protocol, Unpack, runtime_checkable

from attnplug.core.checks import check_flag, check_size
from attnplug.core.config import CONTEXT_CHUNK_ROWS
from attnplug.core.context_parallel import ContextParallel
from attnplug.core.device import Device
from attnplug.core.errors import LayoutError, PolicyError
from attnplug.core.spec import LayerSpec, Phase, check_layers
from attnplug.registry.default import get_registry
from attnplug.registry.devices import DeviceLike, resolve_device
from attnplug.registry.registry import Registry, SelectKwargs
from attnplug.registry.selection.decision import Decision
from attnplug.registry.selection.negotiation import negotiated
from attnplug.runtime.plan.budget import fit_kv_cache, parse_memory
from attnplug.runtime.plan.grouping import other_pages, with_equal_pages, with_layout
from attnplug.runtime.plan.model_plan import ModelPlan
from attnplug.runtime.plan.plan_choice import (
    ByPhase,
    LayerChoices,
    check_served,
    has_phase_rules,
    phase_choices,
    phase_notes,
    uniform_choice,
    without_composites,
)
from attnplug.runtime.plan.sharding import (
    check_interleave,
    checked_place,
    context_spec,
    is_sharded,
    new_tokens_spec,
    refuse_layers,
)
from attnplug.runtime.plan.state_plan import state_plan

_log = logging.getLogger("attnplug")


@runtime_checkable
class HasLayers(Protocol):
    """A model configuration: its layers by name, and the layers that share pages."""

    @property
    def layers(self) -> Mapping[str, LayerSpec]:
        """The spec of each layer."""
        ...

    @property
    def kv_sharing(self) -> Mapping[str, str]:
        """Layers that read another layer's pages, to that layer."""
        ...


def plan(
    specs: Mapping[str, LayerSpec] | HasLayers,
    device: DeviceLike = None,
    *,
    per_phase: bool = True,
    uniform: bool = False,
    kv_sharing: Mapping[str, str] | None = None,
    num_blocks: int | None = None,
    memory: int | str | None = None,
    num_states: int | None = None,
    context_chunk_rows: int = CONTEXT_CHUNK_ROWS,
    context_parallel: ContextParallel | None = None,
    registry: Registry | None = None,
    **kwargs: Unpack[SelectKwargs],
) -> ModelPlan:
    """Decide for all layers at once, so that backends, block sizes and layouts fit each other.

    A layer that a phase rule in `backend` matches is decided phase by phase.

    Args:
        specs: layers by name in order, or a ModelSpec as `read_config` gives it.
        device: as in `attnplug.select`.
        per_phase: choose for each phase alone, as `attnplug select` shows it. Where the choices differ, the layer is served
            by both on one KV cache, as the composite "PREFILL+DECODE". Where they cannot share one, the plan notes the
            reason and one backend serves both phases.
        uniform: one backend for all attention layers: the highest-ranked that serves every layer and that all
            rules allow. Layers that keep a state get a choice of their own.
        kv_sharing: layers that read another layer's pages; by default those of the ModelSpec.
        num_blocks: blocks of the KV pool, the null block included; at least 2.
        memory: bytes for the KV caches and the prefill workspace instead ("80GiB"): as many blocks as fit.
        num_states: pages of the pool of states, the null page included, for layers that keep a state; by default those of
            256 requests, with a page for each draft. With `memory` they get their bytes first.
        context_chunk_rows: computed tokens that a prefill of latent attention expands at once: the rows of the
            prefill workspace.
        context_parallel: the rank of this process among those that share the tokens of each request, from
            `attnplug.runtime.context_parallel`. Layers that see all tokens are sharded: they are planned without a
            causal mask and with LSE, and `ModelPlan.new_tokens` has their decisions for the tokens of a step. Layers
            with a window or chunks, of encoders or with cross attention are whole on each rank.
        registry: chooses the backends; by default the registry of the process.
        **kwargs: as in `attnplug.select`.

    Raises:
        NoBackendError: no backend serves a layer, or with `uniform` no one backend serves all; it lists
            each kind with its reasons. Also for layers whose tokens ranks cannot share: with ALiBi, a selection, or
            multimodal spans, or that keep a state (code `context_parallel`).
        BackendUnavailableError: the backends asked for do not serve a layer; or two backends that rules
            ask for in the phases of one layer share no KV cache.
        LayoutError: layers that agree on no block size or layout, naming layer and backend; an impossible
            `kv_sharing`; too little memory for the workspace and a token of every KV group; an interleave that does
            not divide the block size of a sharded layer.
        PolicyError: as `attnplug.select_layers`; both num_blocks and memory; a registry that is none.
        SpecError: `specs` without layers by name, or a `num_blocks` below 2, or `context_chunk_rows` below 1.
    """
    if isinstance(specs, HasLayers):
        kv_sharing = specs.kv_sharing if kv_sharing is None else kv_sharing
        specs = specs.layers
    check_layers(specs, "must be a mapping of layer names to LayerSpec, or a ModelSpec")
    kv_sharing = {} if kv_sharing is None else kv_sharing
    if not isinstance(kv_sharing, Mapping) or not all(
        isinstance(name, str) for pair in kv_sharing.items() for name in pair
    ):
        raise LayoutError("kv_sharing", kv_sharing, "must be a mapping of layer names to layer names")
    if num_blocks is not None and memory is not None:
        limit = f"cannot be combined with memory={memory!r}"
        raise PolicyError("num_blocks", num_blocks, limit, "give one of the two")
    if num_blocks is not None:
        # Block 0 is the null block, so one block alone serves no request.
        num_blocks = check_size("num_blocks", num_blocks, 2)
    per_phase, uniform = check_flag("per_phase", per_phase), check_flag("uniform", uniform)
    if registry is not None and not isinstance(registry, Registry):
        raise PolicyError("registry", registry, "must be a Registry or None")
    rows = check_size("context_chunk_rows", context_chunk_rows)
    place = checked_place(context_parallel)
    registry = get_registry() if registry is None else registry
    device = resolve_device(device)
    new_tokens: dict[str, Decision] = {}
    layers = specs
    if place is not None:
        refuse_layers(registry.decide_layers(specs, device, negotiate=False, **kwargs)[None], specs)
        specs = {name: context_spec(spec) if is_sharded(spec) else spec for name, spec in specs.items()}
    choices = choose_backends(registry, specs, device, kwargs, per_phase=per_phase, uniform=uniform)
    # Pages come later, because a layer without a backend has none to agree on.
    check_served(registry, choices.decisions)
    if place is not None:
        new_tokens = _new_tokens(registry, layers, device, _alike(kwargs, choices.decisions, uniform))
    decisions, notes = agree_on_pages(registry, choices)
    digest = registry.tuned_tables(device, kwargs.get("tuned")).digest
    if place is not None:
        check_interleave(decisions.items(), place)
    states = state_plan({name: decision.spec for name, decision in decisions.items()}, num_states)
    facts = (
        choices.by_phase,
        notes,
        rows,
        digest,
        place,
        new_tokens,
        None if states is None else states.num_states,
    )
    made = ModelPlan(decisions, device, dict(kv_sharing), num_blocks, None, *facts)
    # Computed here, so that this call refuses an impossible kv_sharing.
    config = made.kv_cache_config
    if memory is not None:
        given = parse_memory(memory)
        workspace = made.prefill_workspace_bytes()
        fitting = fit_kv_cache(config, given, prefill_workspace=workspace, states=states).num_blocks or None
        made = dataclasses.replace(made, memory=given, num_blocks=fitting)
    groups = len(config.kv_cache_groups)
    if made.num_blocks is not None and made.num_blocks <= groups:
        limit = f"must be at least {groups + 1}: the null block, and one for each of {groups} KV groups"
        raise LayoutError("num_blocks", made.num_blocks, limit)
    _log.info("%s", made)
    return made


def _alike(kwargs: SelectKwargs, decisions: Mapping[str, Decision], uniform: bool) -> SelectKwargs:
    """The settings that ask for the one backend of all layers, if `uniform` did."""
    first = next(iter(decisions.values()), None)
    return {**kwargs, "backend": first.backend} if uniform and first is not None else kwargs


def _new_tokens(
    registry: Registry, specs: Mapping[str, LayerSpec], device: Device, kwargs: SelectKwargs
) -> dict[str, Decision]:
    """The decision of each sharded layer for the tokens of a step; latent attention decodes them row by row.

    Raises:
        NoBackendError, BackendUnavailableError, PolicyError, PluginError: as `attnplug.plan`.
    """
    parts = {n: spec for n, spec in specs.items() if is_sharded(spec) and spec.mla is None}
    # All layers, because a rule that matches none of those asked about is an error.
    asked = {n: new_tokens_spec(spec) if n in parts else spec for n, spec in specs.items()}
    found = registry.decide_layers(asked, device, negotiate=False, **kwargs)[None]
    check_served(registry, {f"{name} (its new tokens)": found[name] for name in parts})
    return {name: found[name] for name in parts}


def choose_backends(
    registry: Registry,
    specs: Mapping[str, LayerSpec],
    device: Device,
    kwargs: SelectKwargs,
    *,
    per_phase: bool,
    uniform: bool = False,
) -> LayerChoices:
    """A decision for each layer, also for layers that no backend serves.

    Their block sizes and layouts may not fit each other yet: see `agree_on_pages`.

    Raises:
        NoBackendError, BackendUnavailableError, PolicyError, PluginError: as `attnplug.plan`.
    """
    # None is always asked, for layers whose phases cannot share one KV cache.
    # Most backends of latent attention decode only, so these layers are always decided by phase.
    by_phases = per_phase or has_phase_rules(kwargs.get("backend"))
    by_phases = by_phases or any(spec.mla is not None for spec in specs.values())
    phases = (None, *Phase) if by_phases else (None,)
    # The plan uses only some of these decisions, so the others must not take part in agreeing on pages.
    found = registry.decide_layers(specs, device, phases, negotiate=False, **kwargs)
    by_phase = (
        {name: {phase: found[phase][name] for phase in Phase} for name in specs} if len(phases) > 1 else {}
    )
    if uniform:
        decisions = uniform_choice(registry, specs, device, phases, found[None], kwargs)
        obstacles = dict.fromkeys(specs, "uniform=True asks for one backend")
        return LayerChoices(decisions, by_phase, obstacles=obstacles)
    if by_phase:
        return phase_choices(registry, found[None], by_phase, kwargs, per_phase=per_phase)
    return LayerChoices(found[None])


def decide_model(
    registry: Registry,
    specs: Mapping[str, LayerSpec],
    device: Device,
    kwargs: SelectKwargs,
    *,
    per_phase: bool = True,
) -> tuple[dict[str, Decision], ByPhase, tuple[str, ...]]:
    """The decisions that `attnplug.plan` makes, each phase's own, and its notes; no error for a layer without a backend.

    The console, the pages and the pictures all ask here, so that one question has one answer.

    Raises:
        BackendUnavailableError, LayoutError, PolicyError, PluginError: as `attnplug.plan`.
    """
    choices = choose_backends(registry, specs, device, kwargs, per_phase=per_phase)
    decisions, notes = agree_on_pages(registry, choices)
    return decisions, choices.by_phase, notes


def phases_alone(decision: Decision, by_phase: ByPhase) -> tuple[Decision, ...]:
    """The decisions of each phase where they tell more than the one for both; empty elsewhere."""
    prefill, decode = decision.members[Phase.PREFILL], decision.members[Phase.DECODE]
    if prefill == decode and decision.phase is None and decision.spec.mla is None:
        return ()
    return tuple(by_phase.get(str(decision.layer_name), {}).values())


def agree_on_pages(registry: Registry, choices: LayerChoices) -> tuple[dict[str, Decision], tuple[str, ...]]:
    """The decisions with block sizes and layouts that fit each other, and notes about them.

    Composites that the user did not ask for are dropped if their pages do not fit those of other layers.

    Raises:
        LayoutError: layers that agree on no size or layout, or on one that was refuted here.
    """
    try:
        decisions = _with_pages(registry, choices.decisions)
    except LayoutError as error:
        choices = without_composites(choices, error)
        decisions = _with_pages(registry, choices.decisions)
    noted = [note for decision in decisions.values() for note in decision.notes]
    noted += other_pages(choices.decisions, decisions)
    return decisions, tuple(dict.fromkeys((*phase_notes(decisions, choices), *noted)))


def _with_pages(registry: Registry, decisions: Mapping[str, Decision]) -> dict[str, Decision]:
    agreed = negotiated(decisions)
    if all(agreed.values()):
        agreed = with_layout(with_equal_pages(agreed))
    registry.check_pages(agreed.values())
    return agreed
