"""Jobs for worker processes: a backend that crashes or hangs ends its process, and costs one row."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from attnplug._system.processes import Child, python_command
from attnplug.core.device import Device
from attnplug.core.spec import LayerSpec
from attnplug.registry.measured.step_shapes import StepShape

Event: TypeAlias = Mapping[str, Any]
"""A line that a worker wrote, or the end of one that died; `worker.main` lists them."""

WAITING: Event = {"event": "waiting"}
"""Lets a caller look after several workers at once."""
# A worker without a new line for this long hangs: some libraries compile for minutes.
SECONDS = 600.0
_POLL = 0.02
_DEAD_WITHOUT_WORK = 2
_LONGEST = 200
_CHILD = "from attnplug.tuning.worker import main; main(*sys.argv[1:])"


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One step of one layer, with the backends to run.

    Args:
        number: its place in the caller's list.
        spec: the layer.
        shape: the step.
        backends: name and distribution of each.
        default: the name of the one that is measured in every round.
        timed: measure times; else run each once and compare its output with the oracle.
        prices: fit the prices of shared prefixes instead, for which the step does not matter.
    """

    number: int
    spec: LayerSpec
    shape: StepShape
    backends: tuple[tuple[str, str | None], ...]
    default: str | None = None
    timed: bool = False
    prices: bool = False

    def to_dict(self) -> dict[str, Any]:
        """A JSON object with every field."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**fields, "spec": self.spec.to_dict(), "shape": self.shape.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Job:
        """The job that `to_dict` wrote."""
        given = {"spec": LayerSpec.from_dict(data["spec"]), "shape": StepShape.from_dict(data["shape"])}
        return cls(**{**data, **given, "backends": tuple(map(tuple, data["backends"]))})


def run_jobs(device: Device, jobs: Sequence[Job], seconds: float = SECONDS) -> Iterator[Event]:
    """Run jobs in one worker after another, and give its events as they come; "waiting" some times a second without any.

    If a worker dies, the backend that it was running gets the event "failed". The next worker goes on without this
    backend in all jobs of the layer in its phase: another death there would cost another worker, and tell nothing new.
    """
    rest, idle = list(jobs), 0
    while rest:
        seen = _Seen()
        with _Worker(device, rest) as worker:
            for event in worker.events(seconds):
                if seen.take(event):
                    yield event
            why = worker.why
        if why is None:
            if all(job.number in seen.done for job in rest):
                return
            # A backend may end its process in good order, such as by sys.exit(0).
            why = "its process ended before its work was done"
        # A worker that dies outside of any backend, such as at its start, is tried once more.
        idle = 0 if seen.did_anything else idle + 1
        if idle >= _DEAD_WITHOUT_WORK:
            yield from (_failed(job.number, name, why) for job in rest for name, _ in job.backends)
            return
        if seen.running is not None:
            yield _failed(*seen.running, why)
            seen.failed.append(seen.running)
        for number, name in seen.failed:
            rest = _without(rest, number, name, died=(number, name) in (seen.running, seen.lost))
        rest = [job for job in rest if job.number not in seen.done]


def events_of(
    workers: Iterable[Iterator[Event]], at_once: int, is_late: Callable[[], bool] = lambda: False
) -> Iterator[Event]:
    """The events of workers about their jobs, with at most `at_once` workers running at the same time.

    When `is_late` says so, the workers are ended.
    """
    waiting, running = iter(workers), list[Iterator[Event]]()
    try:
        while True:
            running += itertools.islice(waiting, at_once - len(running))
            if not running:
                return
            for worker in tuple(running):
                if is_late():
                    return
                event = next(worker, None)
                if event is None:
                    running.remove(worker)
                elif "job" in event:
                    yield event
    finally:
        # A worker that is closed ends its process.
        for worker in running:
            if isinstance(worker, Generator):
                worker.close()


def _failed(number: int, name: str, why: str) -> Event:
    return {"event": "failed", "job": number, "backend": name, "why": why}


@dataclasses.dataclass(slots=True)
class _Seen:
    """The events of one worker: the jobs that are done, the backends that failed, and the one that runs."""

    done: set[int] = dataclasses.field(default_factory=set)
    failed: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    running: tuple[int, str] | None = None
    lost: tuple[int, str] | None = None
    """The one that made the GPU unusable."""

    @property
    def did_anything(self) -> bool:
        return bool(self.done or self.failed or self.running)

    def take(self, event: Event) -> bool:
        """Remember an event; whether the caller of `run_jobs` gets it."""
        kind, place = event["event"], (event.get("job"), event.get("backend"))
        if kind == "begin":
            self.running = (event["job"], event["backend"])
        elif kind == "done" or place == self.running:
            self.running = None
        if kind == "done":
            self.done.add(event["job"])
        elif kind in ("failed", "wrong"):
            self.failed.append((event["job"], event["backend"]))
        elif kind == "lost":
            self.lost = (event["job"], event["backend"])
        return kind not in ("begin", "lost")


def _without(jobs: Sequence[Job], number: int, name: str, *, died: bool) -> list[Job]:
    """The jobs without a backend that failed in job `number`: in it, or in all of its layer in its phase if it died."""
    failed = next((job for job in jobs if job.number == number), None)
    kept = []
    for job in jobs:
        alike = failed is not None and (job.spec, job.shape.phase) == (failed.spec, failed.shape.phase)
        left = job.backends
        if job.number == number or (alike and (died or not job.timed)):
            left = tuple(each for each in left if each[0] != name)
        if left:
            kept.append(dataclasses.replace(job, backends=left))
    return kept


class _Worker(Child):
    """A child process with jobs, which writes events to its report."""

    why: str | None = None
    """Why it died; None while it runs and after an orderly end."""

    def __init__(self, device: Device, jobs: Sequence[Job]) -> None:
        task = {"device": device.to_dict(), "jobs": [job.to_dict() for job in jobs]}
        super().__init__(python_command(_CHILD), task)

    def events(self, seconds: float) -> Iterator[Event]:
        """Its lines until it ends, or writes none for `seconds`."""
        last = time.monotonic()
        with self.report.open(encoding="utf-8") as report:
            part = ""
            while True:
                # Asked before reading, so that the lines of a worker that has ended are all read.
                ended = self.is_over
                part += report.read()
                *lines, part = part.split("\n")
                for line in lines:
                    last = time.monotonic()
                    yield json.loads(line)
                if ended:
                    break
                if time.monotonic() - last > seconds:
                    self.why = f"took longer than {seconds:g} s"
                    return
                if not lines:
                    yield WAITING
                    time.sleep(_POLL)
        problem = self.problem(0)
        self.why = problem and f"its process {problem[:_LONGEST]}"
