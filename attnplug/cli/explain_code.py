"""`attnplug explain-code`: what a reason code means, and what can be done about it."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Annotated, Any

import typer

from attnplug._system.terminal_tables import WordTable
from attnplug.cli.arguments import AsJson
from attnplug.cli.output import console, print_json
from attnplug.core.errors import PolicyError
from attnplug.core.features import Feature
from attnplug.core.reasons import REASON_HELP

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
        _list(as_json)
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
    shown = WordTable(("", ""))
    shown.add_row("means", facts["meaning"])
    shown.add_row("looks like", facts["example"])
    for index, step in enumerate(facts["remedies"]):
        shown.add_row("" if index else "what to do", f"{index + 1}. {step}")
    out.print(shown)


def _list(as_json: bool) -> None:
    facts = [_facts(code) for code in REASON_HELP]
    if as_json:
        print_json({"codes": facts}, "attnplug.reason-codes")
        return
    shown = WordTable(("code", "means"), fixed=("code",))
    for each in facts:
        shown.add_row(each["code"], each["meaning"])
    console().print(shown)


def _facts(code: str) -> dict[str, Any]:
    found = REASON_HELP[code.partition(".")[0]]
    name = "feature.<name>" if code == _FEATURE else code
    if code.startswith(f"{_FEATURE}."):
        # The help of features has one of them as its example.
        found = dataclasses.replace(
            found,
            why=found.why.replace("alibi", name[len(_FEATURE) + 1 :]),
            seen=found.seen.replace("alibi", name[len(_FEATURE) + 1 :]),
        )
    return {"code": name, "meaning": found.why, "example": found.seen, "remedies": list(found.steps)}
