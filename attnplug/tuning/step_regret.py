"""The regret of plans by kind of step: short prompts, extends, mixed steps, decodes and drafts; and the rule that lost."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from attnplug.core.composite.steps import StepKind, StepSizes
from attnplug.core.spec import Phase
from attnplug.planning import decide_model
from attnplug.registry.selection.measured_steps import sizes_of

if TYPE_CHECKING:
    from attnplug.registry.measured.step_shapes import StepShape
    from attnplug.registry.measured.tuned import TunedLayer, TunedTable
    from attnplug.registry.plugins.installed import AssumeInstalled
    from attnplug.registry.registry import Registry, SelectKwargs
    from attnplug.registry.selection.decision import Decision
    from attnplug.runtime.plan.plan_choice import ByPhase

PRIORITIES = "priorities"
SHORT = 384
"""The longest query of a short prompt or extend."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepRegret:
    """A cell with the choice of a plan.

    Args:
        layer: place of the layer in the measured table.
        shape: the step.
        kind: of the step, in words.
        policy: "priorities", or the name of a table.
        chosen: the backend that serves the step; "A+B" for one that two serve.
        best: the fastest backend.
        regret: time of the choice over that of the best, minus 1.
        rule: the cause of the choice.
    """

    layer: int
    shape: StepShape
    kind: str
    policy: str
    chosen: str
    best: str
    regret: float
    rule: str

    def __str__(self) -> str:
        lost = f"{self.chosen} is {100 * self.regret:.1f} % slower than {self.best}"
        return f"{self.policy} at {self.shape} of layer kind {self.layer + 1}: {lost}. The rule: {self.rule}"


@dataclasses.dataclass(frozen=True, slots=True)
class KindRegret:
    """The regret of a policy over the cells of one kind of step."""

    policy: str
    kind: str
    cells: int
    mean: float
    worst: float


def step_regrets(
    registry: Registry,
    found: TunedTable,
    tables: Mapping[str, TunedTable],
    *,
    assume_installed: AssumeInstalled = None,
) -> list[StepRegret]:
    """The choices of plans by priorities and by tables for each cell, at the times that `found` has measured.

    A cell whose choice was not measured is left out. Arguments as `regrets`.
    """
    policies: dict[str, TunedTable | Literal[False]] = {PRIORITIES: False, **tables}
    cells = []
    for place, layer in enumerate(found.layers):
        for policy, tuned in policies.items():
            asked: SelectKwargs = {"tuned": tuned, "assume_installed": assume_installed}
            decisions, by_phase, _ = decide_model(registry, {"layer": layer.spec}, found.device, asked)
            for shape, _ in layer.workload:
                costs = _costs(layer, shape)
                chosen, rule = served_by(decisions["layer"], by_phase, shape)
                if chosen in costs:
                    best = min(costs, key=costs.__getitem__)
                    regret = costs[chosen] / costs[best] - 1
                    kind = kind_of(shape, is_latent=layer.spec.mla is not None)
                    cells.append(StepRegret(place, shape, kind, policy, chosen, best, regret, rule))
    return cells


def kinds(cells: Sequence[StepRegret]) -> Iterator[KindRegret]:
    """The mean and the worst of each policy in each kind of step."""
    groups: dict[tuple[str, str], list[float]] = {}
    for cell in cells:
        groups.setdefault((cell.policy, cell.kind), []).append(cell.regret)
    for (policy, kind), values in groups.items():
        yield KindRegret(policy, kind, len(values), statistics.fmean(values), max(values))


def kind_of(shape: StepShape, *, is_latent: bool) -> str:
    """The kind of a step in words, such as "short prompts"."""
    kind = sizes_of(shape).kind
    if kind is StepKind.PREFILL:
        size = "short" if shape.query <= SHORT else "long"
        return f"{size} {'prompts' if shape.query == shape.context else 'extends'}"
    word = {StepKind.DECODE: "decodes", StepKind.DRAFT: "drafts", StepKind.MIXED: "mixed steps"}[kind]
    return f"latent {word}" if is_latent else word


def served_by(decision: Decision, by_phase: ByPhase, shape: StepShape) -> tuple[str, str]:
    """The backend of a plan that serves a step, "A+B" for two, and the cause."""
    sizes = sizes_of(shape)
    if sizes.kind is not StepKind.MIXED:
        return _part(decision, by_phase, sizes)
    for step in decision.steps:
        if step.steps.has(sizes):
            return step.backend, str(step)
    prefill = StepSizes(
        StepKind.PREFILL, shape.query, shape.batch, shape.batch * shape.query, max(shape.lengths)
    )
    decodes = StepSizes(StepKind.DECODE, 1, shape.decodes, shape.decodes, max(shape.lengths))
    (one, why), (other, also) = (_part(decision, by_phase, each) for each in (prefill, decodes))
    return (one, why) if one == other else (f"{one}+{other}", f"{why}; {also}")


def _part(decision: Decision, by_phase: ByPhase, sizes: StepSizes) -> tuple[str, str]:
    for step in decision.steps:
        if step.steps.has(sizes):
            return step.backend, str(step)
    phase = Phase.PREFILL if sizes.kind is StepKind.PREFILL else Phase.DECODE
    name = decision.members[phase]
    alone = by_phase.get("layer", {}).get(phase, decision)
    causes = (
        str(alone.measured),
        f"chosen by {alone.chosen_by}",
        f"priority {alone.chosen and alone.chosen.priority}",
    )
    cause = causes[0] if alone.measured is not None else causes[2 if alone.chosen_by == "priority" else 1]
    return name, f"{phase}s run on {name}: {cause}"


def _costs(layer: TunedLayer, shape: StepShape) -> dict[str, float]:
    rows = (row for row in layer.rows if row.shape == shape and row.is_measured)
    return {row.subject.backend: layer.cost(row) for row in rows}
