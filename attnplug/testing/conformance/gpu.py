"""On a GPU: steps of a backend with step_safe neither wait nor allocate memory that grows with context."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import warnings
from collections.abc import Callable, Iterator

import torch

from attnplug.core.metadata import CommonAttentionMetadata
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.check import Check, ConformanceError, error_context
from attnplug.testing.conformance.harness import Harness
from attnplug.testing.conformance.steps import decodes, layer_of_kind, mixed, step_factory, with_lengths
from attnplug.testing.conformance.target import Target

GPU_TYPES = ("cuda", "rocm")
"""Device types that torch drives as CUDA."""

_WAITS, _GROWS = "waits for the device", "memory grows with context"

_BUSY_CYCLES = 2 * 10**9
"""About a second of a GPU's clock; the host needs only milliseconds to launch a step."""

_SHORT, _LONG = 4096, 16384
_REQUESTS = 8
_SLACK = 1 << 16
"""Bytes that a longer context may add: a few more splits, but less than one byte per key."""


def checks(target: Target) -> Iterator[Check]:
    """The checks of `step_safe`, if the backend declares it and the device is a GPU."""
    # A backend without step_safe promises neither of the two.
    if target.device.type not in GPU_TYPES or not target.backend.step_safe:
        return
    for shape in ("decode", "mixed"):
        summary = f"build and forward of a {shape} step do not wait for the GPU"
        yield Check.of(f"gpu/no-wait-{shape}", summary, _check_no_wait, target, shape)
    for shape, new in (("decode", 1), ("extend", 16)):
        summary = f"a {shape} step allocates no more for longer contexts"
        yield Check.of(f"gpu/no-growth-{shape}", summary, _check_no_growth, target, new)


def _check_no_wait(target: Target, shape: str) -> None:
    spec, size = layer_of_kind(target, "full")
    batch = step_factory(target, spec, decodes(size) if shape == "decode" else mixed(size))()
    harness = Harness.of(target, batch)
    needs = harness.builder.needs_host_seq_lens
    # No more host lengths than the builder declares to need.
    host = None if needs == "none" else batch.common.seq_lens_host
    common = dataclasses.replace(batch.common, seq_lens_host=host, seq_lens_host_exact=needs == "exact")
    with error_context("a step that warms up"):
        # Twice, since a first step may wait while it compiles or allocates.
        _step(harness, batch, common)
        metadata = harness.builder.build(0, common)
        harness.run(batch, metadata)
    parts: dict[str, Callable[[], object]] = {
        "build": lambda: harness.builder.build(0, common),
        "forward": lambda: harness.run(batch, metadata),
    }
    for name, part in parts.items():
        what = f"{name} of a {shape} step, where step_safe is declared"
        torch.cuda.synchronize()
        with error_context(what), _waits_are_errors(what):
            part()
        # torch detects only waits of its own calls. Twice, since the scheduler may have delayed the host.
        if all([_is_waiting(part), _is_waiting(part)]):
            raise ConformanceError(
                f"{what}: it returned only when the GPU had done all work before it", _WAITS
            )


@contextlib.contextmanager
def _waits_are_errors(what: str) -> Iterator[None]:
    """Raise ConformanceError if a torch call makes the host wait."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it may miss waits
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        except RuntimeError as error:
            # Only the error of torch's sync debug mode is about a wait.
            if "synchroniz" not in str(error):
                raise
            raise ConformanceError(f"{what}: {error}", _WAITS) from error
        finally:
            # The mode belongs to the process, and later checks may wait.
            torch.cuda.set_sync_debug_mode(before)


def _is_waiting(part: Callable[[], object]) -> bool:
    """Whether `part` returns only when the GPU has done the work queued before."""
    torch.cuda.synchronize()
    # A busy GPU makes a wait visible: the event is done when `part` returns only if the host waited.
    torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]
    busy = torch.cuda.Event()  # type: ignore[no-untyped-call]
    busy.record()
    part()
    waited = bool(busy.query())  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    return waited


def _check_no_growth(target: Target, new: int) -> None:
    spec, size = layer_of_kind(target, "full")
    batch = target.batch(spec, [new] * _REQUESTS, [new] * _REQUESTS)
    harness = Harness.of(target, batch)
    # All requests use one page, since only sizes matter here.
    table = batch.common.block_table_tensor[:, :1].repeat(1, -(-(_LONG + size) // size) + 1)
    kept, peaks = [], []
    for context in (_SHORT, _LONG):
        with error_context(f"a step of {context} tokens of context"):
            common = with_lengths(batch.common, torch.full((_REQUESTS,), context + new))
            common = dataclasses.replace(common, block_table_tensor=table)
            # Compilation and the growth of workspaces happen in these runs, before the peak is measured.
            for _ in range(2):
                _step(harness, batch, common)
            # Garbage of other checks in this process, freed in one of both measurements, would look like growth.
            gc.collect()
            kept.append(_allocated("current"))
            peaks.append(_peak(functools.partial(_step, harness, batch, common)))
    for what, (short, long) in {"keeps": kept, "takes": peaks}.items():
        if long - short > _SLACK:
            raise ConformanceError(
                f"a step {what} {long - short:,} bytes more with {_LONG} tokens of context than with {_SHORT}, "
                f"where step_safe is declared: {_GROWS}",
                _GROWS,
            )


def _step(harness: Harness, batch: Batch, common: CommonAttentionMetadata) -> None:
    harness.run(batch, harness.builder.build(0, common))


def _peak(work: Callable[[], None]) -> int:
    """The peak of bytes that `work` asked torch for, beyond those held before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = _allocated("current")
    work()
    torch.cuda.synchronize()
    return _allocated("peak") - before


def _allocated(metric: str) -> int:
    """The "current" or "peak" bytes of all tensors.

    They are as asked for: torch's allocator hands out free blocks that are up to a MiB larger, whichever it finds.
    """
    stats = torch.cuda.memory_stats()
    # Other allocators of torch count only what they hand out.
    asked = stats.get("requested_bytes.all.current", 0) > 0
    return int(stats.get(f"{'requested' if asked else 'allocated'}_bytes.all.{metric}", 0))
