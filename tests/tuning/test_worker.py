"""The parts of a worker: inputs, the check against the oracle, timers, and jobs whose worker dies."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import types
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from attnplug import Device, LayerSpec
from attnplug.cli.output.tune_report import TuneReport
from attnplug.core.mla.dims import MLADims
from attnplug.registry.default import list_backends
from attnplug.registry.measured.step_shapes import StepShape
from attnplug.registry.measured.tuned import RowStatus, TimedRow
from attnplug.registry.plugins.installed import BackendVersions
from attnplug.registry.plugins.records import Offer
from attnplug.registry.selection.evidence import read_evidence
from attnplug.tuning import jobs, timers
from attnplug.tuning.cells import Contender, record_wrong
from attnplug.tuning.jobs import Event, Job, run_jobs
from attnplug.tuning.step_inputs import StepInputs, check_output, made_inputs, made_parts
from attnplug.tuning.worker import Runner

CPU, HERE = torch.device("cpu"), Device("cpu")
SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=32)
DIMS = MLADims(q_lora_rank=None, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32)
LAYERS = {
    "full": SPEC,
    "sliding": SPEC.replace(sliding_window=16),
    "chunked": SPEC.replace(chunk_size=32),
    "sinks": SPEC.replace(has_sinks=True),
    "alibi": SPEC.replace(has_alibi=True),
    "cap": SPEC.replace(logits_soft_cap=1.0),
    "lse": SPEC.replace(needs_lse=True),
    "fp8": SPEC.replace(kv_cache_dtype="fp8"),
    "float32": SPEC.replace(dtype="float32"),
    "values": SPEC.replace(head_size_v=16),
    "latent": LayerSpec(num_heads=4, num_kv_heads=1, head_size=80, mla=DIMS),
}
SHAPES = ("decode 3 x 70 ragged", "decode 2 x 3 of 50", "prefill 2 x 40", "prefill 2 x 20 of 60")
MIXED = "mixed 3 x 70 + 2 x 20 of 60 ragged"


def run_torch(spec: LayerSpec, shape: str, served: LayerSpec | None = None) -> StepInputs:
    """The inputs after TORCH has run them as if the layer were `served`."""
    backend = list_backends()["TORCH"].for_layer(spec)
    pages = None if spec.direct_kv else (16, "NHD")
    inputs = made_inputs(backend, spec, StepShape.parse(shape), pages, CPU)
    run = served or spec
    tensors = dataclasses.replace(
        inputs.tensors,
        sinks=inputs.tensors.sinks if run.has_sinks else None,
        alibi_slopes=inputs.tensors.alibi_slopes if run.has_alibi else None,
    )
    mistaken = dataclasses.replace(inputs, spec=run, tensors=tensors)
    impl, builder = made_parts(backend, mistaken, pages)
    inputs.forward(impl, builder.build(0, inputs.common))(0)
    return inputs


@pytest.mark.parametrize("shape", [*SHAPES, MIXED])
@pytest.mark.parametrize("name", LAYERS)
def test_a_right_backend_passes(name: str, shape: str) -> None:
    assert check_output(run_torch(LAYERS[name], shape)) is None


@pytest.mark.parametrize(
    "spec", [SPEC.replace(direct_kv=True), SPEC.replace(attn_type="encoder_only", causal=False)]
)
def test_a_right_backend_without_pages_passes(spec: LayerSpec) -> None:
    backend = list_backends()["TORCH"]
    pages = None if spec.direct_kv else (16, "NHD")
    inputs = made_inputs(backend, spec, StepShape.parse("prefill 2 x 40"), pages, CPU)
    impl, builder = made_parts(backend, inputs, pages)
    inputs.forward(impl, builder.build(0, inputs.common))(0)
    assert check_output(inputs) is None


@pytest.mark.parametrize(
    ("name", "ignored"),
    [
        ("sliding", {"window": (-1, -1)}),
        ("chunked", {"chunk_size": None}),
        ("sinks", {"has_sinks": False}),
        ("alibi", {"has_alibi": False}),
        ("cap", {"logits_soft_cap": None}),
    ],
)
@pytest.mark.parametrize("shape", [*SHAPES, MIXED])
def test_an_ignored_feature_is_found_and_named(name: str, ignored: dict[str, Any], shape: str) -> None:
    spec = LAYERS[name]
    found = check_output(run_torch(spec, shape, spec.replace(**ignored)))
    assert found is not None
    assert found.feature == next(iter(spec.required_features().names()))
    assert found.text.startswith(f"{found.feature} ignored: output of request ")


@pytest.mark.parametrize("request_number", range(4))
def test_each_kind_of_request_of_a_mixed_step_is_compared(request_number: int) -> None:
    """The first and the last that decode, and the first and the last that prefill."""
    inputs = run_torch(SPEC, "mixed 2 x 70 + 2 x 20 of 60")
    assert check_output(inputs) is None
    begins = [0, 1, 2, 22]
    inputs.output[begins[request_number]] += 1.0
    wrong = check_output(inputs)
    assert wrong is not None
    assert f"output of request {request_number}, rows 0 to" in wrong.text


def test_other_mistakes_are_found_too() -> None:
    assert check_output(run_torch(SPEC, "decode 2 x 50", SPEC.replace(scale=0.05))) is not None
    inputs = run_torch(SPEC, "decode 2 x 50")
    inputs.output[0] = torch.nan
    wrong = check_output(inputs)
    assert wrong is not None
    assert (wrong.feature, "NaN" in wrong.text) == ("plain", True)
    # Each of the heads that are compared has rows of its own.
    swapped = run_torch(SPEC, "decode 2 x 50")
    swapped.output.copy_(swapped.output.flip(1))
    assert check_output(swapped) is not None


def test_a_wrong_output_is_a_refuted_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPLUG_EVIDENCE", str(tmp_path / "refuted.json"))
    offer = Offer("TORCH", list_backends()["TORCH"], "", "attnplug", "0.1.0")
    subject = BackendVersions("TORCH", "attnplug", "0.1.0", HERE, ())
    row = TimedRow(subject, StepShape.parse("decode 2 x 50"), (16, "NHD"), RowStatus.WRONG,
              date="2026-11-22T00:00:00+00:00", why="off by 1")  # fmt: skip
    sliding = LAYERS["sliding"]
    assert record_wrong(Contender(offer, subject, (16, "NHD")), sliding, row, "sliding_window").refuted == 1
    ((_, (cell,)),) = read_evidence().cells.items()
    assert cell.id == "sliding_window/decode/d32/bfloat16/auto/b16/NHD"
    assert cell.why == ("at decode 2 x 50: off by 1",)


@pytest.mark.parametrize("feature", [None, "plain"])
def test_only_a_wrong_check_is_remembered_for_selections(
    feature: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ATTNPLUG_EVIDENCE", str(tmp_path / "refuted.json"))
    offer = Offer("TORCH", list_backends()["TORCH"], "", "attnplug", "0.1.0")
    subject = BackendVersions("TORCH", "attnplug", "0.1.0", HERE, ())
    row = TimedRow(subject, StepShape.parse("decode 2 x 50"), (16, "NHD"), RowStatus.WRONG,
              date="2026-11-22T00:00:00+00:00", why="off by 1")  # fmt: skip
    report = TuneReport()
    report.wrong(Contender(offer, subject, (16, "NHD")), SPEC, row, feature)
    assert report.wrong_outputs == 1
    assert len(read_evidence().cells) == (feature is not None)
    words = "does not refuse it" if feature is None else "refuses what was refuted"
    assert words in " ".join(capsys.readouterr().err.split())


def job(
    number: int = 0, *, timed: bool = False, spec: LayerSpec = SPEC, backends: Any = (("TORCH", "attnplug"),)
) -> Job:
    return Job(number, spec, StepShape.parse("decode 2 x 40"), backends, "TORCH", timed)


def test_a_runner_checks_then_times() -> None:
    told: list[tuple[str, dict[str, Any]]] = []
    runner = Runner(
        HERE, lambda event, **facts: told.append((event, facts)), timers.HostTimer(round_us=100.0)
    )
    runner.run(job())
    runner.run(job(1, timed=True))
    kinds = [event for event, _ in told if event != "begin"]
    assert kinds == ["checked", "done", "timed", "done"]
    timed = next(facts for event, facts in told if event == "timed")
    assert timed["us"] > 0
    assert timed["build_us"] > 0
    assert timed["rounds"] >= 3
    assert told[-2][1]["backend"] == "TORCH"


@pytest.mark.parametrize(("calls", "timed"), [(1, False), (3, True), (5, True)])
def test_a_backend_that_computes_only_at_first_is_wrong(calls: int, timed: bool) -> None:
    """It would be the fastest of all: its output still has the numbers of the first call."""
    told: list[tuple[str, dict[str, Any]]] = []

    class Lazy(Runner):
        def _made(self, *asked: Any) -> Any:
            inputs, call, builder = super()._made(*asked)
            left = iter(range(calls))
            return inputs, lambda index: call(index) if next(left, None) is not None else None, builder

    runner = Lazy(HERE, lambda event, **facts: told.append((event, facts)), timers.HostTimer(round_us=100.0))
    runner.run(job(timed=timed))
    ((event, facts),) = [each for each in told if each[0] not in ("begin", "done")]
    # In a process with other backends the fault may be theirs, so no feature is refuted.
    assert (event, facts["backend"], facts["feature"]) == ("wrong", "TORCH", None if timed else "plain")
    assert ("unwritten" if timed else "NaN") in facts["why"]


def test_timed_calls_that_write_another_output_are_wrong() -> None:
    """As those of a graph, whose tensors have gone."""
    told: list[tuple[str, dict[str, Any]]] = []

    class Stale(timers.HostTimer):
        def prepare(self, call: Any, copies: int, *, graph: bool) -> Any:
            run = super().prepare(call, copies, graph=graph)

            def stale() -> float:
                found = run()
                made[0].output.neg_()
                return found

            return stale

    class Kept(Runner):
        def _made(self, *asked: Any) -> Any:
            found = super()._made(*asked)
            made.append(found[0])
            return found

    made: list[StepInputs] = []
    runner = Kept(HERE, lambda event, **facts: told.append((event, facts)), Stale(round_us=100.0))
    runner.run(job(timed=True))
    ((event, facts),) = [each for each in told if each[0] not in ("begin", "done")]
    assert event == "wrong"
    assert facts["why"] == "its timed calls wrote another output than a call alone: relative error 2"


@pytest.mark.parametrize("is_wrong", [True, False])
def test_a_backend_that_is_wrong_after_some_calls_is_wrong(is_wrong: bool) -> None:
    """Alone too, so its timed calls equal those; unless another backend has changed the cache, which it reads right."""
    told: list[tuple[str, dict[str, Any]]] = []

    class Tiring(Runner):
        def _made(self, *asked: Any) -> Any:
            inputs, call, builder = super()._made(*asked)
            left = iter(range(3))

            def tired(index: int) -> None:
                fresh = next(left, None) is not None
                if not fresh and not is_wrong:
                    inputs.caches[0].fill_(0.5)
                call(index)
                if not fresh and is_wrong:
                    inputs.output.neg_()

            return inputs, tired, builder

    runner = Tiring(
        HERE, lambda event, **facts: told.append((event, facts)), timers.HostTimer(round_us=100.0)
    )
    runner.run(job(timed=True))
    ((event, facts),) = [each for each in told if each[0] not in ("begin", "done")]
    assert event == ("wrong" if is_wrong else "timed")
    if is_wrong:
        assert facts["why"].startswith("its later calls are wrong: output of request 0")
        assert facts["feature"] is None


def test_an_error_after_the_rounds_is_no_wrong_output() -> None:
    """Such as of another backend's kernel: a wrong output would be refused from then on."""
    told: list[tuple[str, dict[str, Any]]] = []

    class Late(Runner):
        def _made(self, *asked: Any) -> Any:
            inputs, call, builder = super()._made(*asked)

            def late(index: int) -> object:
                # The first fill with NaN is that of the comparison.
                if calls and bool(inputs.output.isnan().all()):
                    raise RuntimeError("an illegal memory access was encountered")
                calls.append(index)
                return call(index)

            return inputs, late, builder

    calls: list[int] = []
    runner = Late(HERE, lambda event, **facts: told.append((event, facts)), timers.HostTimer(round_us=100.0))
    runner.run(job(timed=True))
    ((event, facts),) = [each for each in told if each[0] not in ("begin", "done")]
    assert (event, facts["why"]) == ("failed", "RuntimeError: an illegal memory access was encountered")


