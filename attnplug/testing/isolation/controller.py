"""The pytest plugin of the process that starts the workers: it tells an observer how each check ended."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadGroupScheduling  # type: ignore[import-untyped]

from attnplug.testing.conformance.check import SkipKind
from attnplug.testing.isolation.failures import Failure
from attnplug.testing.isolation.results import CheckObserver, CheckOutcome, Result
from attnplug.testing.isolation.worker import SETTINGS, cause_of_death

_MODULE = "attnplug/testing/suite.py"
_FAILED_STARTS = 3


class Controller:
    """Turns the reports of workers, and their deaths, into results; JUnit files repeat the `earlier` ones.

    Every worker receives the `settings`, whose `log` is the folder of the workers' logs.
    """

    def __init__(
        self, settings: Mapping[str, Any], earlier: Sequence[Result], observer: CheckObserver
    ) -> None:
        self._settings = settings
        self._earlier = {result.id: result for result in earlier}
        self._observer = observer
        self._failed_starts = 0
        self._collected: set[str] = set()
        self.stopped: str | None = None
        """Why the run cannot continue, if it cannot."""
        self.interrupted = False
        """Whether the user interrupted the run."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> None:
        """Repeat the results of the earlier run."""
        for result in self._earlier.values():
            # A JUnit file writes a test only after its teardown.
            for when in ("call", "teardown"):
                session.config.hook.pytest_runtest_logreport(report=_report_of(result, when))

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Send a worker its settings."""
        node.workerinput[SETTINGS] = {**self._settings, "log": str(self._log_of(node))}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Replace the scheduler of groups."""
        return GroupScheduler(config, log) if config.getoption("dist") == "loadgroup" else None

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any) -> None:
        """Remember that a worker has started and listed its checks."""
        self._collected.add(node.gateway.id)
        self._failed_starts = 0

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Stop the run if workers die at their start, because pytest-xdist would replace them again and again."""
        if not error or node.gateway.id in self._collected:
            return
        self._failed_starts += 1
        if self._failed_starts >= _FAILED_STARTS:
            # An exception comes from a worker that still lives. pytest-xdist describes a dead one by a string.
            cause, detail = self._cause_of_death(node) if isinstance(error, str) else ("", "")
            last = (detail or str(error)).strip().splitlines()[-1]
            reason = f"{cause}\n{last}" if cause else last
            self.stopped = f"no worker process starts: {reason}"
            pytest.exit("no worker process starts", returncode=int(pytest.ExitCode.INTERNAL_ERROR))

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        """Write the cause of a worker's death into the report of the check that it was running."""
        # Only calls are results, so the death counts as the end of the check.
        report.when = "call"
        report.longrepr = "\n".join(self._cause_of_death(report.node)).rstrip()
        reason = self._settings["known"].get(_check_id(crashitem))
        if reason is not None:
            report.outcome = "skipped"
            report.wasxfail = reason

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Distinguish the user's interrupt from the subclasses that pytest and pytest-xdist raise."""
        self.interrupted = excinfo.type is KeyboardInterrupt

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A check starts."""
        self._observer.started(_check_id(nodeid))

    @pytest.hookimpl(tryfirst=True)  # before pytest copies the message to a JUnit file
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The setup, call or teardown of a check ended. Each call is a result, and each failure elsewhere."""
        check = _check_id(report.nodeid)
        if check in self._earlier or (report.when != "call" and report.passed):
            return
        outcome = CheckOutcome(report.outcome)
        if report.skipped and hasattr(report, "wasxfail"):
            outcome = CheckOutcome.KNOWN
        cause, detail = _cause_and_detail(report)
        if outcome is CheckOutcome.SKIPPED and SkipKind.read(cause)[0] is SkipKind.UNTESTED:
            outcome, cause = CheckOutcome.UNTESTED, SkipKind.read(cause)[1]
        failure = Failure.read(report.user_properties)
        self._observer.finished(Result(check, outcome, report.duration, cause, detail, failure))

    def _log_of(self, node: Any) -> Path:
        return Path(self._settings["log"], f"{node.gateway.id}.log")

    def _cause_of_death(self, node: Any) -> tuple[str, str]:
        return cause_of_death(self._log_of(node), self._settings["timeout"])


class GroupScheduler(LoadGroupScheduling):  # type: ignore[misc]
    """The groups of pytest-xdist, corrected for workers that die (needed with pytest-xdist 3.8).

    `LoadGroupScheduling` runs the group of a dead worker again from its first check, with the check that killed the
    worker. It also gives a replacement one check, but a worker starts a check only when it has the next one.
    """

    def remove_node(self, node: Any) -> str | None:
        """Queue the checks that a dead worker has not started; return the one that it was running, if any."""
        work = {
            group: [check for check, is_done in checks.items() if not is_done]
            for group, checks in self.assigned_work[node].items()
        }
        self.assigned_work[node] = {}
        super().remove_node(node)
        # The first check that is not done is the one that killed the worker; it must not run again.
        running = next((checks.pop(0) for checks in work.values() if checks), None)
        for group, checks in reversed(work.items()):
            if checks:
                self.workqueue[group] = dict.fromkeys(checks, False)
                # The rest of the group goes first, before groups that nobody has started.
                self.workqueue.move_to_end(group, last=False)
        if self.workqueue:
            self.schedule()
        return running

    def schedule(self) -> None:
        """Give every worker two groups to start with, replacements too."""
        super().schedule()
        if self.collection:
            super().schedule()


def _check_id(nodeid: str) -> str:
    """The check's id in "attnplug/testing/suite.py::test_conformance[ID]", which "@GROUP" may follow."""
    return nodeid.partition("[")[2].partition("]")[0]


def _report_of(result: Result, when: Any) -> pytest.TestReport:
    skipped = result.outcome is not CheckOutcome.PASSED and when == "call"
    report = pytest.TestReport(
        nodeid=f"{_MODULE}::test_conformance[{result.id}]",
        location=(_MODULE, None, "test_conformance"),
        keywords={},
        outcome="skipped" if skipped else "passed",
        longrepr=(_MODULE, 0, f"Skipped: {result.cause}") if skipped else None,
        when=when,
        duration=result.seconds if when == "call" else 0.0,
    )
    if skipped and result.outcome is CheckOutcome.KNOWN:
        report.wasxfail = result.cause
    return report


def _cause_and_detail(report: pytest.TestReport) -> tuple[str, str]:
    """Why the check did not pass, in a few lines, and the whole text."""
    found = report.longrepr
    if hasattr(report, "wasxfail") or found is None:
        return getattr(report, "wasxfail", ""), ""
    if isinstance(found, tuple):
        return found[2].removeprefix("Skipped: "), ""
    crash = getattr(found, "reprcrash", None)
    if crash is not None:
        if late := re.match(r"Failed: Timeout \(>([\d.]+)s\)", crash.message):
            crash.message = f"timed out after {float(late[1]):g} s at {crash.path}:{crash.lineno}"
        return re.sub(r"^[\w.]*\b(ConformanceError|AssertionError|Failed): ", "", crash.message), str(found)
    text = str(found)
    if strict := re.match(r"\[XPASS\(strict\)\] ?(.*)", text):
        return f"passed, though it is known to fail: {strict[1]}; take it off the list", ""
    return text.partition("\n")[0], text
