"""`attnplug select`: a model's configuration, and which backend serves which of its layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnplug.cli.arguments import (
    AsJson,
    AssumedVersions,
    BackendRules,
    BlockSize,
    DeviceText,
    KVCacheDtype,
    PhaseChoice,
    assumed,
)
from attnplug.cli.memory import budget_for, print_budget
from attnplug.cli.output import console, print_json, table
from attnplug.cli.words import features_in_words, layers_in_words
from attnplug.core.spec import LayerSpec, Phase

if TYPE_CHECKING:
    from rich.table import Table

    from attnplug.integrations.transformers import ModelSpec
    from attnplug.registry.decision import Decision

__all__ = ["select"]


def select(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="A Hugging Face config.json, or the folder it is in.")
    ],
    device: DeviceText = "current",
    tp: Annotated[int, typer.Option("--tp", metavar="N", help="Tensor-parallel size.")] = 1,
    kv_cache_dtype: KVCacheDtype = "auto",
    block_size: BlockSize = None,
    backend: BackendRules = None,
    phase: PhaseChoice = None,
    assume_installed: AssumedVersions = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", metavar="BYTES", help="Also say what fits: blocks and tokens in 80GiB, say."
        ),
    ] = None,
    why: Annotated[bool, typer.Option("--why", help="Show each refused candidate's reasons.")] = False,
    as_json: AsJson = False,
) -> None:
    """Choose a backend for every layer of a model, and say why not the others."""
    from attnplug.integrations.transformers import read_config
    from attnplug.registry.default import get_registry
    from attnplug.registry.policy import parse_rules

    registry = get_registry()
    rules = parse_rules(backend)
    model = read_config(config, tensor_parallel_size=tp, kv_cache_dtype=kv_cache_dtype)
    specs = {name: _with_block_size(spec, block_size) for name, spec in model.layers.items()}
    by_phase = phase is None and any(rule.scope == "phase" for rule in rules)
    rounds: Sequence[Phase | None] = tuple(Phase) if by_phase else (phase,)
    decisions = registry.judge_layers(
        specs, device, rounds, backend=backend, assume_installed=assumed(assume_installed)
    )
    budget = budget_for(decisions[rounds[0]], model.kv_sharing, memory) if memory else None
    every = [d for per_layer in decisions.values() for d in per_layer.values()]
    if as_json:
        data = _as_json(model, every)
        print_json({**data, "budget": None if budget is None else budget.to_dict()} if memory else data)
    else:
        _print(config, model, every, why)
        if memory:
            print_budget(budget, memory)
    raise typer.Exit(0 if all(every) else 3)


def _with_block_size(spec: LayerSpec, block_size: int | None) -> LayerSpec:
    return spec if block_size is None or spec.direct_kv else spec.replace(block_size=block_size)


def _as_json(model: ModelSpec, decisions: Iterable[Decision]) -> dict[str, Any]:
    return {
        "model_type": model.model_type,
        "decisions": [decision.to_dict() for decision in decisions],
        "other_layers": dict(model.other_layers),
        "kv_sharing": dict(model.kv_sharing),
    }


def _print(config: Path, model: ModelSpec, decisions: Sequence[Decision], why: bool) -> None:
    out = console()
    where = decisions[0].device if decisions else "no device"
    name = getattr(where, "name", None)
    out.print(f"{config} ({model.model_type}) on {where}{f' ({name})' if name else ''}\n")
    groups = _groups(decisions)
    out.print(_table(groups))
    _print_rest(model)
    for members in groups:
        first = members[0]
        if why or not first:
            layers = layers_in_words([str(decision.layer_name) for decision in members])
            phase = f", {first.phase}" if first.phase else ""
            out.print(f"\nlayers {layers} ({features_in_words(first.spec)}{phase}):")
            out.print(first.table())
            for note in first.notes:
                out.print(note)
    if not all(decisions):
        lacking = sum(not decision for decision in decisions)
        out.print(f"\nNo backend for {lacking} of {len(decisions)} layers.")


def _groups(decisions: Iterable[Decision]) -> list[list[Decision]]:
    """Decisions that read alike: the same spec, phase, backend and pages."""
    groups: dict[Any, list[Decision]] = {}
    for d in decisions:
        groups.setdefault((d.spec, d.phase, d.backend, d.block_size), []).append(d)
    return list(groups.values())


def _table(groups: Sequence[Sequence[Decision]]) -> Table:
    phases = any(members[0].phase for members in groups)
    columns = ["layers", "which", "heads", "size", "asks for", "backend", "prio", "block"]
    shown = table(
        ["phase", *columns] if phases else columns,
        right=("layers", "size", "prio", "block"),
        fixed=("phase", "layers", "heads", "backend"),
    )
    for members in groups:
        first = members[0]
        spec, chosen = first.spec, first.chosen
        cells = [
            str(len(members)),
            layers_in_words([str(decision.layer_name) for decision in members], 3),
            f"{spec.num_heads}/{spec.num_kv_heads}",
            str(spec.head_size),
            features_in_words(spec),
            first.backend or "none",
            "-" if chosen is None or chosen.priority is None else str(chosen.priority),
            "-" if first.block_size is None else str(first.block_size),
        ]
        shown.add_row(*([str(first.phase)] if phases else []), *cells)
    return shown


def _print_rest(model: ModelSpec) -> None:
    out = console()
    for kind, count in Counter(model.other_layers.values()).items():
        names = [name for name, its in model.other_layers.items() if its == kind]
        out.print(f"not attention: {count} x {kind} ({layers_in_words(names)})")
    sharing: Mapping[str, str] = model.kv_sharing
    if sharing:
        targets = layers_in_words(sorted(set(sharing.values())))
        out.print(f"KV shared: layers {layers_in_words(list(sharing))} read the cache of {targets}")
