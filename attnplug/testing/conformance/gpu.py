"""On a GPU: a backend that declares step_safe makes no step wait, or allocate what grows with context."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import torch

from attnplug.core.metadata import AttentionMetadata, CommonAttentionMetadata
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.check import Check, ConformanceError
from attnplug.testing.conformance.driving import Driver
from attnplug.testing.conformance.steps import decodes, layer_of_kind, mixed, step_of
from attnplug.testing.conformance.target import Target
from attnplug.testing.conformance.verdicts import during

__all__ = ["GPU_TYPES", "checks"]

GPU_TYPES = ("cuda", "rocm")
"""Device types that torch drives as CUDA."""

_WAITS, _GROWS = "waits for the device", "memory grows with context"

_BUSY_CYCLES = 2 * 10**9
"""About a second of a GPU's clock, of which a step takes the host milliseconds."""

_SHORT, _LONG = 4096, 16384
_REQUESTS = 8
_SLACK = 1 << 16
"""Bytes that a longer context may take: a few splits more, and less than a byte for each key."""


def checks(target: Target) -> Iterator[Check]:
    """The checks of `step_safe`, where it is declared and the device is a GPU."""
    if target.device.type not in GPU_TYPES or not target.backend.step_safe:
        return
    for shape in ("decode", "mixed"):
        run = functools.partial(_check_no_wait, target, shape)
        yield Check(
            f"gpu/no-wait-{shape}", run, f"neither build nor forward of a {shape} step waits for the GPU"
        )
    for shape, new in (("decode", 1), ("extend", 16)):
        run = functools.partial(_check_no_growth, target, new)
        yield Check(f"gpu/no-growth-{shape}", run, f"a {shape} step allocates no more for longer contexts")


def _check_no_wait(target: Target, shape: str) -> None:
    spec = layer_of_kind(target, "full")
    size = target.block_size(spec)
    batch = step_of(target, spec, decodes(size) if shape == "decode" else mixed(size))()
    driver = Driver.of(target, batch)
    common = _least_known(driver, batch.common)
    with during("a step that warms up"):
        # Twice: what is compiled or allocated once may wait.
        _step(driver, batch, common)
        metadata = driver.builder.build(0, common)
        driver.run(batch, metadata)
    parts: dict[str, Callable[[], object]] = {
        "build": lambda: driver.builder.build(0, common),
        "forward": lambda: driver.run(batch, metadata),
    }
    for name, part in parts.items():
        what = f"{name} of a {shape} step, where step_safe is declared"
        torch.cuda.synchronize()
        with during(what), _waits_are_errors(what):
            part()
        # torch notices only the waits it makes itself. Twice, since the host may have been held up.
        if all([_is_waiting(part), _is_waiting(part)]):
            raise ConformanceError(
                f"{what}: it returned only when the GPU had done all work before it", _WAITS
            )


def _least_known(driver: Driver, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """The step with no more said of the lengths on the host than the builder declares to need."""
    needs = driver.builder.needs_host_seq_lens
    return dataclasses.replace(
        common,
        seq_lens_host=None if needs == "none" else common.seq_lens_host,
        seq_lens_host_exact=needs == "exact",
    )


@contextlib.contextmanager
def _waits_are_errors(what: str) -> Iterator[None]:
    """ConformanceError where torch would make the host wait."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it may not notice every wait
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            raise ConformanceError(f"{what}: {error}", _WAITS) from error
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _is_waiting(part: Callable[[], object]) -> bool:
    """Whether `part` returns only when the GPU has done what it was given before."""
    torch.cuda.synchronize()
    torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]
    busy = torch.cuda.Event()  # type: ignore[no-untyped-call]
    busy.record()
    part()
    waited = bool(busy.query())  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    return waited


def _check_no_growth(target: Target, new: int) -> None:
    spec = layer_of_kind(target, "full")
    size = target.block_size(spec)
    batch = target.batch(spec, [new] * _REQUESTS, [new] * _REQUESTS)
    driver = Driver.of(target, batch)
    kept, peaks = [], []
    for context in (_SHORT, _LONG):
        with during(f"a step of {context} tokens of context"):
            common = _of_context(batch, size, context + new)
            for _ in range(2):
                _step(driver, batch, common)
            kept.append(torch.cuda.memory_allocated())
            peaks.append(_peak(functools.partial(_step, driver, batch, common)))
    for what, (short, long) in {"keeps": kept, "takes": peaks}.items():
        if long - short > _SLACK:
            raise ConformanceError(
                f"a step {what} {long - short:,} bytes more with {_LONG} tokens of context than with {_SHORT}, "
                f"where step_safe is declared: {_GROWS}",
                _GROWS,
            )


def _of_context(batch: Batch, size: int, length: int) -> CommonAttentionMetadata:
    """The step with requests of `length` tokens, whose pages are all the same one: only sizes matter here."""
    common = batch.common
    host = np.full(_REQUESTS, length, dtype=np.int32)
    table = common.block_table_tensor[:, :1].repeat(1, -(-(_LONG + size) // size) + 1)
    return dataclasses.replace(
        common,
        seq_lens=torch.from_numpy(host.copy()).to(common.seq_lens.device),
        seq_lens_host=host,
        max_seq_len=length,
        block_table_tensor=table,
    )


def _step(driver: Driver, batch: Batch, common: CommonAttentionMetadata) -> None:
    metadata: AttentionMetadata = driver.builder.build(0, common)
    driver.run(batch, metadata)


def _peak(work: Callable[[], None]) -> int:
    """The most bytes that torch had allocated during `work`, beyond those before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
