"""Every head size of a backend over every stored type in every phase, each compared with the float64 oracle.

    python benchmarks/head_sizes.py --json FILE [--backend TRITON] [--jobs 16] [--minutes 7]

`attnplug matrix` samples pairs of values; this crosses head sizes, stored types and phases, with steps that take each launch
and have more than 64 rows a request. Cells run in worker processes, so that a fault ends only one cell. The file is one of
`attnplug matrix --verify --json`: `attnplug matrix merge` and `diff` read it. Exit code 4: a cell is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from attnplug.core.backend import AttentionBackend
from attnplug.core.device import Device
from attnplug.matrix.axes import PLAIN, spec_of
from attnplug.matrix.design import cell_reasons, declare
from attnplug.matrix.model import Cell, Finding, Matrix, Run, Status
from attnplug.matrix.results import write_matrix
from attnplug.matrix.verify import Verification
from attnplug.testing.conformance.check import Check, ConformanceError
from attnplug.testing.conformance.suites import find_backend
from attnplug.testing.conformance.target import Target
from attnplug.testing.design.search import HEAD_SIZES, sizes_to_try
from attnplug.testing.isolation.results import Result
from attnplug.testing.isolation.run import Limits

PHASES = ("decode", "prefill", "mixed")
STORED = (
    *((dtype, "auto") for dtype in ("bfloat16", "float16", "float32")),
    *itertools.product(("bfloat16", "float16"), ("fp8_e4m3", "fp8_e5m2")),
)
"""Types of layers and of what they store."""
SMALL_PAGES = {("bfloat16", "fp8_e4m3"), ("float16", "fp8_e5m2"), ("bfloat16", "auto")}
"""The types that are also tried with pages of 8 tokens."""
USUAL_HEADS, OTHER_HEADS = (8, 2), ((8, 8), (32, 4))


class Step(NamedTuple):
    """The new and all tokens of each request."""

    name: str
    new: list[int]
    tokens: list[int]
    is_large: bool = False
    """Whether it fills a GPU, so that extends are not divided by their keys; tried with OTHER_HEADS too."""


MANY = [100 + 7 * request for request in range(24)]
STEPS = {
    "decode": (
        Step("decodes", [1] * 7, [1, 17, 64, 129, 300, 33, 600]),
        Step("drafts", [2, 5, 16], [40, 70, 300]),
    ),
    "prefill": (
        Step("short prompts", [130, 70, 17], [130, 70, 17]),
        Step("prompts", [300, 70, 1], [300, 70, 1], True),
        Step("extends", [90, 70], [400, 130]),
        Step("many extends", [70] * 24, MANY, True),
    ),
    "mixed": (
        Step("mixed", [1, 90, 1, 40, 4, 70], [300, 90, 17, 120, 64, 200]),
        Step("many mixed", [1] * 8 + [70] * 24, [33, 64, 129, 300, 17, 1, 65, 500, *MANY], True),
    ),
}


def cells_of(backend: type[AttentionBackend]) -> list[Cell]:
    """The cells to run, those with the same sizes and types one after the other; the largest heads first."""
    sizes = sizes_to_try(tuple(backend.get_supported_head_sizes() or ()), HEAD_SIZES) or list(HEAD_SIZES)
    found = []
    for size, (dtype, stored) in itertools.product(sorted(sizes, reverse=True), STORED):
        feature = PLAIN if stored == "auto" else "fp8_kv"
        found += [Cell(feature, phase, size, dtype, stored, 16, "NHD") for phase in PHASES]
        if (dtype, stored) in SMALL_PAGES:
            found.append(Cell(feature, "mixed", size, dtype, stored, 8, "NHD"))
    return found


def cell_checks(target: Target) -> Iterator[Check]:
    """A check for each served cell; those that share compilations are in one group."""
    for cell in cells_of(target.backend):
        if not cell_reasons(target.backend, target.device, cell):
            group = f"d{cell.head_size}-{cell.dtype}-{cell.kv_cache_dtype}"
            yield Check(cell.id, functools.partial(check_cell, target, cell), "equals the oracle", group)


def check_cell(target: Target, cell: Cell) -> None:
    """Run the steps of the cell's phase, with every number of heads.

    Raises:
        ConformanceError: a number is wrong; the text names the step.
    """
    for step, (heads, kv_heads) in forms(cell):
        spec = spec_of(cell).replace(num_heads=heads, num_kv_heads=kv_heads)
        if target.reasons(spec):
            continue
        try:
            check_step(target, spec, step)
        except Exception as problem:
            raise ConformanceError(f"{step.name} with {heads} heads over {kv_heads}: {problem}") from problem


def check_step(target: Target, spec: Any, step: Step) -> None:
    """Compare one step with the oracle."""
    from attnplug.testing import paged_batch, run_batch
    from attnplug.testing.conformance.harness import Output
    from attnplug.testing.conformance.mistakes.expectations import difference

    serving = target.backend.for_layer(spec)
    scales: dict[str, Any] = {"k_scale": 0.5, "v_scale": 2.0} if spec.has_quantized_kv_cache else {}
    batch = paged_batch(
        spec, step.new, step.tokens, device=target.torch_device, backend=serving, padding=3, **scales
    )
    if wrong := difference(batch, Output(*run_batch(serving, batch))):
        raise ConformanceError(wrong)


def forms(cell: Cell) -> Iterator[tuple[Step, tuple[int, int]]]:
    """Steps of a cell, each with numbers of heads."""
    usual = OTHER_HEADS[0] if cell.block_size == 8 else USUAL_HEADS
    for step in STEPS[cell.phase]:
        yield step, usual
        if cell.kv_cache_dtype != "auto" and cell.phase == "prefill" and step.is_large:
            yield from ((step, heads) for heads in OTHER_HEADS)


class Progress:
    """Prints a line for each wrong cell, and one each half minute."""

    def __init__(self, verification: Verification) -> None:
        self._verification = verification
        self._counts: Counter[str] = Counter()
        self._began = self._told = time.monotonic()

    def started(self, check_id: str) -> None:
        """Nothing is printed."""

    def finished(self, result: Result) -> None:
        """Count a cell."""
        status = self._verification.status_of(result)
        self._counts[status] += 1
        if status is not Status.VERIFIED:
            print(
                f"{status}: {result.id}: {result.cause.splitlines()[0][:300] if result.cause else ''}",
                flush=True,
            )
        if time.monotonic() - self._told > 30:
            self._told = time.monotonic()
            done = sum(self._counts.values())
            print(
                f"  {done} of {len(self._verification.ids)} after {self._told - self._began:.0f} s",
                flush=True,
            )


def run(name: str, device: Device, jobs: int, minutes: float, most: int | None) -> Run:
    """Run the cells of a backend for at most so many minutes; the rest is not run."""
    offer = find_backend(name, "--backend")
    declared = declare(offer, device)
    findings = []
    for cell in cells_of(offer.backend)[:most]:
        reasons = cell_reasons(offer.backend, device, cell)
        status = Status.REFUSED if reasons else Status.DECLARED
        findings.append(Finding(cell, status, tuple(map(str, reasons))))
    asked = dataclasses.replace(declared, findings=tuple(findings))
    # Workers import this file by its name.
    verification = Verification(
        asked, offer, device, name=name, checks_of=f"{Path(__file__).stem}:cell_checks"
    )
    if why := verification.prepare():
        print(why, flush=True)
        return verification.outcome()
    limits = Limits.here(device.type, len(verification.remaining), 240.0, jobs, None)
    print(f"{name} on {device}: {len(verification.ids)} cells, {limits.jobs} workers", flush=True)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, minutes * 60)
    try:
        if problem := verification.run(limits, Progress(verification)):
            print(problem, flush=True)
    except KeyboardInterrupt:
        print(f"stopped after {minutes:g} minutes; the rest is not run", flush=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return verification.outcome()


def main() -> int:
    """Run, write the file, and print the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", action="append", help="may be repeated [default: TRITON]")
    parser.add_argument("--json", type=Path, required=True, help="the file to write")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="worker processes")
    parser.add_argument("--minutes", type=float, default=7.0, help="the longest run of one backend")
    parser.add_argument("--most", type=int, help="only the first so many cells")
    chosen = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    # Sixteen processes compile at the same time, each with threads of its own.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    device = Device.current()
    runs = [
        run(name, device, chosen.jobs, chosen.minutes, chosen.most) for name in chosen.backend or ["TRITON"]
    ]
    write_matrix(Matrix(tuple(runs)), chosen.json)
    counts = Counter(str(finding.status) for each in runs for finding in each.findings)
    print(", ".join(f"{number} {status}" for status, number in counts.items()))
    return 4 if counts[Status.REFUTED] else 0


if __name__ == "__main__":
    sys.exit(main())
