"""Runs checks in worker processes: pytest-xdist starts and replaces them, pytest-timeout stops checks."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import attnplug
from attnplug._system import files
from attnplug._system.processes import supervised
from attnplug.testing.isolation.controller import Controller
from attnplug.testing.isolation.listing import Listing
from attnplug.testing.isolation.results import CheckObserver, Result

_MOST_JOBS = 8
_SHARE = 0.8
_LAST_LINES = 20
_LEAST_MEMORY = 2 * 2**30
_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a run.

    Args:
        timeout: seconds per check.
        jobs: worker processes.
        memory: bytes per worker, or None for no limit.
        shrink: seconds in which a worker shrinks wrong answers to their smallest failing steps.
    """

    timeout: float
    jobs: int
    memory: int | None
    shrink: float = 0.0

    @classmethod
    def here(
        cls, device_type: str, checks: int, timeout: float, jobs: int | None, memory: int | None
    ) -> Limits:
        """The limits for `checks` on this machine, which sets `jobs` and `memory` if they are None."""
        count = min(jobs, max(checks, 1)) if jobs else default_jobs(device_type, checks)
        return cls(timeout, count, memory or worker_memory(device_type, count))


def default_jobs(device_type: str, checks: int) -> int:
    """The number of workers: at most one for each core, one for 8 checks, and 8 in all, or 2 on a GPU."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _MOST_JOBS if device_type == "cpu" else 2, checks // 8))


def worker_memory(device_type: str, jobs: int) -> int | None:
    """Each worker's share of four fifths of this machine's memory; None on anything but a CPU."""
    # CUDA maps more than the machine has.
    total = machine_memory()
    if device_type != "cpu" or total is None:
        return None
    return max(int(total * _SHARE) // jobs, _LEAST_MEMORY)


def machine_memory() -> int | None:
    """Bytes of memory of this machine, or of its container if that is less; None if unknown."""
    sizes = []
    with contextlib.suppress(AttributeError, ValueError, OSError):
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for name in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            sizes.append(int(Path(name).read_text(encoding="ascii")))
    return min((size for size in sizes if size > 0), default=None)


def run_checks(
    listing: Listing,
    ids: Sequence[str],
    limits: Limits,
    observer: CheckObserver,
    *,
    earlier: Sequence[Result] = (),
    junit: Path | None = None,
) -> str | None:
    """Run the checks `ids` of a listing, which may be none, and tell `observer` of each.

    At the end the JUnit XML file `junit` is written whole, with the `earlier` results of another run.

    Returns:
        The last output of pytest if the run itself failed, else None.

    Raises:
        KeyboardInterrupt: the user interrupted the run; the workers have ended.
    """
    output = io.StringIO()
    with files.temporary_folder("attnplug-conformance-") as folder:
        settings = {
            "suite": {**dataclasses.asdict(listing.request), "known_failures": None},
            "ids": list(ids),
            "known": {check: listing.known[check] for check in ids if check in listing.known},
            "timeout": limits.timeout,
            "memory": limits.memory,
            "shrink": limits.shrink,
            # Workers share the cores, so that they do not start more threads than there are cores.
            "threads": max(1, (os.cpu_count() or 1) // limits.jobs),
            "log": folder,
        }
        Path(folder, "designs").write_bytes(listing.designs)
        settings["designs"] = str(Path(folder, "designs"))
        controller = Controller(settings, earlier, observer)
        xml = Path(folder, "junit.xml")
        arguments = _arguments(len(ids), limits, xml, has_groups=listing.request.checks_of is not None)
        with pytest.MonkeyPatch.context() as environment, contextlib.redirect_stdout(output):
            _isolate(environment)
            with contextlib.redirect_stderr(output):  # pytest writes usage errors there
                code = pytest.main(arguments, plugins=[controller])
        if controller.interrupted:
            raise KeyboardInterrupt
        if junit is not None and xml.exists():
            try:
                files.write_bytes(junit, xml.read_bytes())
            except OSError as problem:
                return f"{junit} could not be written: {files.why(problem)}"
    if code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        return None
    return controller.stopped or "\n".join(output.getvalue().strip().splitlines()[-_LAST_LINES:])


def _isolate(environment: pytest.MonkeyPatch) -> None:
    """Remove everything from the environment that changes how pytest runs, here and in the workers."""
    # The user's options for another test run must not change which checks run, or how.
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_TIMEOUT", "PYTEST_DEBUG"):
        environment.delenv(name, raising=False)
    # Plugins that are installed for other projects could change outcomes.
    environment.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    # A file of the current folder must not shadow a module.
    environment.setenv("PYTHONSAFEPATH", "1")


def _arguments(checks: int, limits: Limits, xml: Path, *, has_groups: bool) -> list[str]:
    # pytest reads no configuration, conftest or plugin of the current folder, and writes nothing to it.
    arguments = ["-c", os.devnull, "--noconftest", "--rootdir", str(Path(attnplug.__file__).parents[1])]
    arguments += [f"-pno:{name}" for name in ("cacheprovider", "faulthandler", "warnings", "tmpdir")]
    arguments += [f"--junitxml={xml}", "-o", "junit_suite_name=attnplug-conformance"]
    if not checks:
        return [*arguments, str(xml.parent)]
    arguments += ["-pxdist.plugin", "-ppytest_timeout", "-pattnplug.testing.isolation.worker"]
    # Each check may cost a worker. Chunks of one check keep a long check from holding others back.
    arguments += [f"--tx={limits.jobs}*popen//python={shlex.join(supervised([sys.executable]))}"]
    arguments += [f"--max-worker-restart={checks + limits.jobs}", "--maxschedchunk=1"]
    # Groups stay together, in the order of the list.
    arguments += ["--dist=loadgroup", "--no-loadscope-reorder"] if has_groups else ["--dist=load"]
    # The thread method ends the process, so it is used only on systems without SIGALRM.
    method = "signal" if hasattr(signal, "SIGALRM") else "thread"
    arguments += [f"--timeout={limits.timeout}", f"--timeout-method={method}", "--tb=short", "--capture=no"]
    return [*arguments, "--pyargs", "attnplug.testing.suite"]
