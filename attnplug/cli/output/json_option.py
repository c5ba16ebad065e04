"""`--json`: one meaning in every command, and errors as JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from attnplug._system.text import shown
from attnplug.cli.output.output import CommandError, print_json
from attnplug.core import errors

_OPTION = "--json"
_STDOUT = "-"
_TAKE_A_FILE = frozenset({"matrix"})
_CODES: tuple[tuple[type[Exception], str], ...] = (
    (errors.UnknownBackendError, "unknown_backend"),
    (errors.PolicyError, "invalid_option"),
    (errors.SpecError, "invalid_layer"),
    (errors.LayoutError, "invalid_layout"),
    (errors.BatchError, "invalid_batch"),
    (errors.ModelConfigError, "invalid_config"),
    (errors.MatrixFileError, "invalid_file"),
    (errors.PluginError, "plugin"),
    (errors.NoBackendError, "no_backend"),
)
"""The codes of errors in JSON, the most specific class first; the two below are for all others."""
_USAGE, _OTHER = "usage", "failed"
_BAD_USAGE = 2
_SENTENCE = re.compile(
    r"(?P<argument>[\w-]+)='(?P<value>.*?)' (?P<limit>.*?)(?:; (?P<remedy>.*))?", re.DOTALL
)
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""click's class, which typer has in a module of its own or takes from click."""


def with_json(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """The arguments with `--json` in one form for each command, and whether JSON goes to standard output.

    `--json -` is `--json` where the option takes no file, and `--json` alone is `--json -` where it takes one.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    given, rest = list(arguments[:end]), list(arguments[end:])
    takes_file = next((each for each in given if not each.startswith("-")), None) in _TAKE_A_FILE
    to_stdout = False
    for index in reversed(range(len(given))):
        name, equals, value = given[index].partition("=")
        if name != _OPTION:
            continue
        follows = given[index + 1] if index + 1 < len(given) else None
        has_value = bool(equals) or (
            follows is not None and (follows == _STDOUT or not follows.startswith("-"))
        )
        if takes_file and not has_value:
            given.insert(index + 1, _STDOUT)
        value = value if equals else given[index + 1] if index + 1 < len(given) else ""
        to_stdout |= value == _STDOUT or not takes_file
        if not takes_file and value == _STDOUT:
            given[index : index + 1 + (not equals)] = [_OPTION]
    return given + rest, to_stdout


def print_json_error(problem: Exception, exit_code: int, arguments: Sequence[str] = ()) -> None:
    """Print an error as a JSON document; `arguments` are those of the command line."""
    facts = _facts(problem, arguments)
    report: dict[str, object] = {"code": code_of(problem), "message": message_of(problem)}
    report |= {name: _plain(facts.get(name)) for name in ("argument", "value", "limit", "remedy")}
    print_json({"error": {**report, "exit_code": exit_code}}, "attnplug.error")


def code_of(problem: Exception) -> str:
    """The stable name of a kind of error."""
    if isinstance(problem, USAGE_ERROR) or getattr(problem, "exit_code", None) == _BAD_USAGE:
        return _USAGE
    return next((code for kind, code in _CODES if isinstance(problem, kind)), _OTHER)


def _facts(problem: Any, arguments: Sequence[str]) -> Mapping[str, object]:
    """The argument, value, limit and remedy of an error, as far as they are known."""
    if isinstance(problem, errors.MatrixFileError):
        return {"argument": "FILE", "value": problem.path, "limit": problem.what, "remedy": problem.remedy}
    if isinstance(problem, errors.ModelConfigError):
        # Its sentence has the form "PATH: LIMIT; REMEDY".
        path, _, rest = str(problem).partition(": ")
        limit, _, remedy = rest.partition("; ")
        if problem.argument is not None:
            value, _, limit = limit.removeprefix(f"{problem.argument}=").partition(" ")
            return {"argument": problem.argument, "value": value, "limit": limit}
        return {"argument": "CONFIG", "value": path, "limit": limit or str(problem), "remedy": remedy or None}
    if isinstance(problem, USAGE_ERROR):
        option, near = _argument_of(problem), getattr(problem, "possibilities", None)
        return {
            "argument": option,
            "value": _given(option, arguments),
            "limit": str(getattr(problem, "message", "")) or message_of(problem),
            "remedy": f"did you mean {' or '.join(near)}?" if near else None,
        }
    if isinstance(problem, CommandError) and (match := _SENTENCE.fullmatch(str(problem))):
        return match.groupdict()
    facts = {name: getattr(problem, name, None) for name in ("value", "limit", "remedy")}
    return {"argument": getattr(problem, "field", None), **facts}


def _given(option: str | None, arguments: Sequence[str]) -> str | None:
    """The text that the command line gives for an option; None if there is none."""
    for index, text in enumerate(arguments):
        name, equals, value = text.partition("=")
        if name == option:
            return value if equals else next(iter(arguments[index + 1 :]), None)
    return None


def message_of(problem: Any) -> str:
    """The whole sentence of an error."""
    formatted = getattr(problem, "format_message", None)
    return str(problem if formatted is None else formatted())


def _argument_of(problem: Any) -> str | None:
    option = getattr(problem, "option_name", None)
    param = getattr(problem, "param", None)
    if option is None and param is not None:
        option = param.opts[0] if param.param_type_name == "option" else str(param.metavar or param.name)
    return option


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or type(value) in (str, int, float, bool) else shown(value)
