"""A tuning with scripted workers and a clock that a test moves: what is measured, kept, left out and written."""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_plugins import CPU, SPEC, backend, registry

from attnplug import LayerSpec, Phase
from attnplug.registry.measured.step_shapes import StepShape
from attnplug.registry.measured.tuned import RowStatus, TimedRow, TunedTable
from attnplug.registry.measured.tuned_files import read_table, update_table
from attnplug.tuning.jobs import Event, Job
from attnplug.tuning.session import Tuner
from attnplug.tuning.workloads import workload_of

SLIDING = SPEC.replace(sliding_window=64)
LAYERS = {SPEC: ["0", "2"], SLIDING: ["1"]}
WORKLOAD = workload_of("decode 8 x 1k, prefill 2 x 1k")
FAKES = [backend(name, priority) for name, priority in (("A", 90), ("B", 50), ("C", 10))]


class Workers:
    """Runs jobs by a script: times by backend, and backends that fail."""

    def __init__(self, **times: float) -> None:
        self.times, self.now = times, 0.0
        self.wrong: set[str] = set()
        self.crashed: set[str] = set()
        self.jobs: list[Job] = []
        self.interrupt_after: int | None = None
        self.noisy = ""

    def __call__(self, device: Any, jobs: Sequence[Job]) -> Iterator[Event]:
        yield {"event": "environment", "facts": {"driver": "1"}}
        for job in jobs:
            self.jobs.append(job)
            for name, _ in job.backends:
                yield self._event(job, name)
            self.now += 10.0 if job.timed else 1.0
            yield {"event": "done", "job": job.number}
            if (
                self.interrupt_after is not None
                and job.timed
                and sum(j.timed for j in self.jobs) >= self.interrupt_after
            ):
                raise KeyboardInterrupt

    def _event(self, job: Job, name: str) -> Event:
        about = {"job": job.number, "backend": name}
        if name in self.crashed:
            return {**about, "event": "failed", "why": "its process crashed: SIGSEGV"}
        if name in self.wrong:
            return {**about, "event": "wrong", "why": "output[0] is off", "feature": "plain"}
        if not job.timed:
            return {**about, "event": "checked", "seconds": 2.0}
        return {
            **about,
            "event": "timed",
            "us": self.times[name],
            "spread": 0.001,
            "rounds": 5,
            "build_us": 1.0,
            "why": self.noisy,
        }

    @property
    def timed(self) -> list[str]:
        return [f"{job.shape} {'+'.join(name for name, _ in job.backends)}" for job in self.jobs if job.timed]


class Log:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.wrongs: list[str] = []

    def planned(self, kept: int, pending: int) -> None:
        self.told.append(f"{kept} kept, {pending} to measure")

    def checking(self, name: str, cells: int) -> None:
        self.told.append(f"checking {name}")

    def machine(self, environment: Any) -> None:
        self.told.append(f"driver {environment['driver']}")

    def started(self, cell: Any) -> None:
        self.told.append(f"started {cell.shape}")

    def finished(self, cell: Any, rows: Sequence[TimedRow]) -> None:
        self.told.append(f"finished {cell.shape}")

    def wrong(self, contender: Any, spec: LayerSpec, row: TimedRow, feature: str | None) -> None:
        self.wrongs.append(f"{contender.offer.name} {row.shape}")


class Case:
    """A tuning in a file."""

    def __init__(self, path: Path) -> None:
        self.path, self.log = path, Log()
        self.workers = Workers(A=100.0, B=50.0, C=80.0)
        self.fakes = list(FAKES)

    def tuner(self, **facts: Any) -> Tuner:
        now = lambda: dt.datetime(2026, 11, 22, tzinfo=dt.UTC)  # noqa: E731
        given = {"run": self.workers, "clock": lambda: self.workers.now, "now": now, **facts}
        return Tuner(
            registry(*self.fakes), CPU, given.pop("layers", LAYERS), given.pop("workload", WORKLOAD), **given
        )

    def save(self, change: Callable[[TunedTable | None], TunedTable]) -> TunedTable:
        return update_table(self.path, change)

    def run(self, budget: float | None = None, *, fresh: bool = False, **facts: Any) -> Any:
        old = read_table(self.path) if self.path.exists() and not fresh else None
        return self.tuner(**facts).run(old, self.log, self.save, budget)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path / "table.json")


