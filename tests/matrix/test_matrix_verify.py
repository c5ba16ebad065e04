"""Cells as checks, and what running them makes of claims; workers are played, but for one run at the end."""

from __future__ import annotations

import dataclasses

import pytest
from synthetic_matrix import cell, finding, run

from attnplug.backends.torch_native.backend import TorchBackend
from attnplug.core.composite import composite_backend
from attnplug.core.device import Device
from attnplug.core.features import Feature
from attnplug.core.spec import Phase
from attnplug.matrix import verify
from attnplug.matrix.axes import spec_of
from attnplug.matrix.cell_checks import cases_of, cell_checks
from attnplug.matrix.design import design
from attnplug.matrix.model import Status
from attnplug.matrix.verify import RunScope, Verification
from attnplug.registry.plugins.records import Offer
from attnplug.testing.conformance.check import CheckSkipped, ConformanceError
from attnplug.testing.conformance.target import Target
from attnplug.testing.design.search import compile_key
from attnplug.testing.isolation.listing import Listing, ListingFailure, SuiteRequest
from attnplug.testing.isolation.results import CheckOutcome, Result
from attnplug.testing.isolation.run import Limits

CPU = Device("cpu")
LIMITS = Limits(60.0, 2, None)


class Compiling(TorchBackend):
    """TORCH, as if each head size were compiled, and those of fp8 not known."""

    @staticmethod
    def get_name() -> str:
        return "COMPILING"

    @classmethod
    def compile_key(cls, spec):
        if spec.kv_cache_dtype != "auto":
            raise RuntimeError("which?")
        return None if spec.head_size == 16 else ["unhashable"] if spec.head_size == 32 else spec.head_size


class NoWindows(TorchBackend):
    """TORCH, that takes every window for none."""

    @classmethod
    def get_impl_cls(cls):
        class Impl(super().get_impl_cls()):
            @classmethod
            def from_spec(cls, spec, **options):
                return super().from_spec(spec.replace(window=(-1, -1)), **options)

        return Impl


class OnlyDecodes(TorchBackend):
    """TORCH, for decode steps alone."""

    supported_phases = (Phase.DECODE,)

    @staticmethod
    def get_name() -> str:
        return "ONLY_DECODES"


def check_of(backend, **values):
    """The check of one cell."""
    wanted = cell(**values).id
    return next(check for check in cell_checks(Target(backend, CPU)) if check.id == wanted)


class Observer:
    def __init__(self) -> None:
        self.started_ids: list[str] = []
        self.results: list[Result] = []

    def started(self, check_id: str) -> None:
        self.started_ids.append(check_id)

    def finished(self, result: Result) -> None:
        self.results.append(result)


@pytest.fixture
def observer():
    return Observer()


