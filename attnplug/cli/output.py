"""Output of the commands: tables, progress, JSON and errors, readable at 80 columns and without colour."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from rich.progress import Progress


def console() -> Console:
    """Standard output; rich prints no colour outside a terminal or with NO_COLOR set."""
    return Console(highlight=False, markup=False, soft_wrap=False)


def table(columns: Sequence[str], right: Sequence[str] = (), fixed: Sequence[str] = ()) -> Table:
    """An empty table without a frame: `right` columns align right, `fixed` ones never wrap."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        made.add_column(
            column, justify="right" if column in right else "left", no_wrap=column in fixed, overflow="fold"
        )
    return made


def print_json(data: Any) -> None:
    """Print `data` as JSON."""
    typer.echo(json.dumps(data, indent=2))


def error(problem: object, code: int) -> int:
    """Print an error message, and return the exit code."""
    typer.echo(f"attnplug: {problem}", err=True)
    return code


def progress_bar(out: Console) -> Progress:
    """A bar that disappears when done; its tasks have the fields `counts` and `current`."""
    # Imported here because commands without workers need no bar.
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    return Progress(
        BarColumn(24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[counts]}"),
        TextColumn(
            "{task.fields[current]}",
            style="dim",
            markup=False,
            table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
        ),
        console=out,
        transient=True,
        expand=True,
        redirect_stdout=False,
    )