def test_builds_are_timed_for_steps_in_turn_after_the_layer_has_run() -> None:
    """A step that is built again needs no plan, and no layer has asked for one before the first call."""
    events: list[Any] = []

    class Watched(Runner):
        def _made(self, *asked: Any) -> Any:
            inputs, call, builder = super()._made(*asked)
            build = builder.build

            def built(prefix: int, common: Any) -> Any:
                assert torch.is_inference_mode_enabled(), "as engines build"
                assert common.seq_lens.tolist() == common.seq_lens_host.tolist()
                events.append(common.seq_lens_host.tolist())
                return build(prefix, common)

            builder.build = built
            return inputs, lambda index: events.append("call") or call(index), builder

    runner = Watched(HERE, lambda event, **facts: None, timers.HostTimer(round_us=100.0))
    shape = StepShape.parse("decode 2 x 3 of 7 ragged")
    runner.run(dataclasses.replace(job(timed=True), shape=shape))
    assert shape.lengths == (3, 11)
    # The new tokens of a request are always there.
    steps = [[3, tokens] for tokens in range(3, 12)]
    assert events[:46] == ["call", *(5 * steps)]
    assert set(events[46:]) == {"call"}


def test_builds_take_turns_and_the_fastest_round_counts() -> None:
    """Other work of the host adds to a round; one builder that fails costs its own row."""
    told: list[tuple[str, dict[str, Any]]] = []
    rounds = {"A": iter([9e-6, 3e-6, 8e-6, 4e-6, 7e-6]), "B": iter([2e-6, 1e-6]), "C": iter([6e-6] * 5)}
    order: list[str] = []

    class Scripted(Runner):
        def _build_round(self, builder: Any, steps: Any) -> float:
            order.append(builder)
            if (seconds := next(rounds[builder], None)) is None:
                raise RuntimeError("no plan")
            return seconds

    runner = Scripted(HERE, lambda event, **facts: told.append((event, facts)), timers.HostTimer())
    inputs: Any = types.SimpleNamespace(last_steps=lambda count: [])
    candidates: dict[str, Any] = {name: (inputs, None, name, None) for name in rounds}
    assert runner._build_us(job(timed=True), candidates) == pytest.approx({"A": 3.0, "C": 6.0})
    assert order == [*"ABC" * 3, *"AC" * 2]
    assert [*candidates] == ["A", "C"]
    assert [facts["backend"] for event, facts in told if event == "failed"] == ["B"]


