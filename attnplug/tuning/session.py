"""One tuning of a model: the cells to measure, their order, and the table that they give."""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from attnplug.core.spec import LayerSpec, Phase
from attnplug.registry.measured.tuned import RowStatus, TimedRow, TunedLayer, TunedTable, layer_key, merged
from attnplug.registry.selection.decision import Decision
from attnplug.tuning.cells import Contender, LayerKind, Observer, Outcome, TuneCell, composites, contenders
from attnplug.tuning.jobs import Event, Job, events_of, run_jobs
from attnplug.tuning.rounds import ROUNDS
from attnplug.tuning.workloads import Workload, measurable

if TYPE_CHECKING:
    from attnplug.core.device import Device
    from attnplug.registry.measured.step_shapes import StepShape
    from attnplug.registry.measured.tuned_lookup import Tuned
    from attnplug.registry.plugins.installed import AssumeInstalled
    from attnplug.registry.registry import Registry

# They compile the kernels of different layers at the same time.
_CHECKERS = 4
"""Processes that share the checks of a backend."""
_CHECKS_AT_ONCE = 12
_GROWTH = 4

Save: TypeAlias = Callable[[Callable[["TunedTable | None"], "TunedTable"]], "TunedTable"]
Run = Callable[["Device", Sequence[Job]], Iterable[Event]]


