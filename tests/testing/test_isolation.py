"""Checks in worker processes: what is remembered, what a log says of a death, what a worker may take."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from catching import variant

from attnplug.core.device import Device
from attnplug.core.errors import SpecError
from attnplug.registry.plugins.records import Offer
from attnplug.testing.conformance import conformance_checks, suites
from attnplug.testing.isolation import listing as listing_module
from attnplug.testing.isolation import run
from attnplug.testing.isolation.controller import Controller
from attnplug.testing.isolation.listing import (
    Listing,
    ListingFailure,
    SuiteRequest,
    fingerprint,
    list_checks,
    versions,
)
from attnplug.testing.isolation.results import CheckOutcome, Result, SavedResults
from attnplug.testing.isolation.worker import Worker, cause_of_death

LISTING = Listing(
    SuiteRequest("ACME"),
    name="ACME",
    shipped_by="attnplug-acme",
    device="cpu",
    device_type="cpu",
    device_name=None,
    ids=("a/1", "a/2", "a/3"),
    known={},
    versions={"attnplug": "0.1.0", "torch": "2.13.0"},
    code="0123",
)
PASSED = Result("a/1", CheckOutcome.PASSED, 0.5)
STACK = """
Thread 0x00007f01 (most recent call first):
  File "/lib/execnet/gateway_base.py", line 534 in read

{current} 0x00007f02 (most recent call first):
  File "{stdlib}/ctypes/__init__.py", line 519 in string_at
  File "/acme/impl.py", line 42 in attend
  File "/attnplug/testing/suite.py", line 32 in test_conformance
  File "/lib/pluggy/_execution.py", line 147 in _multicall

