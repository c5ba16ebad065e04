"""What the commands print with: tables, JSON and error messages, readable at 80 columns and without colour."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

__all__ = ["console", "error", "print_json", "table"]


def console() -> Console:
    """Standard output; rich drops colour where it is no terminal or NO_COLOR is set."""
    return Console(highlight=False, markup=False, soft_wrap=False)


def table(columns: Sequence[str], right: Sequence[str] = (), fixed: Sequence[str] = ()) -> Table:
    """An empty table without a frame: `right` columns align right, `fixed` ones never wrap."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        made.add_column(
            column,
            justify="right" if column in right else "left",
            no_wrap=column in fixed,
            overflow="fold",
        )
    return made


def print_json(data: Any) -> None:
    """Print JSON for programs."""
    typer.echo(json.dumps(data, indent=2))


def error(problem: object, code: int) -> int:
    """Print an error for people and give back the exit code."""
    typer.echo(f"attnplug: {problem}", err=True)
    return code
