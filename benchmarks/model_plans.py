"""The plan of each example model on compute capability 9.0 with everything installed, and its speed.

    python benchmarks/model_plans.py                        # the table, in seconds and without a GPU
    python benchmarks/model_plans.py --time --json FILE     # on a GPU: one layer of each kind, decode and prefill
    python benchmarks/model_plans.py --batches --json FILE  # on a GPU: ragged, draft and fp8 decodes of each kind of layer
    python benchmarks/model_plans.py --write                # the page, with the times of benchmarks/results/
    python benchmarks/model_plans.py --read                 # first reads examples/models again; needs transformers

Each phase has its own choice (`per_phase=True`). Decode is 64 requests of 8192 tokens by graph replay, prefill one of 8192
new tokens, less where the model takes less; both are checked against a float32 reference before.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import model_batches

from attnplug.cli.output.output import features_in_words
from attnplug.core import AttentionType, LayerSpec, Phase
from attnplug.core.reasons import Reason
from attnplug.planning import agree_on_pages, choose_backends
from attnplug.registry import Candidate, Decision
from attnplug.registry.default import get_registry
from attnplug.registry.devices import resolve_device
from attnplug.registry.registry import SelectKwargs

ROOT = Path(__file__).parents[1]
MODELS = sorted((ROOT / "examples" / "models").glob("*.json"))
LAYERS = ROOT / "benchmarks" / "model_layers.json"
"""The needs of these models' layers, so that neither a GPU machine nor a test has to read them."""
PAGE = ROOT / "docs" / "performance" / "model-plans.md"
TIMES = ROOT / "benchmarks" / "results" / "model-plans-h200.json"
LATENTS = ROOT / "benchmarks" / "results" / "mla-h200.json"
"""What benchmarks/mla.py took: decodes over latents, without the products around them, and prefills with theirs."""
LATENT_DECODES = {
    "TRITON": ("TRITON",),
    "FLASHINFER": ("FLASHINFER", "FlashInfer fa3"),
    "FLASH_MLA": ("FLASH_MLA", "FlashMLA"),
}
"""Backends, and how that file names them, the best name first."""
DEVICE, ORDER_OF, REQUESTS, TOKENS = "sm90", "llama-3.1-8b", 64, 8192
TOLERANCE, TOLERANCE_FP8 = 1e-2, 5e-2
BEGIN = "<!-- what follows is written by benchmarks/model_plans.py -->"
END = "<!-- end of what is written -->"
_CONTEXTS = ("max_position_embeddings", "max_target_positions")
_REPEATS = 7


@dataclasses.dataclass(frozen=True)
class Row:
    """Layers of one model with one plan.

    Args:
        model: the configuration's name.
        layers: how many.
        kind: what they ask for.
        prefill: who prefills them.
        decode: who decodes them.
        page: tokens of a page; None without pages.
        cannot: who serves them in neither phase, and why.
        spec: one of them.
        tokens: what is timed: 8192, or what the model takes.
    """

    model: str
    layers: int
    kind: str
    prefill: str
    decode: str
    page: int | None
    cannot: str
    spec: LayerSpec
    tokens: int

    @property
    def heads(self) -> str:
        return f"{self.spec.num_heads}/{self.spec.num_kv_heads}/{self.spec.head_size}"

    @property
    def key(self) -> list[Any]:
        """A time holds for the row that it was taken of."""
        return [self.model, self.kind, self.heads, self.prefill, self.decode, self.page, self.tokens]

    @property
    def backend(self) -> str:
        return self.prefill if self.prefill == self.decode else f"{self.prefill}+{self.decode}"

    def latents(self, phase: Phase) -> str | None:
        """The time that benchmarks/mla.py has of this phase of the layer; None if it has none."""
        dims = self.spec.mla
        if dims is None or (dims.kv_lora_rank, dims.qk_rope_head_dim) != (512, 64):
            return None
        if phase is Phase.PREFILL and (dims.qk_nope_head_dim, dims.v_head_dim) != (128, 128):
            return None
        kind = f"{phase}" if self.spec.sparse is None else f"{phase}, {self.spec.sparse}"
        backend = self.decode if phase is Phase.DECODE else self.prefill
        return known_latents().get((kind, self.spec.num_heads, backend))

    @property
    def untimed(self) -> str | None:
        """Why no time is taken; None where one is."""
        if self.prefill == "none":
            return "nobody serves it"
        if self.spec.mla is not None:
            return "latent attention, which benchmarks/mla.py times"
        if self.spec.attn_type is AttentionType.ENCODER_DECODER:
            return "cross attention"
        return None if self.page else "no pages"


