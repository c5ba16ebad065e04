"""Steps and layers that come and go leave no memory behind; a bounded cache may grow to its bound.

Layers and steps print nothing to stdout.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import os
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attnplug.core.spec import Phase
from attnplug.testing.conformance.cases.steps import scenario_factory, step_factory, with_lengths
from attnplug.testing.conformance.check import Check, ConformanceError, checks_from
from attnplug.testing.conformance.harness import Harness, blank_output
from attnplug.testing.conformance.target import Target

_STEPS, _LAYERS = 200, 50
# Rounds until a cache must have reached its bound: 1,600 steps.
_MOST_ROUNDS = 8
# Bytes that each step or layer may keep: Python's own tables grow now and then.
_STEP_SLACK, _LAYER_SLACK = 20, 320
# Bytes that a round may keep, however few steps it has: Python reuses the memory of small objects.
_NOISE = 16384
# The longest sequence. So many lengths are not all used in these rounds, so a cache by length grows throughout.
_LONGEST = 2048
# Time of a round and of a slow step; slow backends, such as interpreted ones, run fewer steps with fewer keys.
_SECONDS, _SLOW = 1.0, 0.02


def checks(target: Target) -> Iterator[Check]:
    """The checks of memory."""
    return checks_from(_CHECKS, "state", target)


class _Memory(NamedTuple):
    """Bytes and numbers of what is alive, by kind, and the Python objects by place of their allocation."""

    bytes: dict[str, int]
    counts: dict[str, int]
    objects: tracemalloc.Snapshot

    @classmethod
    def now(cls) -> _Memory:
        """What is alive now."""
        gc.collect()
        objects = tracemalloc.take_snapshot().filter_traces(_HIDDEN)
        storages: dict[int, int] = {}
        for each in gc.get_objects():
            # A proxy object may run code when its class is read, so the type is read instead.
            if issubclass(type(each), torch.Tensor):
                with contextlib.suppress(Exception):  # fake tensors have no storage
                    storage: Any = each.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
        has_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        device = torch.cuda.memory_allocated() if has_gpu else 0
        held = sum(trace.size for trace in objects.traces)
        sizes = {"Python objects and arrays": held, "tensors": sum(storages.values()), "GPU memory": device}
        descriptors = Path("/proc/self/fd")
        opened = sum(1 for _ in descriptors.iterdir()) if descriptors.is_dir() else 0
        return cls(sizes, {"threads": threading.active_count(), "file descriptors": opened}, objects)

    def place(self, before: _Memory) -> str:
        """Where most of the objects were allocated since `before`."""
        found = self.objects.compare_to(before.objects, "lineno")
        if not found or found[0].size_diff <= 0:
            return ""
        frame = found[0].traceback[0]
        return f"; most Python objects come from {frame.filename}:{frame.lineno}"


_TORCH = str(Path(torch.__file__).parent / "*")
# Allocations that are not the backend's: torch keeps some bytes of each call of its compiler for ever.
_HIDDEN = [
    tracemalloc.Filter(False, name) for name in (tracemalloc.__file__, __file__, _TORCH, functools.__file__)
]


def _check_steps(target: Target) -> None:
    spec = target.spec()
    generator = torch.Generator().manual_seed(0)
    new = 3 if target.phase is Phase.PREFILL else 1
    batch = step_factory(target, spec, ([new] * 2, [new] * 2))()
    if batch.kv_cache is not None:
        batch.kv_cache.fill_(0.5)
    harness, size = Harness.of(target, batch), target.block_size(spec)
    # All requests use one page, since only sizes matter here.
    table = batch.common.block_table_tensor[:, :1].repeat(1, _LONGEST // size + 2)
    longest = _LONGEST

    def run(lengths: torch.Tensor) -> None:
        if spec.direct_kv:
            direct = target.batch(spec, [new] * 2, lengths.tolist())
            harness.forward(direct)
            return
        # A step's lengths and table are its own, as an engine's are.
        common = with_lengths(batch.common, lengths)
        common.block_table_tensor = table.clone()
        harness.run(batch, harness.builder.build(0, common))

    def step() -> None:
        long = torch.randint(new, longest + 1, (1,), generator=generator)
        run(torch.cat([long, long % size + new]))

    step()
    # One step may be slow by chance, and with few lengths a cache by length would look bounded.
    if min(_seconds(step) for _ in range(5)) > _SLOW:
        longest = 4 * size
    # Workspaces that grow with the longest sequence are as large as they get before the first round.
    run(torch.full((2,), longest))
    _expect_bounded(step, _STEPS, _STEP_SLACK, "step")


def _check_layers(target: Target) -> None:
    make = step_factory(target, target.spec(), ([1, 5], [9, 21]))
    batch = make()

    def layer() -> None:
        Harness.of(target, batch).forward(batch, blank_output(batch))

    _expect_bounded(layer, _LAYERS, _LAYER_SLACK, "layer that was made, run and dropped")


def _expect_bounded(work: Callable[[], None], count: int, slack: int, what: str) -> None:
    """Raise ConformanceError if every round of `count` calls leaves more than `slack` bytes a call behind."""
    with _tracing():
        seconds = min(_seconds(work) for _ in range(20))  # first calls import, compile and allocate
        count = max(min(count, int(_SECONDS / max(seconds, 1e-6))), 20)
        last = before = after = _Memory.now()
        most, grown = max(slack * count, _NOISE), dict.fromkeys(before.bytes, 0)
        for _ in range(_MOST_ROUNDS):
            for _ in range(count):
                work()
            after = _Memory.now()
            grown = {name: after.bytes[name] - before.bytes[name] for name in after.bytes}
            opened = {name: after.counts[name] - before.counts[name] for name in after.counts}
            if max(opened.values()) >= count // 2:
                # A pool of threads or files with a bound is smaller than this number of steps.
                names = " and ".join(name for name, more in opened.items() if more >= count // 2)
                raise ConformanceError(
                    f"{names} are left behind: {max(opened.values())} by {count} calls, one {what} each"
                )
            if max(grown.values()) <= most:
                return
            last, before = before, after
    kept = ", ".join(f"{size // count:,} bytes of {name}" for name, size in grown.items() if size > most)
    raise ConformanceError(
        f"each {what} keeps {kept}, still after {_MOST_ROUNDS * count:,} of them: "
        f"memory grows without bound{after.place(last)}"
    )


@contextlib.contextmanager
def _tracing() -> Iterator[None]:
    """Trace Python's allocations, with those of numpy."""
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    try:
        yield
    finally:
        if not was_tracing:
            tracemalloc.stop()