class Tuner:
    """Measures the backends of a model's layers.

    Args:
        registry: chooses the candidates.
        device: of this machine.
        layers: the layers of the model by name.
        workload: the shapes to measure.
        backends: names or families to measure beside the default; None for all.
        run: runs jobs in worker processes.
        checks_at_once: the number of processes that check backends at the same time; by default one on a CPU, else
            one for each of the host's processors, at most 12.
        clock: gives seconds, for the budget.
        now: gives the date of rows.
    """

    def __init__(
        self,
        registry: Registry,
        device: Device,
        layers: Mapping[LayerSpec, Sequence[str]],
        workload: Workload,
        *,
        backends: Collection[str] | None = None,
        run: Run = run_jobs,
        checks_at_once: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], dt.datetime] = lambda: dt.datetime.now(dt.UTC),
    ) -> None:
        self.registry, self.device, self._backends = registry, device, backends
        self._run, self._clock, self._now = run, clock, now
        # Most of a check's time is compilation, which needs the host's processors.
        processors = min(os.cpu_count() or 1, _CHECKS_AT_ONCE)
        self._checks_at_once = checks_at_once or (1 if device.type == "cpu" else processors)
        self.left_out: dict[str, str] = {}
        """The layers that cannot be measured, the first of each kind, and why."""
        self.kinds: list[LayerKind] = []
        for spec, names in layers.items():
            part, why = measurable(spec, workload)
            if why:
                self.left_out[names[0]] = why
            if part:
                self.kinds.append(LayerKind(spec, tuple(names), part))
        self._environment: Mapping[str, str] = {}
        self._rows: dict[tuple[int, StepShape, str], TimedRow] = {}
        self._checked: set[tuple[int, StepShape, str]] = set()
        self._measured: set[tuple[int, StepShape]] = set()
        self.cells = self._made_cells()
        """The cells, the heaviest first."""

    @property
    def policy(self) -> dict[str, Any]:
        """The way that times are measured here: rows of another policy are not kept."""
        on_gpu = self.device.type != "cpu"
        mode = "graph replay of decodes, prefills behind a sleeping GPU" if on_gpu else "calls"
        return {"mode": mode, "l2": "cold" if on_gpu else "warm", "pages": "random", "rounds": ROUNDS}

    def run(
        self,
        old: TunedTable | None,
        observer: Observer,
        save: Save,
        budget: float | None = None,
    ) -> Outcome:
        """Check and measure what `old` does not have.

        Args:
            old: the table of an earlier run.
            observer: is told of each cell.
            save: writes the table after each cell: it is given the change.
            budget: seconds for all of it: checks, compilation and measuring. A cell whose measuring has begun when they
                are over is finished, and no other is begun.

        Raises:
            KeyboardInterrupt: the user's; what was measured is saved.
        """
        outcome = Outcome(TunedTable(self.device, ()), [], [], [], {}, self.left_out)
        deadline = None if budget is None else self._clock() + budget
        first = [cell for cell in self.cells if cell.shape.phase is not None]
        self._measure(first, old, observer, save, deadline, outcome)
        # Mixed steps come last, because the winners of the phases together are one of their candidates.
        if len(first) < len(self.cells):
            self._measure(self._mixed_cells(), old, observer, save, deadline, outcome)
        table = outcome.table
        outcome.table = save(
            lambda current: dataclasses.replace(self._change(current), choices=self.choices(table))
        )
        return outcome

    def run_jobs(self, jobs: Sequence[Job]) -> Iterable[Event]:
        """Run jobs of one worker, and give its events."""
        return self._run(self.device, jobs)

    def date(self) -> str:
        """The date of a row that is measured now, with its offset from UTC."""
        return self._now().isoformat(timespec="seconds")

    def _measure(
        self,
        cells: Sequence[TuneCell],
        old: TunedTable | None,
        observer: Observer,
        save: Save,
        deadline: float | None,
        outcome: Outcome,
    ) -> None:
        """Check and measure cells until the deadline."""
        kept, pending = self._split(cells, old)
        observer.planned(len(kept), len(pending))
        outcome.table = save(self._change)
        measured = []
        for part in _parts(pending) if deadline is not None else [pending]:
            if self._is_late(deadline):
                break
            for name, seconds in self._check_all(part, observer, deadline).items():
                outcome.compiled[name] = outcome.compiled.get(name, 0.0) + seconds
            outcome.table = save(self._change)
            for cell in self._time_all(part, observer, deadline):
                measured.append(cell)
                outcome.table = save(self._change)
        outcome.kept += kept
        outcome.measured += measured
        # A cell whose backends all failed has nothing left to measure.
        outcome.left += [
            cell for cell in pending if cell not in measured and self._contenders_not_failed(cell)
        ]

    def _is_late(self, deadline: float | None) -> bool:
        return deadline is not None and self._clock() >= deadline

    def _mixed_cells(self) -> list[TuneCell]:
        """The mixed steps, with the composite of the backends that are fastest in each phase so far."""
        table = self._change(None)
        found = []
        for cell in (cell for cell in self.cells if cell.shape.phase is None):
            more = composites(self.registry, self.device, cell.spec, table)
            found.append(dataclasses.replace(cell, contenders=(*cell.contenders, *more)))
        return found

    def decisions(
        self, table: TunedTable, assumed: AssumeInstalled = None
    ) -> list[tuple[LayerKind, Phase | None, Decision]]:
        """The choice by a table for each kind of layer: in each phase, and where it is another one, for both."""
        found = []
        for kind in self.kinds:
            there = {shape.phase for shape, _ in kind.workload}
            phases = [phase for phase in Phase if phase in there]
            for phase in (*phases, *((None,) if len(there) > 1 or None in there else ())):
                decision = self._ask(kind.spec, phase, table, assumed)
                if decision:
                    found.append((kind, phase, decision))
        return found

    def choices(self, table: TunedTable, assumed: AssumeInstalled = None) -> tuple[dict[str, Any], ...]:
        """The choices as the table has them for people; of another machine's times with the versions there."""
        places = {layer_key(layer.spec): place for place, layer in enumerate(table.layers)}
        return tuple(
            {
                "layer": places[layer_key(kind.spec)],
                "phase": phase and str(phase),
                "backend": decision.backend,
                "default": self._ask(kind.spec, phase, False, assumed).backend or "none",
                "ratio": decision.measured.ratio,
                "why": str(decision.measured),
            }
            for kind, phase, decision in self.decisions(table, assumed)
            if decision.measured is not None and layer_key(kind.spec) in places
        )

    def _ask(self, spec: LayerSpec, phase: Phase | None, tuned: Tuned, assumed: AssumeInstalled) -> Decision:
        return self.registry.explain(spec, self.device, phase, tuned=tuned, assume_installed=assumed)

    def _made_cells(self) -> list[TuneCell]:
        cells = []
        for place, kind in enumerate(self.kinds):
            there = dict.fromkeys(shape.phase for shape, _ in kind.workload)
            by_phase = {
                phase: contenders(self.registry, self.device, kind.spec, phase, self._backends)
                for phase in there
            }
            for shape, weight in kind.workload:
                if by_phase[shape.phase]:
                    cells.append(TuneCell(place, kind.spec, shape, weight, by_phase[shape.phase]))
        # The sort is stable, so equal cells keep the order of the model.
        return sorted(cells, key=lambda cell: -cell.weight * len(self.kinds[cell.layer].names))

    def _split(
        self, cells: Sequence[TuneCell], old: TunedTable | None
    ) -> tuple[list[TuneCell], list[TuneCell]]:
        """The cells that the table has whole, whose rows are taken over, and the others."""
        # A cell with a new backend or version is measured again as a whole, because only
        # backends that take turns can be compared. Failed backends are not tried again.
        kept: list[TuneCell] = []
        pending: list[TuneCell] = []
        usable = old is not None and old.is_for(self.device) and dict(old.policy) == self.policy
        for cell in cells:
            layer = old.by_key.get(layer_key(cell.spec)) if old is not None and usable else None
            found = [_earlier(layer, cell.shape, each) for each in cell.contenders]
            whole = all(found)
            (kept if whole else pending).append(cell)
            for each, row in zip(cell.contenders, found, strict=True):
                if row is not None and (whole or not row.is_measured):
                    self._rows[cell.layer, row.shape, each.offer.full_name] = row
        return kept, pending

    def _check_all(
        self, pending: Sequence[TuneCell], observer: Observer, deadline: float | None
    ) -> dict[str, float]:
        """Run each backend once in each cell, in a process of its own; gives the seconds of first calls."""
        is_late = functools.partial(self._is_late, deadline)
        compiled: dict[str, float] = {}
        checks = [(cell, each) for cell in pending for each in self._contenders_not_failed(cell)]
        split = 1 if self._checks_at_once == 1 else _CHECKERS
        by_worker: dict[tuple[str, int], list[Job]] = {}
        for number, (cell, each) in enumerate(checks):
            worker = each.offer.full_name, cell.layer % split
            by_worker.setdefault(worker, []).append(self._job(number, cell, [each]))
        for name, count in Counter(each.offer.name for _, each in checks).items():
            observer.checking(name, count)
        crowded: list[Job] = []
        started = (iter(self._run(self.device, jobs)) for jobs in by_worker.values())
        for event in events_of(started, self._checks_at_once, is_late):
            cell, each = checks[event["job"]]
            lacks_memory = event["event"] == "failed" and "out of memory" in str(event["why"]).lower()
            if lacks_memory and self._checks_at_once > 1:
                crowded.append(self._job(event["job"], cell, [each]))
            else:
                self._note_check(cell, each, event, observer, compiled)
        # The workers share the device's memory, so a backend that found too little is run again alone.
        for event in events_of((iter(self._run(self.device, [job])) for job in crowded), 1, is_late):
            cell, each = checks[event["job"]]
            self._note_check(cell, each, event, observer, compiled)
        return compiled

    def _note_check(
        self,
        cell: TuneCell,
        contender: Contender,
        event: Event,
        observer: Observer,
        compiled: dict[str, float],
    ) -> None:
        if event["event"] == "checked":
            self._checked.add((cell.layer, cell.shape, contender.offer.full_name))
            short = contender.offer.name
            compiled[short] = compiled.get(short, 0.0) + float(event["seconds"])
        elif event["event"] in ("wrong", "failed"):
            self._note_failure(cell, contender, event, observer)

    def _note_failure(self, cell: TuneCell, contender: Contender, event: Event, observer: Observer) -> None:
        status = RowStatus.WRONG if event["event"] == "wrong" else RowStatus.CRASHED
        row = self._row(cell, contender, status, why=str(event["why"]))
        self._rows[cell.layer, cell.shape, contender.offer.full_name] = row
        if status is RowStatus.WRONG:
            observer.wrong(contender, cell.spec, row, event["feature"])

    def _time_all(
        self, pending: Sequence[TuneCell], observer: Observer, deadline: float | None
    ) -> Iterable[TuneCell]:
        """Measure the cells until the deadline, and give each as it is done."""
        left = enumerate(map(self._contenders_left, pending))
        jobs = [self._job(number, pending[number], each, timed=True) for number, each in left if each]
        started = iter(jobs)
        if not jobs or self._is_late(deadline):
            return
        has_begun = False
        observer.started(pending[next(started).number])
        for event in self._run(self.device, jobs):
            if event["event"] == "environment":
                has_begun = True
                self._environment = event["facts"]
                observer.machine(self._environment)
            if "job" not in event:
                # A worker that has not begun loses no measurement.
                if not has_begun and self._is_late(deadline):
                    return
                continue
            cell = pending[event["job"]]
            if event["event"] == "done":
                names = [each.offer.full_name for each in cell.contenders]
                rows = (self._rows.get((cell.layer, cell.shape, name)) for name in names)
                observer.finished(cell, [row for row in rows if row is not None])
                self._measured.add((cell.layer, cell.shape))
                yield cell
                if self._is_late(deadline):
                    return
                following = next(started, None)
                if following is not None:
                    observer.started(pending[following.number])
                continue
            contender = next(each for each in cell.contenders if each.offer.name == event["backend"])
            if event["event"] in ("failed", "wrong"):
                self._note_failure(cell, contender, event, observer)
                # The next process would begin the cell again.
                if self._is_late(deadline):
                    return
            elif event["event"] == "timed":
                figures = {name: event[name] for name in ("us", "spread", "rounds", "build_us", "why")}
                row = self._row(cell, contender, RowStatus.MEASURED, **figures)
                self._rows[cell.layer, cell.shape, contender.offer.full_name] = row

    def _contenders_left(self, cell: TuneCell) -> list[Contender]:
        """The contenders of a cell that were right in it and failed in no cell of its layer and phase."""
        return [
            each
            for each in self._contenders_not_failed(cell)
            if (cell.layer, cell.shape, each.offer.full_name) in self._checked
        ]

    def _contenders_not_failed(self, cell: TuneCell) -> list[Contender]:
        failed = {
            name
            for (layer, shape, name), row in self._rows.items()
            if layer == cell.layer
            and shape.phase is cell.shape.phase
            and row.status is not RowStatus.MEASURED
        }
        return [each for each in cell.contenders if each.offer.full_name not in failed]

    def _job(
        self, number: int, cell: TuneCell, contenders: Sequence[Contender], *, timed: bool = False
    ) -> Job:
        backends = tuple((each.offer.name, each.offer.distribution) for each in contenders)
        return Job(number, cell.spec, cell.shape, backends, backends[0][0] if backends else None, timed)

    def _row(self, cell: TuneCell, contender: Contender, status: RowStatus, **figures: Any) -> TimedRow:
        about = contender.subject, cell.shape, contender.pages, status
        return TimedRow(*about, date=self.date(), **figures)

    def _change(self, current: TunedTable | None) -> TunedTable:
        """The table of the file with this tuning's layers in it."""
        # Times that were measured in another way are not compared with these.
        same = current is not None and current.is_for(self.device) and dict(current.policy) == self.policy
        before = current.layers if current is not None and same else ()
        old = {layer_key(layer.spec): layer for layer in before}
        layers = [
            TunedLayer(
                kind.spec if kind.spec.direct_kv else kind.spec.replace(block_size=None),
                len(kind.names),
                kind.workload,
                self._with_old(place, found.rows if found else ()),
                found.prices if found else (),
            )
            for place, kind in enumerate(self.kinds)
            for found in (old.get(layer_key(kind.spec)),)
            # A layer without a new row keeps what the file has of it.
            if any(layer == place for layer, _, _ in self._rows)
        ]
        environment = self._environment or (current.environment if current is not None else {})
        return TunedTable(self.device, merged(before, layers), environment, self.policy)

    def _with_old(self, place: int, old: Iterable[TimedRow]) -> tuple[TimedRow, ...]:
        """The rows of a layer, and those of the file whose cells were not measured again, such as of other backends."""
        rows = {_place(row): row for (layer, _, _), row in self._rows.items() if layer == place}
        steps = {shape for shape, _ in self.kinds[place].workload}
        kept = {
            _place(row): row for row in old if row.shape in steps and (place, row.shape) not in self._measured
        }
        return tuple({**kept, **rows}.values())


def _parts(cells: Sequence[TuneCell]) -> Iterator[Sequence[TuneCell]]:
    """Cells in parts, from a single cell to ever more."""
    # Within a budget, each part is checked and then measured. Checks are not remembered, so those of cells
    # that are not measured would be in vain. The parts grow, because each one starts processes of its own.
    start, size = 0, 1
    while start < len(cells):
        yield cells[start : start + size]
        start, size = start + size, size * _GROWTH


def _place(row: TimedRow) -> Hashable:
    return row.subject.backend, row.subject.distribution, row.shape, row.pages


def _earlier(layer: TunedLayer | None, shape: StepShape, contender: Contender) -> TimedRow | None:
    """The row of an earlier run; for a backend that failed in the phase, the row that says so."""
    mine = [row for row in (layer.rows if layer else ()) if row.subject == contender.subject]
    same = (row for row in mine if row.shape == shape and row.pages == contender.pages)
    bad = (row for row in mine if row.shape.phase is shape.phase and row.status is not RowStatus.MEASURED)
    return next(same, None) or next(bad, None)
