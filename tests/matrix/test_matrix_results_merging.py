"""Runs of several machines and days as one: what stands, and what is said of the rest."""

from __future__ import annotations

import pytest
from synthetic_matrix import finding, run

from attnplug.matrix.merging import join, merge
from attnplug.matrix.model import Matrix, Status
from attnplug.matrix.results import run_to_dict

EARLY, LATE = "2026-11-20T10:00:00+00:00", "2026-11-21T10:00:00+01:00"
NEW = {"python": "3.12.3", "torch": "2.12.0"}
OLD = {"python": "3.12.3", "torch": "2.11.0"}


@pytest.fixture
def said():
    return []


@pytest.fixture
def merged(said):
    """`merged(run, run)`: the one run that comes of files with a run each."""

    def join(*runs):
        (only,) = merge([Matrix((each,)) for each in runs], said.append).runs
        return only

    return join


def ran(*findings, date=EARLY, versions=OLD, **fields):
    about = {"device_name": "NVIDIA H200", "commit": "a" * 40, **fields}
    return run(*findings, device="sm90", date=date, versions=versions, **about)


def statuses(found) -> dict[int, str]:
    return {each.cell.head_size: str(each.status) for each in found.findings}


def test_other_backends_and_devices_stand_side_by_side(said):
    runs = [run(), run(device="sm90"), run(backend="TRITON", device="sm90")]
    found = merge([Matrix(tuple(runs[:2])), Matrix(tuple(runs[2:]))], said.append)
    assert [each.key for each in found.runs] == [("TORCH", "cpu"), ("TORCH", "sm90"), ("TRITON", "sm90")]
    assert said == []


def test_nothing_comes_of_nothing():
    assert merge([]) == Matrix(())


@pytest.mark.parametrize("newer_first", [False, True])
def test_of_two_runs_the_newer_says_how_a_cell_is(merged, said, newer_first):
    runs = [ran(finding(Status.REFUTED, "off by one")), ran(finding(Status.VERIFIED), date=LATE)]
    assert statuses(merged(*(runs[::-1] if newer_first else runs))) == {128: "verified"}
    (told,) = said
    assert told == (
        "TORCH on sm90: plain/prefill/d128/bfloat16/auto/b16/NHD was refuted on "
        "2026-11-20T10:00:00+00:00, and is verified on 2026-11-21T10:00:00+01:00"
    )


def test_evidence_beats_a_newer_run_that_did_not_run_the_cell(merged, said):
    early = ran(finding(Status.VERIFIED), finding(Status.NOT_RUN, "interrupted", head_size=64))
    late = ran(finding(Status.NOT_RUN, "interrupted"), finding(Status.VERIFIED, head_size=64), date=LATE)
    found = merged(early, late)
    assert statuses(found) == {128: "verified", 64: "verified"}
    assert (found.date, said) == (LATE, [])


def test_cells_that_only_one_run_has_are_kept(merged):
    early = ran(finding(Status.VERIFIED), finding(Status.VERIFIED, head_size=80))
    assert statuses(merged(early, ran(finding(Status.VERIFIED), date=LATE))) == {
        128: "verified",
        80: "verified",
    }


def test_a_newer_reason_is_the_one_given(merged):
    early, late = (
        ran(finding(Status.REFUSED, why), date=date) for why, date in (("no", EARLY), ("not yet", LATE))
    )
    assert merged(late, early).findings[0].why == ("not yet",)


def test_a_run_with_evidence_beats_a_newer_declaration_without_a_word(merged, said):
    declared = ran(finding(Status.DECLARED), date=LATE, versions={}, device_name=None)
    assert statuses(merged(declared, ran(finding(Status.VERIFIED)))) == {128: "verified"}
    assert said == []


