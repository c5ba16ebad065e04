"""One run of checks in worker processes: pytest-xdist starts and replaces them, pytest-timeout stops checks."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import attnplug
from attnplug.testing.isolation.controller import Controller
from attnplug.testing.isolation.environment import memory_of_this_machine, only_our_pytest
from attnplug.testing.isolation.listing import Listing, Wanted
from attnplug.testing.isolation.results import Result, Watcher

__all__ = ["Limits", "default_jobs", "run_checks", "worker_memory"]

_MOST_JOBS = 8
_SHARE = 0.8
_LAST_LINES = 20
_LEAST_MEMORY = 2 * 2**30


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What checks may take.

    Args:
        timeout: seconds per check.
        jobs: worker processes.
        memory: bytes per worker, or None for no limit.
    """

    timeout: float
    jobs: int
    memory: int | None


def default_jobs(device_type: str, checks: int) -> int:
    """Worker processes for so many checks: one for each core, of a GPU at most two; at least 8 checks each."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _MOST_JOBS if device_type == "cpu" else 2, checks // 8))


def worker_memory(device_type: str, jobs: int) -> int | None:
    """Each worker's share of four fifths of this machine's memory.

    None on anything but a CPU: CUDA maps more than the machine has.
    """
    total = memory_of_this_machine()
    if device_type != "cpu" or total is None:
        return None
    return max(int(total * _SHARE) // jobs, _LEAST_MEMORY)


def run_checks(
    listing: Listing,
    wanted: Wanted,
    ids: Sequence[str],
    limits: Limits,
    watcher: Watcher,
    *,
    before: Sequence[Result] = (),
    junit: Path | None = None,
) -> str | None:
    """Run the checks `ids` and tell `watcher` of each.

    Args:
        listing: of which `ids` are some.
        wanted: what the listing was made for.
        ids: what to run; may be empty.
        limits: of time and memory.
        watcher: who is told how it goes.
        before: results of an earlier run, for the JUnit file.
        junit: where to write JUnit XML, all at once at the end.

    Returns:
        What pytest said where the run as such failed, else None.

    Raises:
        KeyboardInterrupt: the user's; the workers have ended.
    """
    with tempfile.TemporaryDirectory(prefix="attnplug-conformance-") as folder:
        orders = {
            "ids": list(ids),
            "known": {check: listing.known[check] for check in ids if check in listing.known},
            "timeout": limits.timeout,
            "memory": limits.memory,
            "threads": max(1, (os.cpu_count() or 1) // limits.jobs),
            "log": folder,
        }
        controller = Controller(orders, listing.known, before, watcher)
        said = io.StringIO()
        with _written_at_once(junit) as xml, only_our_pytest(), contextlib.redirect_stdout(said):
            arguments = _arguments(wanted, ids, limits, folder)
            if xml is not None:
                arguments += [f"--junitxml={xml}", "-o", "junit_suite_name=attnplug-conformance"]
            code = pytest.main(arguments, plugins=[controller])
            if controller.interrupted:
                raise KeyboardInterrupt
    if code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        return None
    return controller.stopped or "\n".join(said.getvalue().strip().splitlines()[-_LAST_LINES:])


def _arguments(wanted: Wanted, ids: Sequence[str], limits: Limits, folder: str) -> list[str]:
    # No configuration, conftest or plugin of the folder we are in, and nothing written to it.
    arguments = ["-c", os.devnull, "--noconftest", "--rootdir", str(Path(attnplug.__file__).parents[1])]
    for name in ("cacheprovider", "faulthandler", "warnings", "tmpdir"):
        arguments += ["-p", f"no:{name}"]
    if not ids:
        return [*arguments, folder]
    for name in ("xdist.plugin", "pytest_timeout", "attnplug.testing.isolation.worker"):
        arguments += ["-p", name]
    arguments += ["-p", "attnplug.testing.plugin", f"--attn-backend={wanted.name}", f"--level={wanted.level}"]
    if wanted.device is not None:
        arguments.append(f"--attn-device={wanted.device}")
    if wanted.checks_of is not None:
        # Groups stay together, in the order of the list.
        arguments += [f"--attn-checks={wanted.checks_of}", "--dist=loadgroup", "--no-loadscope-reorder"]
    # Every check may cost a worker; a long one must not hold many others back.
    arguments += [f"-n{limits.jobs}", f"--max-worker-restart={len(ids) + limits.jobs}", "--maxschedchunk=1"]
    method = "signal" if hasattr(signal, "SIGALRM") else "thread"
    arguments += [f"--timeout={limits.timeout}", f"--timeout-method={method}", "--tb=short", "--capture=no"]
    return [*arguments, "--pyargs", "attnplug.testing.suite"]


@contextlib.contextmanager
def _written_at_once(target: Path | None) -> Iterator[Path | None]:
    """A path beside `target` that becomes it once all is written; nothing is left where it is not."""
    if target is None:
        yield None
        return
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        yield unfinished
        if unfinished.exists():
            unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
