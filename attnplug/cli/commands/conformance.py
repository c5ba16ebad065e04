"""`attnplug conformance`: checks on this machine that a backend does what it declares."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnplug._system import files
from attnplug.cli.arguments import (
    MOST_SECONDS,
    AsJson,
    Quiet,
    complete_backends,
    complete_devices,
    complete_kv_cache_dtypes,
    jobs_option,
    memory_option,
    timeout_option,
)
from attnplug.cli.output.conformance_report import CHECK_SECONDS
from attnplug.cli.output.output import STDOUT, CommandError, check_output, echo, print_json, write_text
from attnplug.cli.own_process import interrupt_on_sigterm
from attnplug.core.errors import PolicyError
from attnplug.engines.table import ALL, ENGINES
from attnplug.testing.conformance.check import SHRINK_SECONDS

if TYPE_CHECKING:
    from attnplug.cli.output.conformance_report import Report
    from attnplug.testing.isolation.listing import Listing
    from attnplug.testing.isolation.run import Limits

_MODULES = {"pytest": "pytest", "xdist": "pytest-xdist", "pytest_timeout": "pytest-timeout"}
# 130 is 128 plus SIGINT, the code that shells give to an interrupted program.
_FAILED, _USAGE, _INTERRUPTED = 1, 2, 130
_LISTING_SECONDS = 300.0
_LEVELS = ("smoke", "full")
_LIMITS = "Limits"
_which = functools.partial(typer.Option, rich_help_panel="Which checks")


def conformance(
    backend: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="A backend of attnplug list, or NAME@DISTRIBUTION.",
            autocompletion=complete_backends,
            show_default=False,
        ),
    ] = None,
    level: Annotated[
        str,
        _which(
            metavar="smoke|full",
            autocompletion=lambda incomplete: [each for each in _LEVELS if each.startswith(incomplete)],
            help="Number of combinations to try.",
        ),
    ] = "smoke",
    device: Annotated[
        str | None,
        _which(
            metavar="DEVICE",
            autocompletion=complete_devices,
            help="cpu, cuda:1, ... \\[default: the current one]",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        _which(metavar="PATTERN", help="Only checks whose id matches, such as 'correct/*'; may be repeated."),
    ] = None,
    kv_format: Annotated[
        str | None,
        _which(
            "--format",
            metavar="NAME",
            autocompletion=complete_kv_cache_dtypes,
            help="Only the checks of a KV format; of TORCH unless a backend is named.",
        ),
    ] = None,
    engine: Annotated[
        list[str] | None,
        _which(
            "--engine",
            metavar="NAME,...",
            autocompletion=lambda incomplete: [
                each for each in (*ENGINES, ALL) if each.startswith(incomplete)
            ],
            help="Only the numeric checks, through the client of an engine: flash-attn, transformers, vllm, sglang, or all.",
        ),
    ] = None,
    shard: Annotated[str | None, _which(metavar="I/N", help="Run only the I-th of N parts.")] = None,
    resume: Annotated[
        bool, _which("--resume", help="Continue an interrupted run: passed checks are not run again.")
    ] = False,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            metavar="OPTION=VALUE",
            help="Set an option of the backend in all layers; may be repeated.",
        ),
    ] = None,
    known_failures: Annotated[
        Path | None,
        _which(
            metavar="FILE",
            help="TOML: a table \\[known_failures] of id or pattern = reason. These must fail.",
        ),
    ] = None,
    timeout: Annotated[float, timeout_option(_LIMITS, "Time limit of a check.")] = CHECK_SECONDS,
    shrink: Annotated[
        float,
        typer.Option(
            min=0,
            max=MOST_SECONDS,
            metavar="SECONDS",
            help="Time to shrink wrong answers to their smallest failing steps; 0 shrinks none.",
            rich_help_panel=_LIMITS,
        ),
    ] = SHRINK_SECONDS,
    jobs: Annotated[int | None, jobs_option(_LIMITS)] = None,
    memory: Annotated[str | None, memory_option(_LIMITS)] = None,
    summary: Annotated[
        bool,
        typer.Option("--summary", help="Also show the kinds of mistakes that were tried, and those not."),
    ] = False,
    show_ids: Annotated[
        bool, typer.Option("--list", help="Print the ids of the checks, and run none.")
    ] = False,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write JUnit XML; - is standard output.")
    ] = None,
    as_json: AsJson = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show each check, and failures in full.")
    ] = False,
    _quiet: Quiet = False,
) -> None:
    """Check that a backend does what it declares, on this machine with the installed versions.

    Checks run in worker processes. A check that hangs, crashes, runs out of memory or writes to standard output fails with the cause, and the run continues.

    Exit codes: 0 all passed (or failed as known), 1 some failed, 2 bad usage, 130 interrupted.
    """
    # Before the imports below, which need these packages.
    require_the_extra()
    from attnplug.cli.output.conformance_report import Report
    from attnplug.runtime.plan.budget import parse_memory
    from attnplug.testing.conformance.check_filter import Shard, matching
    from attnplug.testing.isolation.listing import ListingFailure, SuiteRequest, list_checks

    backend, only = _chosen(backend, only, kv_format)
    if level not in _LEVELS:
        raise PolicyError("--level", level, "must be smoke or full")
    part = None if shard is None else Shard.parse(shard)
    memory_bytes = None if memory is None else parse_memory(memory)
    if engine:
        from attnplug.cli.commands.conformance_engines import check_engines

        others = {"--format": kv_format, "--shard": shard, "--resume": resume, "--junit": junit}
        others |= {"--known-failures": known_failures, "--summary": summary}
        asked = SuiteRequest(backend, device, level, only=only or ("*",), options=option or ())
        raise typer.Exit(
            check_engines(
                asked,
                engine,
                others,
                timeout=timeout,
                jobs=jobs,
                memory=memory_bytes,
                show_ids=show_ids,
                as_json=as_json,
                verbose=verbose,
            )
        )
    _check_junit(junit, as_json=as_json)
    known = None if known_failures is None else str(known_failures)
    request = SuiteRequest(backend, device, level, known, only=only or ("*",), options=option or ())
    # A document on standard output must be alone there.
    report = Report(verbose, err=as_json or junit == STDOUT)
    try:
        with interrupt_on_sigterm(), report.waiting(f"listing the checks of {backend}"):
            listing = list_checks(request, _LISTING_SECONDS, meanwhile=_import_pytest)
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None
    if isinstance(listing, ListingFailure):
        raise CommandError(listing.text, _USAGE if listing.usage else _FAILED)
    ids = matching(listing.ids, only, "--only") if only else list(listing.ids)
    ids = ids if part is None else part.of(ids)
    if show_ids and as_json:
        print_json({"backend": listing.name, "checks": ids}, "attnplug.checks")
        return
    if show_ids:
        echo("\n".join(ids))
        return
    from attnplug.testing.isolation.results import SavedResults
    from attnplug.testing.isolation.run import Limits, run_checks

    saved = SavedResults(listing, None if part is None else str(part))
    reusable = saved.reusable(listing.known) if resume else {}
    earlier = {check: reusable[check] for check in ids if check in reusable}
    rest = [check for check in ids if check not in earlier]
    limits = Limits.here(listing.device_type, len(rest), timeout, jobs, memory_bytes)
    report.begin(listing, rest, earlier, limits, part)
    report.save_to(saved, rest)
    problem = None
    try:
        if rest or junit is not None:
            with report.bar():
                before = list(earlier.values())
                with interrupt_on_sigterm(), _as_file(junit) as file:
                    problem = run_checks(listing, rest, limits, report, earlier=before, junit=file)
    except KeyboardInterrupt:
        report.interrupted()
        raise typer.Exit(_INTERRUPTED) from None
    # All checks have run, so an interrupt ends the shrinking alone.
    with contextlib.suppress(KeyboardInterrupt):
        _shrink_steps(listing, dataclasses.replace(limits, shrink=0 if problem else shrink), report)
    report.end(rest, problem, summary=summary)
    if as_json:
        print_json(report.to_dict(listing, problem), "attnplug.conformance")
    raise typer.Exit(_FAILED if report.failed or problem else 0)


def _check_junit(junit: Path | None, *, as_json: bool) -> None:
    """PolicyError for a file that cannot be written, and for standard output if it has the JSON."""
    if junit == STDOUT and as_json:
        raise PolicyError("--junit", "-", "is standard output, which has the JSON", "name a file")
    if junit is not None and junit != STDOUT:
        if not files.is_folder(junit.parent):
            raise PolicyError("--junit", str(junit), "is in no folder that exists")
        check_output("--junit", junit)


def _chosen(
    backend: str | None, only: list[str] | None, kv_format: str | None
) -> tuple[str, list[str] | None]:
    """The backend to check and the patterns of its checks: with a format those of the format, TORCH by default."""
    if kv_format is not None:
        if only:
            raise PolicyError("--only", only[0], "is left out with --format, which chooses the checks")
        return backend or "TORCH", _of_format(kv_format)
    if backend is None:
        raise typer.BadParameter("name a backend, or a KV format with --format", param_hint="NAME")
    return backend, only


def _of_format(name: str) -> list[str]:
    """The patterns of the checks of a KV format: of its codec, and of whole layers over its pages."""
    from attnplug.core import kv_format
    from attnplug.registry.default import get_registry

    # The formats of plugins are in the table once the plugins are loaded.
    _ = get_registry().plugins
    row = kv_format.kv_format(name)
    if row.codec is None:
        coded = ", ".join(each.name for each in kv_format.kv_formats() if each.codec)
        raise PolicyError("--format", name, f"has no codec to prove; formats with one are {coded}")
    # One pattern for ids that end with the name and for those that go on: a level may have none of the latter.
    return [f"format/{row.name}-*", f"*-{row.name}*"]


def _shrink_steps(listing: Listing, limits: Limits, report: Report) -> None:
    """Run the first failed check of each mistake again, to find the smallest step that gives its wrong answer."""
    from attnplug.cli.output.conformance_report import SmallestSteps
    from attnplug.testing.isolation.run import run_checks

    # In new workers, because a smaller step may crash them: the results so far are complete.
    if limits.shrink and (wrong := report.to_shrink):
        within = dataclasses.replace(limits, jobs=min(limits.jobs, len(wrong)))
        with interrupt_on_sigterm(), report.waiting("shrinking wrong answers to their smallest steps"):
            run_checks(listing, wrong, within, SmallestSteps(report))


@contextlib.contextmanager
def _as_file(path: Path | None) -> Iterator[Path | None]:
    """A file to write; one for standard output is printed at the end."""
    if path != STDOUT:
        yield path
        return
    with files.temporary_folder("attnplug-junit-") as folder:
        file = Path(folder, "junit.xml")
        yield file
        if files.may_exist(file):
            write_text(STDOUT, files.read_text(file))


def _import_pytest() -> None:
    # The listing runs in a child meanwhile, so the run need not wait for these imports.
    plugins = "_pytest.junitxml", "_pytest.terminal", "xdist.plugin", "pytest_timeout"
    for module in ("attnplug.testing.isolation.run", *plugins):
        importlib.import_module(module)


def require_the_extra(what: str = "conformance") -> None:
    """Exit with bad usage and a remedy if packages that the workers need are not installed."""
    missing = [dist for module, dist in _MODULES.items() if importlib.util.find_spec(module) is None]
    if missing:
        text = f"{what} needs {', '.join(missing)}: pip install {' '.join(missing)}"
        raise CommandError(text, _USAGE)
