"""Answers of several cells: verified only if every combination of served values was run, else sampled."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from synthetic_matrix import finding, run, synthetic_matrix

from attnplug.backends.triton import TritonBackend
from attnplug.matrix import Finding, Matrix, Run, Status
from attnplug.matrix.axes import Extent, served_values
from attnplug.matrix.design import declare
from attnplug.matrix.html import page_data
from attnplug.matrix.merging import merge
from attnplug.matrix.results import read_matrix, run_to_dict, write_matrix
from attnplug.matrix.summary import ValueSummary, summarise

SIZES, PHASES = (64, 80, 128), ("prefill", "decode")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def crossed(*left_out: tuple[int, str], status: Status = Status.VERIFIED) -> Run:
    """Each size in each phase is verified; those left out have another status, or no cell for VERIFIED."""
    findings = [
        finding(status if (size, phase) in left_out else Status.VERIFIED, head_size=size, phase=phase)
        for size, phase in itertools.product(SIZES, PHASES)
        if status is not Status.VERIFIED or (size, phase) not in left_out
    ]
    every = run(
        *(finding(Status.DECLARED, head_size=size, phase=phase) for size in SIZES for phase in PHASES)
    )
    return run(*findings, axes=served_values(every.findings))


def size_answer(found: Run, size: int) -> ValueSummary:
    return summarise(found).answers["head_size"][size]


def test_an_answer_whose_combinations_were_all_run_is_verified() -> None:
    summary = summarise(crossed())
    assert summary.total.status is Status.VERIFIED
    assert {answer.status for each in summary.answers.values() for answer in each.values()} == {
        Status.VERIFIED
    }


def test_one_combination_that_has_no_cell_makes_samples_of_its_values_alone() -> None:
    found = crossed((80, "decode"))
    assert summarise(found).total.status is Status.SAMPLED
    assert [size_answer(found, size).status for size in SIZES] == [
        Status.VERIFIED, Status.SAMPLED, Status.VERIFIED,
    ]  # fmt: skip
    assert size_answer(found, 80).ran == "1 cell"


@pytest.mark.parametrize("status", [Status.DECLARED, Status.NOT_RUN])
def test_a_combination_that_was_not_run_makes_a_sample(status: Status) -> None:
    found = crossed((80, "decode"), status=status)
    assert size_answer(found, 80).status is Status.SAMPLED
    assert size_answer(found, 80).ran == "1 of 2 phases"
    assert size_answer(found, 64).status is Status.VERIFIED


def test_a_combination_that_is_refused_needs_no_run() -> None:
    assert size_answer(crossed((80, "decode"), status=Status.REFUSED), 80).status is Status.VERIFIED


def test_a_sample_says_of_which_values_it_is() -> None:
    found = crossed()
    few = dataclasses.replace(found, findings=found.findings[:2])
    assert summarise(few).answers["phase"]["decode"].part == "1 of 3 head sizes"
    assert summarise(few).total.ran == "1 of 3 head sizes"
    assert run_to_dict(few)["sampled"] == {"cells": 2, "of": 6, "lacking": "1 of 3 head sizes"}
    assert run_to_dict(found)["sampled"] is None


def test_a_filter_does_not_make_a_sample_whole() -> None:
    every = declare(TritonBackend, "sm90")
    chosen = [
        Finding(each.cell, Status.VERIFIED)
        for each in every.findings
        if each.cell.feature == "fp8_kv" and each.cell.head_size in (64, 96, 128)
    ]
    answer = summarise(dataclasses.replace(every, findings=tuple(chosen))).answers["feature"]["fp8_kv"]
    # A filtered run has no refusals of the sizes that it left out, so those of other layers than latents count.
    sizes = {
        each.cell.head_size
        for each in every.findings
        if each.status is Status.DECLARED and each.cell.feature not in ("mla", "sparse")
    }
    assert len(sizes) > 20
    assert (answer.status, answer.part) == (Status.SAMPLED, f"3 of {len(sizes)} head sizes")


def test_every_pair_of_values_is_a_sample_too() -> None:
    every = declare(TritonBackend, "sm90")
    ran = tuple(
        each if each.status is Status.REFUSED else Finding(each.cell, Status.VERIFIED)
        for each in every.findings
    )
    summary = summarise(dataclasses.replace(every, findings=ran))
    answers = dict(summary.answers["feature"])
    assert {answer.status for answer in answers.values()} == {Status.SAMPLED}
    assert summary.answers["feature"]["fp8_kv"].ran.endswith(" cells")
    assert Extent(every).combinations() > 100 * len(every.findings)


def test_results_without_the_served_values_are_samples() -> None:
    for path in RESULTS.glob("matrix-*.json"):
        # What was compiled, and not run, says so.
        status = Status.COMPILED if path.stem == "matrix-triton-compiled" else Status.SAMPLED
        for found in read_matrix(path).runs:
            assert summarise(found).total.status is status, path
    assert summarise(dataclasses.replace(crossed(), axes=None)).total.status is Status.SAMPLED
    assert "sampled" not in run_to_dict(dataclasses.replace(crossed(), axes=None))


def test_the_served_values_are_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "matrix.json"
    write_matrix(Matrix((crossed(),)), path)
    assert read_matrix(path) == Matrix((crossed(),))
    data = json.loads(path.read_text())
    data["runs"][0]["axes"]["head_size"] = ["64", 0]
    path.write_text(json.dumps(data))
    with pytest.raises(Exception, match="axes, which must be null, or an object with a list of values"):
        read_matrix(path)


def test_joined_runs_keep_the_served_values() -> None:
    older = dataclasses.replace(crossed(), axes=None, date="2026-11-22T18:00:00+00:00")
    (found,) = merge([Matrix((crossed(),)), Matrix((older,))]).runs
    assert found.axes == crossed().axes


def test_the_page_says_which_answers_are_whole_and_what_others_lack() -> None:
    (whole,) = page_data(Matrix((crossed(),)))["runs"]
    assert [-1, -1] in whole["whole"]
    assert whole["lacking"] == []
    (sample,) = page_data(Matrix((crossed((80, "decode"), status=Status.NOT_RUN),)))["runs"]
    assert [-1, -1] not in sample["whole"]
    assert [2, 1, "1 of 2 phases"] in sample["lacking"]
    for found in page_data(synthetic_matrix())["runs"]:
        assert found["whole"] == []