def test_each_cell_is_checked_then_measured_heaviest_first_and_written(case: Case) -> None:
    outcome = case.run()
    assert case.workers.timed == ["decode 8 x 1k A+B+C", "prefill 2 x 1k A+B+C"] * 2
    # Two layers of the first kind weigh twice.
    assert [job.spec for job in case.workers.jobs if job.timed] == [SPEC, SPEC, SLIDING, SLIDING]
    assert case.log.told[:5] == [
        "0 kept, 4 to measure", "checking A", "checking B", "checking C", "started decode 8 x 1k",
    ]  # fmt: skip
    assert "driver 1" in case.log.told
    assert outcome.compiled == {"A": 8.0, "B": 8.0, "C": 8.0}
    assert (len(outcome.measured), outcome.left, outcome.left_out) == (4, [], {})
    written = read_table(case.path)
    assert written.digest == outcome.table.digest
    assert [(layer.count, len(layer.rows)) for layer in written.layers] == [(2, 6), (1, 6)]
    assert written.environment == {"driver": "1"}
    assert [(c["layer"], c["phase"], c["backend"], c["default"]) for c in written.choices] == [
        (layer, phase, "B", "A") for layer in (0, 1) for phase in ("decode", "prefill", None)
    ]
    decision = registry(*FAKES).explain(SPEC, CPU, Phase.DECODE, tuned=case.path)
    assert str(decision.measured) == "measured 1.99x faster than A at decode 8 x 1k, spread 0.1 %, 2026-11-22"


def test_several_backends_are_checked_at_once_and_alone_again_if_the_memory_was_short(case: Case) -> None:
    alive, most = [0], [0]
    # Of torch, of CUDA, and of a library.
    shortages = itertools.cycle(
        [
            "OutOfMemoryError: CUDA out of memory",
            "AcceleratorError: CUDA error: out of memory",
            "E: Out of memory",
        ]
    )
    plain = case.workers.__call__

    def crowded(device: Any, jobs: Sequence[Job]) -> Iterator[Event]:
        alive[0] += 1
        most[0] = max(most[0], alive[0])
        for event in plain(device, jobs):
            if event["event"] == "checked" and event["backend"] == "C" and alive[0] > 1:
                why = next(shortages)
                yield {"event": "failed", "job": event["job"], "backend": "C", "why": why}
            else:
                yield event
            yield {"event": "waiting"}
        alive[0] -= 1

    outcome = case.run(run=crowded, checks_at_once=2)
    assert most == [2]
    assert {row.status for layer in outcome.table.layers for row in layer.rows} == {RowStatus.MEASURED}
    assert case.workers.timed == ["decode 8 x 1k A+B+C", "prefill 2 x 1k A+B+C"] * 2


def test_a_backend_that_needs_more_memory_than_there_is_costs_a_row(case: Case) -> None:
    plain = case.workers._event

    def event(job: Job, name: str) -> Event:
        if name == "B":
            return {
                "event": "failed",
                "job": job.number,
                "backend": name,
                "why": "OutOfMemoryError: CUDA out of memory",
            }
        return plain(job, name)

    case.workers._event = event  # type: ignore[method-assign]
    outcome = case.run(checks_at_once=3)
    failed = [row for layer in outcome.table.layers for row in layer.rows if row.why]
    assert [(row.subject.backend, row.status) for row in failed] == [("B", RowStatus.CRASHED)] * 4


def test_a_second_run_measures_nothing(case: Case) -> None:
    first = case.run()
    case.workers.jobs.clear()
    again = case.run()
    assert case.workers.jobs == []
    assert (len(again.kept), again.measured) == (4, [])
    assert again.table.digest == first.table.digest
    assert case.log.told[-1] == "4 kept, 0 to measure"


