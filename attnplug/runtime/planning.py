"""Chooses backends and pages for all layers of a model together."""

from __future__ import annotations

from collections.abc import Mapping

from attnplug.core.device import Device
from attnplug.core.errors import LayoutError
from attnplug.core.spec import LayerSpec, Phase
from attnplug.registry.decision import Decision
from attnplug.registry.negotiation import negotiated
from attnplug.registry.registry import Registry, SelectKwargs
from attnplug.runtime.plan_choice import uniform_choice
from attnplug.runtime.plan_pages import with_equal_pages, with_layout
from attnplug.runtime.plan_phases import (
    LayerChoices,
    has_phase_rules,
    phase_choices,
    phase_notes,
    without_composites,
)


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
    phases = (None, *Phase) if per_phase or has_phase_rules(kwargs.get("backend")) else (None,)
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
    noted = (note for decision in decisions.values() for note in decision.notes)
    return decisions, tuple(dict.fromkeys((*phase_notes(decisions, choices), *noted)))


def _with_pages(registry: Registry, decisions: Mapping[str, Decision]) -> dict[str, Decision]:
    agreed = negotiated(decisions)
    if all(agreed.values()):
        agreed = with_layout(with_equal_pages(agreed))
    registry.check_pages(agreed.values())
    return agreed