@dataclasses.dataclass(frozen=True)
class Plan:
    """The rows of all models, and the built-in order.

    Args:
        rows: in the order of the models' names.
        order: by backend, its priorities for prefill, decode and both, for the first kind of ORDER_OF.
        notes: what plans had to give up.
    """

    rows: tuple[Row, ...]
    order: Mapping[str, tuple[int | None, ...]]
    notes: tuple[str, ...]


def read_layers() -> dict[str, Any]:
    """By model: the tokens it is timed with, and its kinds of layers with how many there are of each."""
    from attnplug.integrations.transformers import read_config

    found = {}
    for path in MODELS:
        config = json.loads(path.read_text())
        counts = Counter(read_config(path).layers.values())
        found[path.stem] = {
            "tokens": min(TOKENS, *(config.get(name, TOKENS) for name in _CONTEXTS)),
            "kinds": [{"layers": count, "spec": spec.to_dict()} for spec, count in counts.items()],
        }
    return found


def make_plan() -> Plan:
    """The plans of all models: of a model's kinds of layers together, for their pages must fit each other."""
    rows: list[Row] = []
    registry = get_registry()
    order: dict[str, tuple[int | None, ...]] = {}
    gave_up: list[str] = []
    for model, told in json.loads(LAYERS.read_text()).items():
        specs = {str(i): LayerSpec.from_dict(kind["spec"]) for i, kind in enumerate(told["kinds"])}
        asked: SelectKwargs = {"assume_installed": "all"}
        choices = choose_backends(registry, specs, resolve_device(DEVICE), asked, per_phase=True)
        decisions, notes = agree_on_pages(registry, choices)
        gave_up += (f"{model}: {note}" for note in notes)
        for (name, decision), kind in zip(decisions.items(), told["kinds"], strict=True):
            spec, members = specs[name], decision.members
            rows.append(
                Row(
                    model=model,
                    layers=kind["layers"],
                    kind=features_in_words(spec),
                    prefill=members[Phase.PREFILL],
                    decode=members[Phase.DECODE],
                    page=decision.block_size,
                    cannot="; ".join(refusals(choices.by_phase[name], set(members.values()))),
                    spec=spec,
                    tokens=told["tokens"],
                )
            )
        if model == ORDER_OF:
            together = choices.fallbacks.get("0", choices.decisions["0"])
            alone = choices.by_phase["0"]
            order = in_order(alone[Phase.PREFILL], alone[Phase.DECODE], together)
    return Plan(tuple(rows), order, tuple(gave_up))


def in_order(*decisions: Decision) -> dict[str, tuple[int | None, ...]]:
    """The priorities in all of these of each backend for such layers."""
    found = [
        {c.name: c.priority for c in decision.candidates if not is_of_latents(c)} for decision in decisions
    ]
    return {name: tuple(each[name] for each in found) for name in found[0]}


def refusals(by_phase: Mapping[Phase, Decision], served: Set[str]) -> Iterator[str]:
    """The backends that serve the layers in neither phase, by their reasons."""
    refused: dict[str, set[str]] = {}
    nowhere = set.intersection(*({each.name for each in decision.refused} for decision in by_phase.values()))
    for decision in by_phase.values():
        for candidate in decision.refused:
            if candidate.name in nowhere - served and not is_of_latents(candidate):
                words = ", ".join(map(in_words, candidate.reasons))
                refused.setdefault(words, set()).add(candidate.name)
    for words, names in refused.items():
        yield f"{words}: {', '.join(f'`{name}`' for name in sorted(names))}"


def is_of_latents(candidate: Candidate) -> bool:
    """Whether a backend refuses a layer because it serves latent attention alone."""
    return "non-MLA not supported" in map(str, candidate.reasons)


def in_words(reason: Reason) -> str:
    """The request, such as "head_size 96"; the fact where no value was."""
    return f"{reason.field} {reason.requested}" if reason.requested else str(reason)


