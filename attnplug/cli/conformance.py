"""`attnplug conformance`: does a backend do what it says, on this machine, with these versions?"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnplug.cli.arguments import jobs_option, memory_option, timeout_option
from attnplug.cli.output import error
from attnplug.core.errors import PolicyError

if TYPE_CHECKING:
    from attnplug.cli.conformance_report import Report
    from attnplug.testing.isolation.listing import Listing, Wanted
    from attnplug.testing.isolation.results import Result
    from attnplug.testing.isolation.run import Limits
    from attnplug.testing.isolation.state import State

__all__ = ["conformance", "require_the_extra"]

_MODULES = {"pytest": "pytest", "xdist": "pytest-xdist", "pytest_timeout": "pytest-timeout"}
_FAILED, _USAGE, _INTERRUPTED = 1, 2, 130
_LISTING_SECONDS = 300.0
_CHOICE, _LIMITS = "Which checks", "Limits"


def conformance(
    backend: Annotated[
        str, typer.Argument(metavar="NAME", help="A backend, as attnplug list has it; or NAME@DISTRIBUTION.")
    ],
    level: Annotated[
        str,
        typer.Option(metavar="smoke|full", help="How much of the space is tried.", rich_help_panel=_CHOICE),
    ] = "smoke",
    device: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE", help="cpu, cuda:1, ... \\[default: the current one]", rich_help_panel=_CHOICE
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Only checks whose id matches, as 'correct/*'; may be repeated.",
            rich_help_panel=_CHOICE,
        ),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Only the I-th of N disjoint parts.", rich_help_panel=_CHOICE),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with an interrupted run: what passed is not run again.",
            rich_help_panel=_CHOICE,
        ),
    ] = False,
    known_failures: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="TOML: a table \\[known_failures] of id or pattern = reason. These must fail.",
            rich_help_panel=_CHOICE,
        ),
    ] = None,
    timeout: Annotated[float, timeout_option(_LIMITS, "How long a check may take.")] = 120.0,
    jobs: Annotated[int | None, jobs_option(_LIMITS)] = None,
    memory: Annotated[str | None, memory_option(_LIMITS)] = None,
    show_ids: Annotated[
        bool, typer.Option("--list", help="Print the ids of the checks and run none.")
    ] = False,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit XML too.")] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show each check, and failures in full.")
    ] = False,
) -> None:
    """Check that a backend does what it declares, here and with these versions.

    Each check runs in a worker process: one that hangs, crashes, runs out of memory or writes to standard output fails with the cause, and the run goes on.

    Exit codes: 0 all passed (or failed as known), 1 some failed, 2 bad usage, 130 interrupted.
    """
    require_the_extra()
    from attnplug.cli.conformance_report import Report
    from attnplug.testing.isolation.listing import Listing, Wanted, list_checks
    from attnplug.testing.isolation.state import State

    wanted = Wanted(backend, device, _level(level), None if known_failures is None else str(known_failures))
    part = _shard(shard)
    allocate = _bytes(memory)
    _check_folder(junit)
    report = Report(verbose)
    try:
        with report.waiting(f"listing the checks of {backend}"):
            listing = list_checks(wanted, _LISTING_SECONDS)
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None
    if not isinstance(listing, Listing):
        raise typer.Exit(error(listing.text, _USAGE if listing.usage else _FAILED))
    ids = _chosen(listing, only or (), part)
    if show_ids:
        typer.echo("\n".join(ids))
        return
    state = State(listing, part)
    before = state.settled(listing.known) if resume else {}
    before = {check: before[check] for check in ids if check in before}
    rest = [check for check in ids if check not in before]
    limits = _limits(listing, len(rest), timeout, jobs, allocate)
    report.begin(listing, rest, before, limits, part)
    problem = _run(listing, wanted, rest, limits, report, state, list(before.values()), junit)
    report.end(rest, problem)
    raise typer.Exit(_FAILED if report.failed or problem else 0)


def _run(
    listing: Listing,
    wanted: Wanted,
    ids: Sequence[str],
    limits: Limits,
    report: Report,
    state: State,
    before: Sequence[Result],
    junit: Path | None,
) -> str | None:
    from attnplug.testing.isolation.run import run_checks

    report.remember_in(state, ids)
    if not ids and junit is None:
        return None
    try:
        with report.running():
            return run_checks(listing, wanted, ids, limits, report, before=before, junit=junit)
    except KeyboardInterrupt:
        report.interrupted()
        raise typer.Exit(_INTERRUPTED) from None


def require_the_extra(what: str = "conformance") -> None:
    """Exit with bad usage, and say what to install, where what the workers need is not."""
    missing = [dist for module, dist in _MODULES.items() if importlib.util.find_spec(module) is None]
    if missing:
        text = f"{what} needs {', '.join(missing)}: pip install 'attnplug[testing]'"
        raise typer.Exit(error(text, _USAGE))


def _level(text: str) -> str:
    if text not in ("smoke", "full"):
        raise PolicyError("--level", text, "must be smoke or full")
    return text


def _shard(text: str | None) -> str | None:
    from attnplug.testing.conformance.selection import Shard

    return None if text is None else str(Shard.parse(text))


def _bytes(text: str | None) -> int | None:
    from attnplug.runtime.budget import parse_memory

    return None if text is None else parse_memory(text)


def _check_folder(junit: Path | None) -> None:
    if junit is not None and (junit.is_dir() or not junit.parent.is_dir()):
        why = "is a folder" if junit.is_dir() else "is in no folder that exists"
        raise PolicyError("--junit", str(junit), why)


def _chosen(listing: Listing, only: Sequence[str], part: str | None) -> list[str]:
    from attnplug.testing.conformance.selection import Shard, matching

    ids = matching(listing.ids, only, "--only") if only else list(listing.ids)
    return ids if part is None else Shard.parse(part).of(ids)


def _limits(listing: Listing, checks: int, timeout: float, jobs: int | None, memory: int | None) -> Limits:
    from attnplug.testing.isolation.run import Limits, default_jobs, worker_memory

    count = min(jobs, max(checks, 1)) if jobs else default_jobs(listing.device_type, checks)
    return Limits(timeout, count, memory or worker_memory(listing.device_type, count))
