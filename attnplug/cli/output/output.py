"""Output of the commands: tables, layers in few words, JSON and errors, readable at 80 columns without colour.

`--json` has one meaning in every command, and errors are JSON then.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import typer
from rich.console import Console

from attnplug._system import files
from attnplug._system.terminal_tables import SafeConsole
from attnplug._system.terminal_tables import verdict as verdict
from attnplug._system.text import safe_text, shown
from attnplug.cli.output.own_output import own_stream
from attnplug.core import errors
from attnplug.core.errors import AttnplugError, PolicyError
from attnplug.core.features import Feature
from attnplug.core.spec import AttentionType, LayerSpec

VERSION = 1
"""The version of every schema of the commands' JSON; docs/reference/json.md describes them."""


def console(*, err: bool = False) -> Console:
    """Standard output, or standard error with `err`.

    It has colours on a terminal or with FORCE_COLOR; NO_COLOR takes them and bold away.
    """
    colours: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    file = sys.stderr if err else own_stream()
    return SafeConsole(file=file, color_system=colours, highlight=False, markup=False, soft_wrap=False)


def echo(text: str, *, err: bool = False) -> None:
    """Print a line that is safe on a terminal, to standard error with `err`."""
    typer.echo(safe_text(text), None if err else own_stream(), err=err)


def print_json(data: Mapping[str, Any], schema: str | None = None) -> None:
    """Print a JSON document of a schema, such as "attnplug.list"; `data` may name its own."""
    typer.echo(json_text(data, schema), own_stream())


def json_text(data: Mapping[str, Any], schema: str | None = None) -> str:
    """The text of a JSON document of a schema."""
    about = {} if schema is None else {"schema": schema, "version": VERSION}
    # json writes every character beyond ASCII as an escape.
    return json.dumps({**about, **data}, indent=2)


STDOUT = Path("-")
"""The name of a file that means standard output."""


def write_text(path: Path, text: str) -> None:
    """Write `text` to a file whole or not at all, or to standard output if `path` is "-".

    Raises:
        MatrixFileError: the file cannot be written; an older one is unchanged.
    """
    if path != STDOUT:
        from attnplug.matrix.results import write_file

        write_file(path, text)
        return
    # An error that a plugin quotes may not be safe on a terminal; a program gets what a file would have.
    shown = safe_text(text) if own_stream().isatty() else text
    typer.echo(shown, own_stream(), nl=not text.endswith("\n"))


def check_output(option: str, path: Path) -> None:
    """PolicyError if `path`, the value of an option, is not a file that can be written; "-" is standard output."""
    if path == STDOUT:
        return
    if files.is_folder(path):
        raise PolicyError(option, str(path), "is a folder", "name a file in it")
    if files.is_special(path):
        raise PolicyError(option, str(path), "is not a regular file", "name another one")
    try:
        files.make_folder(path.parent)
    except OSError as problem:
        limit = f"is in a folder that cannot be made: {files.why(problem)}"
        raise PolicyError(option, str(path), limit, "name another file") from None
    try:
        files.check_output(path)
    except OSError as problem:
        limit = f"cannot be written: {files.why(problem)}"
        raise PolicyError(option, str(path), limit, "name another file") from None


class CommandError(AttnplugError):
    """A failure of a command, with its exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(message)


def error(problem: object, code: int) -> int:
    """Print an error message, and return the exit code."""
    echo(f"attnplug: {problem}", err=True)
    return code


def features_in_words(spec: LayerSpec) -> str:
    """The features that a layer needs, such as "sliding 1024, sinks"; "full" if there are none."""
    asked = spec.required_features()
    if spec.attn_type is not AttentionType.DECODER:
        # Encoders and cross attention are non-causal by nature, encoders keep no cache.
        asked &= ~Feature.NON_CAUSAL & ~Feature.DIRECT_KV
    words = [flag.shown(spec) for flag in asked]
    masks = Feature.SLIDING_WINDOW | Feature.CHUNKED_LOCAL | Feature.CROSS | Feature.ENCODER
    return ", ".join(words if asked & masks or spec.mla or spec.state else ["full", *words])


def layers_in_words(names: Sequence[str], limit: int = 4) -> str:
    """Layer names by their numbers, such as "0-4, 6-10, 12-16, ..."; a single name is unchanged."""
    numbers = indices(names)
    if numbers is None:
        return names[0] if len(names) == 1 else f"{names[0]}, ..."
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return ", ".join(parts[:limit]) + (", ..." if len(parts) > limit else "")


def indices(names: Iterable[str]) -> list[int] | None:
    """The one number in each name, where all have exactly one and none comes twice."""
    found = [re.findall(r"(?<![^.])\d+(?![^.])", name) for name in names]
    if any(len(numbers) != 1 for numbers in found):
        return None
    values = [int(numbers[0]) for numbers in found]
    return sorted(values) if len(set(values)) == len(values) else None


_OPTION = "--json"
_STDOUT = "-"
_TAKE_A_FILE = frozenset({"matrix"})
# The most specific class first, because an error gets the first code that fits.
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
"""The codes of errors in JSON; the two below are for all others."""
_USAGE, _OTHER = "usage", "failed"
_BAD_USAGE = 2
_SENTENCE = re.compile(
    r"(?P<argument>[\w-]+)='(?P<value>.*?)' (?P<limit>.*?)(?:; (?P<remedy>.*))?", re.DOTALL
)
# click's class, which typer has in a module of its own or takes from click, so no import fits both.
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]


def with_json(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """The arguments with `--json` in one form for each command, and whether JSON goes to standard output.

    `--json -` is `--json` where the option takes no file, and `--json` alone is `--json -` where it takes one.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    given, rest = list(arguments[:end]), list(arguments[end:])
    takes_file = next((each for each in given if not each.startswith("-")), None) in _TAKE_A_FILE
    to_stdout = False
    # From the end, because each step may insert or remove arguments.
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
    # JSON has neither NaN nor infinity.
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or type(value) in (str, int, float, bool) else shown(value)