def test_cells_of_other_versions_are_not_mixed(merged, said):
    early = ran(finding(Status.VERIFIED), finding(Status.VERIFIED, head_size=64))
    late = ran(finding(Status.VERIFIED), date=LATE, versions=NEW)
    assert statuses(merged(late, early)) == {128: "verified"}
    assert said == [
        f"TORCH on sm90 of {EARLY} is left out for TORCH on sm90 of {LATE}; torch 2.11.0 is not 2.12.0"
    ]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"device_name": "NVIDIA H100"}, "NVIDIA H100 is not NVIDIA H200"),
        ({"device_name": None}, "an unnamed device is not NVIDIA H200"),
        ({"version": "0.0.9"}, "version 0.0.9 is not 0.1.0"),
        ({"versions": {**OLD, "triton": "3.6.0"}}, "triton 3.6.0 is not missing"),
        ({"versions": {"python": "3.12.3"}}, "torch missing is not 2.11.0"),
        ({"distribution": "attnplug-fork"}, "attnplug-fork is not attnplug"),
    ],
)
def test_nor_those_of_another_device_or_distribution(merged, said, fields, why):
    early, late = ran(finding(Status.REFUTED, "x"), **fields), ran(finding(Status.VERIFIED), date=LATE)
    assert statuses(merged(early, late)) == {128: "verified"}
    assert said[0].endswith(f"; {why}")


def test_of_declarations_the_newest_stands_and_the_others_are_said(merged, said):
    early = ran(finding(Status.DECLARED), versions={}, version="0.0.9")
    assert merged(early, ran(finding(Status.REFUSED, "no"), versions={}, date=LATE)).findings[0].why == (
        "no",
    )
    assert len(said) == 1


def test_cells_of_several_commits_are_joined_and_that_is_said(merged, said):
    early, late = ran(finding(Status.VERIFIED)), ran(finding(Status.VERIFIED), date=LATE, commit=None)
    assert merged(early, late).commit is None
    assert said == ["TORCH on sm90: cells of aaaaaaaaaaaa, no commit are joined"]


def test_of_equal_dates_the_later_file_wins_and_nobody_need_listen():
    runs = [ran(finding(Status.REFUTED, "x")), ran(finding(Status.VERIFIED))]
    (found,) = merge([Matrix((each,)) for each in runs]).runs
    assert statuses(found) == {128: "verified"}


@pytest.fixture
def joined(said):
    """`joined(run, run)`: the one run that people see of files with a run each."""

    def together(*runs):
        (only,) = join([Matrix((each,)) for each in runs], said.append).runs
        return only

    return together


def origins(found) -> dict[int, tuple[str, str, str]]:
    """The status, the card and the torch of each cell, by its head size."""
    return {
        each.cell.head_size: (str(each.status), source.device_name, source.versions.get("torch"))
        for each in found.findings
        for source in [found if each.source is None else found.sources[each.source]]
    }


@pytest.mark.parametrize("late_first", [False, True])
def test_people_see_the_cells_of_other_cards_and_versions_with_their_source(joined, said, late_first):
    early = ran(finding(Status.VERIFIED), finding(Status.VERIFIED, head_size=64), device_name="NVIDIA H100")
    late = ran(finding(Status.VERIFIED, head_size=80), date=LATE, versions=NEW)
    found = joined(*((late, early) if late_first else (early, late)))
    assert origins(found) == {
        128: ("verified", "NVIDIA H100", "2.11.0"),
        64: ("verified", "NVIDIA H100", "2.11.0"),
        80: ("verified", "NVIDIA H200", "2.12.0"),
    }
    # The run with most of the cells gives the joined one its name.
    assert (found.device_name, found.date) == ("NVIDIA H100", EARLY)
    assert [(each.date, each.findings) for each in found.sources] == [(LATE, ())]
    assert said == []


def test_of_two_sources_the_newer_answers_a_cell_and_one_without_a_cell_is_none(joined):
    early = ran(finding(Status.VERIFIED), finding(Status.VERIFIED, head_size=64))
    late = ran(finding(Status.VERIFIED), date=LATE, versions=NEW)
    assert origins(joined(early, late))[128] == ("verified", "NVIDIA H200", "2.12.0")
    older = ran(
        finding(Status.VERIFIED, head_size=64), versions={"torch": "2.10.0"}, date="2026-11-19T10:00:00+00:00"
    )
    assert [each.date for each in joined(early, late, older).sources] == [LATE]


