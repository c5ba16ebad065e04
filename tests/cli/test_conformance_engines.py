"""`attnplug conformance --engine`: the table, its JSON, the exit codes, and what does not go with it."""

from __future__ import annotations

import importlib.util

import pytest
from json_page import check_document

from attnplug.engines.table import ENGINES
from attnplug.testing.isolation import listing as listing_module
from attnplug.testing.isolation import run as run_module
from attnplug.testing.isolation.listing import Listing, ListingFailure
from attnplug.testing.isolation.results import CheckOutcome, Result

IDS = ("correct/decode-a", "correct/decode-b", "correct/mixed-sinks", "correct/mixed-window")
SKIPPED = "layer not served: flash-attn: its functions have no argument for sinks"


@pytest.fixture
def installed(monkeypatch):
    """`installed(*packages)`: only these packages of engines are there."""

    def only(*packages):
        right = importlib.util.find_spec
        others = {row.package for row in ENGINES.values()} - {*packages}
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *more: None if name in others else right(name, *more)
        )

    return only


@pytest.fixture
def command(run, monkeypatch):
    """`command(results, ...)` runs the command, whose workers end with these outcomes by id; the rest passes."""
    asked = []

    def call(results, *arguments):
        def list_checks(request, timeout, **rest):
            asked.append(request)
            return Listing(request, "TORCH", "attnplug", "cpu", "cpu", None, IDS, {}, {"Python": "3"}, "")

        def run_checks(listing, ids, limits, observer, **rest):
            for check in ids:
                observer.finished(results.get(check, Result(check, CheckOutcome.PASSED)))

        monkeypatch.setattr(listing_module, "list_checks", list_checks)
        monkeypatch.setattr(run_module, "run_checks", run_checks)
        return run("conformance", "TORCH", "--device", "cpu", *arguments), asked

    return call


def test_a_row_counts_the_checks_and_the_reasons_of_skips(command, installed):
    installed()
    skipped = {IDS[2]: Result(IDS[2], CheckOutcome.SKIPPED, cause=SKIPPED)}
    outcome, [asked] = command(skipped, "--engine", "flash-attn,vllm")
    assert outcome.code == 0
    assert asked.checks_of == "attnplug.engines.flash_attn:ENGINE.checks"
    words = " ".join(outcome.out.split())
    assert "flash-attn passed 3 0 1 1 its functions have no argument for sinks" in words
    assert "vllm skipped 0 0 0 vllm is not installed; pip install vllm" in words


def test_a_failed_check_ends_with_its_engine_and_exit_code_1(command):
    wrong = {IDS[3]: Result(IDS[3], CheckOutcome.FAILED, cause="output[0]: wrong")}
    outcome, _ = command(wrong, "--engine", "flash-attn", "--only", "correct/mixed-*")
    assert outcome.code == 1
    assert "flash-attn failed 1 1 0" in " ".join(outcome.out.split())
    assert "--engine flash-attn" in next(line for line in outcome.out.splitlines() if "rerun:" in line)


def test_no_engine_at_all_is_no_success(command, installed):
    installed()
    outcome, asked = command({}, "--engine", "vllm")
    assert (outcome.code, asked) == (1, [])
    assert "vllm is not installed" in outcome.out


def test_skips_alone_are_no_success(command):
    skipped = {check: Result(check, CheckOutcome.SKIPPED, cause=SKIPPED) for check in IDS}
    outcome, _ = command(skipped, "--engine", "flash-attn")
    assert outcome.code == 1
    assert "flash-attn skipped 0 0 4" in " ".join(outcome.out.split())


def test_the_json_has_the_engines(command, installed):
    installed()
    skipped = {IDS[2]: Result(IDS[2], CheckOutcome.SKIPPED, cause=SKIPPED)}
    outcome, _ = command(skipped, "--engine", "flash-attn", "--engine", "sglang", "--json")
    check_document(outcome.json)
    first, second = outcome.json["engines"]
    assert (first["engine"], first["result"], first["counts"]["passed"]) == ("flash-attn", "passed", 3)
    assert first["skipped"] == {SKIPPED.partition(": ")[2]: 1}
    assert (second["engine"], second["result"]) == ("sglang", "skipped")


def test_ids_are_listed_by_engine(command):
    outcome, _ = command({}, "--engine", "flash-attn", "--list")
    assert outcome.out.splitlines() == [f"flash-attn {check}" for check in IDS]
    outcome, _ = command({}, "--engine", "flash-attn", "--list", "--json")
    check_document(outcome.json)


@pytest.mark.parametrize("other", [("--resume",), ("--shard", "1/2"), ("--summary",), ("--junit", "-")])
def test_what_keeps_results_of_the_backend_is_refused(command, other):
    outcome, asked = command({}, "--engine", "flash-attn", *other)
    assert (outcome.code, asked) == (2, [])
    assert f"{other[0]}=" in outcome.err
    assert "is left out with --engine" in outcome.err


def test_an_unknown_engine_names_the_near_one(command):
    outcome, _ = command({}, "--engine", "flash_attn")
    assert outcome.code == 2
    assert "did you mean flash-attn?" in outcome.err


def test_an_engine_that_cannot_be_imported_is_a_failed_row(run, monkeypatch):
    failure = ListingFailure("--attn-checks names no function: broken", usage=True)
    monkeypatch.setattr(listing_module, "list_checks", lambda *given, **rest: failure)
    outcome = run("conformance", "TORCH", "--engine", "flash-attn")
    assert outcome.code == 1
    assert "names no function: broken" in " ".join(outcome.out.split())


@pytest.mark.slow
def test_the_checks_really_run_through_an_engine(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ids = ("--only", "correct/mixed-h4x2-d64-float32-b16-NHD", "--only", "correct/mixed-*-NHD-sinks")
    outcome = run("conformance", "TORCH", "--device", "cpu", "--engine", "flash-attn", "--json", *ids)
    assert outcome.code == 0, outcome.err
    check_document(outcome.json)
    [found] = outcome.json["engines"]
    assert found["counts"]["passed"] == 1
    assert found["skipped"] == {"flash-attn: its functions have no argument for sinks": 1}
