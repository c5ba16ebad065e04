"""One backend for all layers of a plan, and the error for layers that no backend serves.

The backend of a layer decided phase by phase: one for both, or a composite on one KV cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from attnplug.core.composite import CompositeBackend
from attnplug.core.composite.steps import StepKind, join_routes
from attnplug.core.device import Device
from attnplug.core.errors import BackendUnavailableError, LayoutError, NoBackendError
from attnplug.core.reasons import Reason
from attnplug.core.spec import LayerSpec, Phase
from attnplug.registry.registry import Registry, Rules, SelectKwargs
from attnplug.registry.selection.decision import Candidate, Decision
from attnplug.registry.selection.measured_ranking import failed_together
from attnplug.registry.selection.negotiation import negotiated
from attnplug.registry.selection.policy import Rule, rule_for, rule_sets
from attnplug.registry.selection.step_choices import Step, step_choices

if TYPE_CHECKING:
    from attnplug.registry.measured.tuned_lookup import Tables

Decisions: TypeAlias = Mapping[str, Decision]
_UNIFORM = "plan", "uniform=True"


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
            # Without negotiation, whose error would not say which layer refuses the backend.
            trial = registry.decide_layers(specs, device, phases, negotiate=False, **by_name)[None]
            refusal = _first_refusal(trial, candidate)
            if not refusal:
                asked = {n: (d.chosen_by, d.rule) if d.rule else _UNIFORM for n, d in decisions.items()}
                return {
                    n: dataclasses.replace(trial[n], chosen_by=asked[n][0], rule=asked[n][1]) for n in specs
                }
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


ByPhase: TypeAlias = Mapping[str, Mapping[Phase, Decision]]


@dataclasses.dataclass(frozen=True, slots=True)
class LayerChoices:
    """The decisions for the layers of a plan, before they agree on pages.

    Args:
        decisions: by layer.
        by_phase: by layer, the choice of each phase alone; empty where no layer is decided by phase.
        fallbacks: by layer, the one backend that can replace a composite which the user did not ask for.
        obstacles: by layer, the reason why the choices of its phases do not serve it together.
    """

    decisions: Mapping[str, Decision]
    by_phase: ByPhase = dataclasses.field(default_factory=dict)
    fallbacks: Mapping[str, Decision] = dataclasses.field(default_factory=dict)
    obstacles: Mapping[str, str] = dataclasses.field(default_factory=dict)


def has_phase_rules(backend: Rules) -> bool:
    """Whether a rule in force here is for one phase only."""
    return any(rule.scope == "phase" for rules in rule_sets(backend) for rule in rules)


def phase_choices(
    registry: Registry, both_phases: Decisions, by_phase: ByPhase, kwargs: SelectKwargs, *, per_phase: bool
) -> LayerChoices:
    """One backend for each layer whose phases choose the same, else the composite of both.

    Args:
        registry: decides about composites.
        both_phases: by layer, the decision for both phases together.
        by_phase: by layer, the decision for each phase alone.
        kwargs: the settings of the user.
        per_phase: decide all layers by phase; otherwise only those that a phase rule matches, and latent attention.

    Raises:
        BackendUnavailableError: two backends that rules ask for and that share no KV cache.
    """
    sets = rule_sets(kwargs.get("backend"))
    decisions, fallbacks, obstacles = {}, {}, {}
    by_step: dict[Any, Decision] = {}
    for name, both in both_phases.items():
        rules = {phase: rule_for(sets, both.spec, phase, name) for phase in (Phase.PREFILL, Phase.DECODE)}
        ruled = any(rule is not None and rule.scope == "phase" for rule in rules.values())
        if not (ruled or per_phase or both.spec.mla is not None):
            decisions[name] = both
            continue
        layer = _Layer(registry, kwargs, name, both, by_phase[name], rules if ruled else None, by_step)
        decisions[name], obstacle = layer.decide()
        if obstacle is not None:
            obstacles[name] = obstacle
        chosen = decisions[name].backend_cls
        is_composite = chosen is not None and issubclass(chosen, CompositeBackend)
        if not ruled and both and is_composite and chosen is not both.backend_cls:
            fallbacks[name] = both
    return LayerChoices(decisions, by_phase, fallbacks, obstacles)


@dataclasses.dataclass(frozen=True, slots=True)
class _Layer:
    """One layer, the decisions for its phases, and the rules to keep; None without phase rules.

    `by_step` has the ranges of steps of the layers before it, because most layers of a model are equal.
    """

    registry: Registry
    kwargs: SelectKwargs
    name: str
    both: Decision
    by_phase: Mapping[Phase, Decision]
    rules: Mapping[Phase, Rule | None] | None
    by_step: dict[Any, Decision]

    def decide(self) -> tuple[Decision, str | None]:
        """The decision, and the reason if the phases' own choices cannot serve the layer together."""
        if self.both.spec.is_encoder:
            return self._encoder(), None
        for decision in self.by_phase.values():
            if not decision:
                return (decision if self.rules else self.both), None
        prefill, decode = self.by_phase[Phase.PREFILL], self.by_phase[Phase.DECODE]
        if prefill.backend_cls is decode.backend_cls:
            alone = self._one_backend()
            # Latents have one decoding backend then, and ranges of their decodes are those of a pair.
            if self.rules is not None or not alone or self.both.spec.mla is not None:
                return alone, None
            return self._by_step(alone, self._tables), None
        first = self._composite(self._best(Phase.PREFILL), self._best(Phase.DECODE))
        if first:
            if self.rules is not None or not self.both:
                return first, None
            failed = failed_together(self._tables, first)
            return (self._by_step(first, self._tables), None) if failed is None else (self.both, failed)
        refused = next(candidate for candidate in first.refused if "+" in candidate.name)
        why = "; ".join(refused.reasons)
        if self.rules is None and self.both:
            return self.both, why
        other = self._next_best()
        if other is not None:
            return other, why
        if self.rules is None:
            # No backend serves the layer, so the table lists the refused pair too.
            return dataclasses.replace(self.both, candidates=(refused, *self.both.candidates)), why
        source, text = self._source()
        raise BackendUnavailableError(
            f"{text}, asked for by {source}, cannot serve layer {self.name} on {self.both.device} together: {why}",
            first,
            refused.reasons,
        )

    @property
    def _tables(self) -> Tables:
        return self.registry.tuned_tables(self.both.device, self.kwargs.get("tuned"))

    def _by_step(self, pair: Decision, tables: Tables) -> Decision:
        chosen = *(self._best(phase) for phase in (Phase.PREFILL, Phase.DECODE)), pair.pages
        key = pair.spec, pair.backend, *chosen
        if key not in self.by_step:
            self.by_step[key] = self._divided(pair, tables)
        # Equal specs may have other defaults.
        return dataclasses.replace(self.by_step[key], layer_name=self.name, spec=pair.spec)

    def _divided(self, pair: Decision, tables: Tables) -> Decision:
        """A pair, or one backend, with the ranges of steps that another backend serves better on the same KV cache."""
        # Without pages nothing is shared. With invariance a row's bits would depend on the other requests. Ranks that share latents decode each row by one
        # impl, and they alone ask latents for LSE.
        latents, spec = self.both.spec.mla is not None, self.both.spec
        if spec.direct_kv or spec.invariance or (latents and (spec.sparse is not None or spec.needs_lse)):
            return pair
        decisions: dict[Phase | None, Decision] = {None: self.both}
        decisions.update((phase, decision) for phase, decision in self.by_phase.items())
        kept: list[Step] = []
        choices = step_choices(self.registry.plugins, decisions, pair, tables)
        best, notes = pair, [*choices.notes]
        for step in choices.found:
            # Prefills of latents are expanded, by the prefilling half of all members.
            if latents and step.choice.steps.kind not in (StepKind.DECODE, StepKind.DRAFT):
                continue
            steps = [*kept, step]
            routes = ((each.choice.steps, unambiguous(self.registry, each.candidate)) for each in steps)
            halves = "+".join(self._best(phase) for phase in (Phase.PREFILL, Phase.DECODE))
            found = self._asked(join_routes(halves, tuple(routes)))
            if found and found.pages == pair.pages:
                kept, best = steps, dataclasses.replace(found, steps=tuple(each.choice for each in steps))
            else:
                notes.append(_kept_apart(step, found, pair))
        return dataclasses.replace(best, notes=(*best.notes, *notes)) if notes else best

    def _encoder(self) -> Decision:
        # An encoder computes all its tokens at once, so its backend for prefill serves both phases.
        prefill = self.by_phase[Phase.PREFILL]
        if not prefill:
            return prefill if self.rules else self.both
        best = self._best(Phase.PREFILL)
        chosen = self._composite(best, best)
        return chosen if chosen or self.rules else self.both

    def _one_backend(self) -> Decision:
        # Evidence can refuse the backend of each phase for batches with both phases.
        decodes = self.by_phase[Phase.DECODE].backend
        if any(each.name == decodes for each in self.both.refused):
            best = self._best(Phase.DECODE)
            return self.both if self.rules is None else self._composite(best, best)
        if self.rules is None and self.both.backend == self.by_phase[Phase.DECODE].backend:
            return self.both
        ruled = (decision for decision in self.by_phase.values() if decision.rule is not None)
        alone = self.by_phase[Phase.DECODE] if self.rules is None else next(ruled)
        # Notes about batches with both phases count too.
        notes = tuple(dict.fromkeys((*alone.notes, *self.both.notes)))
        return dataclasses.replace(alone, phase=None, notes=notes)

    def _best(self, phase: Phase) -> str:
        chosen = self.by_phase[phase].chosen
        return "" if chosen is None else unambiguous(self.registry, chosen)

    def _composite(self, prefill: str, decode: str) -> Decision:
        # A rule for a phase may name a composite; the half of that phase counts.
        return self._asked("+".join((prefill.partition("+")[0], decode.rpartition("+")[2])))

    def _asked(self, backend: str) -> Decision:
        kwargs: SelectKwargs = {**self.kwargs, "backend": backend}
        decision = self.registry.decide(self.both.spec, self.both.device, layer_name=self.name, **kwargs)
        source, text = self._source()
        return dataclasses.replace(decision, chosen_by=source, rule=text)

    def _source(self) -> tuple[str, str]:
        if self.rules is None:
            return "plan", "per_phase=True"
        rules = [rule for rule in self.rules.values() if rule is not None]
        return rules[0].source, ",".join(dict.fromkeys(map(str, rules)))

    def _next_best(self) -> Decision | None:
        """The highest-ranked pair that serves the layer and that all rules allow."""
        prefill, decode = (self._allowed(phase) for phase in (Phase.PREFILL, Phase.DECODE))
        pairs = [(i + j, i, p, d) for i, p in enumerate(prefill) for j, d in enumerate(decode)]
        # The first pair is the one that was refused already.
        for _, _, first, second in sorted(pairs)[1:]:
            decision = self._composite(first, second)
            if decision:
                return decision
        return None

    def _allowed(self, phase: Phase) -> Sequence[str]:
        rule = None if self.rules is None else self.rules[phase]
        return [
            unambiguous(self.registry, each)
            for each in self.by_phase[phase].candidates
            if each.accepted and (rule is None or self.registry.plugins.refers_to(rule.backend, each))
        ]


