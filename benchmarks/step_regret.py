"""The regret of a plan over recorded cells: with one backend for each phase, and with backends for ranges of steps.

    python benchmarks/step_regret.py benchmarks/results/{attention-h200,attention-serving-h200,regret-h200}.json \
        benchmarks/results/{mla-h200,mla-flash-mla-h200}.json --device h200 --json steps.json

It reads the files of `attention.py`, `mla.py`, `step_choice.py` and `attnplug tune --regret`, which have the times of
several backends in each cell, and needs no GPU. A choice without a time in a cell leaves the cell out. Libraries that
were called directly count as their backends where these have no time of their own; FlashInfer only for one token, because
the backend prefills several. `--goal KIND=MEAN,WORST` in percent exits with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attnplug
from attnplug.core import LayerSpec, MLADims, Phase
from attnplug.core.composite.steps import StepKind, StepSizes
from attnplug.registry.default import get_registry
from attnplug.registry.devices import resolve_device
from attnplug.registry.measured.step_shapes import StepShape
from attnplug.registry.measured.tuned_files import read_table
from attnplug.registry.measured.tuned_lookup import PACKAGED
from attnplug.registry.selection.decision import Decision
from attnplug.testing.conformance.builders.step_members import expected_members

PHASES, STEPS = "one backend a phase", "the step chooses"
_SHORT = 384
_DIRECT = {"FlashAttention 4": "FLASH_ATTN_4", "FlashInfer": "FLASHINFER"}
_DRAFTS = 8
_LATENT_LAYERS = 61
"""Of DeepSeek-V3."""


@dataclasses.dataclass(frozen=True)
class RecordedCell:
    """A step of a layer with the microseconds of each backend, and of composites as "A+B"."""

    name: str
    spec: LayerSpec
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    us: Mapping[str, float]
    drafts: bool = False

    @property
    def kind(self) -> str:
        """The kind of step, as regret is summed."""
        longest, shortest = max(self.query_lens), min(self.query_lens)
        if longest == 1 or self.drafts:
            step = "decodes" if longest == 1 else "drafts"
            return f"latent {step}" if self.spec.mla is not None else step
        if shortest == 1:
            return "mixed steps"
        new = self.query_lens == self.seq_lens
        size = "short" if longest <= _SHORT else "long"
        return f"{size} {'prompts' if new else 'extends'}"

    @property
    def threshold(self) -> int:
        """The longest query of a decode."""
        return max(self.query_lens) if self.drafts else 1


@dataclasses.dataclass(frozen=True)
class Regret:
    """A cell with the choice of each policy, and the time of it over that of the best."""

    cell: RecordedCell
    chosen: Mapping[str, str]
    regret: Mapping[str, float]


def cells_of(path: Path) -> Iterator[RecordedCell]:
    """The cells of one file."""
    data = json.loads(path.read_text())
    if data.get("schema") == "attnplug.regret":
        yield from _of_tune(data)
    elif data.get("benchmark") == "step_choice":
        yield from map(of_dict, data["cells"])
    elif data.get("benchmark") == "attention":
        yield from _of_attention(data)
    elif all("heads" in cell and "requests" in cell for cell in data.get("cells", [{}])):
        yield from _of_latents(data)
    else:
        raise SystemExit(
            f"{path} has no cells of attention.py, mla.py, step_choice.py or attnplug tune --regret"
        )


def of_dict(cell: Mapping[str, Any]) -> RecordedCell:
    """A cell that `step_choice.py` wrote."""
    lens = tuple(cell["query_lens"]), tuple(cell["seq_lens"])
    spec = LayerSpec.from_dict(cell["spec"])
    return RecordedCell(cell["name"], spec, *lens, cell["us"], drafts=cell["drafts"])


def _of_attention(data: Mapping[str, Any]) -> Iterator[RecordedCell]:
    from attention import CORE
    from serving import SERVING

    known = {(cell.kind, cell.name): cell for cell in (*CORE, *SERVING)}
    for cell in data["cells"]:
        shape = known.get((cell["kind"], cell["cell"]))
        if shape is None or shape.shared:
            continue
        longest = max(shape.query_lens)
        us = {name: us for name, us in cell["us"].items() if "," not in name and "." not in name}
        for direct, name in _DIRECT.items():
            if (
                direct in us
                and name not in us
                and (direct != "FlashInfer" or longest == 1 or longest > _DRAFTS)
            ):
                us[name] = us[direct]
        own = {name: value for name, value in us.items() if name.isupper()}
        is_draft = shape.kind == "speculative" and 1 < longest <= _DRAFTS
        if shape.kind == "speculative" and longest > _DRAFTS:
            continue
        yield RecordedCell(cell["cell"], shape.spec, shape.query_lens, shape.seq_lens, own, is_draft)


def _of_tune(data: Mapping[str, Any]) -> Iterator[RecordedCell]:
    """The cells of a tuning, whose layers are those of the packaged table."""
    name = str(data["device"]["name"]).split()[-1].lower()
    layers = read_table(PACKAGED / f"{name}.json").layers
    for cell in data["cells"]:
        shape = StepShape.parse(cell["shape"])
        us = {each: value for each, value in cell["us"].items() if each != "TORCH"}
        is_draft = shape.phase is Phase.DECODE and shape.query > 1
        title = f"{cell['shape']}, layer {cell['layer']}"
        yield RecordedCell(title, layers[cell["layer"]].spec, shape.query_lens, shape.lengths, us, is_draft)


def _of_latents(data: Mapping[str, Any]) -> Iterator[RecordedCell]:
    # One build serves all layers of a step. Where none was measured it counts nothing.
    builds = {row["backend"]: row["build_us"] / _LATENT_LAYERS for row in reversed(data.get("host", ()))}
    for cell in data["cells"]:
        stored = {"kv_cache_dtype": "fp8"} if cell["stored"] == "fp8" else {}
        spec = latent_layer(cell["heads"], dtype=cell["dtype"], block_size=cell["page"], **stored)
        us = {name: value + builds.get(name, 0.0) for name, value in cell["us"].items() if name.isupper()}
        lens = (cell["queries"],) * cell["requests"], (cell["length"],) * cell["requests"]
        yield RecordedCell(cell["cell"], spec, *lens, us, cell["queries"] > 1)


def latent_layer(heads: int, **fields: Any) -> LayerSpec:
    """A layer of DeepSeek-V3 with some of its heads."""
    dims = MLADims(
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    return LayerSpec(num_heads=heads, num_kv_heads=1, head_size=dims.latent_size, mla=dims, **fields)


def joined(cells: Sequence[RecordedCell]) -> list[RecordedCell]:
    """Equal cells as one, with the backends of all; of one backend the last time counts."""
    found: dict[Any, RecordedCell] = {}
    for cell in cells:
        key = cell.name, cell.spec, cell.query_lens, cell.seq_lens
        known = found.get(key)
        found[key] = cell if known is None else dataclasses.replace(cell, us={**known.us, **cell.us})
    return [cell for cell in found.values() if len(cell.us) > 1]


def regrets(cells: Sequence[RecordedCell], device: str, tuned: Any = False) -> list[Regret]:
    """The choices of a plan for each cell, with and without ranges of steps."""
    found = []
    decisions: dict[LayerSpec, Decision] = {}
    for cell in cells:
        spec = cell.spec
        if spec not in decisions:
            decisions[spec] = decision_for(spec, device, tuned)
        chosen = {STEPS: choice(decisions[spec], cell, by_step=True)}
        chosen[PHASES] = choice(decisions[spec], cell, by_step=False)
        serving = {name for name in cell.us if _serves(name, spec, device)}
        if serving and all(name in cell.us for name in chosen.values()):
            best = min(cell.us[name] for name in serving)
            regret = {policy: cell.us[name] / best - 1 for policy, name in chosen.items()}
            found.append(Regret(cell, chosen, regret))
    return found


def decision_for(spec: LayerSpec, device: str, tuned: Any) -> Decision:
    """The decision of a plan for a layer, as if all libraries were installed."""
    asked: Any = {"assume_installed": "all", "tuned": tuned}
    return attnplug.plan({"layer": spec}, device, **asked).decisions["layer"]


def choice(decision: Decision, cell: RecordedCell, *, by_step: bool) -> str:
    """The backend that serves a step; "A+B" for one that two serve."""
    members, lens = decision.members, cell.query_lens
    if members[Phase.PREFILL] == members[Phase.DECODE] and not decision.steps:
        return members[Phase.DECODE]
    if cell.spec.mla is not None:
        kind = StepKind.DECODE if max(lens) == 1 else StepKind.DRAFT
        sizes = StepSizes(kind, max(lens), len(lens), sum(lens), max(cell.seq_lens))
        routed = (step.backend for step in decision.steps if by_step and step.steps.has(sizes))
        return next(routed, members[Phase.DECODE])
    if by_step and decision.steps:
        served = expected_members(decision.get_backend_cls(), cell.threshold, lens, max(cell.seq_lens))
        return "+".join(name for name, _ in reversed(served))
    if max(lens) <= cell.threshold:
        return members[Phase.DECODE]
    return members[Phase.PREFILL] if min(lens) > cell.threshold else "+".join(members.values())


def _serves(name: str, spec: LayerSpec, device: str) -> bool:
    asked: Any = {"assume_installed": "all", "tuned": False}
    if "+" in name:
        return bool(get_registry().explain(spec, resolve_device(device), backend=name, **asked))
    phases = (Phase.DECODE,) if spec.mla is not None else tuple(Phase)
    return all(
        any(each.name == name and each.accepted for each in _explained(spec, device, phase).candidates)
        for phase in phases
    )


def _explained(spec: LayerSpec, device: str, phase: Phase) -> Decision:
    return get_registry().explain(spec, resolve_device(device), phase, assume_installed="all", tuned=False)


def summary(found: Sequence[Regret]) -> dict[str, dict[str, Any]]:
    """By kind of step, and for all together: cells, and mean and worst regret of each policy in percent."""
    kinds: dict[str, list[Regret]] = {}
    for each in found:
        kinds.setdefault(each.cell.kind, []).append(each)
    kinds["all"] = list(found)
    return {
        kind: {
            "cells": len(those),
            **{
                policy: {
                    "mean": round(100 * statistics.fmean(each.regret[policy] for each in those), 2),
                    "worst": round(100 * max(each.regret[policy] for each in those), 2),
                    "worst_cell": max(those, key=lambda each: each.regret[policy]).cell.name,
                }
                for policy in (PHASES, STEPS)
            },
        }
        for kind, those in kinds.items()
        if those
    }


def print_summary(kinds: Mapping[str, Mapping[str, Any]]) -> None:
    """A line for each kind of step."""
    print(
        f"{'steps':18}{'cells':>6}"
        + "".join(f"{policy + ': mean':>28}{'worst':>8}" for policy in (PHASES, STEPS))
    )
    for kind, row in kinds.items():
        figures = "".join(
            f"{row[policy]['mean']:26.1f} %{row[policy]['worst']:6.1f} %" for policy in (PHASES, STEPS)
        )
        print(f"{kind:18}{row['cells']:6}{figures}   {row[STEPS]['worst_cell']}")


def missed_goals(goals: Sequence[str], kinds: Mapping[str, Mapping[str, Any]]) -> int:
    """1 if a goal of the form KIND=MEAN,WORST is missed by the step's choice, else 0; each is printed."""
    missed = 0
    for goal in goals:
        kind, _, limits = goal.partition("=")
        for name, limit in zip(("mean", "worst"), map(float, limits.split(",")), strict=True):
            if kinds[kind][STEPS][name] > limit:
                print(f"MISSED: the {name} of {kind} is {kinds[kind][STEPS][name]:.1f} %, above {limit:g} %")
                missed = 1
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--device", default="h200", help="the GPU that the times are of")
    parser.add_argument("--tuned", type=Path, help="a table of measured times; without it priorities choose")
    parser.add_argument("--cells", action="store_true", help="print each cell with a regret above 1 %%")
    parser.add_argument("--goal", action="append", default=[], help="KIND=MEAN,WORST in percent")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    cells = joined([cell for path in options.files for cell in cells_of(path)])
    found = regrets(cells, options.device, False if options.tuned is None else str(options.tuned))
    kinds = summary(found)
    print_summary(kinds)
    for each in sorted(found, key=lambda each: -each.regret[STEPS]) if options.cells else ():
        if each.regret[STEPS] > 0.01:
            print(
                f"{100 * each.regret[STEPS]:6.1f} %  {each.cell.kind}: {each.cell.name}: {each.chosen[STEPS]}",
                dict(each.cell.us),
            )
    if options.json:
        rows = [
            {
                "cell": each.cell.name,
                "kind": each.cell.kind,
                "us": dict(each.cell.us),
                "chosen": dict(each.chosen),
            }
            for each in found
        ]
        text = json.dumps(
            {"benchmark": "step_regret", "device": options.device, "kinds": kinds, "cells": rows}, indent=1
        )
        options.json.write_text(text + "\n", encoding="utf-8")
    return missed_goals(options.goal, kinds)


if __name__ == "__main__":
    sys.exit(main())
