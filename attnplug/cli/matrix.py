"""`attnplug matrix`: what backends claim, cell by cell, and what running the cells here shows."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from attnplug.cli.conformance import require_the_extra
from attnplug.cli.matrix_files import Outputs, diff, merge
from attnplug.cli.output import console, error
from attnplug.core.errors import PolicyError

if TYPE_CHECKING:
    from attnplug.cli.matrix_report import MatrixReport
    from attnplug.core.device import Device
    from attnplug.matrix.model import Matrix, Run
    from attnplug.matrix.verify import Extent, Verification
    from attnplug.registry.records import Offer

__all__ = ["matrix_app"]

_FAILED, _REFUTED, _INTERRUPTED = 1, 4, 130
_WHICH, _RUN, _OUT = "Which cells", "Running them", "Output"

matrix_app = typer.Typer(add_completion=False, subcommand_metavar="[COMMAND]")


@dataclasses.dataclass(frozen=True, slots=True)
class _Pair:
    """One backend on one device."""

    name: str
    offer: Offer
    asked: str | None
    device: Device

    def __str__(self) -> str:
        return f"{self.offer.name} on {self.device}"


@dataclasses.dataclass(frozen=True, slots=True)
class _How:
    """How cells are run, as the options have it."""

    extent: Extent
    resume: bool
    jobs: int | None
    timeout: float
    memory: int | None


@matrix_app.callback(invoke_without_command=True)
def matrix(
    context: typer.Context,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A backend, a family or A+B; may be repeated \\[default: all that attnplug list has]",
            rich_help_panel=_WHICH,
        ),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DEVICE",
            help="cpu, sm90, rocm:9.4, ...; may be repeated \\[default: the current one]",
            rich_help_panel=_WHICH,
        ),
    ] = None,
    feature: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Only cells of this feature, as plain or sinks; may be repeated.",
            rich_help_panel=_WHICH,
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Run the cells that are claimed, here.", rich_help_panel=_RUN),
    ] = False,
    unclaimed: Annotated[
        bool,
        typer.Option("--unclaimed", help="Run those that are refused too.", rich_help_panel=_RUN),
    ] = False,
    compile_limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Of a backend that compiles, run the cells of N compilations only, those of most cells.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with an interrupted run: what is verified is not run again.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(
            min=0.1,
            metavar="SECONDS",
            help="How long a cell may take, compiling included.",
            rich_help_panel=_RUN,
        ),
    ] = 120.0,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Worker processes \\[default: one for each core, on a GPU 2]",
            rich_help_panel=_RUN,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="What each worker may allocate, as 4GiB \\[default: on a CPU its share of the machine]",
            rich_help_panel=_RUN,
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write JSON, to merge and diff.", rich_help_panel=_OUT),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page that needs no network.", rich_help_panel=_OUT),
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write Markdown.", rich_help_panel=_OUT)
    ] = None,
    commit: Annotated[
        str | None,
        typer.Option(
            metavar="SHA",
            help="What the results belong to \\[default: that of attnplug's checkout]",
            rich_help_panel=_OUT,
        ),
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Show each cell as it is run.", rich_help_panel=_OUT),
    ] = False,
) -> None:
    """Show what backends claim to serve, for any device; with --verify, run it here and see.

    Cells are values of feature, phase, head size, dtype, KV dtype, block size and layout, chosen so that each pair of values is in one. Each cell runs in a worker process: one that hangs, crashes or runs out of memory ends alone. What is refuted is refused by attnplug select from then on.

    Exit codes: 0 done, 4 a claim is refuted, 1 nothing of a backend could be run, 2 bad usage, 130 interrupted (results so far are written).
    """
    if context.invoked_subcommand is not None:
        return
    outputs = Outputs(json_file, html, markdown)
    outputs.check()
    pairs = _pairs(backend, device, verify)
    declared = [_declared(pair, feature or (), commit) for pair in pairs]
    if not verify:
        for name, given in (
            ("--unclaimed", unclaimed),
            ("--resume", resume),
            ("--compile-limit", compile_limit),
        ):
            if given:
                raise PolicyError(name, given, "says how cells are run", "add --verify")
        _show(declared, outputs)
        return
    require_the_extra("matrix --verify")
    from attnplug.matrix.verify import Extent
    from attnplug.runtime.budget import parse_memory

    allowed = None if memory is None else parse_memory(memory)
    how = _How(Extent(unclaimed, compile_limit), resume, jobs, timeout, allowed)
    with _terminated_as_interrupted():
        code = _verify(pairs, declared, how, outputs, verbose)
    raise typer.Exit(code)


matrix_app.command("merge")(merge)
matrix_app.command("diff")(diff)


def _verify(
    pairs: Sequence[_Pair], declared: Sequence[Run], how: _How, outputs: Outputs, verbose: bool
) -> int:
    from attnplug.cli.matrix_report import MatrixReport
    from attnplug.matrix.model import Matrix, Status
    from attnplug.matrix.verify import Verification

    report = MatrixReport(verbose)
    pending = [
        Verification(run, pair.offer, pair.device, name=pair.name, asked=pair.asked, extent=how.extent)
        for pair, run in zip(pairs, declared, strict=True)
    ]
    cannot: list[str] = []
    code = 0
    try:
        for pair, verification in zip(pairs, pending, strict=True):
            why = _run_one(pair, verification, how, report)
            cannot += [why] if why else []
            # Whatever ends the next one, these are kept.
            outputs.write_json(Matrix(tuple(each.outcome() for each in pending)))
    except KeyboardInterrupt:
        report.say("interrupted; the same command with --resume goes on from here")
        code = _INTERRUPTED
    found = Matrix(tuple(each.outcome() for each in pending))
    outputs.write(found)
    _remember(found)
    for why in cannot:
        error(why, _FAILED)
    refuted = sum(finding.status is Status.REFUTED for run in found.runs for finding in run.findings)
    if code == 0 and refuted:
        return _REFUTED
    return code or (_FAILED if cannot else 0)


def _run_one(pair: _Pair, verification: Verification, how: _How, report: MatrixReport) -> str | None:
    """Run one backend's cells; why nothing, or not all, could be run."""
    from attnplug.testing.isolation.run import Limits, default_jobs, worker_memory

    if not verification.ids:
        report.end(str(pair), verification.outcome())
        return None
    with report.waiting(f"looking for {pair}"):
        why = verification.prepare(resume=how.resume)
    if why is not None:
        report.end(str(pair), verification.outcome())
        return why
    cells, kind = len(verification.rest), pair.device.type
    count = min(how.jobs, max(cells, 1)) if how.jobs else default_jobs(kind, cells)
    limits = Limits(how.timeout, count, how.memory or worker_memory(kind, count))
    problem = None
    try:
        with report.running(str(pair), verification, limits):
            problem = verification.run(limits, report)
    finally:
        report.end(str(pair), verification.outcome(), problem)
    return None if problem is None else f"the run of {pair} stopped: {problem.splitlines()[0]}"


