"""`attnplug conformance`: what it runs, what it shows, what it remembers and how it ends."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import signal
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from attnplug.cli.output import conformance_report
from attnplug.testing.isolation import listing as listing_module
from attnplug.testing.isolation import run as run_module
from attnplug.testing.isolation.failures import Failure
from attnplug.testing.isolation.listing import Listing, SuiteRequest, list_checks
from attnplug.testing.isolation.results import CheckOutcome, Result, SavedResults


@pytest.fixture(scope="module")
def torch_checks() -> Listing:
    listing = list_checks(SuiteRequest("TORCH", "cpu"), 300)
    assert isinstance(listing, Listing)
    return listing


@pytest.fixture
def command(run, torch_checks, monkeypatch, tmp_path):
    """`command(...)` runs `attnplug conformance TORCH ...` in an empty folder, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(listing_module, "list_checks", lambda request, timeout, **rest: torch_checks)
    return lambda *args: run("conformance", "TORCH", "--device", "cpu", *args)


@pytest.fixture
def no_workers(monkeypatch):
    """Nothing runs; gives the ids that would, call by call."""
    asked = []

    def run_checks(listing, ids, limits, observer, **rest):
        asked.append(list(ids))
        for check in ids:
            observer.finished(Result(check, CheckOutcome.PASSED))

    monkeypatch.setattr(run_module, "run_checks", run_checks)
    return asked


def first(listing: Listing, count: int) -> list[str]:
    """Arguments that choose the first checks."""
    return [part for check in listing.ids[:count] for part in ("--only", check)]


def cases(path) -> dict[str, ET.Element]:
    """The test cases of a JUnit file by check id."""
    found = ET.parse(path).getroot().iter("testcase")
    return {case.attrib["name"].removeprefix("test_conformance[")[:-1]: case for case in found}


def test_help_fits_80_columns_and_names_the_exit_codes(run):
    outcome = run("conformance", "--help")
    assert outcome.code == 0
    assert max(map(len, outcome.out.splitlines())) <= 80
    assert "Exit codes: 0 all passed (or failed as known), 1 some failed, 2 bad usage, 130" in " ".join(
        outcome.out.split()
    )


@pytest.mark.slow
def test_checks_pass_whatever_pytest_is_told_in_the_folder(command, torch_checks, monkeypatch):
    monkeypatch.setenv("PYTEST_ADDOPTS", "-n 4 --no-such-option")
    Path("pytest.ini").write_text("[pytest]\naddopts = --no-such-option\nfilterwarnings = error\n")
    Path("conftest.py").write_text("raise RuntimeError('a conftest that nobody asked for')")
    Path("torch.py").write_text("raise RuntimeError('a torch that nobody asked for')")
    outcome = command(*first(torch_checks, 3), "--junit", "report.xml")
    lines = outcome.out.splitlines()
    assert (outcome.code, outcome.err) == (0, "")
    assert lines[0] == f"TORCH on cpu: 3 of {len(torch_checks.ids)} checks, level smoke, 1 worker"
    assert lines[-2].startswith("TORCH on cpu with Python ")
    assert ", torch " in lines[-2]
    assert lines[-1].startswith("3 checks passed in ")
    assert list(cases("report.xml")) == list(torch_checks.ids[:3])
    assert sorted(map(str, Path().iterdir())) == ["conftest.py", "pytest.ini", "report.xml", "torch.py"]