def test_memory_is_given_back_that_objects_keep_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrapper:
        pass

    def left() -> weakref.ref[Any]:
        one, other = Wrapper(), Wrapper()
        one.plan, other.owner = other, one  # type: ignore[attr-defined]
        return weakref.ref(one)

    freed: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(kept() is None))
    for held in (0, 2 << 30):
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda held=held: held)
        gc.disable()
        try:
            kept = left()
            timers.release(torch.device("cuda"))
        finally:
            gc.enable()
    assert freed == [False, True]


@pytest.mark.parametrize("timed", [True, False])
def test_backends_that_take_turns_share_caches_of_one_form(timed: bool) -> None:
    """Four of five backends on an H200 do, and a small GPU could not hold one of each."""
    seen: list[StepInputs] = []

    class Watched(Runner):
        def _made(self, *asked: Any) -> Any:
            found = super()._made(*asked)
            seen.append(found[0])
            return found

    runner = Watched(HERE, lambda event, **facts: None, timers.HostTimer(round_us=100.0))
    runner._offers["COPY", None] = Offer("COPY", list_backends()["TORCH"], "", None, None)
    both = job(timed=timed, backends=(("TORCH", "attnplug"), ("COPY", None)))
    for asked in (both, both):
        runner.run(asked)
    places = [[cache.data_ptr() for cache in inputs.caches] for inputs in seen]
    # A check could find what another backend has written.
    assert (places[0] == places[1]) is timed
    assert len({id(inputs.output) for inputs in seen}) == 4
    assert seen[0].caches is not seen[2].caches