def test_an_exhausted_budget_leaves_cells_to_the_next_run(case: Case) -> None:
    outcome = case.run(budget=30.0)
    assert len(outcome.measured) == 2
    assert [str(cell.shape) for cell in outcome.left] == ["decode 8 x 1k", "prefill 2 x 1k"]
    assert [layer.spec for layer in read_table(case.path).layers] == [SPEC]
    rest = case.run(budget=1000.0)
    assert (len(rest.kept), len(rest.measured), rest.left) == (2, 2, [])
    assert {layer.spec for layer in rest.table.layers} == {SPEC, SLIDING}


@pytest.mark.parametrize(
    ("budget", "measured", "seconds"),
    [
        (0.0, 0, 0),
        (0.5, 0, 1),
        (2.5, 0, 3),
        (3.5, 1, 13),
        (12.5, 1, 13),
        # The second part has the three other cells: nine checks, then a cell of ten seconds.
        (15.0, 1, 15),
        (21.5, 1, 22),
        (22.5, 2, 32),
        (32.5, 3, 42),
        (1000.0, 4, 52),
    ],
)
def test_a_budget_counts_checks_and_lets_one_cell_end(
    case: Case, budget: float, measured: int, seconds: float
) -> None:
    """A check takes a second, and a cell ten."""
    outcome = case.run(budget=budget)
    assert (len(outcome.measured), len(outcome.left)) == (measured, 4 - measured)
    assert case.workers.now == seconds
    rest = case.run()
    assert (len(rest.kept), len(rest.measured), rest.left) == (measured, 4 - measured, [])


@pytest.mark.parametrize("timed", [False, True])
def test_a_worker_that_starts_for_too_long_is_ended(case: Case, timed: bool) -> None:
    """As one that imports a library for minutes, or compiles."""
    plain, closed = case.workers.__call__, []

    def starts(device: Any, jobs: Sequence[Job]) -> Iterator[Event]:
        if jobs[0].timed is not timed:
            yield from plain(device, jobs)
            return
        try:
            while True:
                case.workers.now += 0.5
                yield {"event": "waiting"}
        finally:
            closed.append(case.workers.now)

    outcome = case.run(run=starts, budget=20.0)
    assert (outcome.measured, len(outcome.left), closed) == ([], 4, [20.0])


def test_a_crash_at_the_end_of_the_budget_starts_no_other_worker(case: Case) -> None:
    restarted = []
    plain = case.workers.__call__

    def crashing(device: Any, jobs: Sequence[Job]) -> Iterator[Event]:
        if not jobs[0].timed:
            yield from plain(device, jobs)
            return
        case.workers.now += 20.0
        yield {
            "event": "failed",
            "job": jobs[0].number,
            "backend": "B",
            "why": "its process crashed: SIGSEGV",
        }
        restarted.append(jobs)

    outcome = case.run(run=crashing, budget=15.0)
    assert (restarted, outcome.measured, len(outcome.left)) == ([], [], 4)
    assert len(case.run(budget=1000.0).measured) == 4


def test_an_interrupted_run_keeps_what_it_has_and_the_next_one_goes_on(case: Case) -> None:
    case.workers.interrupt_after = 2
    with pytest.raises(KeyboardInterrupt):
        case.run()
    case.workers.interrupt_after = None
    assert [len(layer.rows) for layer in read_table(case.path).layers] == [6]
    case.workers.jobs.clear()
    rest = case.run()
    assert (len(rest.kept), len(rest.measured)) == (2, 2)
    whole = Case(case.path.with_name("whole.json"))
    assert whole.run().table.to_dict()["cells"] == rest.table.to_dict()["cells"]


def test_a_run_that_goes_on_does_not_try_again_what_failed(case: Case) -> None:
    """A backend that hangs would cost ten minutes in each run."""
    case.workers.crashed, case.workers.interrupt_after = {"B"}, 1
    with pytest.raises(KeyboardInterrupt):
        case.run()
    case.workers.interrupt_after, case.workers.jobs = None, []
    case.run()
    assert {name for job in case.workers.jobs for name, _ in job.backends} == {"A", "C"}
    rows = [row for layer in read_table(case.path).layers for row in layer.rows if row.subject.backend == "B"]
    assert [row.status for row in rows] == [RowStatus.CRASHED] * 4
    case.workers.jobs = []
    case.run(fresh=True)
    assert {name for job in case.workers.jobs for name, _ in job.backends} == {"A", "B", "C"}