def _kept_apart(step: Step, found: Decision, pair: Decision) -> str:
    """The sentence about a range of steps whose best backend cannot serve them beside the pair."""
    refused = next((each.reasons for each in found.refused if "+" in each.name), ())
    why = "; ".join(refused) or f"with {found.backend} pages would be {found.pages}, not {pair.pages}"
    return f"{step.choice.steps.words} would run on {step.choice.backend}, but {why}"


def without_composites(choices: LayerChoices, error: LayoutError) -> LayerChoices:
    """The choices with the fallbacks in place of composites whose pages do not fit those of other layers.

    Raises:
        LayoutError: `error`, if there are no fallbacks.
    """
    if not choices.fallbacks:
        raise error
    obstacles = {**choices.obstacles, **dict.fromkeys(choices.fallbacks, str(error))}
    decisions = {**choices.decisions, **choices.fallbacks}
    return LayerChoices(decisions, choices.by_phase, obstacles=obstacles)


def phase_notes(decisions: Decisions, choices: LayerChoices) -> tuple[str, ...]:
    """A sentence for each pair of backends that the phases alone would choose and that the plan gave up."""
    given_up: dict[tuple[str, ...], list[str]] = {}
    for name, phases in choices.by_phase.items():
        prefill, decode = (str(phases[phase].backend) for phase in (Phase.PREFILL, Phase.DECODE))
        if prefill != decode and decisions[name] and name in choices.obstacles:
            key = (prefill, decode, choices.obstacles[name], str(decisions[name].backend))
            given_up.setdefault(key, []).append(name)
    return tuple(
        f"{len(names)} {'layer' if len(names) == 1 else 'layers'} would prefill on {prefill} and decode on "
        f"{decode}, but {reason}. {served} serves both phases"
        for (prefill, decode, reason, served), names in given_up.items()
    )