def test_runs_of_one_source_are_one(joined):
    first, second = (ran(finding(Status.VERIFIED, head_size=size)) for size in (64, 80))
    other = ran(finding(Status.VERIFIED, head_size=96), versions=NEW, date=LATE)
    found = joined(first, other, second)
    assert set(origins(found)) == {64, 80, 96}
    assert [each.date for each in found.sources] == [LATE]


def test_what_was_run_counts_more_than_what_another_compiled_or_claims(joined):
    main = ran(finding(Status.VERIFIED), finding(Status.DECLARED, head_size=64))
    compiled = ran(
        finding(Status.COMPILED),
        finding(Status.COMPILED, head_size=64),
        versions={"triton": "3.7.1"},
        date=LATE,
    )
    claims = ran(finding(Status.REFUSED, "no", head_size=80), versions=NEW, date=LATE)
    found = joined(main, compiled, claims)
    assert origins(found) == {
        128: ("verified", "NVIDIA H200", "2.11.0"),
        64: ("compiled", "NVIDIA H200", None),
    }


@pytest.mark.parametrize(("card", "status"), [("NVIDIA H100", "refuted"), ("NVIDIA H200", "verified")])
def test_a_newer_run_clears_a_wrong_cell_only_on_the_card_where_it_was_wrong(joined, said, card, status):
    wrong = ran(finding(Status.REFUTED, "off"), device_name=card)
    right = ran(finding(Status.VERIFIED), finding(Status.VERIFIED, head_size=64), date=LATE, versions=NEW)
    found = joined(wrong, right)
    assert origins(found)[128][:2] == (status, card)
    assert len(said) == 1
    assert said[0].startswith("TORCH on sm90: plain/prefill/d128/bfloat16/auto/b16/NHD was refuted on ")


@pytest.mark.parametrize(
    ("cards", "status"),
    [
        # Each card in order of time, and what it found.
        (("H100 refuted", "H200 refuted", "H200 verified"), ("refuted", "H100")),
        (("H100 refuted", "H200 refuted", "H100 verified"), ("refuted", "H200")),
        (("H100 refuted", "H200 refuted", "H200 verified", "H100 verified"), ("verified", "H100")),
        (("H100 verified", "H200 refuted", "H100 verified"), ("refuted", "H200")),
    ],
)
def test_a_cell_that_was_wrong_on_two_cards_is_right_once_it_is_right_on_both(joined, cards, status):
    runs = [
        ran(
            finding(Status(found), *(["off"] if found == "refuted" else [])),
            device_name=card,
            versions={"torch": f"2.{number}.0"},
            date=f"2026-11-2{number}T10:00:00+00:00",
        )
        for number, (card, found) in enumerate(map(str.split, cards))
    ]
    assert origins(joined(*runs))[128][:2] == status


def test_another_version_of_the_backend_does_not_join(joined, said):
    early = ran(finding(Status.VERIFIED), finding(Status.VERIFIED, head_size=64), version="0.0.9")
    assert set(origins(joined(early, ran(finding(Status.VERIFIED), date=LATE)))) == {128}
    assert said[0].endswith("; version 0.0.9 is not 0.1.0")


def test_no_file_is_written_of_several_sources(joined):
    early = ran(finding(Status.VERIFIED), device_name="NVIDIA H100")
    found = joined(early, ran(finding(Status.VERIFIED, head_size=64), date=LATE))
    with pytest.raises(ValueError, match="TORCH on sm90 has the cells of several cards or versions"):
        run_to_dict(found)


def test_other_backends_and_devices_are_joined_with_none():
    runs = [run(), run(device="sm90"), run(backend="TRITON", device="sm90")]
    assert join([Matrix(tuple(runs))]) == Matrix(tuple(runs))
