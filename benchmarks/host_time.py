"""The host's time in calls, in turn; what a call launches, launched bare; and without a GPU no kernels."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from installed import versions

__all__ = [
    "ON_GPU",
    "device_name",
    "kernels",
    "launched",
    "microseconds",
    "replay",
    "write_report",
]

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = (
        "1"  # so that kernels take a CPU's tensors; triton reads it when imported
    )

CALLS = 20
"""Between two waits for the GPU: its queue must not fill."""
Launch = tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]


@contextlib.contextmanager
def kernels(do: Callable[..., None]) -> Iterator[None]:
    """Inside, `do(kernel, grid, arguments, options)` replaces every launch."""
    from attnplug.backends.triton.kernels.prefill import prefill_kernel

    def getitem(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **options: do(kernel, grid, arguments, options)

    # Triton's methods are inherited: what is set here is removed again.
    kind: Any = type(prefill_kernel)
    kind.__getitem__, before = getitem, kind.__getitem__
    try:
        yield
    finally:
        kind.__getitem__ = before


def launched(call: Callable[[], object]) -> list[Launch]:
    """The launches of `call`, in order."""
    from attnplug.ops.triton.launch import BoundKernel

    kept: list[Launch] = []

    def keep(kernel: Any, grid: tuple[int, ...], *given: Any) -> None:
        kept.append((kernel._kernel, grid, (*given, *kernel._bound), kernel._options))

    kind: Any = BoundKernel
    kind.__call__, before = keep, kind.__call__
    try:
        call()
    finally:
        kind.__call__ = before
    return kept


def replay(launches: Sequence[Launch]) -> Callable[[], None]:
    """The same launches, as Triton is called, with their arguments at hand."""

    def run() -> None:
        for kernel, grid, arguments, options in launches:
            kernel[grid](*arguments, **options)

    return run


def microseconds(calls: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """One call of each: the median over rounds of the mean of a few, with the GPU idle before."""
    means: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(rounds):
        for call, kept in zip(calls, means, strict=True):
            if ON_GPU:
                torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(CALLS):
                call()
            kept.append((time.perf_counter() - began) / CALLS)
    return [statistics.median(kept) * 1e6 for kept in means]


def device_name() -> str:
    return torch.cuda.get_device_name() if ON_GPU else "none: kernels do nothing"


def write_report(path: Path, figures: Sequence[dict[str, Any]], *distributions: str) -> None:
    """Figures as JSON, with date, device and versions."""
    data = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "device": device_name(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        **versions("attnplug", "torch", "triton", *distributions),
        "unit": "us",
        "figures": list(figures),
    }
    path.write_text(json.dumps(data, indent=2) + "\n")
