"""Measures the layers of several models at once: a table of times, steps held back from it, and a second run.

    python benchmarks/tune_models.py measure OUT          # on the device; the same command continues
    python benchmarks/tune_models.py report OUT           # anywhere, also of a measurement that was cut

The parts of a measurement are: "cells", the steps of the table and those held back from it, in all.json; "again", the
steps of the table by another process, in again.json; and "gemma", how long `attnplug tune` takes for one model, twice.
The report writes table.json (as `attnplug tune --output` does), held.json, and regret-h200.json for the docs. It
compares the choices of the priorities and of the table with the best of each cell held back, and the choices of the two
runs. It prints each goal; the exit code is 1 if one is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tune_goals import goals, kinds_of

from attnplug import LayerSpec
from attnplug.cli.output.tune_report import TuneReport
from attnplug.integrations.transformers import read_config
from attnplug.registry.default import get_registry
from attnplug.registry.devices import is_here, resolve_device
from attnplug.registry.measured.tuned import TunedTable, layer_key
from attnplug.registry.measured.tuned_files import read_table, update_table
from attnplug.tuning.jobs import Job, run_jobs
from attnplug.tuning.regret import CellRegret, regrets, summaries, versions_of
from attnplug.tuning.session import Tuner
from attnplug.tuning.step_regret import kinds, step_regrets
from attnplug.tuning.workloads import Workload, layers_of, workload_of

MODELS = Path(__file__).parents[1] / "examples" / "models"
SIX = "llama-3.1-8b,llama-3.1-70b,qwen3-30b-a3b,mistral-7b-v0.1,gemma-3-27b-text,gpt-oss-20b"
BACKENDS = "TRITON,FLASHINFER,FLASH_ATTN_4,FLASH_ATTN_2,TORCH"
TABLE = (
    "decode 64 x 4k ragged, decode 8 x 4k ragged, decode 1 x 4k, decode 4 x 32k, decode 16 x 4 of 4k, "
    "prefill 4 x 1k, prefill 1 x 8k, prefill 4 x 512 of 4k ragged, prefill 64 x 100, prefill 16 x 300, "
    "mixed 24 x 3k + 1 x 512 of 512"
)
HELD = (
    "decode 48 x 6k ragged, decode 12 x 3k ragged, decode 2 x 6k, decode 2 x 24k, decode 12 x 4 of 6k, "
    "prefill 3 x 1500, prefill 1 x 5k, prefill 3 x 700 of 5k ragged, prefill 90 x 60, prefill 20 x 250, "
    "mixed 20 x 3k + 1 x 400 of 2k"
)


def layers_of_models(names: Sequence[str]) -> dict[LayerSpec, list[str]]:
    """The kinds of layers of all models, each with the layers of the first model that has it."""
    found: dict[object, tuple[LayerSpec, list[str]]] = {}
    for name in names:
        model = read_config(MODELS / f"{name}.json")
        for spec, layers in layers_of(model.layers, None).items():
            found.setdefault(layer_key(spec), (spec, [f"{name}:{layer}" for layer in layers]))
    return dict(found.values())


workers = functools.partial(run_jobs, seconds=240.0)
"""Measures: a backend that hangs must not take all the time for which a device is lent."""


def without_checks(device: Any, jobs: Sequence[Job]) -> Iterable[Any]:
    """Runs jobs that measure; those that check passed in the run before."""
    if jobs[0].timed:
        return workers(device, jobs)
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
    """Run the parts in turn; one that fails costs only itself."""
    options.folder.mkdir(parents=True, exist_ok=True)
    # Workers load what an earlier one has compiled; the library's own setting.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    # A refutation here must not change the candidates of a later part or of the report.
    os.environ["ATTNPLUG_EVIDENCE"] = str(options.folder.resolve() / "refuted.json")
    for part in options.parts:
        began = time.monotonic()
        print(f"part {part}", flush=True)
        try:
            PARTS[part](options)
        except Exception:  # noqa: BLE001  (of any part, which costs that part)
            traceback.print_exc()
        note(options.folder, {part: time.monotonic() - began})


def note(folder: Path, seconds: dict[str, float]) -> None:
    """Add figures to seconds.json."""
    path = folder / "seconds.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(kept | seconds, indent=1) + "\n")


def measure_cells(options: argparse.Namespace) -> None:
    """Check and measure the steps of the table and those held back."""
    table, held = workload_of(options.table), workload_of(options.held)
    # Cells held back come after those of the table, whose weights are a thousand times theirs.
    both = (*table, *((shape, weight / 1000) for shape, weight in held))
    run_tuner(options, both, options.folder / "all.json", options.budget)


def measure_again(options: argparse.Namespace) -> None:
    """Measure the steps of the table again, without checks, and without what failed."""
    path, first = options.folder / "again.json", options.folder / "all.json"
    if first.exists() and not path.exists():
        update_table(path, lambda _: failures_of(read_table(first)))
    run_tuner(options, workload_of(options.table), path, options.again_budget, run=without_checks)


def failures_of(table: TunedTable) -> TunedTable:
    """The table with the rows of those that failed only: a tuning that continues it does not try them again."""
    layers = (
        dataclasses.replace(layer, rows=tuple(row for row in layer.rows if not row.is_measured))
        for layer in table.layers
    )
    return dataclasses.replace(table, layers=tuple(layer for layer in layers if layer.rows), choices=())


def run_tuner(
    options: argparse.Namespace, workload: Workload, path: Path, budget: float | None, **facts: Any
) -> None:
    """Tune the layers of all models with a workload, into a file that continues."""
    registry, device = get_registry(), resolve_device(options.device)
    backends = [name for name in options.backends.split(",") if registry.plugins.find(name)]
    layers = layers_of_models(options.models.split(","))
    before = read_table(path) if path.exists() else None
    tuner = Tuner(registry, device, layers, workload, backends=backends, **{"run": workers, **facts})
    report = TuneReport()
    outcome = tuner.run(before, report, functools.partial(update_table, path), budget)
    if outcome.left:
        report.say(f"{len(outcome.left)} cells are left; the same command continues")


def measure_gemma(options: argparse.Namespace) -> None:
    """The seconds of `attnplug tune` for gemma-3-27b at batches of 1, 8 and 64, and of the same command again."""
    table = options.folder / "gemma.json"
    table.unlink(missing_ok=True)
    command = [sys.executable, "-m", "attnplug", "tune", str(MODELS / "gemma-3-27b-text.json")]
    command += ["--device", options.device, "--batch", options.gemma_batch, "--output", str(table)]
    for name in ("first_s", "again_s"):
        began = time.monotonic()
        code = subprocess.run(command, check=False).returncode
        # 4: a backend was wrong, which the command has noted.
        if code not in (0, 4):
            raise RuntimeError(f"{' '.join(command[2:])} ended with code {code}")
        note(options.folder, {name: time.monotonic() - began})


PARTS = {"cells": measure_cells, "again": measure_again, "gemma": measure_gemma}


def split(options: argparse.Namespace) -> tuple[TunedTable, TunedTable]:
    """The table and the steps held back, written from what was measured; also if the measurement was cut."""
    whole = read_table(options.folder / "all.json")
    layers = {layer.spec: ["0"] * layer.count for layer in whole.layers}
    parts = []
    for name, text in (("table", options.table), ("held", options.held)):
        path, workload = options.folder / f"{name}.json", workload_of(text)
        path.unlink(missing_ok=True)
        write(path, part_of(whole, workload), layers, workload)
        parts.append(read_table(path))
    return parts[0], parts[1]


def write(path: Path, part: TunedTable, layers: dict[LayerSpec, list[str]], workload: Workload) -> None:
    """Write a part of a table, with the choices that it gives."""
    tuner = Tuner(get_registry(), part.device, layers, workload)
    made = dataclasses.replace(part, choices=tuner.choices(part, assumed_of(part)))
    update_table(path, lambda _: made)


def assumed_of(table: TunedTable) -> dict[str, str] | None:
    """The versions to judge a table of another machine by; None for those that are installed on its own."""
    return None if is_here(table.device) else versions_of(table)


def report(options: argparse.Namespace) -> int:
    """Print regret, agreement and goals; 1 if a goal is missed."""
    (table, held), registry = split(options), get_registry()
    again = options.folder / "again.json"
    assumed = assumed_of(held)
    cells = regrets(registry, held, {"packaged table": table}, assume_installed=assumed)
    print(f"{len(cells)} cells held back, on {held.device} {held.device.name or ''}; {held.environment}")
    policies = summaries(cells)
    for each in policies:
        shares = "  ".join(f"{name} {100 * getattr(each, name):5.1f} %" for name in ("mean", "p95", "worst"))
        print(f"{each.policy:32}  {shares}  at most {100 * each.over_default:+.1f} % against priorities")
    steps = step_regrets(registry, held, {"packaged table": table}, assume_installed=assumed)
    for kind in kinds(steps):
        shares = f"mean {100 * kind.mean:5.1f} %  worst {100 * kind.worst:5.1f} %"
        print(f"plan by {kind.policy:24}  {kind.kind:14} {kind.cells:4} cells  {shares}")
    worst = sorted(cells, key=lambda cell: cell.regret("priorities"), reverse=True)
    print("priorities are farthest from the best at:")
    for cell in worst[:12]:
        print(f"  {_words(held, cell)}")
    alike: dict[str, float] = {}
    if again.exists():
        same, gaps = agreement(registry, table, read_table(again), assumed)
        unlike = [gap for fine, gap in zip(same, gaps, strict=True) if not fine]
        share = statistics.fmean(same) if same else 0.0
        alike = {"cells": len(same), "share": share, "gap": max(unlike, default=0.0)}
    write_regret(options.folder / "regret-h200.json", held, cells)
    found = goals(
        {
            "cells": len(cells),
            "models": _models_of(held, options.models.split(",")),
            "kinds": kinds_of([cell.shape for cell in cells]),
            "backends": {name for cell in cells for name in cell.costs},
            "policies": {each.policy: each for each in policies},
        },
        alike,
        _figures(options, table, assumed),
    )
    print(*found, sep="\n")
    return int(any(goal.met is False for goal in found))


def _models_of(held: TunedTable, names: Sequence[str]) -> int:
    """The number of models that have cells of each kind of layers."""
    every = {name: layers_of(read_config(MODELS / f"{name}.json").layers, None) for name in names}
    return sum(all(layer_key(spec) in held.by_key for spec in kinds) for kinds in every.values())


def _figures(options: argparse.Namespace, table: TunedTable, assumed: Any) -> dict[str, Any]:
    """The figures beside regret that were measured."""
    found: dict[str, Any] = {}
    for name, path in (("seconds", options.folder / "seconds.json"), ("engine", options.engine)):
        if path is not None and path.exists():
            found[name] = json.loads(path.read_text())
    return found | found.pop("seconds", {}) | select_us(table, assumed)


def select_us(table: TunedTable, assumed: Any, rounds: int = 300) -> dict[str, float]:
    """Microseconds of a selection with a table on this machine, and what the table adds to the first of a layer."""
    registry, layer = get_registry(), next(iter(table.layers), None)
    if layer is None:
        return {}
    phase = layer.workload[0][0].phase
    firsts: dict[bool, list[float]] = {False: [], True: []}
    # Layers that differ in their scale have the same rows, and decisions of their own.
    for number in range(rounds):
        for tuned in firsts:
            spec = layer.spec.replace(scale=0.1 + 1e-6 * (2 * number + tuned))
            began = time.perf_counter()
            registry.explain(
                spec, table.device, phase, tuned=table if tuned else False, assume_installed=assumed
            )
            firsts[tuned].append(time.perf_counter() - began)
    warm = []
    for _ in range(rounds):
        began = time.perf_counter()
        registry.explain(layer.spec, table.device, phase, tuned=table, assume_installed=assumed)
        warm.append(time.perf_counter() - began)
    # Pairs of neighbours, because a machine is faster at times than at others.
    added = statistics.median(
        tuned - untuned for untuned, tuned in zip(firsts[False], firsts[True], strict=True)
    )
    return {"warm_us": 1e6 * statistics.median(warm), "first_us": 1e6 * added}


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
    """For each cell of both tables: whether they make the same choice, and how far the best is ahead of the second."""
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
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="default: all")
    parser.add_argument("--budget", type=float, help="seconds to measure cells, without checks")
    parser.add_argument("--again-budget", type=float, help="seconds to measure those of the table again")
    parser.add_argument("--gemma-batch", default="1,8,64", help="default: %(default)s")
    parser.add_argument("--engine", type=Path, help="the report of benchmarks/tuned_engine.py, for the goals")
    options = parser.parse_args()
    if options.what == "report":
        return report(options)
    measure(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