def test_a_wrong_backend_is_told_never_timed_and_not_tried_again(case: Case) -> None:
    case.workers.times["B"] = 1.0
    case.workers.wrong = {"B"}
    outcome = case.run()
    assert case.log.wrongs == ["B decode 8 x 1k", "B prefill 2 x 1k"] * 2
    assert case.workers.timed == ["decode 8 x 1k A+C", "prefill 2 x 1k A+C"] * 2
    assert {c["backend"] for c in outcome.table.choices} == {"C"}
    case.workers.jobs.clear()
    assert len(case.run().kept) == 4
    assert case.workers.jobs == []


def test_a_crashed_default_is_compared_with_by_nobody(case: Case) -> None:
    case.workers.crashed = {"A"}
    table = case.run().table
    assert [row.status for row in table.layers[0].rows if row.subject.backend == "A"] == [
        RowStatus.CRASHED
    ] * 2
    decision = registry(*FAKES).explain(SPEC, CPU, Phase.DECODE, tuned=table)
    assert [each.name for each in decision.candidates] == ["B", "C", "A"]
    assert all(job.default == "B" for job in case.workers.jobs if job.timed)


def test_a_crash_while_measuring_costs_its_cell(case: Case) -> None:
    plain = case.workers._event

    def event(job: Job, name: str) -> Event:
        if job.timed and name == "B" and job.shape.phase is Phase.DECODE:
            return {
                "event": "failed",
                "job": job.number,
                "backend": name,
                "why": "its process crashed: SIGKILL",
            }
        return plain(job, name)

    case.workers._event = event  # type: ignore[method-assign]
    table = case.run().table
    chosen = {(c["layer"], c["phase"]): c["backend"] for c in table.choices}
    assert chosen[0, "decode"] == "C"
    assert chosen[0, "prefill"] == "B"


def test_a_backend_that_is_wrong_when_it_is_timed_is_told_and_not_chosen(case: Case) -> None:
    plain = case.workers._event

    def event(job: Job, name: str) -> Event:
        if job.timed and name == "B":
            return {
                "event": "wrong",
                "job": job.number,
                "backend": "B",
                "why": "unwritten",
                "feature": None,
            }
        return plain(job, name)

    case.workers._event = event  # type: ignore[method-assign]
    table = case.run().table
    assert case.log.wrongs == ["B decode 8 x 1k", "B prefill 2 x 1k"] * 2
    assert {c["backend"] for c in table.choices} == {"C"}


def test_when_all_backends_fail_nothing_is_left_to_measure(case: Case) -> None:
    case.workers.crashed = {"A", "B", "C"}
    outcome = case.run()
    assert (outcome.measured, outcome.left) == ([], [])
    assert len(case.run().kept) == 4


def test_only_the_backends_asked_for_and_the_default_are_measured(case: Case) -> None:
    case.run(backends=["C"])
    assert case.workers.timed == ["decode 8 x 1k A+C", "prefill 2 x 1k A+C"] * 2


def test_rows_of_the_other_backends_stay_where_only_some_are_asked_for(case: Case) -> None:
    case.run()
    before = read_table(case.path)
    assert case.run(backends=["B"]).measured == []
    assert read_table(case.path).digest == before.digest