@pytest.mark.slow
def test_an_interrupted_run_goes_on_where_it_stopped(command, torch_checks, monkeypatch):
    finished = conformance_report.Report.finished

    def stop_after_two(self, result):
        finished(self, result)
        if len(self._results) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(conformance_report.Report, "finished", stop_after_two)
        outcome = command(*first(torch_checks, 5), "--junit", "report.xml")
    assert outcome.code == 130
    assert "interrupted: 2 checks passed; 3 to go" in outcome.out
    assert "run the same command with --resume to continue" in outcome.out
    assert not list(Path().iterdir())
    with SavedResults(torch_checks).path.open("a") as file:
        file.write('{"id": "torn')

    outcome = command(*first(torch_checks, 5), "--junit", "report.xml", "--resume", "--verbose")
    assert outcome.code == 0
    assert "2 results kept from the run before" in outcome.out
    shown = [line.split()[1] for line in outcome.out.splitlines() if line.startswith("passed ")]
    assert sorted(shown) == sorted(torch_checks.ids[2:5])
    assert sorted(cases("report.xml")) == sorted(torch_checks.ids[:5])


@pytest.mark.slow
def test_a_known_failure_that_passes_fails_and_says_so(command, torch_checks, monkeypatch):
    known = dataclasses.replace(torch_checks, known={torch_checks.ids[0]: "acme#12"})
    monkeypatch.setattr(listing_module, "list_checks", lambda request, timeout, **rest: known)
    outcome = command(*first(torch_checks, 2), "--known-failures", "known.toml", "--junit", "report.xml")
    assert outcome.code == 1
    assert "passed, though it is known to fail: acme#12; take it off the list" in outcome.out
    assert "\n1 check failed, 1 check passed in " in outcome.out
    assert cases("report.xml")[torch_checks.ids[0]].find("failure") is not None


