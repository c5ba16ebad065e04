"""The `attnplug` program: its commands, error messages and exit codes."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Annotated

import typer

from attnplug._system.files import why
from attnplug._system.text import shortened
from attnplug.cli.arguments import completion
from attnplug.cli.commands.conformance import conformance
from attnplug.cli.commands.doctor import doctor
from attnplug.cli.commands.explain import explain, explain_code
from attnplug.cli.commands.list import list_backends, show
from attnplug.cli.commands.matrix import matrix_app
from attnplug.cli.commands.new_package import new_backend, new_format
from attnplug.cli.commands.select import select
from attnplug.cli.commands.tune import tune
from attnplug.cli.commands.warm import warm
from attnplug.cli.output.help import HelpfulCommand, HelpfulGroup
from attnplug.cli.output.output import (
    USAGE_ERROR,
    CommandError,
    error,
    message_of,
    print_json_error,
    with_json,
)
from attnplug.cli.output.own_output import (
    apart_from_plugins,
    is_own_process,
    leave_standard_output,
    open_standard_streams,
    reserve_standard_output,
)
from attnplug.cli.own_process import can_watch, hear_of_children, leave_threads, run_watched
from attnplug.core.errors import (
    AttnplugError,
    LayoutError,
    MatrixFileError,
    ModelConfigError,
    NoBackendError,
    PolicyError,
    SpecError,
)
from attnplug.registry.plugins.project import read_from_here

FAILED, BAD_USAGE, NO_BACKEND = 1, 2, 3
# 128 plus SIGINT, the code that shells give to an interrupted program.
INTERRUPTED = 130
_HELP = "Choose attention backends for the layers of a model, and explain each choice."

app = typer.Typer(
    name="attnplug",
    cls=HelpfulGroup,
    help=_HELP,
    epilog="Example: attnplug select examples/models/gpt-oss-20b.json --device h100\n"
    "Exit codes: 0 success, 1 other failure, 2 bad usage, 3 a layer without a backend, 4 a refuted claim, 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _add(name: str, command: Callable[..., None], example: str) -> None:
    made = app.command(name, cls=HelpfulCommand, epilog=f"Example: attnplug {name}{example}")
    made(apart_from_plugins(command))


_add("list", list_backends, "")
_add("show", show, " TRITON")
_add("select", select, " config.json --device h100 --kv-cache-dtype fp8")
_add("explain", explain, " --head-size 80 --sliding-window 4096 --device a100")
_add("explain-code", explain_code, " head_size")
_add("doctor", doctor, " FLASH_ATTN")
_add("conformance", conformance, " TRITON --only 'correct/*'")
app.add_typer(matrix_app, name="matrix")
_add("tune", tune, " config.json --batch 1,8,64 --context 8k --prefill 4x4k")
_add("warm", warm, " config.json --device h100 --cache kernels")
_add("completion", completion, " bash >> ~/.bashrc")
_add("new-backend", new_backend, " acme")
_add("new-format", new_format, " acme-int6")


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
    # Not if a program that runs the command inside, such as a test, has replaced the stream.
    if sys.stdout is sys.__stdout__:
        open_standard_streams()
    if not is_own_process():
        _program()
        return
    hear_of_children()
    if can_watch():
        run_watched(_with_own_output)
    else:
        try:
            _with_own_output()
        except SystemExit as ended:
            leave_threads(ended.code)
            raise


def _with_own_output() -> None:
    # Imports make objects by the hundred thousand, and hardly any garbage to look for.
    gc.set_threshold(50_000)
    own = reserve_standard_output()
    try:
        _program()
    finally:
        # Flushed here, because a plugin may end the process at its exit.
        with contextlib.suppress(BrokenPipeError):
            own.flush()
        sys.stdout = sys.__stdout__
        # The process ends: Python need not look through all of torch for cycles once more, which takes 0.2 s.
        gc.freeze()


def exit_code(problem: Exception) -> int:
    """The exit code of an error."""
    if isinstance(problem, CommandError):
        return problem.exit_code
    if isinstance(problem, NoBackendError):
        return NO_BACKEND
    is_usage = isinstance(problem, (LayoutError, MatrixFileError, PolicyError, SpecError))
    if isinstance(problem, ModelConfigError):
        is_usage = problem.unreadable or problem.argument is not None
    return BAD_USAGE if is_usage or not isinstance(problem, AttnplugError) else FAILED


@contextlib.contextmanager
def _broken_torch() -> Iterator[None]:
    """An error while torch is imported, such as a CUDA library that is not there, becomes one message."""
    try:
        yield
    except Exception as problem:
        frames = (frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(problem.__traceback__))
        # Python takes a module that raised out again.
        if "torch" in sys.modules or "torch" not in {*frames, getattr(problem, "name", None)}:
            raise
        remedy = "repair it until python -c 'import torch' runs"
        text = f"torch cannot be imported: {type(problem).__name__}: {shortened(str(problem))}; {remedy}"
        raise CommandError(text, FAILED) from problem


def _program() -> None:
    """Run a command; each AttnplugError becomes one message and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A name that the terminal's encoding lacks must not end a listing.
            stream.reconfigure(errors="backslashreplace")
    arguments, to_stdout = with_json(sys.argv[1:])
    try:
        with read_from_here(), _broken_torch():
            # With JSON, errors of usage are printed below too.
            ended = app(arguments, prog_name="attnplug", standalone_mode=not to_stdout)
        sys.exit(ended if isinstance(ended, int) else 0)
    except (AttnplugError, USAGE_ERROR) as problem:
        code = exit_code(problem)
        if to_stdout:
            print_json_error(problem, code, arguments)
        sys.exit(error(message_of(problem), code))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # The reader of the output has exited, such as in `attnplug list | head`.
        sys.stderr.close()
        sys.exit(FAILED)
    except OSError as problem:
        if problem.filename is not None:
            sys.exit(error(f"{problem.filename} cannot be used: {why(problem)}", BAD_USAGE))
        # Other errors without a file name are faults of attnplug, and keep their traceback.
        if problem.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        leave_standard_output()
        sys.exit(error(f"the output cannot be written: {problem.strerror}", FAILED))