def test_a_job_reads_back_from_json() -> None:
    one = job(3, timed=True, spec=LAYERS["latent"])
    assert Job.from_dict(one.to_dict()) == one


class Scripted:
    """Stands in for worker processes: each takes the next script of events, and dies if it says so."""

    def __init__(self, scripts: Sequence[tuple[Sequence[Event], str | None]]) -> None:
        self.scripts, self.given = list(scripts), []  # type: ignore[var-annotated]

    def __call__(self, device: Device, rest: Sequence[Job]) -> Any:
        self.given.append([(each.number, [name for name, _ in each.backends]) for each in rest])
        events, why = self.scripts.pop(0)

        class Worker:
            def __enter__(self) -> Worker:
                return self

            def __exit__(self, *problem: object) -> None:
                pass

            def events(self, seconds: float) -> Any:
                yield from events

        worker = Worker()
        worker.why = why  # type: ignore[attr-defined]
        return worker


def told(event: str, number: int, name: str | None = None, **facts: Any) -> Event:
    return {"event": event, "job": number, **({} if name is None else {"backend": name}), **facts}


TWO = (("A", None), ("B", None))


def test_a_timed_job_goes_on_without_the_backend_that_died(monkeypatch: pytest.MonkeyPatch) -> None:
    crash = [told("begin", 0, "A"), told("begin", 0, "B")]
    rest = [told("timed", 0, "A"), told("done", 0), told("timed", 1, "A"), told("done", 1), told("done", 2)]
    workers = Scripted([(crash, "its process crashed: SIGSEGV"), (rest, None)])
    monkeypatch.setattr(jobs, "_Worker", workers)
    alike = [job(number, timed=True, backends=TWO) for number in (0, 1)]
    other = dataclasses.replace(job(2, timed=True, backends=TWO), shape=StepShape.parse("prefill 1 x 8"))
    found = list(run_jobs(HERE, [*alike, other]))
    assert found[0] == told("failed", 0, "B", why="its process crashed: SIGSEGV")
    assert found[1:] == rest
    assert workers.given[1] == [(0, ["A"]), (1, ["A"]), (2, ["A", "B"])]


