"""One backend for all layers of a plan, and the error for layers that no backend serves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from attnplug.core.device import Device
from attnplug.core.errors import BackendUnavailableError, LayoutError, NoBackendError
from attnplug.core.reasons import Reason
from attnplug.core.spec import LayerSpec, Phase
from attnplug.registry.registry import Registry, SelectKwargs
from attnplug.registry.selection.decision import Candidate, Decision
from attnplug.registry.selection.negotiation import negotiated
from attnplug.registry.selection.policy import Rule, rule_for, rule_sets

Decisions: TypeAlias = Mapping[str, Decision]


def uniform_choice(
    registry: Registry,
    specs: Mapping[str, LayerSpec],
    device: Device,
    phases: Sequence[Phase | None],
    decisions: Decisions,
    kwargs: SelectKwargs,
) -> dict[str, Decision]:
    """One backend for every layer: the first in the first layer's ranking that serves all and that rules allow.

    Raises:
        NoBackendError: there is none; it names the layer or rule against each candidate.
    """
    if not specs:
        return {}
    first = next(iter(decisions.values()))
    sets = rule_sets(kwargs.get("backend"))
    found = ((rule_for(sets, spec, phase, name), name) for name, spec in specs.items() for phase in phases)
    rules: dict[Rule, str] = {}
    for rule, layer in found:
        if rule is not None:
            rules.setdefault(rule, layer)
    refusals = []
    for candidate in first.candidates:
        forbidden = (each for each in rules if not registry.plugins.refers_to(each.backend, candidate))
        rule = next(forbidden, None)
        if rule is not None:
            refusal = f"is not what {rule.source} asks for layer {rules[rule]}: {rule}"
        elif not candidate.accepted:
            refusal = f"does not serve layer {first.layer_name}: {'; '.join(candidate.reasons)}"
        else:
            by_name: SelectKwargs = {**kwargs, "backend": unambiguous(registry, candidate)}
            trial = registry.decide_layers(specs, device, phases, negotiate=False, **by_name)[None]
            refusal = _first_refusal(trial, candidate)
            if not refusal:
                return {layer: _with_source(trial[layer], decisions[layer]) for layer in specs}
        refusals.append(f"{candidate.name} {refusal}")
    lines = "\n  ".join(refusals) or "no backend is installed"
    raise NoBackendError(f"no one backend serves every layer, as uniform=True asks\n  {lines}", first)


def unambiguous(registry: Registry, candidate: Candidate) -> str:
    """The name that selects this candidate and no other."""
    found = registry.plugins.find(candidate.name)
    return candidate.name if found else f"{candidate.name}@{candidate.distribution}"


def _first_refusal(trial: Decisions, candidate: Candidate) -> str:
    for layer, decision in trial.items():
        if not decision:
            reasons = next((c.reasons for c in decision.refused if c.name == candidate.name), ())
            return f"does not serve layer {layer}: {'; '.join(reasons)}"
    try:
        negotiated(trial)
    except LayoutError as error:
        return f"cannot share pages with itself: {error}"
    return ""


def _with_source(decision: Decision, before: Decision) -> Decision:
    if before.rule is not None:
        return dataclasses.replace(decision, chosen_by=before.chosen_by, rule=before.rule)
    return dataclasses.replace(decision, chosen_by="plan", rule="uniform=True")


def check_served(registry: Registry, decisions: Decisions) -> None:
    """Refuse a plan with layers that no backend serves, and list each kind with its reasons.

    Raises:
        BackendUnavailableError: rules ask for the backend of every such layer.
        NoBackendError: at least one such layer has no rule.
    """
    lacking: dict[tuple[LayerSpec, str | None], list[str]] = {}
    for name, decision in decisions.items():
        if not decision:
            lacking.setdefault((decision.spec, decision.rule), []).append(name)
    if not lacking:
        return
    none = "\n    no backend is installed"
    parts: list[str] = []
    reasons: list[Reason] = []
    for names in lacking.values():
        decision = decisions[names[0]]
        backend = None if decision.rule is None else decision.rule.rpartition("=")[2]
        against = [c for c in decision.refused if backend is None or registry.plugins.refers_to(backend, c)]
        lines = "".join(f"\n    {c.name}: {'; '.join(c.reasons)}" for c in against)
        more = f" and {len(names) - 1} like it" if len(names) > 1 else ""
        phase = f" in {decision.phase}" if decision.phase else ""
        asked = f" (asked of {decision.rule} by {decision.chosen_by})" if decision.rule else ""
        parts.append(f"\n  layer {names[0]}{more}{phase}{asked}{lines or none}")
        reasons += [reason for candidate in against for reason in candidate.reasons]
    first = decisions[next(iter(lacking.values()))[0]]
    message = f"no backend on {first.device} serves{''.join(parts)}"
    if all(rule is not None for _, rule in lacking):
        raise BackendUnavailableError(message, first, reasons)
    raise NoBackendError(message, first)