def _seconds(work: Callable[[], None]) -> float:
    # Time of this process, because other processes must not change what is tried.
    begin = time.process_time()
    work()
    return time.process_time() - begin


_CHECKS = {
    "memory-steps": (_check_steps, "memory does not grow with the steps, except in caches with a bound"),
    "memory-layers": (_check_layers, "layers that are dropped leave no memory behind"),
}


_PRINTED_STEPS = 3


def output_checks(target: Target) -> Iterator[Check]:
    """The check of what is printed."""
    summary = "layers and steps print nothing to stdout"
    yield Check.of("state/prints-nothing", summary, _check_printed, target)


def _check_printed(target: Target) -> None:
    make = scenario_factory(target, "decode")

    def live() -> None:
        batch = make()
        harness = Harness.of(target, batch)
        for _ in range(_PRINTED_STEPS):
            harness.forward(batch)

    # A library may print a notice when it is first used.
    for _ in range(2):
        live()
    with _stdout() as written:
        live()
    if written:
        text = written[0] if len(written[0]) <= 60 else f"{written[0][:60]}..."
        raise ConformanceError(
            f"layers and steps print to stdout: {text!r}; write to a logger, since commands print data there"
        )


@contextlib.contextmanager
def _stdout() -> Iterator[list[str]]:
    """Keep what is printed, also by C code; the list has it at the end, unless it is empty."""
    written: list[str] = []
    printed = io.StringIO()
    sys.stdout.flush()
    with tempfile.TemporaryFile() as raw:
        saved = os.dup(1)
        os.dup2(raw.fileno(), 1)
        try:
            with contextlib.redirect_stdout(printed):
                yield written
        finally:
            os.dup2(saved, 1)
            os.close(saved)
        raw.seek(0)
        text = printed.getvalue() + raw.read().decode(errors="replace")
    if text:
        written.append(text)
