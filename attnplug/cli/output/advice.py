"""Warnings of `select` and `explain`: layers that only the reference serves, and what would help."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from attnplug.cli.output.output import console, layers_in_words

if TYPE_CHECKING:
    from attnplug.registry.selection.decision import Decision
    from attnplug.registry.selection.nearest import NearMiss

Advice = dict[tuple["NearMiss", ...], list["Decision"]]
"""Decisions for which only the reference, or no backend, serves the layer, by their nearest misses."""


def advice_for(decisions: Iterable[Decision]) -> Advice:
    """The decisions that want advice, grouped by it."""
    from attnplug.registry.default import get_registry
    from attnplug.registry.selection.nearest import nearest_misses, only_reference_serves

    registry, found = get_registry(), Advice()
    known: dict[Any, tuple[NearMiss, ...]] = {}
    for decision in decisions:
        if decision and not only_reference_serves(decision):
            continue
        key = (decision.spec, decision.device, decision.phase, decision.candidates)
        if key not in known:
            known[key] = nearest_misses(registry, decision)
        found.setdefault(known[key], []).append(decision)
    return found


def print_advice(advice: Mapping[tuple[NearMiss, ...], list[Decision]]) -> None:
    """Print the advice below a blank line; nothing without any."""
    from attnplug._system.terminal_tables import Paragraph

    out = console()
    for index, line in enumerate(advice_in_words(advice)):
        if index == 0 or line.startswith("warning"):
            out.print()
        out.print(Paragraph(line, "yellow" if line.startswith("warning") else ""))


def advice_in_words(advice: Mapping[tuple[NearMiss, ...], list[Decision]]) -> Iterator[str]:
    """A warning for each group of layers, then a sentence for each of the cheapest changes.

    Without such a change, the sentence has the reasons of the nearest backend.
    """
    for misses, decisions in advice.items():
        first = decisions[0]
        which = _which(decisions)
        device = first.device.name or first.device
        if first:
            yield f"warning: only the reference {first.backend} serves {which} on {device}. It is slow on a GPU."
            nearest = next(iter(first.refused), None)
            if nearest and not misses:
                yield f"{nearest.name} is the nearest: {'; '.join(nearest.reasons)}."
        for miss in misses:
            if miss.cost == misses[0].cost:
                yield f"{miss.backend} serves {'this' if first else which} {miss}."


def advice_as_data(advice: Mapping[tuple[NearMiss, ...], list[Decision]]) -> list[dict[str, Any]]:
    """A JSON object for each group: its layers, whether the reference serves them, and all near misses."""
    return [
        {
            "layers": list(dict.fromkeys(decision.layer_name for decision in decisions)),
            "phase": decisions[0].phase and str(decisions[0].phase),
            "only_reference": bool(decisions[0]),
            "nearest": [miss.to_dict() for miss in misses],
        }
        for misses, decisions in advice.items()
    ]


def _which(decisions: list[Decision]) -> str:
    names = [str(decision.layer_name) for decision in decisions if decision.layer_name]
    phases = {decision.phase for decision in decisions}
    names = list(dict.fromkeys(names))
    layers = f"layers {layers_in_words(names)}" if len(names) > 1 else "this layer"
    phase = phases.pop() if len(phases) == 1 else None
    return f"{layers} in {phase}" if phase else layers