def _pairs(backends: Sequence[str] | None, devices: Sequence[str] | None, verify: bool) -> list[_Pair]:
    """Each backend asked for on each device asked for."""
    from attnplug.registry.default import get_registry
    from attnplug.registry.devices import is_here, resolve_device
    from attnplug.registry.policy import Rule

    plugins = get_registry().plugins
    offers: dict[str, tuple[str, Offer]] = {}
    for name in backends or [offer.name for offer in plugins.offers]:
        found = plugins.resolve(Rule(name, "default", "*", "--backend"))
        for offer in found:
            offers.setdefault(offer.full_name, (name if len(found) == 1 else offer.name, offer))
    where: dict[str, tuple[str | None, Device]] = {}
    asked: Sequence[str | None] = devices or [None]
    for text in asked:
        device = resolve_device(text)
        if verify and not is_here(device):
            remedy = f"leave it out, or name {resolve_device(None)}; without --verify any device can be asked"
            raise PolicyError("--device", text, "is not of this machine, so nothing can be run on it", remedy)
        where.setdefault(str(device), (text, device))
    return [
        _Pair(name, offer, text, device) for text, device in where.values() for name, offer in offers.values()
    ]


def _declared(pair: _Pair, features: Sequence[str], commit: str | None) -> Run:
    from attnplug.matrix.axes import FEATURES
    from attnplug.matrix.declared import declare

    for name in features:
        if name not in FEATURES:
            raise PolicyError("--feature", name, f"must be one of {', '.join(FEATURES)}")
    run = declare(pair.offer, pair.device)
    if features:
        kept = tuple(finding for finding in run.findings if finding.cell.feature in features)
        run = dataclasses.replace(run, findings=kept)
    return dataclasses.replace(run, commit=commit) if commit else run


def _show(runs: Sequence[Run], outputs: Outputs) -> None:
    from attnplug.matrix.model import Matrix
    from attnplug.matrix.terminal import render_terminal

    found = Matrix(tuple(runs))
    outputs.write(found)
    render_terminal(found, console())


def _remember(found: Matrix) -> None:
    """Tell the selector what was refuted, and what no longer is."""
    from attnplug.matrix.results import run_to_dict
    from attnplug.registry.refuted import record

    for run in found.runs:
        record(run_to_dict(run))


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Write what is known where a scheduler ends us, as where the user does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
