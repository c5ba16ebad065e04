"""`attnplug select`: reads a model's configuration and chooses a backend for each layer."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from attnplug._system.terminal_tables import Paragraph, WrappedTable
from attnplug.cli.arguments import (
    AllowRefuted,
    AsJson,
    AssumedVersions,
    BackendRules,
    BlockSize,
    ConfigPath,
    DeviceText,
    KVCacheDtype,
    ModelDtype,
    NoTuned,
    OptionTexts,
    PhaseChoice,
    Quiet,
    TensorParallel,
    TunedFile,
    settings,
)
from attnplug.cli.output.output import console, features_in_words, layers_in_words, print_json
from attnplug.cli.output.own_output import is_quiet
from attnplug.cli.output.run_report import waiting
from attnplug.cli.output.select_report import (
    ASSUMES,
    STATES,
    LayerStrip,
    advice_as_data,
    advice_for,
    budget_for,
    left_out,
    print_advice,
    print_budget,
    print_missing,
    print_reference,
    print_steps,
    why_chosen,
)
from attnplug.core.errors import PolicyError
from attnplug.core.spec import LayerSpec, Phase
from attnplug.integrations.model_spec import NOT_READ, Client
from attnplug.registry.selection.policy import rule_sets

if TYPE_CHECKING:
    from attnplug.core.device import Device
    from attnplug.integrations.transformers import ModelSpec
    from attnplug.registry.registry import SelectKwargs
    from attnplug.registry.selection.decision import Decision
    from attnplug.runtime.plan.plan_choice import ByPhase


_Alone: TypeAlias = "Mapping[str, Sequence[Decision]]"
"""By layer, the decisions of its phases where they tell more than the one for both; empty elsewhere."""
_DTYPE_CODES = frozenset({"dtype", "kv_cache_dtype"})


def select(
    config: ConfigPath,
    device: DeviceText = "current",
    client: Annotated[
        Client,
        typer.Option("--for", help="The program that runs the model: an engine with pages, or transformers."),
    ] = Client.ENGINE,
    tp: TensorParallel = 1,
    dtype: ModelDtype = None,
    kv_cache_dtype: KVCacheDtype = "auto",
    block_size: BlockSize = None,
    backend: BackendRules = None,
    option: OptionTexts = None,
    phase: PhaseChoice = None,
    per_phase: Annotated[
        bool | None,
        typer.Option(
            "--per-phase/--one-backend",
            help="Choose a backend for each phase of a layer, or one for both. \\[default: for each phase]",
            show_default=False,
        ),
    ] = None,
    assume_installed: AssumedVersions = None,
    allow_refuted: AllowRefuted = None,
    tuned: TunedFile = None,
    no_tuned: NoTuned = False,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", metavar="BYTES", help="Show the KV cache that fits in this memory, such as 80GiB."
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests",
            metavar="N",
            min=1,
            help="Requests whose states are taken from --memory. \\[default: 256]",
            show_default=False,
        ),
    ] = None,
    why: Annotated[bool, typer.Option("--why", help="Show the reasons of each refused backend.")] = False,
    as_json: AsJson = False,
    _quiet: Quiet = False,
) -> None:
    """Choose a backend for each layer of a model, and explain refusals."""
    from attnplug.integrations.transformers import read_config
    from attnplug.planning import decide_model, phases_alone
    from attnplug.registry.default import get_registry
    from attnplug.registry.devices import resolve_device
    from attnplug.runtime.plan.plan_choice import has_phase_rules

    _check_options(per_phase, phase, requests, memory)
    if client is Client.TRANSFORMERS:
        _refuse_pages(kv_cache_dtype, block_size, memory)
    with waiting(f"Running {config} once without weights, to see each layer's attention"):
        model = read_config(
            config, tensor_parallel_size=tp, kv_cache_dtype=kv_cache_dtype, client=client, dtype=dtype
        )
    specs = dict(model.layers)
    if block_size is not None:
        for name, spec in model.layers.items():
            # Other layers have no pages of tokens.
            specs[name] = spec.replace(block_size=block_size) if spec.has_pages else spec
    asked = settings(backend, option, assume_installed, allow_refuted, tuned, no_tuned, device)
    where = resolve_device(device)
    # One backend serves all calls of transformers, unless the user asks for a phase's own.
    each = client is Client.ENGINE if per_phase is None else per_phase
    if phase is None and (each or client is Client.ENGINE or has_phase_rules(backend)):
        decisions, by_phase, notes = decide_model(get_registry(), specs, where, asked, per_phase=each)
    else:
        decisions, by_phase, notes = _for_one_phase(specs, where, phase, asked, client)
    alone = {name: phases_alone(decision, by_phase) for name, decision in decisions.items()}
    advice = advice_for(_asked(decisions, alone))
    budget = budget_for(decisions, model, memory, requests) if memory is not None else None
    if dtype is None:
        notes = (*notes, *_float32_note(list(_asked(decisions, alone))))
    notes = (*(note.removesuffix(".") for note in model.notes), *notes, *_rule_note(backend, decisions))
    every = list(decisions.values())
    if as_json:
        data: dict[str, Any] = {
            "model_type": model.model_type,
            "for": str(client),
            "decisions": [decision.to_dict() for decision in every],
            "other_layers": dict(model.other_layers),
            "kv_sharing": dict(model.kv_sharing),
            "prefixes": {str(each.layer_name): each.prefix_refusal for each in every if each},
            "advice": advice_as_data(advice),
        }
        if by_phase:
            phased = {name: {str(p): d.to_dict() for p, d in each.items()} for name, each in by_phase.items()}
            data["by_phase"] = phased
        data["notes"] = list(notes)
        if memory is not None:
            data["budget"] = None if budget is None else budget.to_dict()
            data["not_counted"] = left_out(model)
        print_json(data, "attnplug.select")
    else:
        title = f"{config} ({model.model_type}){' in transformers' if client is Client.TRANSFORMERS else ''}"
        _print(title, model, every, where, alone, notes, why)
        print_advice(advice)
        if device == "current" and every[:1] and every[0].device.type == "cpu":
            print_reference(every, f"attnplug select {shlex.quote(str(config))} --device h100")
        if memory is not None:
            print_budget(budget, model, memory, every)
    raise typer.Exit(0 if all(every) else 3)


def _check_options(
    per_phase: bool | None, phase: Phase | None, requests: int | None, memory: str | None
) -> None:
    """PolicyError for options that need each other, or exclude each other."""
    if per_phase is not None and phase is not None:
        limit = f"cannot be combined with --phase {phase}"
        raise PolicyError("--per-phase", per_phase, limit, "give one of the two")
    if requests is not None and memory is None:
        raise PolicyError("--requests", requests, "needs --memory, from which their states are taken")


def _for_one_phase(
    specs: Mapping[str, LayerSpec], device: Device, phase: Phase | None, asked: SelectKwargs, client: Client
) -> tuple[dict[str, Decision], ByPhase, tuple[str, ...]]:
    """The decisions for `phase`, or for all calls of transformers, in the form of `decide_model`."""
    from attnplug.registry.default import get_registry
    from attnplug.runtime.plan.grouping import with_layout

    decisions = get_registry().decide_layers(specs, device, (phase,), **asked)[phase]
    if client is Client.ENGINE:
        decisions = with_layout(decisions)
    return decisions, {}, tuple(dict.fromkeys(note for each in decisions.values() for note in each.notes))


def _asked(decisions: Mapping[str, Decision], alone: _Alone) -> Iterator[Decision]:
    """The decisions as they were made: for both phases, or for each."""
    for name, decision in decisions.items():
        yield from alone[name] or (decision,)


def _float32_note(decisions: Sequence[Decision]) -> tuple[str, ...]:
    """A note if backends refuse layers for the float32 of their file alone."""
    refused: dict[str, list[str]] = {}
    for decision in decisions:
        if decision.spec.dtype != "float32":
            continue
        for candidate in decision.candidates:
            if candidate.codes and set(candidate.codes) <= _DTYPE_CODES:
                refused.setdefault(candidate.name, []).append(str(decision.layer_name))
    if not refused:
        return ()
    layers = layers_in_words(list(dict.fromkeys(name for names in refused.values() for name in names)))
    told = f"The file's dtype float32 decided against {', '.join(refused)} for layers {layers}"
    return (f"{told}; --dtype bfloat16 shows the choice in 16 bits",)


def _rule_note(backend: str | None, decisions: Mapping[str, Decision]) -> tuple[str, ...]:
    """A note if a rule for all layers, or for a phase, left layers that keep a state to another backend."""
    rules = [rule for rules in rule_sets(backend) for rule in rules if rule.scope in ("default", "phase")]
    asked = {rule.backend for rule in rules}
    states = (each for each in decisions.values() if each.spec.state is not None and each.rule is None)
    free = [each for each in states if each.backend not in asked]
    if not rules or not free:
        return ()
    named = ", ".join(dict.fromkeys(map(str, rules)))
    kinds = ",".join(f"{kind}=NAME" for kind in dict.fromkeys(each.spec.kinds[0] for each in free))
    served = ", ".join(dict.fromkeys(str(each.backend) for each in free))
    text = f"{named} is for attention layers: {len(free)} layers with a state are served by {served}"
    return (f"{text}; a rule such as {kinds} chooses for them",)


def _refuse_pages(kv_cache_dtype: str, block_size: int | None, memory: str | None) -> None:
    """PolicyError for options of paged KV caches."""
    given = {"--block-size": block_size, "--memory": memory}
    given["--kv-cache-dtype"] = None if kv_cache_dtype == "auto" else kv_cache_dtype
    for option, value in given.items():
        if value is not None:
            limit = (
                "cannot be combined with --for transformers, which keeps keys and values in caches of its own"
            )
            raise PolicyError(option, value, limit, f"leave {option} out")


def _print(
    title: str,
    model: ModelSpec,
    decisions: Sequence[Decision],
    device: Device,
    alone: _Alone,
    notes: Sequence[str],
    why: bool,
) -> None:
    out = console()
    out.print(f"{title} on {device}{f' ({device.name})' if device.name else ''}")
    if any(each.assumed == "all" for each in decisions):
        out.print(f"{ASSUMES}.")
    out.print()
    alike: dict[Any, list[Decision]] = {}
    for each in decisions:
        alike.setdefault((each.spec, each.phase, each.backend, each.block_size), []).append(each)
    groups = list(alike.values())
    shown = list(_asked({str(each.layer_name): each for each in decisions}, alone))
    out.print(_table(groups, split=any(alone.values())))
    if len(decisions) > 1:
        out.print()
        out.print(_strip(decisions))
    out.print()
    out.print(Paragraph(f"Why this one: {why_chosen(shown)}."))
    print_steps(groups)
    print_missing(shown)
    _print_rest(model)
    for note in () if is_quiet() else notes:
        out.print()
        out.print(Paragraph(f"{note}."))
    for members in groups:
        first = members[0]
        if why or not first:
            layers = layers_in_words([str(member.layer_name) for member in members])
            # A layer that no backend serves in one phase has that phase's decision as its joined one.
            for decision in (first, *(each for each in alone[str(first.layer_name)] if each is not first)):
                phase = f", {decision.phase}" if decision.phase else ""
                out.print(f"\nlayers {layers} ({features_in_words(decision.spec)}{phase}):")
                out.print(decision.table())
            if first:
                reason = first.prefix_refusal
                read = (
                    "once for all requests that begin with it"
                    if reason is None
                    else f"by each request: {reason}"
                )
                out.print(Paragraph(f"A shared prefix is read {read}."))
                if reason is None:
                    out.print(Paragraph(f"Prices by which steps decide: {first.price_source}."))
    if not all(decisions):
        lacking = sum(not decision for decision in decisions)
        out.print(f"\nNo backend for {lacking} of {len(decisions)} layers.")


def _table(groups: Sequence[Sequence[Decision]], split: bool) -> WrappedTable:
    phases = any(members[0].phase for members in groups)
    served_by = ["prefill", "decode"] if split else ["backend"]
    columns = ["layers", "which", "heads", "size", "asks for", *served_by, "block"]
    shown = WrappedTable(
        ["phase", *columns] if phases else columns,
        right=("layers", "size", "block"),
        fixed=("phase", "layers", "heads", "backend", "prefill", "decode"),
        heading="layers {which}",
    )
    for members in groups:
        first = members[0]
        spec = first.spec
        served = list(first.members.values()) if split else [first.backend or "none"]
        cells = [
            str(len(members)),
            layers_in_words([str(decision.layer_name) for decision in members], 2),
            f"{spec.num_heads}/{spec.num_kv_heads}",
            str(spec.head_size),
            features_in_words(spec),
            *served,
            "-" if first.block_size is None else str(first.block_size),
        ]
        shown.add_row(*([str(first.phase or "both")] if phases else []), *cells)
    return shown


def _strip(decisions: Sequence[Decision]) -> LayerStrip:
    """The layers in the order that the model runs them; one row for each phase where the phases differ."""
    members = [decision.members for decision in decisions]
    rows = {str(phase): [each[phase] for each in members] for phase in (Phase.PREFILL, Phase.DECODE)}
    if rows[Phase.PREFILL] == rows[Phase.DECODE]:
        rows = {"": rows[Phase.DECODE]}
    return LayerStrip(rows, (candidate.name for each in decisions for candidate in each.candidates))


def _print_rest(model: ModelSpec) -> None:
    out = console()
    # transformers has the states of all its layers in a cache of its own, and a note says so.
    is_counted = not model.layers or any(not spec.direct_kv for spec in model.layers.values())
    for kind, count in Counter(model.other_layers.values()).items():
        names = [name for name, its in model.other_layers.items() if its == kind]
        part, unread, reason = kind.partition(NOT_READ)
        shown = f"{count} x {part} ({layers_in_words(names)})"
        lost = "; their state is not counted" if is_counted and part.startswith(STATES) else ""
        out.print(f"not read: {shown}, because {reason}" if unread else f"not attention: {shown}{lost}")
    if model.kv_sharing:
        targets = layers_in_words(sorted(set(model.kv_sharing.values())))
        out.print(f"KV shared: layers {layers_in_words(list(model.kv_sharing))} read the cache of {targets}")