def test_a_check_that_died_is_not_repeated_for_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    crash = [told("begin", 0, "A")]
    other = [told("begin", 2, "A"), told("checked", 2, "A"), told("done", 2)]
    workers = Scripted([(crash, "took longer than 600 s"), (other, None)])
    monkeypatch.setattr(jobs, "_Worker", workers)
    one = (("A", None),)
    asked = [job(0, backends=one), job(1, backends=one), job(2, backends=one, spec=LAYERS["sinks"])]
    found = list(run_jobs(HERE, asked))
    assert [each["event"] for each in found] == ["failed", "checked", "done"]
    assert workers.given == [[(0, ["A"]), (1, ["A"]), (2, ["A"])], [(2, ["A"])]]


def test_a_lost_gpu_costs_the_backend_that_lost_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = [told("begin", 0, "A"), told("failed", 0, "A", why="CUDA error"), told("lost", 0, "A")]
    workers = Scripted(
        [(lost, "its process left with exit code 1"), ([told("done", 0), told("done", 1)], None)]
    )
    monkeypatch.setattr(jobs, "_Worker", workers)
    found = list(run_jobs(HERE, [job(number, timed=True, backends=TWO) for number in (0, 1)]))
    assert [each["event"] for each in found] == ["failed", "done", "done"]
    assert workers.given[1] == [(0, ["B"]), (1, ["B"])]


