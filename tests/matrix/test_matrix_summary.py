"""What several cells say together: the strongest status, shared reasons, and values that do not go together."""

from __future__ import annotations

import pytest
from synthetic_matrix import cell, finding, run, synthetic_matrix

from attnplug.backends.triton.backend import TritonBackend
from attnplug.matrix import Finding, Matrix, Status
from attnplug.matrix.design import declare
from attnplug.matrix.summary import (
    ValueSummary,
    by_device,
    counts_in_words,
    evidence_lines,
    refusal_lines,
    serving,
    summarise,
    values_by_status,
    values_of,
)


def answer_of(*statuses: Status) -> ValueSummary:
    findings = [
        Finding(cell(head_size=size), status, ("because",)) for size, status in enumerate(statuses, start=1)
    ]
    return summarise(run(*findings)).answers["feature"]["plain"]


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ((Status.VERIFIED, Status.REFUTED, Status.REFUSED), Status.REFUTED),
        ((Status.DECLARED, Status.VERIFIED, Status.NOT_RUN), Status.SAMPLED),
        ((Status.NOT_RUN, Status.DECLARED), Status.DECLARED),
        ((Status.REFUSED, Status.UNCLAIMED, Status.NOT_RUN), Status.NOT_RUN),
        ((Status.REFUSED, Status.UNCLAIMED), Status.UNCLAIMED),
        ((Status.REFUSED, Status.REFUSED), Status.REFUSED),
    ],
)
def test_nothing_wrong_hides_behind_something_right(statuses: tuple[Status, ...], expected: Status) -> None:
    assert answer_of(*statuses).status is expected


def test_a_sample_says_of_which_values_it_is() -> None:
    assert (
        answer_of(Status.VERIFIED, Status.NOT_RUN, Status.DECLARED, Status.REFUSED).part
        == "1 of 3 head sizes"
    )


def test_a_fraction_says_how_many_of_the_claimed_cells_were_verified() -> None:
    values = [(64, "decode"), (64, "prefill"), (80, "decode"), (80, "prefill")]
    statuses = [Status.VERIFIED, Status.NOT_RUN, Status.DECLARED, Status.VERIFIED]
    cells = zip(values, statuses, strict=True)
    found = run(*(finding(status, head_size=size, phase=phase) for (size, phase), status in cells))
    assert summarise(found).total.part == "2/4"


def test_a_fraction_says_how_many_of_the_claimed_cells_were_refuted() -> None:
    assert answer_of(Status.VERIFIED, Status.REFUTED).part == "1/2"


@pytest.mark.parametrize("status", [Status.VERIFIED, Status.REFUTED, Status.DECLARED, Status.REFUSED])
def test_cells_that_agree_need_no_fraction(status: Status) -> None:
    assert answer_of(status, status).part == ""


def test_a_run_without_cells_is_not_run() -> None:
    assert summarise(run()).total.status is Status.NOT_RUN


def test_a_refused_value_has_the_reasons_that_all_its_cells_share() -> None:
    refused = run(
        finding(Status.REFUSED, "sinks not supported", feature="sinks"),
        finding(Status.REFUSED, "576 is too large", "sinks not supported", feature="sinks", head_size=576),
    )
    assert summarise(refused).answers["feature"]["sinks"].why == ("sinks not supported",)


def test_a_refused_value_whose_cells_share_no_reason_has_those_of_the_shortest() -> None:
    refused = run(finding(Status.REFUSED, "one", "two"), finding(Status.REFUSED, "three", head_size=576))
    assert summarise(refused).answers["feature"]["plain"].why == ("three",)


def test_a_refuted_value_has_all_evidence_once() -> None:
    refuted = run(
        finding(Status.REFUTED, "off by 1"),
        finding(Status.REFUTED, "off by 1", "no window", head_size=64),
        finding(Status.REFUSED, "too large", head_size=576),
    )
    assert summarise(refuted).total.why == ("off by 1", "no window")


def test_values_that_are_served_but_not_together_limit_each_other() -> None:
    limited = run(
        finding(Status.DECLARED, feature="alibi"),
        finding(Status.DECLARED, head_size=256),
        finding(Status.REFUSED, "not with 256", feature="alibi", head_size=256),
    )
    answers = summarise(limited).answers
    (limit,) = answers["feature"]["alibi"].limits
    assert (limit.axis, limit.value, limit.why) == ("head_size", 256, ("not with 256",))
    (back,) = answers["head_size"][256].limits
    assert (back.axis, back.value) == ("feature", "alibi")
    assert answers["feature"]["plain"].limits == ()


def test_a_feature_lists_the_values_that_it_is_served_with_where_others_are_refused() -> None:
    storage = {"fp8": Status.REFUSED, "fp8_e4m3": Status.REFUSED, "fp8_e5m2": Status.DECLARED}
    found = [finding(status, feature="fp8_kv", kv_cache_dtype=name) for name, status in storage.items()]
    for cells in (found, [*found, finding(Status.DECLARED)]):
        answers = summarise(run(*cells)).answers
        assert str(answers["feature"]["fp8_kv"].restriction) == "fp8_e5m2 only"
        assert answers["kv_cache_dtype"]["fp8_e5m2"].restriction is None


@pytest.mark.parametrize("device", ["sm80", "sm86"])
def test_fp8_where_triton_has_e5m2_alone_says_so(device: str) -> None:
    answer = summarise(declare(TritonBackend, device)).answers["feature"]["fp8_kv"]
    assert answer.counts[Status.REFUSED] > answer.counts[Status.DECLARED]
    assert str(answer.restriction) == "fp8_e5m2 only"
    assert summarise(declare(TritonBackend, "sm90")).answers["feature"]["fp8_kv"].restriction is None


