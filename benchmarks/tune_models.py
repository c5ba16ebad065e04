"""Measures the layers of several models at once: a table of times, steps held back from it, and a second run.

    python benchmarks/tune_models.py measure OUT          # on the device; the same command continues
    python benchmarks/tune_models.py report OUT           # anywhere

OUT gets table.json (as `attnplug tune --output` writes it), held.json (the steps to measure regret with) and again.json
(the steps of the table, measured by another process). The report compares the choices of the priorities and of the
table with the best of each cell held back, and the choices of the two runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from attnplug import LayerSpec
from attnplug.cli.tune_report import TuneReport
from attnplug.integrations.transformers import read_config
from attnplug.registry.default import get_registry
from attnplug.registry.devices import is_here, resolve_device
from attnplug.registry.tuned import TunedTable, layer_key
from attnplug.registry.tuned_files import read_table, update_table
from attnplug.tuning.jobs import Job, run_jobs
from attnplug.tuning.regret import CellRegret, regrets, summaries, versions_of
from attnplug.tuning.session import Tuner
from attnplug.tuning.workloads import Workload, layers_of, workload_of

MODELS = Path(__file__).parents[1] / "examples" / "models"
SIX = "llama-3.1-8b,llama-3.1-70b,qwen3-30b-a3b,mistral-7b-v0.1,gemma-3-27b-text,gpt-oss-20b"
BACKENDS = "TRITON,FLASHINFER,FLASH_ATTN_4,FLASH_ATTN_2,TORCH"
TABLE = (
    "decode 64 x 4k ragged, decode 8 x 4k ragged, decode 1 x 4k, decode 4 x 32k, decode 16 x 4 of 4k, "
    "prefill 4 x 1k, prefill 1 x 8k, prefill 4 x 512 of 4k ragged"
)
HELD = (
    "decode 48 x 6k ragged, decode 12 x 3k ragged, decode 2 x 6k, decode 2 x 24k, decode 12 x 4 of 6k, "
    "prefill 3 x 1500, prefill 1 x 5k, prefill 3 x 700 of 5k ragged"
)
CLEAR = 0.04
"""Two runs must choose alike where the best is ahead of the second by more than this share."""


def layers_of_models(names: Sequence[str]) -> dict[LayerSpec, list[str]]:
    """The kinds of layers of all models, each with the layers of the first model that has it."""
    found: dict[object, tuple[LayerSpec, list[str]]] = {}
    for name in names:
        model = read_config(MODELS / f"{name}.json")
        for spec, layers in layers_of(model.layers, None).items():
            found.setdefault(layer_key(spec), (spec, [f"{name}:{layer}" for layer in layers]))
    return dict(found.values())


def without_checks(device: Any, jobs: Sequence[Job]) -> Iterable[Any]:
    """Runs jobs that measure; those that check passed in the run before."""
    if jobs[0].timed:
        return run_jobs(device, jobs)
    return _passed(jobs)


def _passed(jobs: Sequence[Job]) -> Iterator[Any]:
    for job in jobs:
        for name, _ in job.backends:
            yield {"event": "checked", "job": job.number, "backend": name, "seconds": 0.0}


def part_of(table: TunedTable, workload: Workload) -> TunedTable:
    """The table with the steps of one workload only."""
    kept = dict(workload)
    layers = []
    for layer in table.layers:
        rows = tuple(row for row in layer.rows if row.shape in kept)
        if rows:
            layers.append(dataclasses.replace(layer, workload=workload, rows=rows))
    return dataclasses.replace(table, layers=tuple(layers), choices=())


def measure(options: argparse.Namespace) -> None:
    """Check all cells once, measure them, and measure those of the table again."""
    out, registry, device = options.folder, get_registry(), resolve_device(options.device)
    out.mkdir(parents=True, exist_ok=True)
    layers = layers_of_models(options.models.split(","))
    table, held = workload_of(options.table), workload_of(options.held)
    # Cells held back come after those of the table, whose weights are a thousand times theirs.
    both = (*table, *((shape, weight / 1000) for shape, weight in held))
    backends = [name for name in options.backends.split(",") if registry.plugins.find(name)]
    began, times = time.monotonic(), {}

    def run(workload: Workload, path: Path, **facts: Any) -> TunedTable:
        before = read_table(path) if path.exists() else None
        tuner = Tuner(registry, device, layers, workload, backends=backends, **facts)
        report, start = TuneReport(), time.monotonic()
        outcome = tuner.run(before, report, functools.partial(update_table, path), options.budget)
        times[path.stem] = time.monotonic() - start
        if outcome.left:
            report.say(f"{len(outcome.left)} cells are left; the same command continues")
        return outcome.table

    whole = run(both, out / "all.json")
    write(out / "table.json", part_of(whole, table), layers, table)
    write(out / "held.json", part_of(whole, held), layers, held)
    run(table, out / "again.json", run=without_checks)
    (out / "seconds.json").write_text(json.dumps({**times, "whole": time.monotonic() - began}))


def write(path: Path, part: TunedTable, layers: dict[LayerSpec, list[str]], workload: Workload) -> None:
    """Write a part of a table, with the choices that it gives."""
    tuner = Tuner(get_registry(), part.device, layers, workload)
    made = dataclasses.replace(part, choices=tuner.choices(part))
    update_table(path, lambda _: made)


def report(options: argparse.Namespace) -> int:
    """Print regret and agreement; 1 if a goal is missed."""
    table, held, again = (read_table(options.folder / f"{name}.json") for name in ("table", "held", "again"))
    registry = get_registry()
    assumed = None if is_here(held.device) else versions_of(held)
    cells = regrets(registry, held, {"packaged table": table}, assume_installed=assumed)
    print(f"{len(cells)} cells held back, on {held.device} {held.device.name or ''}; {held.environment}")
    for each in summaries(cells):
        shares = "  ".join(f"{name} {100 * getattr(each, name):5.1f} %" for name in ("mean", "p95", "worst"))
        print(f"{each.policy:32}  {shares}  at most {100 * each.over_default:+.1f} % against priorities")
    worst = sorted(cells, key=lambda cell: cell.regret("priorities"), reverse=True)
    print("priorities are farthest from the best at:")
    for cell in worst[:12]:
        print(f"  {_words(held, cell)}")
    cells_alike, gaps = agreement(registry, table, again, assumed)
    share = statistics.fmean(cells_alike) if cells_alike else 1.0
    unlike = [gap for alike, gap in zip(cells_alike, gaps, strict=True) if not alike]
    print(f"two runs choose alike in {100 * share:.1f} % of {len(cells_alike)} cells;", end=" ")
    print(f"the widest gap where they do not is {100 * max(unlike, default=0.0):.1f} %")
    write_regret(options.folder / "held.regret.json", held, cells)
    return int(share < 0.95 or max(unlike, default=0.0) > CLEAR)


def _words(held: TunedTable, cell: CellRegret) -> str:
    spec, chosen = held.layers[cell.layer].spec, cell.chosen["priorities"]
    what = f"{spec.num_heads}/{spec.num_kv_heads} heads of {spec.head_size}, window {spec.window[0]}"
    return (
        f"{what}, {cell.shape}: {chosen} {100 * cell.regret('priorities'):.0f} % slower than {cell.best}, "
        f"table chooses {cell.chosen['packaged table']}"
    )


def agreement(
    registry: Any, one: TunedTable, other: TunedTable, assumed: Any
) -> tuple[list[bool], list[float]]:
    """For each cell of both tables: whether they choose alike, and how far the best is ahead of the second."""
    alike, gaps = [], []
    for layer in one.layers:
        for shape, _ in layer.workload:
            costs = [_costs(table, layer.spec, shape) for table in (one, other)]
            if not all(costs):
                continue
            chosen = {
                registry.explain(
                    layer.spec, one.device, shape.phase, tuned=table.at(shape), assume_installed=assumed
                ).backend
                for table in (one, other)
            }
            alike.append(len(chosen) == 1)
            gaps.append(min(_gap(each) for each in costs))
    return alike, gaps


def _costs(table: TunedTable, spec: LayerSpec, shape: Any) -> list[float]:
    layer = table.by_key.get(layer_key(spec))
    rows = () if layer is None else layer.rows
    return sorted(layer.cost(row) for row in rows if layer and row.shape == shape and row.is_measured)


def _gap(costs: list[float]) -> float:
    return costs[1] / costs[0] - 1 if len(costs) > 1 else 0.0


def write_regret(path: Path, held: TunedTable, cells: Sequence[CellRegret]) -> None:
    """Write what benchmarks/regret.py plots."""
    data = [
        {
            "layer": cell.layer,
            "shape": str(cell.shape),
            "best": cell.best,
            "us": dict(cell.costs),
            "chosen": dict(cell.chosen),
            "regret": {policy: cell.regret(policy) for policy in cell.chosen},
        }
        for cell in cells
    ]
    device = held.device.to_dict()
    path.write_text(
        json.dumps({"schema": "attnplug.regret", "version": 1, "device": device, "cells": data}, indent=1)
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("measure", "report"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="current")
    parser.add_argument("--models", default=SIX, help="files of examples/models, without .json")
    parser.add_argument("--backends", default=BACKENDS, help="those that are not known here are left out")
    parser.add_argument("--table", default=TABLE, help="steps of the table")
    parser.add_argument("--held", default=HELD, help="steps held back")
    parser.add_argument(
        "--budget", type=float, help="seconds for each of the two measurements, without checks"
    )
    options = parser.parse_args()
    if options.what == "report":
        return report(options)
    measure(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
