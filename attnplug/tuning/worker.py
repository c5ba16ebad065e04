"""The worker process of `attnplug tune`: runs the jobs of a file and reports each step as a JSON line."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attnplug.core.device import Device
from attnplug.core.metadata import AttentionCGSupport
from attnplug.registry.default import get_registry
from attnplug.registry.selection.decision import Placement
from attnplug.registry.selection.gates import import_parts, preferred_pages, serving
from attnplug.testing.comparison import tolerance
from attnplug.tuning.cells import environment
from attnplug.tuning.jobs import Job
from attnplug.tuning.prices import measured_prices
from attnplug.tuning.rounds import Timing, measure_in_turns
from attnplug.tuning.step_inputs import SharedCaches, StepInputs, check_output, made_inputs, made_parts
from attnplug.tuning.timers import Timer, measured_ceilings, release, synchronize, timer_for

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.core.metadata import AttentionMetadataBuilder, CommonAttentionMetadata
    from attnplug.registry.measured.step_shapes import StepShape

    _Candidate = tuple[StepInputs, Callable[[int], object], AttentionMetadataBuilder[Any], torch.Tensor]
    """The inputs of a job for one backend, its forward, its builder, and the output of its first call."""

_BUILDS = 9
"""Steps whose builds are timed in a round."""

_BUILD_ROUNDS = 5

# Engines run their decodes as graphs.
_SHORT = 16
"""Steps of at most this many new tokens per request are replayed as graphs."""


def main(task: str, report: str) -> None:
    """Run the jobs in the file `task`, and append events to the file `report`.

    "environment" once; for each backend of a job "begin" when it starts to run, then "checked" with seconds, "wrong"
    with why and feature, "failed" with why, "timed" with the figures, or "priced" with prices; "done" after each job. The feature is None if
    only timed calls are wrong.
    """
    data = json.loads(Path(task).read_text(encoding="utf-8"))
    device = Device.from_dict(data["device"])
    handle = os.open(report, os.O_WRONLY | os.O_APPEND)

    def tell(event: str, **facts: Any) -> None:
        # One write for each line, so that a crash of the next step loses none.
        os.write(handle, f"{json.dumps({'event': event, **facts})}\n".encode())

    runner = Runner(device, tell)
    jobs = [Job.from_dict(each) for each in data["jobs"]]
    tell("environment", facts=environment() | (runner.ceilings() if any(job.timed for job in jobs) else {}))
    for job in jobs:
        runner.run(job)
    # The modules of torch take a tenth of a second to end, and those of a backend may hang.
    os._exit(0)


class Runner:
    """Runs jobs on one device.

    Args:
        device: of this machine.
        tell: receives the events.
        timer: measures rounds, by default as the device's kind needs.
    """

    def __init__(self, device: Device, tell: Callable[..., None], timer: Timer | None = None) -> None:
        self._device, self._tell = device, tell
        self._timer: Timer = timer or timer_for(device.type)
        self._host_timer: Timer = timer or timer_for(device.type, host=True)
        self._where = torch.device("cpu" if device.type == "cpu" else "cuda")
        self._plugins = get_registry().plugins
        self._caches: SharedCaches = {}
        self._offers = {(o.name, o.distribution): o for o in self._plugins.every_offer}

    def ceilings(self) -> dict[str, str]:
        """The copy and the matmul of the device, measured now."""
        found = measured_ceilings(self._where, self._timer.us)
        release(self._where)
        return found

    def run(self, job: Job) -> None:
        """Run one job."""
        (self._price if job.prices else self._time if job.timed else self._check)(job)
        self._caches.clear()
        release(self._where)
        self._tell("done", job=job.number)

    def _check(self, job: Job) -> None:
        for name, distribution in job.backends:
            self._tell("begin", job=job.number, backend=name)
            began = time.perf_counter()
            try:
                inputs, call, _ = self._made(job, name, distribution)
                call(0)
                # The second call counts: a backend that remembers the first one would leave its output as it is.
                inputs.output.fill_(torch.nan)
                call(0)
                synchronize(self._where)
            except Exception as problem:  # noqa: BLE001  (a backend's, which costs a row)
                self._failed(job, name, problem)
                continue
            seconds = time.perf_counter() - began
            wrong = check_output(inputs)
            if wrong is None:
                self._tell("checked", job=job.number, backend=name, seconds=seconds)
            else:
                self._tell("wrong", job=job.number, backend=name, why=wrong.text, feature=wrong.feature)

    def _time(self, job: Job) -> None:
        runs: dict[str, Callable[[], float]] = {}
        made: dict[str, tuple[StepInputs, torch.Tensor, _Remembering]] = {}
        candidates = self._candidates(job)
        build_us = self._build_us(job, candidates)
        for name, (inputs, call, builder, first) in candidates.items():
            self._tell("begin", job=job.number, backend=name)
            try:
                short, graph = _is_short(job.shape), self._replays(job.shape, builder)
                # A backend without graphs pays for its launches there.
                timer = self._host_timer if short and not graph else self._timer
                remembering = _Remembering(call)
                run = timer.prepare(remembering, max(len(inputs.caches), 1), graph=graph)
                runs[name] = self._announced(job, name, run)
                made[name] = inputs, first, remembering
            except Exception as problem:  # noqa: BLE001  (a backend's, which costs a row)
                self._failed(job, name, problem)
        for name, timing in self._measured(job, runs).items():
            inputs, first, remembering = made[name]
            try:
                why = self._different(inputs, first, remembering, runs[name])
            except Exception as problem:  # noqa: BLE001  (a backend's, or an earlier one's, which costs a row)
                self._failed(job, name, problem.cause if isinstance(problem, _RoundError) else problem)
                continue
            if why is not None:
                self._tell("wrong", job=job.number, backend=name, why=why, feature=None)
                continue
            figures = {"us": timing.us, "spread": timing.spread, "rounds": timing.rounds, "why": timing.noisy}
            self._tell("timed", job=job.number, backend=name, build_us=build_us[name], **figures)

    def _price(self, job: Job) -> None:
        for name, _ in job.backends:
            self._tell("begin", job=job.number, backend=name)
            try:
                prices, error, steps = measured_prices(job.spec, name, self._device, self._timer)
            except Exception as problem:  # noqa: BLE001  (a backend's, which costs its prices)
                self._failed(job, name, problem)
                continue
            figures = {"prices": prices.to_dict(), "error": error, "steps": steps}
            self._tell("priced", job=job.number, backend=name, **figures)

    def _candidates(self, job: Job) -> dict[str, _Candidate]:
        """The parts of each backend, after a first call."""
        found: dict[str, _Candidate] = {}
        for name, distribution in job.backends:
            self._tell("begin", job=job.number, backend=name)
            try:
                inputs, call, builder = self._made(job, name, distribution)
                # Builders make the plans that layers have asked for.
                call(0)
                found[name] = inputs, call, builder, inputs.output.clone()
            except Exception as problem:  # noqa: BLE001  (a backend's, which costs a row)
                self._failed(job, name, problem)
        return found

    def _different(
        self, inputs: StepInputs, first: torch.Tensor, call: _Remembering, run: Callable[[], float]
    ) -> str | None:
        """The difference of timed calls from a call alone, or of that from the first call; None without one."""

        def written(work: Callable[[], object]) -> torch.Tensor:
            inputs.output.fill_(torch.nan)
            work()
            synchronize(self._where)
            return inputs.output.clone()

        most = tolerance(inputs.spec, quantized_queries=inputs.quantized_queries).whole
        # A graph over lost tensors would write nothing, or an old output.
        timed, alone = written(run), written(lambda: call(call.last))
        if bool(timed.isnan().any()):
            return "its timed calls left outputs unwritten"
        if not (error := _error(timed, alone)) <= most:
            return f"its timed calls wrote another output than a call alone: relative error {error:.2g}"
        if _error(written(lambda: call(0)), first) <= most:
            return None
        # Another backend may have changed the cache, so the reference reads what is in it now.
        wrong = check_output(inputs)
        return None if wrong is None else f"its later calls are wrong: {wrong.text}"

    def _measured(self, job: Job, runs: dict[str, Callable[[], float]]) -> dict[str, Timing]:
        """The times of the backends that get through all rounds."""
        while True:
            try:
                return measure_in_turns(runs, job.default, watch=self._timer.moment)
            except _RoundError as problem:
                del runs[problem.backend]
                self._failed(job, problem.backend, problem.cause)

    def _announced(self, job: Job, name: str, run: Callable[[], float]) -> Callable[[], float]:
        """A round that names its backend first, so that its crash counts against this backend."""

        def announced() -> float:
            self._tell("begin", job=job.number, backend=name)
            try:
                return run()
            except Exception as problem:
                raise _RoundError(name, problem) from problem

        return announced

    def _made(
        self, job: Job, name: str, distribution: str | None
    ) -> tuple[StepInputs, Callable[[int], object], AttentionMetadataBuilder[Any]]:
        """The inputs of a job for one backend, its forward, and its builder."""
        # Plugins offer the halves of a composite, but not the composite.
        offer = self._offers.get((name, distribution)) or next(
            offer for offer in self._plugins.find(name) if offer.distribution == distribution
        )
        served, asked = serving(offer, Placement(job.spec, self._device, job.shape.phase))
        backend: type[AttentionBackend] = served.backend
        if reasons := import_parts(backend):
            raise RuntimeError("; ".join(reasons))
        pages = preferred_pages(backend, asked.spec, self._device)
        inputs = made_inputs(
            backend, asked.spec, job.shape, pages, self._where, copies=job.timed, made=self._caches
        )
        impl, builder = made_parts(backend, inputs, pages)
        with torch.inference_mode():
            # FLASHINFER plans a captured decode in another way than a plain one, and engines capture their decodes.
            if self._replays(job.shape, builder):
                metadata = builder.build_for_cudagraph_capture(inputs.common)
            else:
                metadata = builder.build(0, inputs.common)
        forward = inputs.forward(impl, metadata)

        @torch.inference_mode()
        def call(index: int) -> object:
            return forward(index)

        return inputs, call, builder

    def _replays(self, shape: StepShape, builder: AttentionMetadataBuilder[Any]) -> bool:
        """Whether steps are replayed as graphs: decodes, as engines run them, but no mixed steps and prefills."""
        if not (self._timer.has_graphs and _is_short(shape)):
            return False
        one, more = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, AttentionCGSupport.UNIFORM_BATCH
        declared = builder.get_cudagraph_support(builder.config, builder.kv_cache_spec)
        return declared >= (one if shape.query == 1 else more)

    @torch.inference_mode()
    def _build_us(self, job: Job, candidates: dict[str, _Candidate]) -> dict[str, float]:
        """Microseconds of the host for a build of each candidate; the GPU does its part meanwhile."""
        # A round is the median of steps in turn. The least of the rounds counts, because
        # other work of the host can only add to it. Candidates take turns, since a host
        # is faster at times than at others. One that fails is left out of `candidates`.
        steps = {name: inputs.last_steps(_BUILDS) for name, (inputs, *_) in candidates.items()}
        found: dict[str, list[float]] = {name: [] for name in candidates}
        # Other work of the host can double a build that is timed once. Two runs then
        # choose differently for windows of 128, where a build is a third of a step.
        for _ in range(_BUILD_ROUNDS):
            for name in [*candidates]:
                self._tell("begin", job=job.number, backend=name)
                try:
                    found[name].append(self._build_round(candidates[name][2], steps[name]))
                except Exception as problem:  # noqa: BLE001  (a backend's, which costs a row)
                    del candidates[name]
                    self._failed(job, name, problem)
        return {name: 1e6 * min(found[name]) for name in candidates}

    def _build_round(
        self, builder: AttentionMetadataBuilder[Any], steps: Sequence[CommonAttentionMetadata]
    ) -> float:
        """Seconds of the host for a build, the median of `steps`."""
        times = []
        for common in steps:
            synchronize(self._where)
            began = time.perf_counter()
            builder.build(0, common)
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def _failed(self, job: Job, name: str, problem: BaseException) -> None:
        text = f"{type(problem).__name__}: {problem}".splitlines()[0][:500]
        self._tell("failed", job=job.number, backend=name, why=text)
        if self._where.type == "cuda":
            try:
                torch.cuda.synchronize()
                # After an aborted capture the generator may still be in it.
                torch.randn(1, device=self._where)
            except RuntimeError:
                # An error of a kernel makes the GPU unusable for this process: the next one goes on.
                self._tell("lost", job=job.number, backend=name)
                os._exit(1)


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The difference, relative to what is expected; NaN if either has one."""
    return float((found.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-30))


def _is_short(shape: StepShape) -> bool:
    return shape.query <= _SHORT and shape.phase is not None


class _Remembering:
    """A forward that remembers which copy of the cache it attended last, also while a graph is captured."""

    def __init__(self, call: Callable[[int], object]) -> None:
        self._call, self.last = call, 0

    def __call__(self, index: int) -> object:
        self.last = index
        return self._call(index)


class _RoundError(Exception):
    """An exception in a round of `backend`."""

    def __init__(self, backend: str, cause: BaseException) -> None:
        self.backend, self.cause = backend, cause
        super().__init__(backend)
