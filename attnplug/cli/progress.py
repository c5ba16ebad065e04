"""The bar of commands that run many things in workers."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

__all__ = ["progress_bar"]


def progress_bar(out: Console) -> Progress:
    """A bar that goes when it is done; its tasks have the fields `counts` and `current`."""
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
