"""The pytest plugin of the process that hands out the checks: why a worker died, and how each check ended."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from attnplug.testing.isolation.deaths import cause_of_death
from attnplug.testing.isolation.results import Outcome, Result, Watcher
from attnplug.testing.isolation.worker import ORDERS, Orders, check_id
from attnplug.testing.plugin import REMOTE

__all__ = ["NODE", "Controller"]

NODE = "attnplug/testing/suite.py::test_conformance[{}]"
"""The node id of a check."""
_FAILED_STARTS = 3


class Controller:
    """Tells a watcher what the workers report.

    Args:
        orders: what every worker is told; `log` is the folder of their logs.
        known: the reason of each check that is known to fail, by id.
        before: results of an earlier run, which are reported again for JUnit files.
        watcher: who is told.
    """

    def __init__(
        self, orders: Orders, known: Mapping[str, str], before: Sequence[Result], watcher: Watcher
    ) -> None:
        self._orders = orders
        self._known = known
        self._before = before
        self._watcher = watcher
        self._replaying = False
        self._failed_starts = 0
        self._collected: set[str] = set()
        self.stopped: str | None = None
        """Why the run cannot go on, where it cannot."""
        self.interrupted = False
        """Whether the user stopped the run; a worker that stops itself is no reason to."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Tell attnplug.testing.plugin that only workers need the checks."""
        config.stash[REMOTE] = True

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> None:
        """Report the results of the earlier run."""
        self._replaying = True
        for result in self._before:
            for when in ("setup", "call", "teardown"):
                session.config.hook.pytest_runtest_logreport(report=_report_of(result, when))
        self._replaying = False

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Give a worker its orders."""
        log = Path(self._orders["log"], f"{node.gateway.id}.log")
        node.workerinput[ORDERS] = {**self._orders, "log": str(log)}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Where groups stay together, a scheduler that runs no check again that a worker died of."""
        from attnplug.testing.isolation.groups import Groups

        return Groups(config, log) if config.getvalue("dist") == "loadgroup" else None

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any) -> None:
        """Note that a worker came as far as its list of checks."""
        self._collected.add(node.gateway.id)
        self._failed_starts = 0

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Stop where workers die before they have run anything; they would be replaced for ever."""
        if not error or node.gateway.id in self._collected:
            return
        self._failed_starts += 1
        if self._failed_starts >= _FAILED_STARTS:
            how, detail = self._how_it_died(node)
            last = (detail or str(error)).strip().splitlines()[-1]
            self.stopped = f"no worker process starts: {how}\n{last}"
            pytest.exit("no worker process starts", returncode=int(pytest.ExitCode.INTERNAL_ERROR))

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        """Say in the report of the check that a worker died with, why it did."""
        how, detail = self._how_it_died(report.node)
        report.when = "call"
        report.longrepr = f"{how}\n{detail}".rstrip()
        reason = self._known.get(check_id(crashitem))
        if reason is not None:
            report.outcome = "skipped"
            report.wasxfail = reason

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Tell the user's interrupt from those that pytest and pytest-xdist raise themselves."""
        self.interrupted = excinfo.type is KeyboardInterrupt

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A check begins."""
        self._watcher.started(check_id(nodeid))

    @pytest.hookimpl(tryfirst=True)  # before what it says is written to a JUnit file
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A check's setup, call or teardown ended: the call counts, and whatever else did not pass."""
        if self._replaying or (report.when != "call" and report.passed):
            return
        _name_timeout(report)
        cause, detail = _why(report)
        self._watcher.finished(
            Result(check_id(report.nodeid), _outcome(report), report.duration, cause, detail)
        )

    def _how_it_died(self, node: Any) -> tuple[str, str]:
        """The cause in one line, and what the worker's log says."""
        log = Path(self._orders["log"], f"{node.gateway.id}.log")
        said = ""
        with contextlib.suppress(OSError):
            said = log.read_text(encoding="utf-8", errors="replace")
        return cause_of_death(said, self._orders["timeout"], lambda: _exit_status(node))


def _report_of(result: Result, when: Any) -> pytest.TestReport:
    skipped = result.outcome is not Outcome.PASSED and when == "call"
    report = pytest.TestReport(
        nodeid=NODE.format(result.id),
        location=("attnplug/testing/suite.py", None, "test_conformance"),
        keywords={},
        outcome="skipped" if skipped else "passed",
        longrepr=("attnplug/testing/suite.py", 0, f"Skipped: {result.cause}") if skipped else None,
        when=when,
        duration=result.seconds if when == "call" else 0.0,
    )
    if skipped and result.outcome is Outcome.KNOWN:
        report.wasxfail = result.cause
    return report


def _outcome(report: pytest.TestReport) -> Outcome:
    if report.skipped:
        return Outcome.KNOWN if hasattr(report, "wasxfail") else Outcome.SKIPPED
    return Outcome.PASSED if report.passed else Outcome.FAILED


def _name_timeout(report: pytest.TestReport) -> None:
    """Say what pytest-timeout's message means."""
    crash = getattr(report.longrepr, "reprcrash", None)
    late = None if crash is None else re.match(r"Failed: Timeout \(>([\d.]+)s\)", crash.message)
    if crash is not None and late is not None:
        crash.message = f"timed out after {float(late[1]):g} s at {crash.path}:{crash.lineno}"


def _why(report: pytest.TestReport) -> tuple[str, str]:
    """The cause in a few lines, and the whole text."""
    if hasattr(report, "wasxfail"):
        return report.wasxfail, ""
    found = report.longrepr
    if found is None:
        return "", ""
    if isinstance(found, tuple):
        return found[2].removeprefix("Skipped: "), ""
    crash = getattr(found, "reprcrash", None)
    text = str(found)
    if crash is None:
        # Of a worker that died, or of a known failure that passed.
        strict = re.match(r"\[XPASS\(strict\)\] ?(.*)", text)
        if strict:
            return f"passed, though it is known to fail: {strict[1]}; take it off the list", ""
        return text.partition("\n")[0], text
    message = re.sub(r"^[\w.]*\b(ConformanceError|AssertionError|Failed): ", "", crash.message)
    return message, text


def _exit_status(node: Any) -> str:
    """How its process ended, as ": SIGKILL"; nothing where execnet does not say."""
    process = getattr(getattr(node.gateway, "_io", None), "popen", None)
    if not isinstance(process, subprocess.Popen):
        return ""
    try:
        code = process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        return ""
    if code >= 0:
        return f": it left with exit code {code}"
    name = signal.Signals(-code).name
    return f": {name}" + (", as when the system runs out of memory" if name == "SIGKILL" else "")