def table(rows: Sequence[Row], times: Mapping[str, Any] | None) -> str:
    """The plan in Markdown, with the times of rows that they were taken of."""
    taken = {json.dumps(each["row"]): each for each in (times or {}).get("rows", ())}
    lines = [
        "| model | layers | heads | asks for | prefill | decode | page | decode, us | prefill, us | who cannot, and why |",
        "|---|---:|---|---|---|---|---:|---:|---:|---|",
    ]
    for row in rows:
        found = taken.get(json.dumps(row.key), {})
        cells = (
            row.model,
            row.layers,
            row.heads,
            row.kind,
            *(f"`{each}`" if each != "none" else "nobody" for each in (row.prefill, row.decode)),
            row.page or "-",
            row.latents(Phase.DECODE) or shown(found.get("decode_us"), row),
            row.latents(Phase.PREFILL) or shown(found.get("prefill_us"), row),
            row.cannot,
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def shown(us: float | None, row: Row) -> str:
    if us is None:
        return "-" if row.untimed else ""
    return f"{us:.0f}" + ("" if row.tokens == TOKENS else f" ({row.tokens} tokens)")


def known_latents() -> dict[tuple[str, int, str], str]:
    """By kind, number of heads and backend, what benchmarks/mla.py took of the steps that are timed here."""
    told = json.loads(LATENTS.read_text()) if LATENTS.exists() else {}
    found: dict[tuple[str, int, str], str] = {}
    asked = {"requests": REQUESTS, "length": TOKENS, "queries": 1}
    # Earlier files have no others.
    alike = {"page": 64, "stored": "bfloat16"}
    for cell in told.get("cells", ()):
        if (asked | alike).items() <= (alike | cell).items():
            for backend, names in LATENT_DECODES.items():
                us = next((cell["us"][name] for name in names if name in cell["us"]), None)
                if us is not None:
                    found["decode", cell["heads"], backend] = f"{us:.0f} (latents)"
    for cell in told.get("selection", ()):
        if cell["requests"] == REQUESTS and str(TOKENS) in cell["us"]:
            kind = f"decode, token_topk {cell['topk']}"
            found[kind, cell["heads"], "TRITON"] = f"{cell['us'][str(TOKENS)]:.0f} (latents)"
    for cell in told.get("prefill", ()):
        if (cell["requests"], cell["new"]) == (1, TOKENS):
            for name, us in cell["us"].items():
                found["prefill", cell["heads"], name] = f"{us:.0f} (expanded)"
    return found


def taken_on(times: Mapping[str, Any] | None) -> str:
    if times is None:
        return "Times: not measured yet."
    versions = ", ".join(f"{name} {version}" for name, version in times["versions"].items())
    text = f"Times: {times['device']}, {times['date']}, {versions}."
    if LATENTS.exists():
        told = json.loads(LATENTS.read_text())
        text += f"\nTimes over latents: {told['device']}, {told['date']}, torch {told['torch']}, triton {told['triton']}, "
        text += f"flashinfer {told['flashinfer']}."
    return text


def written(plan: Plan, times: Mapping[str, Any] | None) -> str:
    """The part of the page between its markers."""
    ranks = "\n".join(
        f"| `{name}` | " + " | ".join(map(str, each)) + " |" for name, each in plan.order.items()
    )
    order = f"| backend | prefill | decode | both |\n|---|---:|---:|---:|\n{ranks}"
    notes = "".join(f"* {note}.\n" for note in plan.notes)
    real = "## Decodes of real batches\n\n" + model_batches.written(plan.rows)
    parts = (BEGIN, order, table(plan.rows, times), notes.rstrip(), taken_on(times), real, END)
    return "\n\n".join(filter(None, parts))


def page(text: str, plan: Plan, times: Mapping[str, Any] | None) -> str:
    """The page with a new part between its markers."""
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{PAGE.name} has no {BEGIN} and {END}")
    return before + written(plan, times) + after


def known_times() -> dict[str, Any] | None:
    found: dict[str, Any] | None = json.loads(TIMES.read_text()) if TIMES.exists() else None
    return found


def measured(row: Row) -> dict[str, Any]:
    """Times of one layer, or why there are none."""
    import attnplug

    result: dict[str, Any] = {"row": row.key}
    if row.untimed:
        return {**result, "not_measured": row.untimed}
    spec = row.spec.replace(block_size=row.page)
    decision = attnplug.explain(spec, backend=row.backend)
    if not decision:
        return {**result, "not_measured": decision.explanation()}
    one = (row.tokens,)
    for phase, lens in (("decode", ((1,) * REQUESTS, one * REQUESTS)), ("prefill", (one, one))):
        try:
            result[f"{phase}_us"] = timed(phase, spec, lens, decision)
        except Exception as problem:  # noqa: BLE001 - what cannot run is shown, and the others are timed
            result[f"{phase}_not_measured"] = str(problem).partition("\n")[0][:200]
    return result


def timed(
    phase: str, spec: LayerSpec, lens: tuple[tuple[int, ...], tuple[int, ...]], decision: Decision
) -> float:
    """Microseconds of one call; ValueError where it is wrong."""
    from paged_layers import Cell, PagedLayer, interleaved_us

    sizes = spec.num_heads, spec.num_kv_heads, spec.head_size
    layer = PagedLayer(Cell(phase, phase, sizes, *lens, page=spec.block_size or 1, layer=spec))
    call = layer.attend(decision.get_backend_cls(), give_new=phase == "prefill")
    layer.output.fill_(float("nan"))
    error, bound = layer.error(call(0)), TOLERANCE_FP8 if spec.has_quantized_kv_cache else TOLERANCE
    if not error < bound:
        raise ValueError(f"error {error:.3g} is above {bound}")
    decodes = phase == "decode"
    count = 1 if not decodes else 4 if layer.cell.kv_bytes > 200_000_000 else 16
    return interleaved_us({"it": call}, count, _REPEATS, graphs=decodes)["it"]


def timings(
    rows: Sequence[Row],
    path: Path | None,
    key: Callable[[Row], list[Any]] = lambda row: row.key,
    measure: Callable[[Row], dict[str, Any]] = measured,
) -> dict[str, Any]:
    """All times, with what they were taken on; those that `path` has are kept, and each new one is written there."""
    import torch
    from installed import versions

    names = ("attnplug", "torch", "triton", "flashinfer-python", "flash-attn", "flash-attn-4")
    times: dict[str, Any] = {
        "benchmark": "model_plans",
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(),
        "versions": versions(*names),
        "rows": [],
    }
    if path and path.exists():
        before = json.loads(path.read_text())
        if (before["device"], before["versions"]) != (times["device"], times["versions"]):
            raise SystemExit(f"{path} was taken on {before['device']}, {before['versions']}: move it away")
        # Times that could not be taken are tried again.
        kept = [each for each in before["rows"] if not any("not_measured" in key for key in each)]
        times = {**before, "rows": kept}
    done = [each["row"] for each in times["rows"]]
    for row in rows:
        if key(row) in done:
            continue
        times["rows"].append(measure(row))
        print({**times["rows"][-1], "row": " ".join(map(str, key(row)))}, flush=True)
        torch.cuda.empty_cache()
        if path:
            path.write_text(json.dumps(times, indent=1) + "\n")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--time", action="store_true", help="time a layer of each kind; needs a GPU")
    parser.add_argument("--batches", action="store_true", help="time decodes of real batches; needs a GPU")
    parser.add_argument(
        "--json",
        type=Path,
        help=f"write the times here, and take no row again that is here; for the page {TIMES.name}, "
        f"and with --batches {model_batches.TIMES.name}",
    )
    parser.add_argument("--read", action="store_true", help=f"write {LAYERS.relative_to(ROOT)} first")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    chosen = parser.parse_args()
    if chosen.json and chosen.time == chosen.batches:
        parser.error("--json needs either --time or --batches: there is nothing else to write")
    if chosen.read:
        lines = (f"{json.dumps(model)}: {json.dumps(told)}" for model, told in read_layers().items())
        LAYERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    plan, times = make_plan(), known_times()
    if chosen.time or chosen.batches:
        import torch

        if not torch.cuda.is_available():
            parser.error("--time and --batches need a GPU that torch can use")
    if chosen.time:
        times = timings(plan.rows, chosen.json)
    if chosen.batches:
        rows = model_batches.distinct(plan.rows)
        timings(rows, chosen.json, model_batches.key, lambda row: model_batches.measured(row, timed))
    print(written(plan, times))
    if chosen.write:
        PAGE.write_text(page(PAGE.read_text(), plan, times))


if __name__ == "__main__":
    main()
