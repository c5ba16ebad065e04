"""Who serves a layer phase by phase: one backend, or a composite of two on one KV cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from attnplug.core.composite import CompositeBackend
from attnplug.core.device import Device
from attnplug.core.errors import BackendUnavailableError, LayoutError
from attnplug.core.spec import AttentionType, LayerSpec, Phase
from attnplug.registry.decision import Decision
from attnplug.registry.policy import Rule, rule_for, rule_sets
from attnplug.registry.registry import Registry, Rules, SelectKwargs
from attnplug.runtime.plan_choice import unambiguous

__all__ = ["Phased", "has_phase_rules", "phase_choice", "phase_notes", "without_composites"]

Decisions = Mapping[str, Decision]


@dataclasses.dataclass(frozen=True, slots=True)
class Phased:
    """The decision of each layer, and of composites that nobody asked for what to fall back to.

    Args:
        decisions: by layer.
        instead: by layer, the one backend that would serve it.
        why: by layer, why its phases' own choices do not serve it together.
    """

    decisions: dict[str, Decision]
    instead: Mapping[str, Decision]
    why: Mapping[str, str]


def has_phase_rules(backend: Rules) -> bool:
    """Whether a rule in force here is for one phase only."""
    return any(rule.scope == "phase" for rules in rule_sets(backend) for rule in rules)


def phase_choice(
    registry: Registry,
    specs: Mapping[str, LayerSpec],
    device: Device,
    found: Mapping[Phase | None, Decisions],
    asked: SelectKwargs,
    *,
    per_phase: bool,
) -> Phased:
    """Each layer's backend: where its phases choose alike that one, else the composite of both.

    Args:
        registry: judges composites.
        specs: the layers.
        device: the device planned for.
        found: what each phase alone, and both together, would choose.
        asked: as the user did.
        per_phase: ask of all layers; otherwise only of those that a phase rule speaks of.

    Raises:
        BackendUnavailableError: two backends that rules ask for and that share no KV cache.
    """
    sets = rule_sets(asked.get("backend"))
    decisions, instead, why = {}, {}, {}
    for name, spec in specs.items():
        by_phase = {phase: found[phase][name] for phase in Phase}
        rules = {phase: rule_for(sets, spec, phase, name) for phase in (Phase.PREFILL, Phase.DECODE)}
        ruled = any(rule is not None and rule.scope == "phase" for rule in rules.values())
        both = found[None][name]
        if not (ruled or per_phase):
            decisions[name] = both
            continue
        layer = _Layer(registry, device, asked, name, by_phase, rules if ruled else None, both)
        decisions[name], reason = layer.decide()
        if reason is not None:
            why[name] = reason
        if not ruled and both and _is_composite(decisions[name]) and decisions[name].backend != both.backend:
            instead[name] = both
    return Phased(decisions, instead, why)


@dataclasses.dataclass(frozen=True, slots=True)
class _Layer:
    """One layer, what its phases chose, and the rules that must be kept; None where there are none."""

    registry: Registry
    device: Device
    asked: SelectKwargs
    name: str
    by_phase: Mapping[Phase, Decision]
    rules: Mapping[Phase, Rule | None] | None
    both: Decision

    def decide(self) -> tuple[Decision, str | None]:
        """The decision, and why it is not what the phases alone would choose, where it is not."""
        if self.both.spec.attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY):
            return self._encoder(), None
        for decision in self.by_phase.values():
            if not decision:
                return (decision if self.rules else self.both), None
        prefill, decode = self.by_phase[Phase.PREFILL], self.by_phase[Phase.DECODE]
        if prefill.backend_cls is decode.backend_cls:
            return self._alike(), None
        first = self._together(self._best(Phase.PREFILL), self._best(Phase.DECODE))
        if first:
            return first, None
        refused = next(candidate for candidate in first.refused if "+" in candidate.name)
        why = "; ".join(refused.reasons)
        if self.rules is None and self.both:
            return self.both, why
        other = self._next_best()
        if other is not None:
            return other, why
        if self.rules is None:
            # Nobody serves it: the table says so of the pair, too.
            return dataclasses.replace(self.both, candidates=(refused, *self.both.candidates)), why
        source, text = self._source()
        raise BackendUnavailableError(
            f"{text}, asked for by {source}, cannot serve layer {self.name} on {self.device} together: {why}",
            first,
            refused.reasons,
        )

    def _encoder(self) -> Decision:
        """An encoder computes all its tokens at once: what decodes elsewhere has no part in it."""
        prefill = self.by_phase[Phase.PREFILL]
        if not prefill:
            return prefill if self.rules else self.both
        best = self._best(Phase.PREFILL)
        chosen = self._together(best, best)
        return chosen if chosen or self.rules else self.both

    def _alike(self) -> Decision:
        if self._is_wrong_for_both():
            best = self._best(Phase.DECODE)
            return self.both if self.rules is None else self._together(best, best)
        if self.rules is None and self.both.backend == self.by_phase[Phase.DECODE].backend:
            return self.both
        ruled = (decision for decision in self.by_phase.values() if decision.rule is not None)
        alone = self.by_phase[Phase.DECODE] if self.rules is None else next(ruled)
        # What is said of batches that hold both phases counts, too.
        notes = tuple(dict.fromkeys((*alone.notes, *self.both.notes)))
        return dataclasses.replace(alone, phase=None, notes=notes)

    def _is_wrong_for_both(self) -> bool:
        """Whether what serves each phase alone is refused where batches hold both, as evidence may say."""
        name = self.by_phase[Phase.DECODE].backend
        return any(not candidate.accepted and candidate.name == name for candidate in self.both.candidates)

    def _best(self, phase: Phase) -> str:
        chosen = self.by_phase[phase].chosen
        return "" if chosen is None else unambiguous(self.registry, chosen)

    def _together(self, prefill: str, decode: str) -> Decision:
        # A rule for a phase may name a composite, and means the half of that phase.
        halves = prefill.partition("+")[0], decode.rpartition("+")[2]
        asked: SelectKwargs = {**self.asked, "backend": "+".join(halves)}
        judged = self.registry.decide(self.both.spec, self.device, layer_name=self.name, **asked)
        source, text = self._source()
        return dataclasses.replace(judged, chosen_by=source, rule=text)

    def _source(self) -> tuple[str, str]:
        if self.rules is None:
            return "plan", "per_phase=True"
        rules = [rule for rule in self.rules.values() if rule is not None]
        return rules[0].source, ",".join(dict.fromkeys(map(str, rules)))

    def _next_best(self) -> Decision | None:
        """The first pair, going down both rankings, that serves the layer as all rules allow."""
        prefill, decode = (self._allowed(phase) for phase in (Phase.PREFILL, Phase.DECODE))
        pairs = [(i + j, i, p, d) for i, p in enumerate(prefill) for j, d in enumerate(decode)]
        for _, _, first, second in sorted(pairs)[1:]:
            judged = self._together(first, second)
            if judged:
                return judged
        return None

    def _allowed(self, phase: Phase) -> Sequence[str]:
        rule = None if self.rules is None else self.rules[phase]
        offers = None
        if rule is not None:
            offers = {(o.name, o.distribution) for o in self.registry.plugins.find(rule.backend)}
        return [
            unambiguous(self.registry, candidate)
            for candidate in self.by_phase[phase].candidates
            if candidate.accepted and (offers is None or (candidate.name, candidate.distribution) in offers)
        ]


def _is_composite(decision: Decision) -> bool:
    return decision.backend_cls is not None and issubclass(decision.backend_cls, CompositeBackend)


def without_composites(phased: Phased, error: LayoutError) -> Phased:
    """The plan without the composites that nobody asked for, since their pages do not fit the other layers'.

    Raises:
        LayoutError: `error`, where there are none.
    """
    if not phased.instead:
        raise error
    decisions = {**phased.decisions, **phased.instead}
    return Phased(decisions, {}, {**phased.why, **dict.fromkeys(phased.instead, str(error))})


def phase_notes(
    decisions: Decisions, by_phase: Mapping[str, Mapping[Phase, Decision]], why: Mapping[str, str]
) -> tuple[str, ...]:
    """A sentence for each pair of backends that the phases alone would have chosen and that did not come about."""
    given_up: dict[tuple[str, ...], list[str]] = {}
    for name, phases in by_phase.items():
        prefill, decode = (str(phases[phase].backend) for phase in (Phase.PREFILL, Phase.DECODE))
        if prefill != decode and decisions[name] and name in why:
            given_up.setdefault((prefill, decode, why[name], str(decisions[name].backend)), []).append(name)
    return tuple(
        f"{len(names)} {'layer' if len(names) == 1 else 'layers'} would prefill on {prefill} and decode on "
        f"{decode}, but {reason}. {served} serves both phases"
        for (prefill, decode, reason, served), names in given_up.items()
    )
