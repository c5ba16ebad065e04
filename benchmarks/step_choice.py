"""All backends and the chosen composite at steps of each kind, in one run, and the regret of the choice per kind.

    python benchmarks/step_choice.py --device cuda --limit 240 --json steps.json     # the same command continues
    python benchmarks/step_choice.py --report --json steps.json                      # the regret of a file; no GPU
    TRITON_INTERPRET=1 python benchmarks/step_choice.py --device cpu --tiny --json tiny.json \
        --composite "TORCH+TRITON[prefill query ..4 on TRITON; mixed requests ..2 on TRITON]"

Each cell is checked against the float64 reference and then timed, backends in turn, as `attnplug tune` does. The file is
written after each cell. A cell that the file has is not measured again. After `--limit` seconds the worker ends.

The cost of a step is the kernel and a share of the build: one build serves `--layers` layers. The regret of four choices is
printed: one backend a phase, the step chooses by priorities, the same by a table of the layer's other cells in this file, and
the composite as it was timed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime as dt
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from step_regret import PHASES, STEPS, RecordedCell, choice, latent_layer

import attnplug
from attnplug.core import Device, LayerSpec, Phase
from attnplug.registry.default import get_registry
from attnplug.registry.devices import resolve_device
from attnplug.registry.measured.step_shapes import StepShape
from attnplug.registry.measured.tuned import TimedRow, TunedLayer, TunedTable
from attnplug.registry.plugins.installed import BackendVersions
from attnplug.registry.selection.decision import Decision
from attnplug.tuning.cells import Contender, contenders, subject_of
from attnplug.tuning.jobs import Job, run_jobs

WITH_TABLE, AS_TIMED = "the step chooses, with a table", "the composite as timed"
POLICIES = PHASES, STEPS, WITH_TABLE, AS_TIMED

_LATENT_LAYERS = 61
SHAPES = {
    "short prompts": ("prefill 200 x 40", "prefill 90 x 100", "prefill 30 x 300", "prefill 8 x 200"),
    "long prompts": ("prefill 4 x 1500", "prefill 1 x 20000"),
    "extends": ("prefill 16 x 64 of 8k", "prefill 1 x 512 of 32k", "prefill 3 x 700 of 5k ragged"),
    "mixed steps": (
        "mixed 24 x 3k + 1 x 512 of 512",
        "mixed 60 x 8k + 1 x 4k",
        "mixed 48 x 4k + 4 x 100 of 100 ragged",
        "mixed 20 x 2k + 1 x 256 of 8k",
    ),
    "decodes": ("decode 48 x 6k ragged", "decode 8 x 30k", "decode 1 x 8k"),
    "drafts": ("decode 20 x 3 of 5k", "decode 4 x 4 of 30k"),
}
LATENTS = (
    "decode 48 x 6k ragged",
    "decode 8 x 30k",
    "decode 4 x 8k",
    "decode 2 x 8k",
    "decode 1 x 8k",
    "decode 20 x 3 of 5k",
    "decode 2 x 3 of 8k",
)
TINY = {
    "short prompts": ("prefill 3 x 4", "prefill 2 x 3 of 9"),
    "long prompts": ("prefill 1 x 20",),
    "mixed steps": ("mixed 1 x 9 + 1 x 6", "mixed 3 x 9 + 1 x 6"),
    "decodes": ("decode 3 x 9", "decode 1 x 5"),
    "drafts": ("decode 2 x 2 of 9",),
}


@dataclasses.dataclass(frozen=True)
class Measured:
    """A cell to measure: a layer at a step."""

    spec: LayerSpec
    shape: StepShape

    @property
    def name(self) -> str:
        """The same in every run."""
        kind = "latents" if self.spec.mla is not None else "heads"
        heads = f"{self.spec.num_heads}/{self.spec.num_kv_heads}/{self.spec.head_size}"
        return f"{kind} {heads}, {self.shape}"

    @property
    def phase(self) -> Phase | None:
        """The phase for which candidates are asked."""
        return self.shape.phase


def cells_of(tiny: bool) -> list[Measured]:
    """The cells, those of the first layer first."""
    if tiny:
        plain = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32")
        return [Measured(plain, StepShape.parse(text)) for texts in TINY.values() for text in texts]
    layers = [
        LayerSpec(num_heads=heads, num_kv_heads=kv_heads, head_size=size, dtype="bfloat16")
        for heads, kv_heads, size in ((32, 8, 128), (28, 4, 128), (64, 8, 64))
    ]
    cells = [Measured(layers[0], StepShape.parse(text)) for texts in SHAPES.values() for text in texts]
    cells += [
        Measured(latent_layer(heads, dtype="bfloat16"), StepShape.parse(text))
        for heads in (16, 32, 64, 128)
        for text in LATENTS
    ]
    for spec in layers[1:]:
        cells += [Measured(spec, StepShape.parse(text)) for texts in SHAPES.values() for text in texts]
    return cells


def plan_of(
    spec: LayerSpec, device: Device, composite: str | None, tuned: Any = False, **asked: Any
) -> Decision:
    """The decision of a plan for a layer, or of a composite that is given."""
    rules = {} if composite is None or spec.mla is not None else {"backend": composite}
    return attnplug.plan({"layer": spec}, device, tuned=tuned, **rules, **asked).decisions["layer"]


def contenders_of(
    cell: Measured, device: Device, decision: Decision, names: Sequence[str] | None
) -> dict[str, Contender]:
    """The accepted backends, the pair in a mixed step, and the chosen composite, by the names that jobs have."""
    registry = get_registry()
    accepted = contenders(registry, device, cell.spec, cell.phase, None)
    found = {each.offer.name: each for each in accepted if names is None or each.offer.name in names}
    pages = next(iter(found.values())).pages if found else None
    pair = "+".join(dict.fromkeys(decision.members.values()))
    composites = [pair] if cell.phase is None else []
    if decision.steps:
        composites.append(str(decision.full_name))
    for name in composites:
        for offer in registry.plugins.find(name)[:1] if name not in found else ():
            found[name] = Contender(offer, subject_of(offer, device), decision.pages or pages)
    return found


def measure(
    cells: Sequence[Measured], device: Device, options: argparse.Namespace, data: dict[str, Any]
) -> None:
    """Measure the cells that the file lacks until the limit, and write the file after each."""
    end = time.monotonic() + options.limit
    known = {cell["name"] for cell in data["cells"]}
    pending = [cell for cell in cells if cell.name not in known]
    entries: list[dict[str, Any]] = []
    jobs: list[Job] = []
    for index, cell in enumerate(pending):
        decision = plan_of(cell.spec, device, options.composite)
        found = contenders_of(cell, device, decision, options.backends and options.backends.split(","))
        backends = tuple((name, each.offer.distribution) for name, each in found.items())
        default = backends[0][0] if backends else None
        jobs += [
            Job(2 * index + timed, cell.spec, cell.shape, backends, default, bool(timed)) for timed in (0, 1)
        ]
        entries.append(_entry(cell, decision, found))
    print(f"{len(known)} cells are in the file, {len(pending)} to measure", flush=True)
    # A closed generator ends its worker.
    with contextlib.closing(_events(jobs, device)) as events:
        for event in events:
            if "job" in event:
                _note(entries[event["job"] // 2], event, data, options.json)
            if time.monotonic() > end:
                print("the limit is over; the same command continues", flush=True)
                return


def _events(jobs: Sequence[Job], device: Device) -> Iterator[Mapping[str, Any]]:
    # A library may compile for minutes.
    yield from run_jobs(device, jobs, seconds=300.0)


def _entry(cell: Measured, decision: Decision, found: Mapping[str, Contender]) -> dict[str, Any]:
    return {
        "name": cell.name,
        "spec": cell.spec.to_dict(),
        "shape": cell.shape.to_dict(),
        "query_lens": list(cell.shape.query_lens),
        "seq_lens": list(cell.shape.lengths),
        "drafts": cell.shape.phase is Phase.DECODE and cell.shape.query > 1,
        "composite": decision.full_name,
        "us": {},
        "build_us": {},
        "spread": {},
        "failed": {},
        "versions": {name: dict(each.subject.versions) for name, each in found.items()},
        "distributions": {
            name: [each.subject.distribution, each.subject.version] for name, each in found.items()
        },
        "pages": {name: each.pages for name, each in found.items()},
    }


def _note(entry: dict[str, Any], event: Mapping[str, Any], data: dict[str, Any], path: Path) -> None:
    kind = event["event"]
    if kind == "timed":
        for field in ("us", "build_us", "spread"):
            entry[field][event["backend"]] = event[field]
    elif kind in ("wrong", "failed"):
        entry["failed"][event["backend"]] = str(event["why"])
        print(f"{entry['name']}: {event['backend']} {kind}: {event['why']}", flush=True)
    elif kind == "done" and event["job"] % 2:
        entry["date"] = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        data["cells"].append(entry)
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        times = ", ".join(
            f"{name} {us:.1f}" for name, us in sorted(entry["us"].items(), key=lambda each: each[1])
        )
        print(f"{entry['name']}: {times}", flush=True)


def cost(cell: Mapping[str, Any], name: str, layers: int) -> float:
    """Microseconds of a layer in a step: the kernel, and its share of the build."""
    count = _LATENT_LAYERS if cell["spec"].get("mla") else layers
    return float(cell["us"][name] + cell["build_us"].get(name, 0.0) / count)


def table_without(
    cells: Sequence[Mapping[str, Any]], left: Mapping[str, Any], device: Device, layers: int
) -> TunedTable:
    """A table of the other cells of a layer."""
    rows, workload = [], {}
    for cell in cells:
        if cell["spec"] != left["spec"] or cell["name"] == left["name"]:
            continue
        shape = StepShape.from_dict(cell["shape"])
        workload[shape] = 1.0
        for name, us in cell["us"].items():
            if "[" in name:
                continue
            distribution, version = cell["distributions"][name]
            subject = BackendVersions(
                name, distribution, version, device, tuple(cell["versions"][name].items())
            )
            pages = cell["pages"][name]
            facts = {"build_us": cell["build_us"][name], "spread": cell["spread"][name], "rounds": 5}
            rows.append(TimedRow(subject, shape, pages and tuple(pages), us=us, date=cell["date"], **facts))
    spec = LayerSpec.from_dict(left["spec"])
    count = _LATENT_LAYERS if spec.mla is not None else layers
    return TunedTable(
        device, (TunedLayer(spec, count, tuple(workload.items()), tuple(rows)),) if rows else ()
    )


def report(data: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Print the regret of each kind of step; the figures."""
    device = Device.from_dict(data["device"])
    kinds: dict[str, list[dict[str, float]]] = {}
    for cell in data["cells"]:
        costs = {name: cost(cell, name, options.layers) for name in cell["us"]}
        plain = {name: us for name, us in costs.items() if "[" not in name}
        if len(plain) < 2 and len(costs) < 2:
            continue
        recorded = RecordedCell(
            cell["name"],
            LayerSpec.from_dict(cell["spec"]),
            tuple(cell["query_lens"]),
            tuple(cell["seq_lens"]),
            plain,
            cell["drafts"],
        )
        assumed = {name: version for each in cell["versions"].values() for name, version in each.items()}
        decision = plan_of(recorded.spec, device, options.composite, assume_installed=assumed)
        table = table_without(data["cells"], cell, device, options.layers)
        tuned = plan_of(recorded.spec, device, options.composite, table, assume_installed=assumed)
        chosen = {
            PHASES: choice(decision, recorded, by_step=False),
            STEPS: choice(decision, recorded, by_step=True),
            WITH_TABLE: choice(tuned, recorded, by_step=True),
        }
        composite = str(cell["composite"])
        times = {policy: plain[name] for policy, name in chosen.items() if name in plain}
        times[AS_TIMED] = costs[composite] if composite in costs else times.get(STEPS, min(plain.values()))
        best = min(plain.values())
        regret = {policy: us / best - 1 for policy, us in times.items()}
        kinds.setdefault(recorded.kind, []).append(regret)
        if options.verbose:
            words = ", ".join(
                f"{policy}: {chosen.get(policy, composite)} {100 * value:.1f} %"
                for policy, value in regret.items()
            )
            print(f"{cell['name']}: best {min(plain, key=plain.__getitem__)}; {words}")
    kinds["all"] = [each for those in kinds.values() for each in those]
    found = {
        kind: {
            policy: {
                "cells": len(values),
                "mean": round(100 * statistics.fmean(values), 2),
                "worst": round(100 * max(values), 2),
            }
            for policy in POLICIES
            if (values := [each[policy] for each in those if policy in each])
        }
        for kind, those in kinds.items()
        if those
    }
    for policy in POLICIES:
        print(f"\n{policy}\n{'steps':18}{'cells':>6}{'mean':>9}{'worst':>9}")
        for kind, row in found.items():
            if policy in row:
                each = row[policy]
                print(f"{kind:18}{each['cells']:6}{each['mean']:7.1f} %{each['worst']:7.1f} %")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which the worker ends")
    parser.add_argument(
        "--json", type=Path, required=True, help="the file of the cells, which a later call continues"
    )
    parser.add_argument("--layers", type=int, default=32, help="layers that share a build; latents have 61")
    parser.add_argument(
        "--backends", help="measure only these beside the composite, such as TRITON,FLASH_ATTN_4"
    )
    parser.add_argument("--only", default="", help="measure cells whose names begin so")
    parser.add_argument("--composite", help="use this composite instead of the plan's")
    parser.add_argument("--tiny", action="store_true", help="small cells, for a CPU")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--verbose", action="store_true", help="print the choices for each cell")
    options = parser.parse_args()
    data: dict[str, Any] = {"benchmark": "step_choice", "cells": []}
    if options.json.exists():
        data = json.loads(options.json.read_text(encoding="utf-8"))
    if not options.report:
        device = resolve_device(options.device)
        data.setdefault("device", device.to_dict())
        if data["device"] != device.to_dict():
            raise SystemExit(f"{options.json} has cells of {data['device']}, not of {device.to_dict()}")
        chosen = [cell for cell in cells_of(options.tiny) if cell.name.startswith(options.only)]
        measure(chosen, device, options, data)
    data["regret"] = report(data, options)
    options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
