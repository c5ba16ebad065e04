"""`attnplug matrix`: shows the cells that backends claim, and runs them here."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

from attnplug.cli import completion
from attnplug.cli.arguments import jobs_option, memory_option, timeout_option
from attnplug.cli.commands.conformance import require_the_extra
from attnplug.cli.commands.matrix_cells import declared_cells, pairs_of
from attnplug.cli.commands.matrix_files import Outputs, diff, merge, show
from attnplug.cli.output.help import HelpfulCommand, HelpfulGroup
from attnplug.cli.output.output import echo, error
from attnplug.cli.output.own_output import apart_from_plugins
from attnplug.core.errors import PolicyError
from attnplug.matrix.model import Matrix

_FAILED = 1
_RUN = "Running them"
_which = functools.partial(typer.Option, rich_help_panel="Which cells")
_run = functools.partial(typer.Option, rich_help_panel=_RUN)
_out = functools.partial(typer.Option, rich_help_panel="Output")

matrix_app = typer.Typer(
    cls=HelpfulGroup,
    add_completion=False,
    subcommand_metavar="[COMMAND]",
    epilog="Example: attnplug matrix --backend TRITON --device h100 --html matrix.html",
    rich_markup_mode=None,
)


@matrix_app.callback(invoke_without_command=True)
@apart_from_plugins
def matrix(
    context: typer.Context,
    backend: Annotated[
        list[str] | None,
        _which(
            metavar="NAME",
            autocompletion=completion.backends,
            help="A backend, a family or A+B; may be repeated \\[default: all of attnplug list]",
        ),
    ] = None,
    device: Annotated[
        list[str] | None,
        _which(
            metavar="DEVICE",
            autocompletion=completion.devices,
            help="cpu, sm90, rocm:9.4, ...; may be repeated \\[default: the current one]",
        ),
    ] = None,
    feature: Annotated[
        list[str] | None,
        _which(
            metavar="NAME",
            autocompletion=completion.features,
            help="Only cells of this feature, such as plain or sinks; may be repeated.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        _which(
            metavar="PATTERN",
            help="Only cells whose id matches, such as 'sinks/decode/d128/*'; may be repeated.",
        ),
    ] = None,
    verify: Annotated[bool, _run("--verify", help="Run the claimed cells on this machine.")] = False,
    unclaimed: Annotated[bool, _run("--unclaimed", help="Run the refused cells too.")] = False,
    compile_limit: Annotated[
        int | None,
        _run(
            min=1,
            metavar="N",
            help="If a backend compiles, run only the N compilations with the most cells.",
        ),
    ] = None,
    resume: Annotated[
        bool, _run("--resume", help="Continue an interrupted run: verified cells are not run again.")
    ] = False,
    timeout: Annotated[float, timeout_option(_RUN, "Time limit of a cell, with compilation.")] = 120.0,
    jobs: Annotated[int | None, jobs_option(_RUN)] = None,
    memory: Annotated[str | None, memory_option(_RUN)] = None,
    json_file: Annotated[
        Path | None,
        _out("--json", metavar="FILE", help="Write JSON, for merge and diff; - is standard output."),
    ] = None,
    html: Annotated[
        Path | None, _out(metavar="FILE", help="Write a page that needs no network; - is standard output.")
    ] = None,
    markdown: Annotated[
        Path | None, _out(metavar="FILE", help="Write Markdown; - is standard output.")
    ] = None,
    commit: Annotated[
        str | None, _out(metavar="SHA", help="Commit of the results \\[default: that of attnplug's checkout]")
    ] = None,
    verbose: Annotated[bool, _out("--verbose", "-v", help="Show each cell that is run.")] = False,
) -> None:
    """Show the cells that backends claim to serve, for any device; with --verify, run them here.

    A cell has a value of feature, phase, head size, dtype, KV dtype, block size and layout; each pair of values is in a cell. Cells run in worker processes: if a cell hangs, crashes or runs out of memory, the others still run. After a refutation, attnplug select refuses the cell.

    Exit codes: 0 done, 4 a claim is refuted, 1 a backend could not be run, 2 bad usage, 130 interrupted (the results so far are written).
    """
    if context.invoked_subcommand is not None:
        return
    outputs = Outputs(json_file, html, markdown)
    outputs.check()
    pairs = pairs_of(backend, device, verify=verify)
    declared, notes = declared_cells(pairs, feature or (), only or (), commit, sampled_only=verify)
    if not verify:
        given = {"--unclaimed": unclaimed, "--resume": resume, "--compile-limit": compile_limit}
        for name, value in {**given, "--jobs": jobs, "--memory": memory}.items():
            if value:
                raise PolicyError(name, value, "says how cells are run", "add --verify")
        found = Matrix(tuple(declared))
        outputs.write(found, with_models=True)
        if not outputs.to_stdout:
            show(found)
        for note in notes:
            echo(f"attnplug: {note}", err=True)
        return
    # Only a run needs the extra `testing`; a display of the cells does not.
    require_the_extra("matrix --verify")
    from attnplug.cli.commands.matrix_verify import RunOptions, run_cells
    from attnplug.cli.own_process import interrupt_on_sigterm
    from attnplug.matrix.verify import RunScope
    from attnplug.runtime.plan.budget import parse_memory

    allowed = None if memory is None else parse_memory(memory)
    options = RunOptions(RunScope(unclaimed, compile_limit), resume, jobs, timeout, allowed)
    with interrupt_on_sigterm():
        code, cannot = run_cells(pairs, declared, options, outputs, verbose)
    # A backend that cannot run here is an error only if the user asked for it by name.
    for why in cannot if backend else ():
        error(why, _FAILED)
        code = code or _FAILED
    raise typer.Exit(code)


_MERGE = "Example: attnplug matrix merge h100.json a100.json --html matrix.html"
_DIFF = "Example: attnplug matrix diff before.json after.json"
matrix_app.command("merge", cls=HelpfulCommand, epilog=_MERGE)(apart_from_plugins(merge))
matrix_app.command("diff", cls=HelpfulCommand, epilog=_DIFF)(apart_from_plugins(diff))