Extension modules: torch._C (total: 1)
"""


@pytest.fixture
def state(tmp_path):
    return SavedResults(LISTING, None, tmp_path)


def test_the_last_result_of_a_check_counts(state):
    state.add(PASSED)
    state.add(Result("a/1", CheckOutcome.FAILED, 0.0, "crashed after it had passed"))
    assert state.load() == {"a/1": Result("a/1", CheckOutcome.FAILED, 0.0, "crashed after it had passed")}


def test_a_line_that_was_cut_off_is_passed_over_and_the_next_one_is_whole(state):
    state.add(PASSED)
    with state.path.open("a") as file:
        file.write('{"id": "a/2", "outc')
    state.add(Result("a/3", CheckOutcome.SKIPPED, 0.0, "why"))
    assert list(state.load()) == ["a/1", "a/3"]


@pytest.mark.parametrize(
    "line", ["[]", "3", '{"id": "a/1"}', '{"id": 1, "outcome": "odd", "seconds": 1}', "\x00"]
)
def test_lines_that_mean_nothing_are_passed_over(state, line):
    state.path.write_text(f"{line}\n")
    assert state.load() == {}


def test_nothing_is_remembered_before_a_first_run(state):
    assert state.load() == {}


def test_what_needs_no_second_run(state):
    for check, outcome in (("a/1", "passed"), ("a/2", "failed"), ("a/3", "skipped"), ("a/4", "known")):
        state.add(Result(check, CheckOutcome(outcome)))
    assert list(state.reusable({})) == ["a/1", "a/3"]
    assert list(state.reusable({"a/4": "why"})) == ["a/1", "a/3", "a/4"]
    assert list(state.reusable({"a/1": "it passed, and must now fail"})) == ["a/3"]


def test_a_new_run_forgets_only_what_it_runs(state):
    state.add(PASSED)
    state.add(Result("a/2", CheckOutcome.PASSED))
    state.remove(["a/2"])
    assert list(state.load()) == ["a/1"]
    assert [path.name for path in state.path.parent.iterdir()] == [state.path.name]


@pytest.mark.parametrize(
    "change",
    [
        {"name": "ACNE"},
        {"shipped_by": None},
        {"device": "sm90"},
        {"device_name": "NVIDIA H200"},
        {"request": SuiteRequest("ACME", level="full")},
        {"request": SuiteRequest("ACME", checks_of="acme:cells")},
        {"versions": {"attnplug": "0.1.0", "torch": "2.14.0"}},
        {"code": "4567"},
        {"options": "tile=32"},
    ],
)
def test_another_backend_version_device_level_or_code_has_a_state_of_its_own(state, tmp_path, change):
    assert SavedResults(dataclasses.replace(LISTING, **change), None, tmp_path).path != state.path


def test_each_shard_has_a_state_of_its_own_in_the_users_cache(state, monkeypatch, tmp_path):
    assert SavedResults(LISTING, "1/2", tmp_path).path != SavedResults(LISTING, "2/2", tmp_path).path
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tmp_path in SavedResults(LISTING).path.parents


def test_edited_code_has_another_fingerprint(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "attnplug_made_here"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "kernel.py").write_text("one")
    before = fingerprint(["attnplug_made_here"])
    assert fingerprint(["attnplug_made_here", "attnplug_made_here"]) == before
    (package / "kernel.py").write_text("two")
    assert fingerprint(["attnplug_made_here"]) != before
    (package / "kernel.py").write_text("one")
    os.utime(package / "kernel.py", (1, 1))
    assert fingerprint(["attnplug_made_here"]) == before


def test_of_large_files_the_time_tells(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(listing_module, "_LARGE", 2)
    (tmp_path / "attnplug_large.py").write_text("one")
    before = fingerprint(["attnplug_large"])
    os.utime(tmp_path / "attnplug_large.py", (1, 1))
    assert fingerprint(["attnplug_large"]) != before


def test_a_module_without_files_has_a_fingerprint_too(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "attnplug_one_file.py").write_text("one")
    monkeypatch.setitem(sys.modules, "attnplug_made_in_code", types.ModuleType("attnplug_made_in_code"))
    found = {
        fingerprint([n]) for n in ("attnplug_one_file", "attnplug_made_in_code", "attnplug_is_not_there")
    }
    assert len(found) == 2
    assert fingerprint(["sys"]) == fingerprint([])


def test_versions_are_those_of_what_the_backend_needs():
    backend = variant("ACME", requires=("numpy>=1", ("no-such-library", "rich")))
    found = versions(Offer("ACME", backend, "acme", "packaging", "1.0"))
    assert list(found) == ["Python", "attnplug", "torch", "packaging", "numpy", "rich"]


def test_memory_is_the_least_of_machine_and_container(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(run, "_CGROUPS", (str(limit), str(tmp_path / "none")))
    whole = run.machine_memory()
    limit.write_text("max\n")
    assert run.machine_memory() == whole
    limit.write_text("1048576\n")
    assert run.machine_memory() == 1048576


def test_nothing_of_the_shell_changes_our_pytest(monkeypatch):
    monkeypatch.setenv("PYTEST_ADDOPTS", "-n 4")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    with pytest.MonkeyPatch.context() as environment:
        run._isolate(environment)
        assert "PYTEST_ADDOPTS" not in os.environ
        assert os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] == "1"
    assert os.environ["PYTEST_ADDOPTS"] == "-n 4"
    assert "PYTHONSAFEPATH" not in os.environ


def test_workers_are_few_for_few_checks_and_for_a_gpu(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    assert [run.default_jobs("cpu", checks) for checks in (0, 1, 16, 40, 5000)] == [1, 1, 2, 5, 8]
    assert run.default_jobs("cuda", 5000) == 2


def test_workers_share_the_memory_of_the_machine(monkeypatch):
    monkeypatch.setattr(run, "machine_memory", lambda: 100 * 2**30)
    assert run.worker_memory("cpu", 4) == 20 * 2**30
    assert run.worker_memory("cpu", 400) == 2 * 2**30
    assert run.worker_memory("cuda", 4) is None
    monkeypatch.setattr(run, "machine_memory", lambda: None)
    assert run.worker_memory("cpu", 4) is None


def stack(current: str) -> str:
    return STACK.format(current=current, stdlib=Path(os.__file__).parent)


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("Timeout (0:00:08)!" + stack("Thread"), "timed out after 6 s at /acme/impl.py:42, in attend"),
        (
            "Fatal Python error: Segmentation fault\n" + stack("Current thread"),
            "the worker process crashed: Segmentation fault at /acme/impl.py:42, in attend",
        ),
        (
            "terminate called after throwing an instance of 'AcmeError'\n  what():  no such kernel\n"
            "Fatal Python error: Aborted\n\n" + stack("Current thread"),
            "the worker process crashed: Aborted: what():  no such kernel at /acme/impl.py:42, in attend",
        ),
        (
            "terminate called after throwing an instance of 'std::bad_alloc'\nFatal Python error: Aborted\n",
            "out of memory: terminate called after throwing an instance of 'std::bad_alloc'",
        ),
        (
            "the GPU's context was lost: AcceleratorError: an illegal memory access\nwas encountered",
            "the GPU's context was lost: AcceleratorError: an illegal memory access",
        ),
        ("acme: a warning\n", "the worker process crashed: SIGKILL, as when the system runs out of memory"),
        ("", "the worker process crashed: SIGKILL, as when the system runs out of memory"),
    ],
)
def test_a_log_tells_why_its_worker_died(said, cause, tmp_path):
    (tmp_path / "gw0.log").write_text(said)
    killed = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    (tmp_path / "gw0.pid").write_text(str(killed.pid))
    found, detail = cause_of_death(tmp_path / "gw0.log", 6.0)
    killed.wait()
    assert found == cause
    assert "_multicall" not in detail
    assert "gateway_base" not in detail
    assert ("/acme/impl.py" in detail) == ("impl.py" in cause)


NODE = types.SimpleNamespace(gateway=types.SimpleNamespace(id="gw0"))


class Seen:
    """A watcher that keeps what it is told."""

    def __init__(self) -> None:
        self.results: list[Result] = []
        self.begun: list[str] = []

    def started(self, check_id: str) -> None:
        self.begun.append(check_id)

    def finished(self, result: Result) -> None:
        self.results.append(result)


@pytest.fixture
def seen():
    return Seen()


@pytest.fixture
def controller(tmp_path, seen):
    settings = {"timeout": 1.0, "log": str(tmp_path), "known": {"a/2": "acme#12"}}
    return Controller(settings, (), seen)


def report_of(check: str, outcome: str, longrepr: object = None, when: str = "call") -> pytest.TestReport:
    return pytest.TestReport(
        f"suite.py::test_conformance[{check}]", ("p", None, "p"), {}, outcome, longrepr, when
    )


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("raise SystemExit(7)", "the worker process crashed: it left with exit code 7"),
        ("import os; os.kill(os.getpid(), 9)", "crashed: SIGKILL, as when the system runs out of memory"),
        ("import os; os.kill(os.getpid(), 15)", "crashed: SIGTERM"),
    ],
)
def test_a_worker_without_a_word_is_judged_by_how_its_process_ended(controller, tmp_path, code, how):
    worker = subprocess.Popen([sys.executable, "-c", code])
    (tmp_path / "gw0.pid").write_text(str(worker.pid))
    report = report_of("a/1", "failed", "crashed", "???")
    report.node = NODE
    controller.pytest_handlecrashitem(report.nodeid, report)
    worker.wait()
    assert (report.when, report.outcome) == ("call", "failed")
    assert str(report.longrepr).endswith(how)


def test_a_worker_that_never_told_its_process_is_not_asked_how_it_ended(controller):
    report = report_of("a/1", "failed", "crashed")
    report.node = NODE
    controller.pytest_handlecrashitem(report.nodeid, report)
    assert report.longrepr == "the worker process crashed"


def test_a_check_that_kills_its_worker_as_known_is_told_as_a_known_failure(controller, seen, tmp_path):
    (tmp_path / "gw0.log").write_text("Fatal Python error: Aborted\n")
    report = report_of("a/2", "failed", "crashed")
    report.node = NODE
    controller.pytest_handlecrashitem(report.nodeid, report)
    controller.pytest_runtest_logreport(report)
    assert seen.results == [Result("a/2", CheckOutcome.KNOWN, 0.0, "acme#12")]


def test_each_report_becomes_a_result(controller, seen):
    controller.pytest_runtest_logstart("suite.py::test_conformance[a/1]")
    controller.pytest_runtest_logreport(report_of("a/1", "passed", when="setup"))
    controller.pytest_runtest_logreport(report_of("a/1", "passed"))
    controller.pytest_runtest_logreport(report_of("a/2", "skipped", ("suite.py", 3, "Skipped: no sinks")))
    controller.pytest_runtest_logreport(report_of("a/3", "failed", "[XPASS(strict)] acme#13"))
    controller.pytest_runtest_logreport(report_of("a/4", "failed", "it crashed\nat the end", "teardown"))
    assert seen.begun == ["a/1"]
    assert [(result.id, str(result.outcome), result.cause) for result in seen.results] == [
        ("a/1", "passed", ""),
        ("a/2", "skipped", "no sinks"),
        ("a/3", "failed", "passed, though it is known to fail: acme#13; take it off the list"),
        ("a/4", "failed", "it crashed"),
    ]


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ("attnplug.testing.conformance.check.ConformanceError: wrong\nby 2", "wrong\nby 2"),
        ("AssertionError: wrong", "wrong"),
        ("acme.errors.AcmeError: wrong", "acme.errors.AcmeError: wrong"),
        ("Failed: Timeout (>6.0s) from pytest-timeout.", "timed out after 6 s at impl.py:42"),
    ],
)
def test_the_cause_of_a_failure_is_its_message(controller, seen, message, cause):
    crash = types.SimpleNamespace(message=message, path="impl.py", lineno=42)
    controller.pytest_runtest_logreport(report_of("a/1", "failed", types.SimpleNamespace(reprcrash=crash)))
    assert seen.results[0].cause == cause


def test_only_the_users_interrupt_is_one(controller):
    for problem, is_the_users in ((pytest.exit.Exception("gone"), False), (KeyboardInterrupt(), True)):
        with pytest.raises(type(problem)) as caught:
            raise problem
        controller.pytest_keyboard_interrupt(caught)
        assert controller.interrupted is is_the_users


def test_workers_that_never_start_end_the_run_with_the_reason(controller, tmp_path):
    (tmp_path / "gw0.log").write_text("ImportError: acme.so: wrong ELF class\n")
    node = NODE
    controller.pytest_testnodedown(node, None)
    for _ in range(2):
        controller.pytest_testnodedown(node, "EOF")
    with pytest.raises(pytest.exit.Exception):
        controller.pytest_testnodedown(node, "EOF")
    assert controller.stopped.endswith("ImportError: acme.so: wrong ELF class")


def test_workers_that_cannot_load_the_checks_end_the_run_with_the_reason(controller):
    problem = RuntimeError("Traceback:\nUsageError: NAME='ACME' is not a backend")
    for _ in range(2):
        controller.pytest_testnodedown(NODE, problem)
    with pytest.raises(pytest.exit.Exception):
        controller.pytest_testnodedown(NODE, problem)
    assert controller.stopped == "no worker process starts: UsageError: NAME='ACME' is not a backend"


def test_the_list_is_made_in_a_child():
    listing = list_checks(SuiteRequest("TORCH", "cpu"), 120)
    assert isinstance(listing, Listing)
    assert (listing.name, listing.shipped_by, listing.device_type) == ("TORCH", "attnplug", "cpu")
    assert len(set(listing.ids)) == len(listing.ids) > 50
    assert {"Python", "attnplug", "torch"} <= set(listing.versions)


@pytest.mark.parametrize(
    ("patterns", "has_cases"),
    [
        (("declaration/name",), False),
        (("declaration/*", "merge/*"), False),
        (("declaration/name", "correct/*"), True),
        (("corr*/*",), True),
        (("*mixed*",), True),
        (("listed/*",), True),
    ],
)
def test_cases_are_searched_only_if_a_pattern_may_match_one(patterns, has_cases):
    ids = [each.id for each in conformance_checks(variant("PLAIN"), device="cpu", only=patterns)]
    assert any(each.startswith("correct/") for each in ids) is has_cases
    assert "declaration/name" in ids


@pytest.mark.slow
def test_a_pattern_that_matches_nothing_brings_the_whole_list_for_the_message():
    listing = list_checks(SuiteRequest("TORCH", "cpu", only=("declaration/nme",)), 120)
    assert isinstance(listing, Listing)
    assert any(each.startswith("correct/") for each in listing.ids)


def test_another_list_of_checks_may_be_asked_for():
    listing = list_checks(
        SuiteRequest("TORCH", "cpu", checks_of="attnplug.matrix.cell_checks:cell_checks"), 120
    )
    assert isinstance(listing, Listing)
    assert "sinks/decode/d128/bfloat16/auto/b16/NHD" in listing.ids
    assert listing.request.checks_of == "attnplug.matrix.cell_checks:cell_checks"


def test_a_list_of_checks_that_is_none_is_bad_usage():
    trouble = list_checks(SuiteRequest("TORCH", "cpu", checks_of="attnplug.matrix.model:cells"), 120)
    assert isinstance(trouble, ListingFailure)
    assert trouble.usage
    assert trouble.text.startswith("--attn-checks='attnplug.matrix.model:cells' names no function: module")


@pytest.fixture
def worker(monkeypatch, tmp_path):
    """A worker in this process, whose end raises SystemExit; its log is `log`."""
    made = object.__new__(Worker)
    made._log = os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT)
    os.write(made._log, b"what the kernel said first")
    monkeypatch.setattr(os, "_exit", sys.exit)
    yield made
    os.close(made._log)


def gpu(monkeypatch, *, is_used=True, problem=None):
    """torch with a GPU on which the next call raises `problem`."""

    def synchronize():
        if problem is not None:
            raise problem

    cuda = types.SimpleNamespace(is_initialized=lambda: is_used, synchronize=synchronize)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))


def test_a_worker_ends_with_the_context_of_its_gpu_and_says_why(worker, monkeypatch, tmp_path):
    gpu(monkeypatch, problem=RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(SystemExit):
        worker._end_without_gpu(ValueError("output is NaN"))
    assert cause_of_death(tmp_path / "log", 1.0)[0] == "the GPU's context was lost: ValueError: output is NaN"


@pytest.mark.parametrize("state", [{}, {"is_used": False, "problem": RuntimeError("no driver")}])
def test_a_worker_whose_gpu_works_or_is_not_used_goes_on(worker, monkeypatch, tmp_path, state):
    gpu(monkeypatch, **state)
    worker._end_without_gpu(ValueError("output is NaN"))
    monkeypatch.delitem(sys.modules, "torch")
    worker._end_without_gpu(ValueError("output is NaN"))
    assert (tmp_path / "log").read_bytes() == b"what the kernel said first"


def test_a_worker_sets_its_limits_before_torch_is_imported(run_with_plugins):
    code = "import sys, attnplug.testing.isolation.worker; print('torch' in sys.modules)"
    assert run_with_plugins([], code).stdout.strip() == "False"


def test_a_list_that_takes_too_long_is_given_up():
    trouble = list_checks(SuiteRequest("TORCH", "cpu"), 0.01)
    assert trouble == ListingFailure("listing the checks of TORCH took longer than 0.01 s", usage=False)


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("import os; os.abort()", "crashed: SIGABRT"),
        ("raise RuntimeError('no licence')", "failed: RuntimeError: no licence"),
        ("raise SystemExit(3)", "failed: the process left with exit code 3"),
    ],
)
def test_a_child_that_dies_while_it_lists_is_described(monkeypatch, code, how):
    monkeypatch.setattr("attnplug.testing.isolation.listing._CHILD", code)
    assert list_checks(SuiteRequest("TORCH"), 120) == ListingFailure(
        f"listing the checks of TORCH {how}", usage=False
    )


def test_the_child_reports_bad_usage_as_such(monkeypatch, tmp_path):
    from attnplug.testing.isolation.listing import main

    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    task = tmp_path / "task"
    task.write_text(json.dumps({"name": "TORCH", "device": "cpu", "level": "half"}))
    main(str(task), str(tmp_path / "report"))
    assert json.loads((tmp_path / "report").read_text()) == {
        "text": str(SpecError("level", "half", "must be one of smoke, full")),
        "usage": True,
    }
    assert codes == [0]


@pytest.mark.slow
def test_a_gpu_with_a_number_becomes_the_current_one(monkeypatch):
    import torch

    chosen = []
    monkeypatch.setattr(suites, "resolve_device", lambda device: Device("cpu"))
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for device in ("cuda:1", "rocm:0", "cpu", None):
        suites.load_suite("TORCH", device=device)
    assert chosen == [1, 0]