def test_old_rows_stay_until_their_cell_is_measured_again(case: Case) -> None:
    case.run()
    case.fakes.append(backend("D", 5))
    case.workers.times |= {"B": 55.0, "D": 1.0}
    case.workers.interrupt_after = sum(job.timed for job in case.workers.jobs) + 1
    with pytest.raises(KeyboardInterrupt):
        case.run()
    (full, sliding) = read_table(case.path).layers
    by_shape = [
        {row.subject.backend: row.us for row in full.rows if row.shape == s} for s, _ in full.workload
    ]
    assert by_shape == [
        {"A": 100.0, "B": 55.0, "C": 80.0, "D": 1.0},
        {"A": 100.0, "B": 50.0, "C": 80.0},
    ]
    assert {row.us for row in sliding.rows} == {100.0, 50.0, 80.0}
    case.workers.interrupt_after, case.workers.crashed = None, {"B"}
    case.run()
    rows = [row for layer in read_table(case.path).layers for row in layer.rows]
    assert sum(row.subject.backend == "D" for row in rows) == 4
    assert {row.status for row in rows if row.subject.backend == "B"} == {
        RowStatus.MEASURED,
        RowStatus.CRASHED,
    }


def test_a_new_backend_or_version_is_measured_with_all_others(case: Case) -> None:
    case.fakes = FAKES[:2]
    case.run()
    case.fakes = list(FAKES)
    case.workers.jobs.clear()
    case.run()
    assert case.workers.timed == ["decode 8 x 1k A+B+C", "prefill 2 x 1k A+B+C"] * 2


def test_a_noisy_cell_says_so_in_its_rows_and_is_kept(case: Case) -> None:
    case.workers.noisy = "noisy: the speed of the device changed by 30 % between rounds"
    table = case.run().table
    assert {row.why for layer in read_table(case.path).layers for row in layer.rows} == {case.workers.noisy}
    assert registry(*FAKES).explain(SPEC, CPU, Phase.DECODE, tuned=table).backend == "B"
    assert len(case.run().kept) == 4


def test_times_of_another_policy_or_device_are_not_kept(case: Case) -> None:
    case.run()
    text = case.path.read_text()
    case.path.write_text(text.replace('"rounds": 5}', '"rounds": 9}', 1))
    assert len(case.run().measured) == 4
    case.path.write_text(case.path.read_text().replace('"type": "cpu"', '"type": "mps"', 1))
    outcome = case.run()
    assert len(outcome.measured) == 4
    assert read_table(case.path).device == CPU


MIXED = workload_of("decode 8 x 1k, prefill 2 x 1k, mixed 4 x 1k + 1 x 64")


def test_a_mixed_step_is_measured_last_with_the_composite_of_the_phases_winners(case: Case) -> None:
    case.workers.times["A+B"] = 60.0
    plain = case.workers._event

    def event(job: Job, name: str) -> Event:
        found = plain(job, name)
        # A is the fastest in prefills, and B in decodes.
        return (
            {**found, "us": 10.0} if job.timed and name == "A" and job.shape.phase is Phase.PREFILL else found
        )

    case.workers._event = event  # type: ignore[method-assign]
    outcome = case.run(layers={SPEC: ["0", "1"]}, workload=MIXED)
    assert case.workers.timed == [
        "decode 8 x 1k A+B+C", "prefill 2 x 1k A+B+C", "mixed 4 x 1k + 1 x 64 A+B+C+A+B",
    ]  # fmt: skip
    rows = {(str(row.shape), row.subject.backend): row for row in outcome.table.layers[0].rows}
    assert rows["mixed 4 x 1k + 1 x 64", "A+B"].us == 60.0
    assert read_table(case.path).to_dict()["cells"] == outcome.table.to_dict()["cells"]
    case.workers.jobs.clear()
    assert len(case.run(layers={SPEC: ["0", "1"]}, workload=MIXED).kept) == 3
    assert case.workers.jobs == []
    # No selection chooses a composite by itself.
    decision = registry(*FAKES).explain(SPEC, CPU, tuned=outcome.table)
    assert [each.name for each in decision.candidates] == ["A", "B", "C"]


def test_without_two_winners_a_mixed_step_is_measured_with_single_backends(case: Case) -> None:
    case.run(layers={SPEC: ["0"]}, workload=MIXED)
    assert case.workers.timed[-1] == "mixed 4 x 1k + 1 x 64 A+B+C"
    only = workload_of("mixed 4 x 1k + 1 x 64")
    other = Case(case.path.with_name("other.json"))
    assert len(other.run(layers={SPEC: ["0"]}, workload=only).measured) == 1
    assert {c["phase"]: c["backend"] for c in read_table(other.path).choices} == {None: "B"}