def test_a_backend_that_ends_its_process_in_good_order_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as by sys.exit(0): the exit code alone would say that all work is done."""
    workers = Scripted([([told("begin", 0, "A")], None), ([told("timed", 0, "B"), told("done", 0)], None)])
    monkeypatch.setattr(jobs, "_Worker", workers)
    found = list(run_jobs(HERE, [job(0, timed=True, backends=TWO)]))
    assert [(each["event"], each.get("backend")) for each in found] == [
        ("failed", "A"), ("timed", "B"), ("done", None),
    ]  # fmt: skip
    assert found[0]["why"] == "its process ended before its work was done"
    assert workers.given[1] == [(0, ["B"])]


def test_a_signal_without_a_name_ends_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_CHILD", "import os; os.kill(os.getpid(), 39)")
    found = [each for each in run_jobs(HERE, [job(0, backends=TWO[:1])]) if each != jobs.WAITING]
    assert found == [told("failed", 0, "A", why="its process crashed: signal 39")]


def test_a_worker_that_never_starts_is_tried_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Scripted([([], "its process left with exit code 1: no torch")] * 2)
    monkeypatch.setattr(jobs, "_Worker", workers)
    found = list(run_jobs(HERE, [job(0, backends=TWO)]))
    assert [(each["event"], each["backend"]) for each in found] == [("failed", "A"), ("failed", "B")]


class FakeGpu:
    """torch.cuda with a clock: a call takes 50 us of the device and 10 us of the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = self.device = 0.0
        self.slept: list[int] = []
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0.0

            def record(self) -> None:
                gpu.device = max(gpu.device, gpu.host)
                self.at = gpu.device

            def query(self) -> bool:
                return gpu.host >= self.at

            def elapsed_time(self, end: Any) -> float:
                return (end.at - self.at) / 1e3

        class Graph:
            def replay(self) -> None:
                gpu.host += 5.0
                gpu.device = max(gpu.device, gpu.host) + 50.0 * gpu.captured

        @contextlib.contextmanager
        def graph(_: Graph) -> Any:
            gpu.captured, before = 0, (gpu.host, gpu.device)
            gpu.capturing, gpu.stream = True, "capture"
            try:
                yield
            except Exception as problem:
                # As torch does: the error of the capture replaces it, and the stream stays.
                raise RuntimeError("CUDA error: the capture was invalidated") from problem
            finally:
                gpu.capturing = False
            gpu.stream = "default"
            gpu.host, gpu.device = before

        self.capturing, self.captured, self.stream = False, 0, "default"
        for name, value in {"Event": Event, "CUDAGraph": Graph, "graph": graph, "synchronize": self.synchronize,
                            "_sleep": self.sleep, "current_stream": lambda: gpu.stream,
                            "set_stream": lambda stream: setattr(gpu, "stream", stream)}.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)

    def synchronize(self, *_: object) -> None:
        self.host = self.device = max(self.host, self.device)

    def sleep(self, cycles: int) -> None:
        self.slept.append(cycles)
        self.device = max(self.device, self.host) + cycles / 2000.0

    def call(self, index: int) -> None:
        self.captured += self.capturing
        self.host += 10.0
        self.device = max(self.device, self.host) + 50.0


def test_a_gpu_is_timed_by_replay_and_behind_a_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    timer = timers.GpuTimer()
    assert timer.prepare(gpu.call, 3, graph=True)() == pytest.approx(50.0)
    assert gpu.captured % 3 == 0, "each copy of the cache is read as often"
    assert timer.prepare(gpu.call, 3, graph=False)() == pytest.approx(50.0)
    assert set(gpu.slept) == {timers._SLEEPS[0]}


def test_an_aborted_capture_raises_its_cause_and_leaves_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)

    def call(index: int) -> None:
        gpu.call(index)
        if gpu.capturing:
            raise ValueError("reads a length back")

    with pytest.raises(ValueError, match="reads a length back"):
        timers.GpuTimer().prepare(call, 1, graph=True)
    assert gpu.stream == "default"


@pytest.mark.parametrize("graph", [True, False])
def test_a_round_keeps_the_tensors_of_its_call(graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph has addresses only: without this, the next candidate's tensors would be in the same memory."""
    gpu, cache = FakeGpu(monkeypatch), torch.zeros(1)

    def call(index: int, cache: torch.Tensor = cache) -> None:
        gpu.call(index)

    kept = weakref.ref(cache)
    run = timers.GpuTimer().prepare(call, 1, graph=graph)
    del call, cache
    gc.collect()
    assert kept() is not None
    del run
    gc.collect()
    assert kept() is None


def test_launches_of_a_backend_without_graphs_count(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)

    def slow_host(index: int) -> None:
        gpu.host += 90.0
        gpu.call(index)

    sleeping, counting = timers.timer_for("cuda"), timers.timer_for("cuda", host=True)
    assert sleeping.prepare(slow_host, 1, graph=False)() == pytest.approx(50.0)
    assert counting.prepare(slow_host, 1, graph=False)() > 95.0
