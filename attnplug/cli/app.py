"""The `attnplug` program: its commands, error messages and exit codes."""

from __future__ import annotations

import contextlib
import io
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from attnplug.cli.conformance import conformance
from attnplug.cli.doctor import doctor
from attnplug.cli.explain import explain
from attnplug.cli.list import list_backends, show
from attnplug.cli.matrix import matrix_app
from attnplug.cli.new_backend import new_backend
from attnplug.cli.output import error
from attnplug.cli.own_output import apart_from_plugins, is_own_process, reserve_standard_output
from attnplug.cli.own_process import can_watch, run_watched
from attnplug.cli.select import select
from attnplug.core.errors import (
    AttnplugError,
    LayoutError,
    MatrixFileError,
    NoBackendError,
    PolicyError,
    SpecError,
)

NO_BACKEND = 3
BAD_USAGE = 2
FAILED = 1
_HELP = "Choose attention backends for the layers of a model, and explain each choice."

app = typer.Typer(
    name="attnplug",
    help=_HELP,
    epilog="Exit codes: 0 success, 1 other failure, 2 bad usage, 3 a layer without a backend.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("list")(apart_from_plugins(list_backends))
app.command("show")(apart_from_plugins(show))
app.command("select")(apart_from_plugins(select))
app.command("explain")(apart_from_plugins(explain))
app.command("doctor")(apart_from_plugins(doctor))
app.command("conformance")(apart_from_plugins(conformance))
app.add_typer(matrix_app, name="matrix")
app.command("new-backend")(apart_from_plugins(new_backend))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"attnplug {version('attnplug')}")
        raise typer.Exit


@app.callback(help=_HELP)
def _root(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Options before the command."""


def main() -> None:
    """Run the program, in a process of its own if it can be watched there."""
    if not is_own_process():
        _program()
    elif can_watch():
        run_watched(_with_own_output)
    else:
        _with_own_output()


def _with_own_output() -> None:
    own = reserve_standard_output()
    try:
        _program()
    finally:
        # Flushed here, because a plugin may end the process at its exit.
        with contextlib.suppress(BrokenPipeError):
            own.flush()
        sys.stdout = sys.__stdout__


def _program() -> None:
    """Run a command; each AttnplugError becomes one message and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A name that the terminal's encoding lacks must not end a listing.
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except NoBackendError as problem:
        sys.exit(error(problem, NO_BACKEND))
    except (LayoutError, MatrixFileError, PolicyError, SpecError) as problem:
        sys.exit(error(problem, BAD_USAGE))
    except AttnplugError as problem:
        sys.exit(error(problem, FAILED))
    except BrokenPipeError:
        # The reader of the output has exited, such as in `attnplug list | head`.
        sys.stderr.close()
        sys.exit(FAILED)
