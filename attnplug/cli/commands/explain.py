"""`attnplug explain`: one layer given by flags, and what every backend says of it.

`attnplug explain-code`: what a reason code means, and what can be done about it.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group

from attnplug._system.terminal_tables import Paragraph, WrappedTable
from attnplug.cli.arguments import (
    AllowRefuted,
    AsJson,
    AssumedVersions,
    BackendRules,
    BlockSize,
    DeviceText,
    KVCacheDtype,
    NoTuned,
    OptionTexts,
    PhaseChoice,
    Quiet,
    TunedFile,
    complete_dtypes,
    settings,
)
from attnplug.cli.output.output import console, print_json
from attnplug.cli.output.select_report import ASSUMES, advice_as_data, advice_for, print_advice, print_missing
from attnplug.core.errors import PolicyError, SpecError
from attnplug.core.features import Feature
from attnplug.core.reasons import REASON_HELP
from attnplug.core.spec import AttentionType, LayerSpec, Phase

if TYPE_CHECKING:
    from attnplug.core.composite.steps import StepChoice
    from attnplug.registry.registry import SelectKwargs
    from attnplug.registry.selection.decision import Decision

_layer = functools.partial(typer.Option, rich_help_panel="The layer")


def explain(
    num_heads: Annotated[int, _layer(metavar="N", help="Query heads.")] = 32,
    num_kv_heads: Annotated[
        int | None, _layer(metavar="N", help="Key and value heads. \\[default: as num-heads]")
    ] = None,
    head_size: Annotated[int | None, _layer(metavar="N", help="Elements per head. \\[default: 128]")] = None,
    dtype: Annotated[
        str, _layer(metavar="DTYPE", help="float16, bfloat16 or float32.", autocompletion=complete_dtypes)
    ] = "bfloat16",
    kv_cache_dtype: KVCacheDtype = "auto",
    block_size: BlockSize = None,
    attn_type: Annotated[AttentionType, _layer(help="Kind of attention.")] = AttentionType.DECODER,
    causal: Annotated[
        bool | None, _layer(help="Hide the keys after a query, or not. \\[default: causal for a decoder]")
    ] = None,
    scale: Annotated[float | None, _layer(metavar="X", help="Softmax scale.")] = None,
    sliding_window: Annotated[
        int | None, _layer(metavar="N", help="Keys that a query sees, including its own.")
    ] = None,
    device: DeviceText = "current",
    phase: PhaseChoice = None,
    backend: BackendRules = None,
    option: OptionTexts = None,
    assume_installed: AssumedVersions = None,
    allow_refuted: AllowRefuted = None,
    tuned: TunedFile = None,
    no_tuned: NoTuned = False,
    as_json: AsJson = False,
    _quiet: Quiet = False,
    **features: Any,
) -> None:
    """Explain which backend serves one layer, and why the others do not. Options describe the layer. Imports no kernels."""
    from attnplug.registry.default import explain as ask

    asked = {flag.ask.field: _value(flag, features[flag.ask.field]) for flag in _OWN_OPTION}
    asked = {field: value for field, value in asked.items() if value is not None}
    dims = asked.get("mla")
    spec = LayerSpec(
        num_heads=num_heads,
        # With latent attention all heads share one latent.
        num_kv_heads=(num_heads if dims is None else 1) if num_kv_heads is None else num_kv_heads,
        head_size=(128 if dims is None else dims.latent_size) if head_size is None else head_size,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        attn_type=attn_type,
        causal=causal,
        scale=scale,
        sliding_window=sliding_window,
        **asked,
    )
    kwargs = settings(backend, option, assume_installed, allow_refuted, tuned, no_tuned, device)
    decision = ask(spec, device, phase, **kwargs)
    shown = _each_phase(decision, device, kwargs) if phase is None else [decision]
    steps = _steps(decision, kwargs) if len(shown) > 1 else decision.steps
    advice = advice_for(shown)
    if as_json:
        alone = {str(each.phase): each.to_dict() for each in shown if each is not decision}
        phased = {"by_phase": alone} if alone else {}
        whole = {**decision.to_dict(), "steps": [each.to_dict() for each in steps]}
        print_json({**whole, "advice": advice_as_data(advice), **phased})
    else:
        out = console()
        if decision.assumed == "all":
            out.print(f"{ASSUMES}.")
        for index, each in enumerate(shown):
            if index:
                out.print()
            out.print(each)
        if len(shown) > 1 and steps:
            out.print()
            out.print(Group(*(Paragraph(f"In a plan, {step}.") for step in steps)))
        print_missing(shown)
        print_advice(advice)
    raise typer.Exit(0 if all(shown) else 3)


def _each_phase(both: Decision, device: str, kwargs: SelectKwargs) -> list[Decision]:
    """The decisions of the two phases if their backends differ and can share one cache, as in a plan; else `both`."""
    from attnplug.registry.default import explain as ask

    if both.rule is not None:
        return [both]
    alone = [ask(both.spec, device, phase, **kwargs) for phase in (Phase.PREFILL, Phase.DECODE)]
    names = list(dict.fromkeys(str(each.backend) for each in alone if each))
    pair: SelectKwargs = {**kwargs, "backend": "+".join(names)}
    return alone if len(names) == 2 and ask(both.spec, device, **pair) else [both]


def _steps(both: Decision, kwargs: SelectKwargs) -> tuple[StepChoice, ...]:
    """The ranges of steps in which a plan of the layer has another backend than that of their phase."""
    from attnplug.planning import decide_model
    from attnplug.registry.default import get_registry

    decisions, _, _ = decide_model(get_registry(), {"layer": both.spec}, both.device, kwargs)
    return decisions["layer"].steps


_OWN_OPTION = [flag for flag in Feature if flag.ask.help is not None]
"""The features with an option of their own; the others share one that is written out above."""


def _option(flag: Feature) -> inspect.Parameter:
    """The option of a feature, as typer reads it from a signature."""
    row = flag.ask
    kind = str if row.parse else type(row.values[0])
    metavar = row.metavar or {int: "N", float: "X"}.get(kind)
    option = _layer(row.option, metavar=metavar, help=row.help)
    default, hint = (False, bool) if kind is bool else (None, kind | None)
    return inspect.Parameter(
        row.field, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, option]
    )


def _value(flag: Feature, given: Any) -> Any:
    """The value of a feature's field that its option gives; SpecError for text that is not like the metavar."""
    row = flag.ask
    if given is None or row.parse is None:
        return given
    required, _, optional = str(row.metavar).partition("[")
    least, most = required.count(",") + 1, str(row.metavar).count(",") + 1
    parts = [part.strip() for part in given.split(",")]
    try:
        values = [*parts[: row.words], *(int(part) for part in parts[row.words :])]
    except ValueError:
        values = []
    if not least <= len(values) <= most:
        form = f"be {most} integers" if not (optional or row.words) else f"have the form {row.metavar}"
        raise SpecError(row.option, given, f"must {form} with commas between them")
    return row.parse(*values)