def test_an_exhausted_budget_leaves_mixed_steps_too(case: Case) -> None:
    outcome = case.run(layers={SPEC: ["0"]}, workload=MIXED, budget=25.0)
    assert [str(cell.shape) for cell in outcome.left] == ["mixed 4 x 1k + 1 x 64"]
    assert len(case.run(layers={SPEC: ["0"]}, workload=MIXED).kept) == 2


def test_other_layers_of_the_file_stay(case: Case) -> None:
    case.run(layers={SPEC: ["0"]})
    case.run(layers={SLIDING: ["0"]})
    assert [layer.spec for layer in read_table(case.path).layers] == [SPEC, SLIDING]


def test_layers_that_cannot_be_measured_are_named(case: Case) -> None:
    spans, cross = SPEC.replace(mm_prefix=True), SPEC.replace(attn_type="encoder_decoder")
    encoder = SPEC.replace(attn_type="encoder", causal=False)
    layers = {SPEC: ["0"], spans: ["spans"], cross: ["cross"], encoder: ["encoder"]}
    outcome = case.run(layers=layers, workload=workload_of("decode 1 x 64"))
    assert {name: why.partition(":")[0] for name, why in outcome.left_out.items()} == {
        "spans": "is of spans",
        "cross": "attends an encoder",
        "encoder": "computes all its tokens at once, and the workload has no such prefill",
    }


def test_regret_compares_choices_with_the_best_of_each_cell(case: Case) -> None:
    from attnplug.tuning.regret import regrets, summaries

    measured = case.run().table
    case.workers.times = {"A": 10.0, "B": 20.0, "C": 40.0}
    case.path.unlink()
    other = case.run().table
    cells = regrets(registry(*FAKES), measured, {"table": measured, "other": other})
    assert len(cells) == 4
    assert {cell.best for cell in cells} == {"B"}
    found = {each.policy: each for each in summaries(cells)}
    assert set(found) == {"priorities", "table", "table, nearest shape", "other", "other, nearest shape"}
    assert found["table"].mean == found["table"].worst == 0.0
    assert found["table"].over_default < -0.4
    assert found["priorities"].mean == found["other"].mean
    assert found["priorities"].worst == pytest.approx(201 / 101 - 1)
    assert summaries([]) == []


def test_the_regret_of_plans_names_the_kind_of_step_and_the_rule_that_lost(case: Case) -> None:
    from attnplug.tuning.step_regret import kinds, step_regrets

    measured = case.run().table
    cells = step_regrets(registry(*FAKES), measured, {"table": measured})
    assert {cell.policy for cell in cells} == {"priorities", "table"}
    assert all(cell.regret == 0 for cell in cells if cell.policy == "table")
    lost = [cell for cell in cells if cell.regret]
    assert {cell.best for cell in lost} == {"B"}
    assert {cell.chosen for cell in lost} == {"A"}
    assert all(f"run on {cell.chosen}: priority " in cell.rule for cell in lost)
    assert "A is 99.0 % slower than B. The rule: " in str(lost[0])
    found = {(each.policy, each.kind): each for each in kinds(cells)}
    assert sum(each.cells for each in found.values()) == len(cells)
    assert all(each.worst >= each.mean >= 0 for each in found.values())


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("prefill 64 x 100", "short prompts"),
        ("prefill 1 x 16k", "long prompts"),
        ("prefill 4 x 64 of 16k", "short extends"),
        ("prefill 1 x 2k of 32k", "long extends"),
        ("decode 8 x 4k", "decodes"),
        ("decode 16 x 4 of 4k", "drafts"),
        ("mixed 24 x 3k + 1 x 512 of 512", "mixed steps"),
    ],
)
def test_steps_have_a_kind_in_words(text: str, kind: str) -> None:
    from attnplug.tuning.step_regret import kind_of

    shape = StepShape.parse(text)
    assert kind_of(shape, is_latent=False) == kind
    latent = kind_of(shape, is_latent=True)
    assert latent == (f"latent {kind}" if shape.phase is not Phase.PREFILL else kind)
