"""Steps and layers that come and go leave nothing behind; a bounded cache may grow to its bound.

Layers and steps print nothing to stdout.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import io
import logging
import os
import sys
import tempfile
import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from attnplug.core.spec import LayerSpec, Phase
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.cases.steps import (
    decode_lengths,
    layers_of_each_feature,
    mixed_lengths,
    scenario_factory,
    step_factory,
    with_lengths,
)
from attnplug.testing.conformance.check import Check, CheckSkipped, ConformanceError, checks_from
from attnplug.testing.conformance.harness import Harness, layer_words
from attnplug.testing.conformance.process.native_memory import native_bytes, no_choices_of_cublas
from attnplug.testing.conformance.target import Target

_WARM, _ROUND, _LONG_ROUND = 2, 6, 160
"""Calls before the first count, and calls of the first round, in which C code may leak unnoticed or may not.

Each further round has twice as many.
"""
_MOST, _MOST_OPEN = 800, 100
"""Calls after which a cache must have reached its bound, and a pool of threads or files."""
# Slow backends, such as interpreted ones, are given up after this time, and fewer calls.
_SECONDS, _LEAST, _SLOW = 10.0, 100, 0.1
# Bytes of C code that a round may keep: allocators keep some freed memory for the same thread.
_SLACK = 4096
# The longest sequence. So many lengths are not all used in these rounds, so a cache by length grows throughout.
_LONGEST = 2048
_CONTAINERS = frozenset(
    (list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict)
)

_Work: TypeAlias = Callable[[], object]


def checks(target: Target) -> Iterator[Check]:
    """The checks of memory."""
    return checks_from(_CHECKS, "state", target)


class _Alive(NamedTuple):
    """What is alive: exact numbers, which are the same after each call that keeps nothing."""

    objects: int
    entries: int
    native: int
    device: int
    threads: int
    descriptors: int

    @classmethod
    def now(cls, older: list[Any]) -> _Alive:
        """The numbers now, without garbage and without the interpreter's own caches; `older` are frozen containers."""
        _collect()
        objects = sys.getallocatedblocks()
        # A container grows in leaps of its memory, so its entries are counted.
        entries = sum(map(len, older)) + sum(map(len, _containers()))
        device = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
        folder = Path("/proc/self/fd")
        opened = sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0
        return cls(objects, entries, native_bytes(), device, threading.active_count(), opened)

    def since(self, before: _Alive, count: int) -> dict[str, int]:
        """What each of `count` calls has left behind since `before`, on average, by its name; empty if none did."""
        grown = {name: after - old for name, after, old in zip(self._fields, self, before, strict=True)}
        # One of two calls may keep something.
        least = dict.fromkeys(grown, count // 2) | {"native": max(_SLACK, 24 * count), "device": 32 * count}
        return {name: -(-more // count) for name, more in grown.items() if more >= least[name]}


def _collect() -> None:
    """Drop garbage and the interpreter's own caches."""
    # torch looks methods up by names that it makes anew, and the type cache keeps some thousand of them.
    clear: Callable[[], None] = getattr(sys, "_clear_internal_caches", None) or sys._clear_type_cache
    clear()
    gc.collect()


def _containers() -> list[Any]:
    return [each for each in gc.get_objects() if type(each) in _CONTAINERS]


@contextlib.contextmanager
def _older_containers() -> Iterator[list[Any]]:
    """The containers of the process; each collection of garbage is quick, since it leaves all older objects alone."""
    gc.collect()
    older, is_frozen = _containers(), gc.get_freeze_count() > 0
    if not is_frozen:
        gc.freeze()
    try:
        yield older
    finally:
        if not is_frozen:
            gc.unfreeze()


_NAMES = {
    "objects": "Python objects",
    "entries": "entries of containers",
    "native": "bytes of C code",
    "device": "bytes of GPU memory",
    "threads": "threads",
    "descriptors": "file descriptors",
}


def _check_steps(target: Target) -> None:
    _expect_bounded(dict(_steps(target)), "step", _MOST, _LONG_ROUND)
    # Steps of other lengths leave freed memory of other sizes with the allocator, so they come later.
    with contextlib.suppress(CheckSkipped):
        spec = target.paged_spec(attn_type="decoder")
        step = _drawn_step(target, spec)
        with no_choices_of_cublas():
            _expect_bounded({f"{layer_words(spec)}, with other lengths": step}, "step", _MOST)


def _steps(target: Target) -> Iterator[tuple[str, _Work]]:
    """By layer: a step of prefills and decodes, and one of decodes that a draft model asks for."""
    for spec in layers_of_each_feature(target):
        with contextlib.suppress(CheckSkipped):
            size = target.block_size(spec)
            mixed, decodes = (target.batch(spec, *each(size)) for each in (mixed_lengths, decode_lengths))
            harness = Harness.of(target, mixed, num_speculative_tokens=2)

            def work(harness: Harness = harness, mixed: Any = mixed, decodes: Any = decodes) -> None:
                harness.run(mixed, harness.builder.build(0, mixed.common))
                harness.run(decodes, harness.builder.build_for_drafting(decodes.common, 1))

            yield layer_words(spec), work


def _drawn_step(target: Target, spec: LayerSpec) -> _Work:
    """Runs a step of two requests with other lengths in each call."""
    generator = torch.Generator().manual_seed(0)
    new = 3 if target.phase is Phase.PREFILL else 1
    batch = step_factory(target, spec, ([new] * 2, [new] * 2))()
    if batch.kv_cache is not None:
        batch.kv_cache.fill_(0.5)
    harness, size = Harness.of(target, batch), target.block_size(spec)
    # All requests use one page, since only sizes matter here.
    table = batch.common.block_table_tensor[:, :1].repeat(1, _LONGEST // size + 2)

    def run(lengths: torch.Tensor) -> None:
        # A step's lengths and table are its own, as an engine's are.
        common = with_lengths(batch.common, lengths)
        common.block_table_tensor = table.clone()
        harness.run(batch, harness.builder.build(0, common))

    def step() -> None:
        long = torch.randint(new, _LONGEST + 1, (1,), generator=generator)
        run(torch.cat([long, long % size + new]))

    # Workspaces that grow with the longest sequence are as large as they get before the first count.
    run(torch.full((2,), _LONGEST))
    return step


def _check_layers(target: Target) -> None:
    works: dict[str, _Work] = {}
    for spec in layers_of_each_feature(target):
        with contextlib.suppress(CheckSkipped):
            batch = target.batch(spec, *mixed_lengths(target.block_size(spec)))
            works[layer_words(spec)] = functools.partial(_live, target, batch)
    _expect_bounded(works, "layer that was made, run and dropped", _MOST // 2)


def _live(target: Target, batch: Batch) -> None:
    """Make a layer and its builder, run a step and drop them."""
    Harness.of(target, batch).forward(batch)
    # Pools of pinned memory grow with the layers that wait for the collector, and those grow with the round.
    gc.collect()


def _expect_bounded(works: dict[str, _Work], what: str, most: int, first: int = _ROUND) -> None:
    """Raise ConformanceError if `most` calls of one of these works, by layer, all leave something behind.

    The first round of the first work has `first` calls.
    """
    with _no_records(), _older_containers() as older:
        for place, (layer, work) in enumerate(works.items()):
            kept = _kept(work, most, older, _ROUND if place else first)
            opened = [_NAMES[name] for name in ("threads", "descriptors") if name in kept]
            if opened:
                names = " and ".join(opened)
                raise ConformanceError(f"{names} are left behind, one or more by each {what}, of {layer}")
            if kept:
                told = ", ".join(f"{size:,} {_NAMES[name]}" for name, size in kept.items())
                sizes, line = _sizes_and_line(work)
                raise ConformanceError(
                    f"each {what} keeps {', '.join([told, *sizes])}, of {layer}: memory grows without bound{line}"
                )


def _kept(work: _Work, most: int, older: list[Any], count: int) -> dict[str, int]:
    """What each call keeps in each of ever longer rounds, until `most` calls; empty once a round keeps nothing."""
    # Time of this process, because other processes must not change what is tried.
    begin = time.process_time()
    for number in range(max(_WARM, count // 4)):  # first calls import, compile and allocate
        begin = time.process_time()
        work()
        if number and time.process_time() - begin > _SLOW:
            count = _ROUND
            break
    done, before = 0, _Alive.now(older)
    # The numbers themselves are objects, so they are there at each count.
    before = _Alive.now(older)
    while True:
        for _ in range(count):
            work()
        after = _Alive.now(older)
        kept = after.since(before, count)
        done += count
        is_late = done >= _LEAST and time.process_time() - begin > _SECONDS
        is_open = done >= _MOST_OPEN and {"threads", "descriptors"} & kept.keys()
        if not kept or done >= most or is_late or is_open:
            return kept
        before, count = after, 2 * count


@contextlib.contextmanager
def _no_records() -> Iterator[None]:
    """Nothing that a backend logs or warns of is recorded, as tests do."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _sizes_and_line(work: _Work) -> tuple[list[str], str]:
    """Bytes of Python objects and tensors that a call keeps, and the line that allocated most of the objects."""
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    try:
        found = []
        for count in (_WARM, _ROUND):
            for _ in range(count):
                work()
            _collect()
            found.append((tracemalloc.take_snapshot(), _tensor_bytes()))
    finally:
        if not was_tracing:
            tracemalloc.stop()
    (before, tensors), (after, more) = found
    lines = after.filter_traces(_OWN).compare_to(before.filter_traces(_OWN), "lineno")
    sizes = {"Python objects and arrays": sum(line.size_diff for line in lines), "tensors": more - tensors}
    told = [f"{size // _ROUND:,} bytes of {name}" for name, size in sizes.items() if size >= _ROUND]
    if not lines or lines[0].size_diff <= 0:
        return told, ""
    # torch allocates for others, so a line of the backend says more.
    best = next(
        (line for line in lines if line.size_diff > 0 and _TORCH not in line.traceback[0].filename), lines[0]
    )
    return told, f"; most Python objects come from {best.traceback[0].filename}:{best.traceback[0].lineno}"


_TORCH = str(Path(torch.__file__).parent)
_OWN = [tracemalloc.Filter(False, name) for name in (tracemalloc.__file__, __file__)]


def _tensor_bytes() -> int:
    """Bytes of all tensors that Python knows."""
    storages: dict[int, int] = {}
    for each in gc.get_objects():
        # A proxy object may run code when its class is read, so the type is read instead.
        if issubclass(type(each), torch.Tensor):
            with contextlib.suppress(Exception):  # fake tensors have no storage
                storage: Any = each.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


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