@pytest.mark.slow
def test_a_terminal_sees_a_bar(command, torch_checks, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    outcome = command(*first(torch_checks, 2))
    assert outcome.code == 0
    assert "2/2" in outcome.err
    assert "━" in outcome.err


def test_only_what_did_not_pass_runs_again(command, torch_checks, no_workers):
    ids = torch_checks.ids
    SavedResults(torch_checks).path.parent.mkdir(parents=True)
    for check, outcome in ((ids[0], "passed"), (ids[1], "failed"), (ids[2], "skipped"), (ids[3], "known")):
        SavedResults(torch_checks).add(Result(check, CheckOutcome(outcome)))
    assert command("--resume").code == 0
    assert no_workers[-1] == [ids[1], *ids[3:]]
    assert command().code == 0
    assert no_workers[-1] == list(ids)


def test_nothing_left_to_run_starts_no_worker_and_still_writes_the_report(command, torch_checks, monkeypatch):
    SavedResults(torch_checks).path.parent.mkdir(parents=True)
    SavedResults(torch_checks).add(Result(torch_checks.ids[0], CheckOutcome.PASSED, 1.5))
    SavedResults(torch_checks).add(Result(torch_checks.ids[1], CheckOutcome.SKIPPED, 0.0, "nothing to try"))
    outcome = command(*first(torch_checks, 2), "--resume", "--junit", "report.xml")
    assert outcome.code == 0
    assert "1 check passed, 1 skipped in " in outcome.out
    passed, skipped = cases("report.xml").values()
    assert passed.attrib["time"] == "1.500"
    assert skipped.find("skipped").attrib["message"] == "nothing to try"
    assert command(*first(torch_checks, 2), "--resume").code == 0


def test_shards_are_disjoint_and_together_all(command, torch_checks, no_workers):
    for part in ("1/3", "2/3", "3/3"):
        assert f"shard {part}" in command("--shard", part).out
    assert sorted(check for part in no_workers for check in part) == sorted(torch_checks.ids)


def test_the_ids_are_listed(command, torch_checks, no_workers):
    assert command("--list").out.split() == list(torch_checks.ids)
    assert command("--list", "--only", torch_checks.ids[4]).out == f"{torch_checks.ids[4]}\n"
    assert not no_workers


def test_off_a_terminal_a_line_tells_how_far_it_is(command, torch_checks, no_workers):
    count = len(torch_checks.ids)
    lines = [line for line in command().out.splitlines() if f" of {count}: " in line]
    assert len(lines) == 10
    assert lines[-1] == f"{count} of {count}: {count} passed"


def test_failures_are_told_with_their_first_lines_and_a_check_unheard_of_failed(
    command, torch_checks, monkeypatch
):
    def run_checks(listing, ids, limits, observer, **rest):
        observer.started(ids[0])
        observer.finished(Result(ids[0], CheckOutcome.PASSED, 2.0))
        observer.finished(
            Result(
                ids[0], CheckOutcome.FAILED, 2.0, "\n".join(map(str, range(1, 14))), "the whole\ntraceback"
            )
        )
        observer.finished(Result(ids[1], CheckOutcome.KNOWN, 0.0, "acme#12"))
        return "all workers are gone"

    monkeypatch.setattr(run_module, "run_checks", run_checks)
    outcome = command(*first(torch_checks, 3))
    assert outcome.code == 1
    shown = "".join(f"        {line}\n" for line in [*range(1, 13), "... (--verbose shows all)"])
    again = (
        f"        rerun: attnplug conformance TORCH --only {torch_checks.ids[0]} --level smoke --device cpu"
    )
    assert f"failed  {torch_checks.ids[0]} (2.0 s)\n{shown}{again} --jobs 1\n" in outcome.out
    assert "        13\n" not in outcome.out
    assert f"failed  {torch_checks.ids[2]}\n        did not run\n" in outcome.out
    assert "the run stopped:\nall workers are gone\n" in outcome.out
    assert "2 checks failed, 0 checks passed, 1 failed as known in " in outcome.out
    assert "        the whole\n        traceback\n" in command(*first(torch_checks, 3), "--verbose").out


def test_the_first_check_of_each_mistake_is_shrunk_in_a_second_run(command, torch_checks, monkeypatch):
    calls = []

    def run_checks(listing, ids, limits, observer, **rest):
        calls.append((list(ids), limits.shrink))
        found = Failure("soft cap ignored", is_named=True, tokens=9)
        if limits.shrink:
            found = dataclasses.replace(found, size="1 request of 2 tokens", test="def test_soft_cap(): ...")
        for check in ids:
            # A verdict of the second run does not count.
            outcome = CheckOutcome.PASSED if limits.shrink else CheckOutcome.FAILED
            observer.finished(Result(check, outcome, failure=found))

    monkeypatch.setattr(run_module, "run_checks", run_checks)
    ids = list(torch_checks.ids[:3])
    outcome = command(*first(torch_checks, 3), "--shrink", "7")
    assert (outcome.code, calls) == (1, [(ids, 0.0), (ids[:1], 7.0)])
    assert f"        and 2 more checks say the same: {ids[1]}, {ids[2]}\n" in outcome.out
    assert (
        "        smallest failing step, 1 request of 2 tokens:\n\ndef test_soft_cap(): ...\n" in outcome.out
    )
    assert "3 checks failed, 0 checks passed in " in outcome.out
    checks = {each["id"]: each for each in command(*first(torch_checks, 3), "--json").json["checks"]}
    assert [checks[check]["smallest_step"] for check in ids] == ["def test_soft_cap(): ...", None, None]
    assert {each["mistake"] for each in checks.values()} == {"soft cap ignored"}
    calls.clear()
    command(*first(torch_checks, 3), "--shrink", "0")
    assert calls == [(ids, 0.0)]


@pytest.mark.parametrize("name", ["fp8", "bfloat16", "nvpf4"])
def test_a_format_without_a_codec_is_refused_by_its_option(name, run):
    outcome = run("conformance", "--format", name)
    assert outcome.code == 2
    assert f"--format={name!r} has no codec to prove; formats with one are nvfp4" in outcome.err


def test_an_interrupt_while_shrinking_keeps_the_report(command, torch_checks, monkeypatch):
    def run_checks(listing, ids, limits, observer, **rest):
        if limits.shrink:
            raise KeyboardInterrupt
        for check in ids:
            observer.finished(Result(check, CheckOutcome.FAILED, failure=Failure("sinks ignored")))

    monkeypatch.setattr(run_module, "run_checks", run_checks)
    outcome = command(*first(torch_checks, 3), "--shrink", "7", "--summary")
    assert outcome.code == 1
    assert "3 checks failed, 0 checks passed in " in outcome.out
    assert re.search(r"\d of 13 kinds of mistakes were tried, and \d of them (was|were) found\n", outcome.out)
    assert "--resume" not in outcome.out


def test_a_run_that_stops_is_no_success_even_where_nothing_failed(command, torch_checks, monkeypatch):
    monkeypatch.setattr(run_module, "run_checks", lambda *args, **rest: "pytest broke")
    SavedResults(torch_checks).path.parent.mkdir(parents=True)
    SavedResults(torch_checks).add(Result(torch_checks.ids[0], CheckOutcome.PASSED))
    assert command(*first(torch_checks, 1), "--resume", "--junit", "report.xml").code == 1


def test_a_cache_that_cannot_be_written_is_said_and_harms_nothing(command, tmp_path, no_workers):
    (tmp_path / "cache").write_text("a file where the folder should be")
    outcome = command()
    assert outcome.code == 0
    assert "nothing is kept for --resume: " in outcome.out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--level", "half"), "--level='half' must be smoke or full"),
        (("--shard", "5/4"), "--shard='5/4' must be I/N with I from 1 to N; such as 1/4"),
        (("--only", "corect/*"), "--only='corect/*' matches no check; "),
        (("--memory", "much"), "memory='much' must be bytes"),
        (("--junit", "no/such/folder.xml"), "--junit='no/such/folder.xml' is in no folder that exists"),
        (("--junit", "."), "--junit='.' is a folder"),
    ],
)
def test_bad_usage_exits_with_2_and_says_what_is_meant(command, no_workers, args, said):
    outcome = command(*args)
    assert outcome.code == 2
    assert said in outcome.err
    assert not no_workers


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ("TROCH",),
            "NAME='TROCH' is not a backend; loaded are FLASHINFER, FLASH_ATTN, FLASH_ATTN_2, FLASH_ATTN_3, FLASH_ATTN_4, FLASH_MLA, TORCH, TRITON; did you mean TORCH or TRITON?",
        ),
        (("TORCH", "--device", "sm35"), "TORCH does not run here on sm35: this machine has no sm35"),
    ],
)
def test_a_backend_or_device_that_is_not_here_is_bad_usage(run, args, said):
    outcome = run("conformance", *args)
    assert (outcome.code, outcome.out) == (2, "")
    assert said in outcome.err


def test_a_list_that_cannot_be_made_is_a_failure(command, monkeypatch):
    trouble = listing_module.ListingFailure("listing the checks of TORCH crashed: SIGSEGV", usage=False)
    monkeypatch.setattr(listing_module, "list_checks", lambda request, timeout, **rest: trouble)
    outcome = command()
    assert (outcome.code, outcome.err) == (1, "attnplug: listing the checks of TORCH crashed: SIGSEGV\n")


def test_an_interrupt_while_listing_ends_it(command, monkeypatch):
    def interrupted(request, timeout, **rest):
        raise KeyboardInterrupt

    monkeypatch.setattr(listing_module, "list_checks", interrupted)
    assert command().code == 130


def test_without_the_extra_it_says_what_to_install(command, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "xdist" else find(name))
    outcome = command()
    assert outcome.code == 2
    assert outcome.err == "attnplug: conformance needs pytest-xdist: pip install pytest-xdist\n"


def test_the_program_starts_without_pytest_and_torch(run_with_plugins):
    code = "import sys, attnplug.cli; print({'pytest', 'torch', 'xdist'} & set(sys.modules))"
    assert run_with_plugins([], code).stdout.strip() == "set()"
