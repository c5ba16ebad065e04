"""The ranges of steps of one layer that another backend serves better than those chosen for its phases.

Measured times decide, where a table has them. The priorities that backends declare for ranges of steps count in all ranges of
which no measured step speaks against them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from attnplug.core.composite.steps import StepChoice, StepKind, StepPriority, StepRange
from attnplug.core.interface.answers import answer, declared, serving_class
from attnplug.core.interface.guarded import guarded_call
from attnplug.core.spec import Phase
from attnplug.registry.selection.gates import blame
from attnplug.registry.selection.measured_steps import measured_steps

if TYPE_CHECKING:
    from attnplug.registry.measured.tuned_lookup import Tables
    from attnplug.registry.plugin_set import PluginSet
    from attnplug.registry.selection.decision import Candidate, Decision

Decisions: TypeAlias = Mapping[Phase | None, "Decision"]


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A choice, and the candidate that serves its steps."""

    choice: StepChoice
    candidate: Candidate


@dataclasses.dataclass(frozen=True, slots=True)
class Steps:
    """The choices for ranges of steps, the first that has a step counts; and a note for each fault of a backend."""

    found: tuple[Step, ...]
    notes: tuple[str, ...]


def step_choices(plugins: PluginSet, decisions: Decisions, pair: Decision, tables: Tables) -> Steps:
    """The choices for ranges of steps of a layer.

    Args:
        plugins: have the classes of candidates.
        decisions: for each phase, and for both.
        pair: of the two backends that the phases choose.
        tables: measured times, the most important first.
    """
    measured = measured_steps(decisions, pair, tables)
    found = [Step(each.choice, each.candidate) for each in measured.found]
    faults: dict[str, None] = {}
    # Times of steps in a range count more than a declaration, which serves between them where none speaks against it.
    found += (
        each
        for each in _by_priority(plugins, decisions, faults)
        if not measured.refute(each.choice.steps, each.candidate.name)
    )
    return Steps(tuple(found), tuple(faults))


@dataclasses.dataclass(frozen=True, slots=True)
class _Ranked:
    """A candidate of one phase with what it declares about ranges of steps."""

    candidate: Candidate
    priority: int
    declared: Sequence[StepPriority]
    drafts: int
    """Its rank for drafts."""

    def rank(self, steps: StepRange) -> int:
        """Its rank for a range: that of a declared range around it, or its priority in the phase."""
        around = (each.priority for each in self.declared if each.steps.covers(steps))
        return next(around, self.drafts if steps.kind is StepKind.DRAFT else self.priority)


def _by_priority(plugins: PluginSet, decisions: Decisions, faults: dict[str, None]) -> list[Step]:
    found: list[tuple[int, Step]] = []
    for kind in (StepKind.DRAFT, StepKind.DECODE, StepKind.PREFILL, StepKind.MIXED):
        decision = decisions[kind.phase]
        # A rule or a plugin that ranks was asked about the whole phase.
        if decision.rule is not None or decision.ranked_by:
            continue
        ranked = list(_ranked(plugins, decision, decisions, faults))
        ranges = dict.fromkeys(
            each.steps for one in ranked for each in one.declared if each.steps.kind is kind
        )
        if kind is StepKind.DRAFT:
            ranges[StepRange(kind)] = None
        for steps in ranges:
            best = _best(ranked, steps, decisions)
            if best is not None:
                found.append(best)
    # Of two ranges that have a step, the one of the higher rank decides.
    return [step for _, step in sorted(found, key=lambda each: -each[0])]


def _best(ranked: Sequence[_Ranked], steps: StepRange, decisions: Decisions) -> tuple[int, Step] | None:
    """The rank and the choice of the candidate that ranks above the one chosen for the phase; None if none does."""
    if steps.kind is StepKind.MIXED:
        halves = [decisions[phase].chosen for phase in (Phase.PREFILL, Phase.DECODE)]
        own = sum(half.priority or 0 for half in halves if half is not None) // 2
        name = "+".join(half.name for half in halves if half is not None)
    else:
        default = decisions[steps.kind.phase].chosen
        mine = next((each for each in ranked if each.candidate is default), None)
        if mine is None:
            return None
        own, name = mine.rank(steps), mine.candidate.name
    measured = decisions[steps.kind.phase].measured is not None
    # Mixed steps, and phases that times decided, know no priorities but those declared for the range.
    others = (
        each
        for each in ranked
        if each.candidate.name != name
        and (not (measured or steps.kind is StepKind.MIXED) or _declares(each, steps))
    )
    best = max(others, key=lambda each: each.rank(steps), default=None)
    if best is None or best.rank(steps) <= own:
        return None
    why = f"priority {best.rank(steps)} for such steps, and {name} has {own}"
    return best.rank(steps), Step(StepChoice(steps, best.candidate.name, why), best.candidate)


def _declares(ranked: _Ranked, steps: StepRange) -> bool:
    return any(each.steps.covers(steps) for each in ranked.declared)


def _ranked(
    plugins: PluginSet, decision: Decision, decisions: Decisions, faults: dict[str, None]
) -> Iterator[_Ranked]:
    in_prefill = {each.name: each.priority or 0 for each in decisions[Phase.PREFILL].candidates}
    for candidate in decision.candidates:
        offer = plugins.offer_of(candidate) if candidate.accepted else None
        if offer is None:
            continue
        backend, error = guarded_call(serving_class, offer.backend, decision.spec)
        if error is not None:
            continue
        asked = decision.spec, decision.device
        ranges, error = guarded_call(answer, backend, "get_step_priorities", *asked)
        if error is not None:
            faults[f"{blame(backend, error, 'get_step_priorities')}; ignored"] = None
            ranges = ()
        own = candidate.priority or 0
        on_prefill, _ = guarded_call(declared, backend, "drafts_on_prefill")
        drafts = min(own, in_prefill.get(candidate.name, own)) if on_prefill else own
        yield _Ranked(candidate, own, ranges, drafts)
