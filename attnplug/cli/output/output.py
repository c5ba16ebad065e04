"""Output of the commands: tables, layers in few words, JSON and errors, readable at 80 columns without colour."""

from __future__ import annotations

import json
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
from attnplug._system.text import safe_text
from attnplug.cli.output.own_output import own_stream
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
    """PolicyError if `path`, the value of an option, is no file that can be written; "-" is standard output."""
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
    return ", ".join(words if asked & masks or spec.mla else ["full", *words])


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