@pytest.mark.parametrize(
    ("served", "refused", "words"),
    [
        ({"phase": ["decode"]}, {"phase": ["prefill", "mixed"]}, "decode only"),
        ({"head_size": [64]}, {"head_size": [80, 96]}, "head size 64 only"),
        ({"head_size": [128, 64]}, {"head_size": [80]}, "head size 64 and 128 only"),
        ({"kv_cache_dtype": ["auto"]}, {"kv_cache_dtype": ["fp8_e4m3"]}, "KV dtype auto only"),
        ({"head_size": [16, 32, 64]}, {"head_size": [80, 96, 112, 128]}, "3 of 7 head sizes"),
        ({"head_size": [16, 32, 64]}, {"head_size": [80, 96]}, None),
    ],
)
def test_a_feature_with_fewer_values_than_others_names_or_counts_them(
    served: dict[str, list[object]], refused: dict[str, list[object]], words: str | None
) -> None:
    (axis,) = served
    plain = [finding(Status.DECLARED, **{axis: value}) for value in (*served[axis], *refused[axis])]
    sinks = [
        finding(status, feature="sinks", **{axis: value})
        for status, values in ((Status.DECLARED, served[axis]), (Status.REFUSED, refused[axis]))
        for value in values
    ]
    answer = summarise(run(*plain, *sinks)).answers["feature"]["sinks"]
    assert (answer.restriction and str(answer.restriction)) == words
    assert answer.is_starred is (words is None)


def test_a_value_that_is_refused_with_everything_restricts_no_other() -> None:
    found = [finding(Status.DECLARED, head_size=64)]
    found += [finding(Status.REFUSED, "no", head_size=size) for size in (80, 96, 112)]
    assert summarise(run(*found)).answers["feature"]["plain"].restriction is None


def test_a_value_that_is_served_nowhere_limits_nothing() -> None:
    refused = run(
        finding(Status.DECLARED, feature="alibi"),
        finding(Status.REFUSED, "576 is too large", feature="alibi", head_size=576),
    )
    assert summarise(refused).answers["feature"]["alibi"].limits == ()


def test_values_that_another_cell_serves_together_limit_nothing() -> None:
    served = run(
        finding(Status.DECLARED, feature="alibi", head_size=256),
        finding(Status.REFUSED, "not in float32", feature="alibi", head_size=256, dtype="float32"),
        finding(Status.DECLARED, dtype="float32"),
    )
    limits = summarise(served).answers["feature"]["alibi"].limits
    assert [(limit.axis, limit.value) for limit in limits] == [("dtype", "float32")]


def test_the_values_of_an_axis_stand_in_reading_order() -> None:
    summary = summarise(
        run(
            *(finding(Status.DECLARED, head_size=size, feature="mla") for size in (256, 64)),
            finding(Status.DECLARED),
        )
    )
    assert list(summary.answers["head_size"]) == [64, 128, 256]
    assert list(summary.answers["feature"]) == ["plain", "mla"]
    assert values_of([summary, summarise(run(finding(Status.DECLARED, feature="zeta")))], "feature") == [
        "plain",
        "mla",
        "zeta",
    ]


def test_runs_are_told_apart_by_device() -> None:
    found = by_device(Matrix((run(device="cpu"), run(device="sm90"), run(backend="TRITON", device="cpu"))))
    assert {device: [each.backend for each in runs] for device, runs in found.items()} == {
        "cpu": ["TORCH", "TRITON"],
        "sm90": ["TORCH"],
    }


def test_counts_name_what_is_there() -> None:
    assert (
        counts_in_words(answer_of(Status.REFUSED, Status.VERIFIED, Status.REFUSED).counts)
        == "1 verified, 2 refused"
    )
    assert counts_in_words(summarise(run()).total.counts) == "none"


def test_lists_of_values_have_a_star_for_limits_and_no_place_for_missing_pages() -> None:
    summary = summarise(
        run(
            finding(Status.VERIFIED, block_size=16),
            finding(Status.VERIFIED, block_size=32),
            finding(Status.VERIFIED, block_size=16, head_size=64),
            finding(Status.REFUSED, "not with 64", block_size=32, head_size=64),
            finding(Status.VERIFIED, feature="direct_kv", block_size=None, layout=None),
            finding(Status.REFUSED, "too small", block_size=1),
        )
    )
    assert values_by_status("block_size", summary.answers["block_size"]) == {
        Status.SAMPLED: "16, 32*",
        Status.REFUSED: "1",
    }


def test_who_serves_nothing_is_said_with_the_shared_reason() -> None:
    summaries = [
        summarise(run(finding(Status.DECLARED))),
        summarise(run(finding(Status.REFUSED, "cpu is not cuda"), backend="FLASHINFER")),
    ]
    assert serving(summaries) == summaries[:1]
    assert refusal_lines(summaries) == ["FLASHINFER: cpu is not cuda"]


def test_evidence_is_said_once_for_all_cells_that_share_it() -> None:
    findings = [finding(Status.NOT_RUN, "no time left", head_size=size) for size in (16, 32, 64, 80, 96)]
    lines = evidence_lines([summarise(run(*findings, finding(Status.NOT_RUN)))], Status.NOT_RUN)
    assert lines == [
        f"TORCH {', '.join(each.cell.id for each in findings[:3])} and 2 more: no time left",
        "TORCH plain/prefill/d128/bfloat16/auto/b16/NHD: nothing was recorded",
    ]


def test_every_cell_is_counted_once_for_each_axis() -> None:
    for each in synthetic_matrix().runs:
        for answers in summarise(each).answers.values():
            assert sum(sum(answer.counts.values()) for answer in answers.values()) == len(each.findings)
