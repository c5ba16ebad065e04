"""Parts of the output of `attnplug select`: advice, the strip of layers, and the KV cache that fits into memory.

Advice, which `explain` prints too: layers that only the reference serves, and what would help.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from attnplug._system.terminal_tables import Paragraph, WrappedTable
from attnplug.cli.output.output import console, layers_in_words
from attnplug.cli.output.own_output import is_quiet
from attnplug.core.dtypes import element_size
from attnplug.matrix.words import NO_BACKEND, colours, letters

if TYPE_CHECKING:
    from attnplug.core.composite.steps import StepChoice
    from attnplug.integrations.model_spec import ModelSpec
    from attnplug.registry.selection.decision import Decision
    from attnplug.registry.selection.nearest import NearMiss
    from attnplug.runtime.plan.budget import MemoryBudget


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
        # Layers of one kind share a search, which examines each refused backend many times.
        if key not in known:
            known[key] = nearest_misses(registry, decision)
        found.setdefault(known[key], []).append(decision)
    return found


def print_advice(advice: Mapping[tuple[NearMiss, ...], list[Decision]]) -> None:
    """Print the advice below a blank line; nothing without any, or if the command is quiet."""
    out = console()
    for index, line in enumerate(() if is_quiet() else advice_in_words(advice)):
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
            # A backend for other types of devices is near to nothing here.
            nearest = next((each for each in first.refused if "device_type" not in each.codes), None)
            if nearest and not misses:
                yield f"{nearest.name} is the nearest: {'; '.join(nearest.reasons)}."
            elif not misses:
                yield f"No other installed backend is for {first.device.type}."
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


ASSUMES = "Assumes every library that such a machine could install"


def print_missing(decisions: Sequence[Decision]) -> None:
    """Print in one line the libraries of the chosen backends that are not installed here; nothing without any."""
    from attnplug.core.composite.pair import parts_of
    from attnplug.registry.plugins.installed import missing_requirements

    missing: dict[str, str] = {}
    for decision in decisions:
        if decision.assumed != "all" or decision.backend_cls is None:
            continue
        for part in parts_of(decision.backend_cls):
            for reason in missing_requirements(part.requires):
                missing[str(reason.remedy)] = part.get_name()
    if missing:
        text = ", ".join(f"{name} ({remedy})" for remedy, name in missing.items())
        console().print(Paragraph(f"Missing here: {text}."))


def print_reference(decisions: Sequence[Decision], command: str) -> None:
    """Print what the reference is, and the command for a GPU, if it serves a layer on a machine without a GPU."""
    names = [c.name for d in decisions for c in (d.chosen,) if c is not None and c.priority == 0]
    if names:
        out = console()
        out.print()
        out.print(
            Paragraph(
                f"{names[0]} is the reference: right and slow, on any machine. No GPU is here; for one:"
            )
        )
        out.print(f"  {command}", soft_wrap=True)  # one line, to be copied


def why_chosen(decisions: Iterable[Decision]) -> str:
    """Why these backends serve their layers, in words: "highest priority of those that serve the layer"."""
    causes: dict[str, dict[str, None]] = {}
    for decision in decisions:
        accepted = sum(candidate.accepted for candidate in decision.candidates)
        if not decision:
            cause = "no backend serves the layer"
        elif decision.measured is not None:
            cause = "fastest in measured times"
        elif decision.rule is not None and decision.chosen_by != "plan":
            cause = f"asked for by {'--backend' if decision.chosen_by == 'backend' else decision.chosen_by}"
        elif decision.ranked_by:
            cause = f"ranked first by {', '.join(decision.ranked_by)}"
        elif accepted == 1:
            cause = "the only one that serves the layer"
        else:
            cause = "highest priority of those that serve the layer"
        causes.setdefault(cause, {})[decision.backend or "none"] = None
    if len(causes) == 1:
        return next(iter(causes))
    return "; ".join(f"{', '.join(names)}: {cause}" for cause, names in causes.items())


def print_steps(groups: Sequence[Sequence[Decision]]) -> None:
    """Print the steps that another backend serves than that of their phase, and why; nothing without any.

    Args:
        groups: decisions for equal layers, each group with one list of steps.
    """
    alike: dict[tuple[StepChoice, ...], list[str]] = {}
    for members in groups:
        names = alike.setdefault(members[0].steps, [])
        names += [str(decision.layer_name) for decision in members]
    for steps, names in alike.items():
        where = f" in layers {layers_in_words(names)}" if len(alike) > 1 else ""
        for step in steps:
            words = step.steps.words
            text = f"{words[0].upper()}{words[1:]}{where} run on {step.backend}: {step.why}."
            console().print(Paragraph(text))


# Cells between two blanks, so that a layer's number can be counted.
_GROUP = 10


class LayerStrip:
    """Rows of cells, wrapped at the width of the terminal, and a legend. Letters tell all without colour.

    Args:
        rows: the backend of each layer, "none" without one, in the order that the model runs them; by the
            name of the row, which is empty for a single one.
        known: the names of all backends, so that each has the same letter for every model.
    """

    def __init__(self, rows: Mapping[str, Sequence[str]], known: Iterable[str] = ()) -> None:
        self._rows = rows
        self._used = list(dict.fromkeys(itertools.chain.from_iterable(rows.values())))
        self._letters = letters((*known, *self._used))
        found = colours(self._letters).items()
        self._styles = {name: each for name, (_, each) in found} | {NO_BACKEND: "red"}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        count = max(map(len, self._rows.values()))
        titles = max(map(len, self._rows))
        margin = len(str(count - 1)) + 2 + (titles + 2 if titles else 0)
        # Each group of cells needs one more column for its blank.
        room = options.max_width - margin
        a_line = (room + 1) // (_GROUP + 1) * _GROUP or max(room, 1)
        for start in range(0, count, a_line):
            for title, names in self._rows.items():
                before = f"{title:{titles}}  " if titles else ""
                yield self._line(f"{before}{start:{len(str(count - 1))}}  ", names[start : start + a_line])
        entries = [Text(f"{self._letters[name]} = {name}", self._styles[name]) for name in self._used]
        yield Text(", ").join(entries)

    def _line(self, before: str, names: Sequence[str]) -> Text:
        line = Text(before, no_wrap=True, overflow="ignore")
        for index, name in enumerate(names):
            line.append(" " if index and index % _GROUP == 0 else "")
            line.append(self._letters[name], self._styles[name])
        return line


_KINDS = {
    "Full": "full",
    "SlidingWindow": "sliding",
    "ChunkedLocal": "chunked",
    "MLA": "mla",
    "Cross": "cross",
}
STATES = ("mamba", "linear_attention", "conv", "recurrent", "rwkv", "xlstm")
"""Kinds of other layers that keep a state of fixed size for each request, in a form that the reader does not know."""
# These parts see a whole input at once, and keep no state.
_ENCODER = re.compile(r"vision|visual|image|audio|speech|encoder|tower")


def left_out(model: ModelSpec) -> dict[str, int]:
    """The layers whose states the estimate does not count, by kind: they depend on requests, not on tokens."""
    kept = (kind for name, kind in model.other_layers.items() if not _ENCODER.search(name))
    kinds = Counter(re.split(r"[^a-z_0-9]", kind)[0] for kind in kept)
    return {kind: count for kind, count in kinds.items() if kind.startswith(STATES)}


def budget_for(
    decisions: Mapping[str, Decision], model: ModelSpec, memory: str, requests: int | None = None
) -> MemoryBudget | None:
    """The KV cache that fits into `memory`; None if a layer has no backend, so no known page size.

    The index keys of sparse layers count as part of each block. The states of so many `requests` get their bytes first.

    Raises:
        LayoutError: `memory` cannot be parsed or is too small, or pages cannot be made equal.
    """
    from attnplug.core.config import CONTEXT_CHUNK_ROWS
    from attnplug.runtime.plan.budget import fit_kv_cache, index_key_bytes, most_workspace_bytes, parse_memory
    from attnplug.runtime.plan.grouping import group_kv_caches, planned_caches, unify_page_sizes
    from attnplug.runtime.plan.state_plan import state_plan, states_for

    size = parse_memory(memory)
    if not all(decisions.values()):
        return None
    caches = unify_page_sizes(planned_caches(decisions))
    workspace = most_workspace_bytes((each.spec for each in decisions.values()), CONTEXT_CHUNK_ROWS)
    config = group_kv_caches(caches, kv_sharing=model.kv_sharing)
    keys = sum(
        caches[name].block_size * index_key_bytes(decisions[name].spec, elements)
        for name, elements in model.index_keys.items()
        if name in caches
    )
    specs = {name: decision.spec for name, decision in decisions.items()}
    given = (
        None if requests is None or not any(spec.state for spec in specs.values()) else states_for(requests)
    )
    states = state_plan(specs, given)
    return fit_kv_cache(config, size, prefill_workspace=workspace, index_keys=keys, states=states)


def print_budget(
    budget: MemoryBudget | None, model: ModelSpec, memory: str, decisions: Sequence[Decision] = ()
) -> None:
    """Print groups, page bytes, blocks and tokens, the prefill workspace of latents, and what the estimate leaves out."""
    out = console()
    _print_blocks(budget, model, memory)
    if budget is not None and budget.groups:
        _print_shared([each for each in decisions if each and each.shares_prefixes])
    states = left_out(model)
    if states:
        counted = " and ".join(f"{count} {kind}" for kind, count in states.items())
        text = (
            f"Not counted: the states of {counted} layers. Each request needs them once, whatever its length."
        )
        out.print()
        out.print(Paragraph(f"{text} Take them from the memory yourself."))


def _print_shared(sharing: Sequence[Decision]) -> None:
    """Print that shared blocks count once, and the memory of steps that read them together."""
    if not sharing:
        return
    text = "Blocks that requests share are stored once."
    priced = [each.spec for each in sharing if each.is_priced]
    if priced:
        # Layers run one after another. Each part of a row is its output, and a float32 LSE for each head.
        most = max(each.num_heads * (each.head_size_v * element_size(each.dtype) + 4) for each in priced)
        text += (
            f" Steps that read them together take {most:,} bytes more for each new token and shared prefix."
        )
    out = console()
    out.print()
    out.print(Paragraph(text))


def _print_states(budget: MemoryBudget, memory: str) -> None:
    states = budget.states
    if states is None:
        return
    text = (
        f"States of {len(states.caches)} layers, taken from the {memory} first: {states.bytes:,} bytes "
        f"({states.bytes / 2**30:.1f} GiB) for {states.max_requests:,} requests. Each request needs "
        f"{states.bytes_per_state:,} bytes, whatever its length; one page more is the null page."
    )
    out = console()
    out.print()
    out.print(Paragraph(text))


def _print_blocks(budget: MemoryBudget | None, model: ModelSpec, memory: str) -> None:
    from attnplug.core.config import CONTEXT_CHUNK_ROWS

    out = console()
    if budget is None:
        out.print(f"\nNo estimate for {memory}: a layer has no backend, so its page size is unknown.")
        return
    _print_states(budget, memory)
    if not budget.groups:
        out.print(f"\nNo estimate for {memory}: no layer keeps a KV cache.")
        return
    longest = "A sequence of any length fits."
    if budget.max_tokens is not None:
        longest = f"The longest sequence that fits has {budget.max_tokens:,} tokens."
    out.print(
        f"\nKV cache in {memory}: {budget.num_blocks:,} blocks of {budget.bytes_per_block:,} bytes "
        f"(one is the null block).\n{longest}\n"
    )
    if budget.prefill_workspace:
        out.print(
            f"Prefill workspace of latent attention, taken from the {memory}:\n"
            f"{budget.prefill_workspace:,} bytes for {CONTEXT_CHUNK_ROWS:,} rows of context.\n"
        )
    if budget.index_keys:
        share = budget.index_keys / (budget.bytes_per_block - budget.index_keys)
        out.print(
            f"Index keys of {len(model.index_keys)} sparse layers: {budget.index_keys:,} bytes of each block, "
            f"{share:.0%} of its pages.\n"
        )
    columns = ("group", "kind", "layers", "which", "block", "page bytes", "blocks", "tokens alone")
    numbers = ("group", "layers", "block", "page bytes", "blocks", "tokens alone")
    shown = WrappedTable(columns, right=numbers, heading="group {group}: layers {which}")
    for index, group in enumerate(budget.groups):
        cache = group.kv_cache_spec
        shown.add_row(
            str(index),
            _KINDS[type(cache).__name__.removesuffix("Spec").removesuffix("Attention")],
            str(len(group.layer_names)),
            layers_in_words(group.layer_names, 2),
            str(cache.block_size),
            f"{cache.page_size_bytes:,}",
            f"{budget.usable_blocks:,}",
            f"{budget.tokens_of(group):,}",
        )
    out.print(shown)
    if budget.padding_layers:
        out.print(f"\nPadding to groups of equal size uses the pages of {budget.padding_layers} more layers.")
