"""The files of `attnplug matrix`: it writes them, `merge` joins and `diff` compares them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from attnplug._system import files
from attnplug.cli.output.output import STDOUT, check_output, console, echo, json_text, write_text
from attnplug.core.errors import AttnplugError, PolicyError
from attnplug.matrix import merging
from attnplug.matrix.merging import CellChange, ChangeKind, changes
from attnplug.matrix.model import Matrix, Status
from attnplug.matrix.results import matrix_text, read_matrix

_LOST = _REFUTED = 4
_SHOWN = 200


@dataclasses.dataclass(frozen=True, slots=True)
class Outputs:
    """The files to write; None leaves one out."""

    json: Path | None = None
    html: Path | None = None
    markdown: Path | None = None

    def check(self, json_option: str = "--json") -> None:
        """Make the folders of the files; PolicyError names a file that cannot be written, before a long run."""
        options = {json_option: self.json, "--html": self.html, "--markdown": self.markdown}
        names: dict[Path, str] = {}
        for name, path in options.items():
            if path is None:
                continue
            check_output(name, path)
            # Two paths may be links to one file.
            other = names.setdefault(path if path == STDOUT else files.resolved(path), name)
            if other != name:
                raise PolicyError(name, str(path), f"is the file of {other} too", "name two files")

    @property
    def to_stdout(self) -> bool:
        """Whether one of them is standard output, which then has nothing else."""
        return STDOUT in (self.json, self.html, self.markdown)

    def save_json(self, matrix: Matrix) -> None:
        """Write the data to its file, if it has one, while a run goes on."""
        if self.json is not None and self.json != STDOUT:
            write_text(self.json, matrix_text(matrix))

    def write(self, matrix: Matrix, *, with_models: bool = False) -> None:
        """Write all files; MatrixFileError names one that cannot be written.

        `with_models` adds the view "Which backend for my model?" to the page, from the backends of this machine.
        """
        if self.json is not None:
            write_text(self.json, matrix_text(matrix))
        if self.html is not None:
            from attnplug.matrix.html import render_html

            write_text(self.html, render_html(matrix, models=_models() if with_models else None))
        if self.markdown is not None:
            from attnplug.matrix.markdown import render_markdown

            write_text(self.markdown, render_markdown(matrix))


def _models() -> dict[str, Any] | None:
    """The data of the view of models; None, and a message, if settings of the environment forbid a selection."""
    from attnplug.matrix.model_page import model_data
    from attnplug.registry.default import get_registry

    try:
        return model_data(get_registry())
    except AttnplugError as problem:
        _say(f"the page is without the view of models: {problem}")
        return None


def show(matrix: Matrix) -> None:
    """Print a matrix as tables."""
    from attnplug.matrix.terminal import render_terminal

    render_terminal(matrix, console())


def merge(
    paths: Annotated[list[Path], typer.Argument(metavar="FILE", help="Results from attnplug matrix --json.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", "--json", metavar="FILE", help="Write the joined JSON; - is standard output."
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page that needs no network; - is standard output."),
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write Markdown; - is standard output.")
    ] = None,
    by_file: Annotated[
        bool,
        typer.Option(
            "--by-file", help="Keep the runs of each file, and add the file's name to their devices."
        ),
    ] = False,
) -> None:
    """Join the results of several machines; without a file to write, show them.

    Runs of one backend on one device with the same versions are joined cell by cell: a cell with evidence replaces one without, then the newer replaces the older. For other versions, only the newest run is kept. Messages name the runs that are left out, and the cells on which runs disagree. --by-file keeps the runs of all versions.

    Exit codes: 0 joined, 4 joined and a claim is refuted, 2 a file cannot be read.
    """
    outputs = Outputs(output, html, markdown)
    outputs.check("--output")
    read = [read_matrix(path) for path in paths]
    if by_file:
        counts = Counter(path.stem for path in paths)
        # The name of a file without its suffix, or its path if another file has the same name.
        names = [each.stem if counts[each.stem] == 1 else str(each.with_suffix("")) for each in paths]
        read = list(map(merging.with_name, read, names))
    found = merging.merge(read, _say)
    outputs.write(found)
    if outputs == Outputs():
        show(found)
    refuted = [(run, each) for run in found.runs for each in run.findings if each.status is Status.REFUTED]
    for run, each in refuted[:_SHOWN]:
        _say(f"{run.backend} on {run.device}: {each.cell.id} is refuted: {'; '.join(each.why)}")
    if len(refuted) > _SHOWN:
        _say(f"... and {len(refuted) - _SHOWN} more are refuted")
    if refuted:
        raise typer.Exit(_REFUTED)


def diff(
    old: Annotated[
        Path, typer.Argument(metavar="OLD", help="The older results, from attnplug matrix --json.")
    ],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The newer results.")],
    show_all: Annotated[
        bool, typer.Option("--all", help="Show every change, even if there are many of one kind.")
    ] = False,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write every change as JSON; - is standard output."),
    ] = None,
) -> None:
    """Show the changes from OLD to NEW, the most serious first.

    Exit codes: 0 no claim was lost, 4 a claim is refuted, withdrawn, or its cell is missing, 2 a file cannot be read.
    """
    outputs = Outputs(json_file)
    outputs.check()
    found = changes(read_matrix(old), read_matrix(new))
    counts = Counter(change.kind for change in found)
    if json_file is not None:
        data = {"counts": counts, "changes": [dataclasses.asdict(change) for change in found]}
        write_text(json_file, json_text(data, "attnplug.matrix-changes"))
    if not outputs.to_stdout:
        _print_changes(found, counts, show_all)
    if any(kind.is_loss for kind in counts):
        raise typer.Exit(_LOST)


def _print_changes(found: Sequence[CellChange], counts: Mapping[ChangeKind, int], show_all: bool) -> None:
    for kind, number in counts.items():
        most = number if show_all else _SHOWN
        for change in [each for each in found if each.kind is kind][:most]:
            echo(str(change))
        if number > most:
            echo(f"... and {number - most} more {kind}; --all shows them")
    echo(", ".join(f"{number} {kind}" for kind, number in counts.items()) or "nothing changed")


def _say(text: str) -> None:
    echo(f"attnplug: {text}", err=True)