@pytest.fixture
def play(monkeypatch, tmp_path):
    """`play(declared, results)`: a Verification whose workers give these results, one after another."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    listing = Listing(SuiteRequest("TORCH"), "TORCH", "attnplug", "cpu", "cpu", None, (), {}, {}, "0123")

    def make(declared, results=(), *, listed=listing, problem=None, backend=TorchBackend, **extent):
        def run_checks(listing, ids, limits, observer):
            for result in results:
                if result is KeyboardInterrupt:
                    raise KeyboardInterrupt
                observer.started(result.id)
                observer.finished(result)
            return problem

        monkeypatch.setattr(verify, "list_checks", lambda request, timeout: listed)
        monkeypatch.setattr(verify, "run_checks", run_checks)
        offer = Offer("TORCH", backend, "attnplug:torch", "attnplug", "0.1.0")
        return Verification(declared, offer, CPU, name="TORCH", extent=RunScope(**extent))

    return make


def result(cause="", outcome=None, **values) -> Result:
    ended = outcome or (CheckOutcome.FAILED if cause else CheckOutcome.PASSED)
    return Result(cell(**values).id, ended, 0.5, cause)


def found(verification) -> list:
    return [(each.status, each.why) for each in verification.outcome().findings]


# Checks of cells.


def test_each_cell_is_a_check_under_its_id():
    target = Target(TorchBackend, CPU)
    assert [check.id for check in cell_checks(target)] == [each.id for each in design(TorchBackend, CPU)]


def test_cells_of_one_compile_key_are_one_group_and_others_stand_alone():
    checks = {check.id: check.group for check in cell_checks(Target(Compiling, CPU))}
    by_size = {
        size: {group for check, group in checks.items() if f"/d{size}/" in check and "/auto/" in check}
        for size in (16, 32, 64, 128)
    }
    assert by_size[16] == by_size[32] == {None}
    assert len(by_size[64]) == len(by_size[128]) == 1
    assert by_size[64] != by_size[128]
    assert {group for check, group in checks.items() if "/fp8_e4m3/" in check} == {None}


@pytest.mark.parametrize(
    ("values", "shapes"),
    [
        ({"phase": "prefill"}, ["prefill", "extend"]),
        ({"phase": "decode"}, ["decode"]),
        ({"phase": "mixed"}, ["mixed"]),
        ({"phase": "prefill", "feature": "encoder", "block_size": None, "layout": None}, ["prefill"]),
    ],
)
def test_a_phase_is_tried_in_the_batches_that_stand_for_it(values, shapes):
    cases = cases_of(cell(**values), TorchBackend)
    assert [case.shape for case in cases] == shapes
    assert {(case.block_size, case.layout) for case in cases} == {(16, "NHD")}


def test_a_composite_is_tried_with_decodes_in_front_too():
    both = composite_backend(Compiling, OnlyDecodes)
    assert [case.shape for case in cases_of(cell(phase="mixed"), both)] == ["mixed", "ordered"]
    check_of(both, phase="mixed")()


@pytest.mark.parametrize("feature", ["plain", "sinks", "sliding_window", "lse"])
def test_a_cell_that_is_right_passes(feature):
    check_of(TorchBackend, feature=feature, phase="mixed")()


def test_a_cell_that_is_wrong_fails_with_the_case_the_numbers_and_the_name_of_the_mistake():
    with pytest.raises(ConformanceError) as failed:
        check_of(NoWindows, feature="sliding_window", phase="prefill")()
    assert str(failed.value).startswith("prefill-h4x2-d128-bfloat16-b16-NHD-window6.0: output")
    assert "; these are the numbers of a known mistake: sliding window ignored" in str(failed.value)
    assert failed.value.named == "sliding window ignored"


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"kv_cache_dtype": "mxfp4"}, "stores no kv_cache_dtype='mxfp4'"),
    ],
)
def test_layers_that_the_kit_has_no_batches_of_are_skipped(values, why):
    with pytest.raises(CheckSkipped, match=why):
        cases_of(cell(phase="decode", **values), TorchBackend)


# Which cells are run.


def test_the_keys_of_most_claimed_cells_come_first_and_none_last(play):
    sizes = (16, 64, 128)
    cells = [{"head_size": size, "dtype": dtype} for size in sizes for dtype in ("bfloat16", "float16")]
    assert [compile_key(Compiling, spec_of(cell(**each))) for each in cells] == [None, None, 64, 64, 128, 128]
    claimed = (cells[5], cells[0])
    declared = run(
        *(finding(Status.DECLARED if each in claimed else Status.REFUSED, **each) for each in cells)
    )
    ids = play(declared, backend=Compiling, unclaimed=True).ids
    assert ids == [cell(**cells[index]).id for index in (4, 5, 2, 3, 0, 1)]


def test_what_is_claimed_is_run_and_what_is_refused_when_asked(play):
    declared = run(finding(Status.DECLARED), finding(Status.REFUSED, "no", head_size=64))
    assert play(declared).ids == [cell().id]
    assert play(declared, unclaimed=True).ids == [cell().id, cell(head_size=64).id]


def test_beyond_the_limit_of_compilations_nothing_is_run(play):
    sizes = (16, 64, 128, 128)
    cells = [
        {"head_size": size, "dtype": dtype}
        for size, dtype in zip(sizes, ("bfloat16",) * 3 + ("float16",), strict=True)
    ]
    declared = run(*(finding(Status.DECLARED, **values) for values in cells))
    limited = play(declared, backend=Compiling, compile_limit=1)
    assert (limited.ids, limited.compile_keys) == (
        [cell(**values).id for values in (cells[2], cells[3], cells[0])],
        1,
    )
    assert limited.prepare() is None
    assert found(limited)[1] == (
        Status.NOT_RUN,
        ("compiles for one of 1 keys beyond the limit of 1",),
    )
    assert play(declared, backend=Compiling).compile_keys == 2


# What results make of claims.


@pytest.mark.parametrize(
    ("ended", "status"),
    [
        (result(), Status.VERIFIED),
        (result("output[0]: 1 is not 2; known mistake: window ignored"), Status.REFUTED),
        (result("the worker process crashed: SIGSEGV at impl.py:29, in attend"), Status.REFUTED),
        (result("the GPU's context was lost: AcceleratorError: illegal memory access"), Status.REFUTED),
        (result("RuntimeError: out of resource: shared memory"), Status.REFUTED),
        (result("timed out after 120 s at impl.py:29"), Status.NOT_RUN),
        (result("out of memory: can't allocate memory"), Status.NOT_RUN),
        (result("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"), Status.NOT_RUN),
        (
            result("the worker process crashed: SIGKILL, as when the system runs out of memory"),
            Status.NOT_RUN,
        ),
        (result("the worker process crashed: SIGTERM"), Status.NOT_RUN),
        (result("attnplug.core.errors.BackendUnavailableError: nvcc is missing"), Status.NOT_RUN),
        (result("the kit has no batches of it", CheckOutcome.SKIPPED), Status.NOT_RUN),
    ],
)
def test_a_claim_is_verified_refuted_or_not_run(play, observer, ended, status):
    verification = play(run(finding(Status.DECLARED)), [ended])
    assert verification.prepare() is None
    assert verification.run(LIMITS, observer) is None
    assert found(verification) == [(status, (ended.cause,) if ended.cause else ())]
    assert verification.status_of(ended) is status
    assert (observer.started_ids, observer.results) == ([ended.id], [ended])


def test_a_failure_without_a_word_is_evidence_too(play, observer):
    verification = play(run(finding(Status.DECLARED)), [result(outcome=CheckOutcome.FAILED)])
    verification.prepare()
    verification.run(LIMITS, observer)
    assert found(verification) == [(Status.REFUTED, ("it failed and did not say why",))]


def test_what_is_refused_is_unclaimed_where_it_works_and_refused_where_not(play, observer):
    declared = run(finding(Status.REFUSED, "no"), finding(Status.REFUSED, "never", head_size=64))
    verification = play(declared, [result(), result("wrong", head_size=64)], unclaimed=True)
    verification.prepare()
    verification.run(LIMITS, observer)
    assert found(verification) == [(Status.UNCLAIMED, ("no",)), (Status.REFUSED, ("never",))]


def test_a_worker_that_dies_after_a_cell_passed_counts(play, observer):
    crash = result("the worker process crashed: SIGSEGV")
    verification = play(run(finding(Status.DECLARED)), [result(), crash, result()])
    verification.prepare()
    verification.run(LIMITS, observer)
    assert found(verification) == [(Status.REFUTED, (crash.cause,))]
    assert observer.results == [result(), crash]


def test_an_interrupted_run_says_what_it_knows_and_goes_on_later(play, observer):
    declared = run(
        finding(Status.DECLARED),
        finding(Status.DECLARED, head_size=64),
        finding(Status.REFUSED, "no", head_size=80),
    )
    first = play(declared, [result(), KeyboardInterrupt])
    first.prepare()
    with pytest.raises(KeyboardInterrupt):
        first.run(LIMITS, observer)
    assert found(first) == [
        (Status.VERIFIED, ()),
        (Status.NOT_RUN, ("interrupted",)),
        (Status.REFUSED, ("no",)),
    ]
    second = play(declared, [result("wrong", head_size=64)])
    second.prepare(resume=True)
    assert second.remaining == [cell(head_size=64).id]
    second.run(LIMITS, observer)
    assert [status for status, _ in found(second)] == [Status.VERIFIED, Status.REFUTED, Status.REFUSED]
    third = play(declared)
    third.prepare(resume=True)
    assert third.remaining == [cell(head_size=64).id]
    fourth = play(declared)
    fourth.prepare()
    assert fourth.remaining == fourth.ids


def test_with_nothing_left_to_run_no_worker_starts(play, observer):
    first = play(run(finding(Status.DECLARED)), [result()])
    first.prepare()
    first.run(LIMITS, observer)
    again = play(run(finding(Status.DECLARED)), [KeyboardInterrupt])
    again.prepare(resume=True)
    assert again.run(LIMITS, observer) is None
    assert found(again) == [(Status.VERIFIED, ())]


def test_where_the_backend_does_not_run_here_no_cell_is_run_and_all_say_why(play):
    why = "TORCH does not run here on cpu: torch is missing"
    verification = play(
        run(finding(Status.DECLARED), finding(Status.REFUSED, "no", head_size=64)),
        listed=ListingFailure(why, True),
    )
    assert verification.prepare() == why
    assert found(verification) == [(Status.NOT_RUN, (why,)), (Status.REFUSED, ("no",))]


def test_cells_of_which_nothing_was_heard_say_how_the_run_stopped(play, observer):
    declared = run(finding(Status.DECLARED), finding(Status.DECLARED, head_size=64))
    verification = play(declared, [result()], problem="no worker process starts: SIGKILL")
    verification.prepare()
    assert verification.run(LIMITS, observer) == "no worker process starts: SIGKILL"
    assert found(verification)[1] == (
        Status.NOT_RUN,
        ("no result came: no worker process starts: SIGKILL",),
    )


def test_a_run_needs_a_list_first(play, observer):
    with pytest.raises(RuntimeError, match="needs a successful"):
        play(run(finding(Status.DECLARED))).run(LIMITS, observer)


def test_the_outcome_says_where_when_and_with_what(play, observer):
    declared = dataclasses.replace(run(finding(Status.DECLARED)), commit="0123")
    verification = play(declared, [result()])
    verification.prepare()
    verification.run(LIMITS, observer)
    outcome = verification.outcome()
    assert (outcome.key, outcome.commit) == (("TORCH", "cpu"), "0123")
    assert list(outcome.versions) == ["Python", "attnplug", "torch"]
    assert outcome.date.endswith("+00:00")
    assert outcome.date > declared.date


def test_no_feature_is_left_that_the_kit_could_try():
    untried = {name for flag in Feature for name in flag.names() if not name.startswith("state")}
    pages = {"block_size": None, "layout": None}
    for feature in sorted(untried):
        more: dict[str, object] = dict(pages) if feature in ("direct_kv", "encoder") else {}
        more |= {"head_size": 576} if feature == "mla" else {}
        stored = {"kv_cache_dtype": "fp8_e4m3"} if feature in ("fp8_kv", "head_scales") else {}
        assert cases_of(cell(feature=feature, **more, **stored), TorchBackend)