def _with_features(command: Callable[..., None]) -> None:
    """Give the command an option for each feature of `_OWN_OPTION` in the place of `**features`."""
    # typer needs the annotations as objects, and this module has them as text.
    signature = inspect.signature(command, eval_str=True)
    written = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    before = next(index for index, each in enumerate(written) if each.name == "device")
    options = [_option(flag) for flag in _OWN_OPTION]
    parameters = [
        each.replace(kind=each.KEYWORD_ONLY) for each in (*written[:before], *options, *written[before:])
    ]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ |= {each.name: each.annotation for each in options}


_with_features(explain)

_FEATURE = "feature"


def codes() -> list[str]:
    """Every code, with one for each feature."""
    features = [f"{_FEATURE}.{name}" for flag in Feature for name in flag.names()]
    return [*REASON_HELP, *features]


def explain_code(
    code: Annotated[
        str | None,
        typer.Argument(
            metavar="CODE",
            help="A code of a reason, such as head_size; without one, all are listed.",
            autocompletion=lambda incomplete: [each for each in codes() if each.startswith(incomplete)],
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Explain a reason code: its cause, what to do, and an example."""
    if code is None:
        every = [_facts(code) for code in REASON_HELP]
        if as_json:
            print_json({"codes": every}, "attnplug.reason-codes")
            return
        listed = WrappedTable(("code", "means"), fixed=("code",))
        for each in every:
            listed.add_row(each["code"], each["meaning"])
        console().print(listed)
        return
    if code not in codes():
        near = difflib.get_close_matches(code, codes(), 3)
        remedy = f"did you mean {' or '.join(near)}?" if near else "attnplug explain-code lists all codes"
        raise PolicyError("CODE", code, "is an unknown reason code", remedy)
    facts = _facts(code)
    if as_json:
        print_json(facts, "attnplug.explain-code")
        return
    out = console()
    out.print(facts["code"], style="bold")
    shown = WrappedTable(("", ""))
    shown.add_row("means", facts["meaning"])
    shown.add_row("looks like", facts["example"])
    for index, step in enumerate(facts["remedies"]):
        shown.add_row("" if index else "what to do", f"{index + 1}. {step}")
    out.print(shown)


def _facts(code: str) -> dict[str, Any]:
    found = REASON_HELP[code.partition(".")[0]]
    name = "feature.<name>" if code == _FEATURE else code
    if code.startswith(f"{_FEATURE}."):
        # The help of features has one of them as its example.
        why, seen = (text.replace("alibi", name[len(_FEATURE) + 1 :]) for text in (found.why, found.seen))
        found = dataclasses.replace(found, why=why, seen=seen)
    return {"code": name, "meaning": found.why, "example": found.seen, "remedies": list(found.steps)}
