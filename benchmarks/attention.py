"""Attention on a GPU: attnplug's backends and the kernel libraries called directly, in one process.

    python benchmarks/attention.py --suite core --backends TRITON,peers --json core.json
    python benchmarks/attention.py --suite serving --backends TRITON,FLASHINFER.prefill_backend=fa3,peers --json serving.json
    python benchmarks/attention.py --suite serving --kinds extend --backends "TRITON,FlashAttention 4" --json serving.json
    python benchmarks/attention.py --suite serving --smoke      # without a GPU and without times: small cells are right

Ceilings first (copy, matrix product on random data), then every cell: correctness, then times of all
contenders in turn, decodes by graph replay and prefills as calls, behind a sleeping GPU and over more KV than the L2
holds. The environment variable FLASHINFER_PREFILL says which template the peer FlashInfer prefills on. A contender
may be a backend with one option, such as FLASHINFER.prefill_backend=fa3.

A run of several minutes can be cut into calls: `--kinds ragged,speculative` measures parts of a suite, `--cells TEXT`
cells whose names contain the text. The file of `--json` is written after each part. It keeps the cells that an earlier
call wrote there, on the same device with the same versions, so that calls add up; each cell has its date.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if "--smoke" in sys.argv:
    # So that kernels take a CPU's tensors; triton reads it when imported.
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from installed import versions
from paged_layers import Cell, PagedLayer, graph_us, interleaved_us
from peers import PEERS
from serving import SERVING, judge_serving, small

import attnplug
from attnplug.registry.plugins.options import parse_options

LLAMA_8B, LLAMA_70B, LLAMA_70B_TP8 = (32, 8, 128), (64, 8, 128), (8, 1, 128)
QWEN3_30B, GEMMA_2, GEMMA_3, GPT_OSS = (32, 4, 128), (16, 8, 256), (32, 16, 128), (64, 8, 64)
_MEASURED = "attnplug", "torch", "triton", "flashinfer-python", "flash-attn", "flash-attn-4"
TOLERANCE = {"bfloat16": 1e-2, "fp8": 5e-2}


def decode(
    name: str, heads: tuple[int, int, int], lens: Sequence[int], kind: str = "decode", **fields: Any
) -> Cell:
    return Cell(name, kind, heads, (1,) * len(lens), tuple(lens), tuple(fields.items()))


def prefill(name: str, heads: tuple[int, int, int], lens: Sequence[int]) -> Cell:
    return Cell(name, "prefill", heads, tuple(lens), tuple(lens))


CORE = [
    decode("Llama-3-8B 64 x 8k", LLAMA_8B, [8192] * 64),
    decode("Llama-3-8B 8 x 32k", LLAMA_8B, [32768] * 8),
    decode("Llama-3-8B 1 x 8k", LLAMA_8B, [8192]),
    decode("Llama-3-8B 256 x 1k", LLAMA_8B, [1024] * 256),
    decode("Llama-3-70B 64 x 8k", LLAMA_70B, [8192] * 64),
    decode("Llama-3-70B TP8 8 x 32k", LLAMA_70B_TP8, [32768] * 8),
    decode("Llama-3-70B TP8 64 x 8k", LLAMA_70B_TP8, [8192] * 64),
    decode("Qwen3-30B-A3B 64 x 8k", QWEN3_30B, [8192] * 64),
    decode("Qwen3-30B-A3B 1 x 8k", QWEN3_30B, [8192]),
    decode("Gemma-2-9B 64 x 8k", GEMMA_2, [8192] * 64),
    decode("Gemma-2-9B 1 x 8k", GEMMA_2, [8192]),
    decode("Gemma-3-27B 64 x 8k", GEMMA_3, [8192] * 64),
    decode("gpt-oss-20B 64 x 8k", GPT_OSS, [8192] * 64),
    decode("gpt-oss-20B 1 x 8k", GPT_OSS, [8192]),
    decode("even, 16 x 7.75k", LLAMA_8B, [7936] * 16, "skew"),
    decode("skewed, 64k and 15 x 4k", LLAMA_8B, [65536, *[4096] * 15], "skew"),
    decode("1k context, 64", GEMMA_3, [1024] * 64, "window"),
    decode("window 1024 of 32k, 64", GEMMA_3, [32768] * 64, "window", sliding_window=1024),
    decode("fp8 KV, 64 x 8k", LLAMA_8B, [8192] * 64, "fp8", kv_cache_dtype="fp8"),
    decode("soft cap, 64 x 8k", GEMMA_2, [8192] * 64, "feature", logits_soft_cap=50.0),
    decode("sinks, 64 x 8k", GPT_OSS, [8192] * 64, "feature", has_sinks=True),
    decode("window 4096 of 8k, 64", LLAMA_8B, [8192] * 64, "feature", sliding_window=4096),
    prefill("D 128, 4 x 4k", LLAMA_8B, [4096] * 4),
    prefill("D 128, 1 x 16k", LLAMA_8B, [16384]),
    prefill("D 64, 4 x 4k", GPT_OSS, [4096] * 4),
    prefill("D 64, 1 x 16k", GPT_OSS, [16384]),
    prefill("D 256, 4 x 4k", GEMMA_2, [4096] * 4),
    prefill("D 256, 1 x 16k", GEMMA_2, [16384]),
    Cell("1k more of 8k, 4", "extend", LLAMA_8B, (1024,) * 4, (9216,) * 4),
    Cell("60 decodes of 8k", "part", LLAMA_8B, (1,) * 60, (8192,) * 60),
    Cell("a prefill of 4k", "part", LLAMA_8B, (4096,), (4096,)),
    Cell("both", "mixed", LLAMA_8B, (1,) * 60 + (4096,), (8192,) * 60 + (4096,)),
]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", choices=("core", "serving"), default="core")
    parser.add_argument("--kinds", help="only cells of these kinds, as decode,prefill")
    parser.add_argument("--cells", help="only cells whose name contains this text")
    parser.add_argument(
        "--backends", default="TRITON,peers", help="names of attnplug's and of peers, or peers for all"
    )
    parser.add_argument(
        "--json", type=Path, help="write the figures here after each kind of cells, beside those there"
    )
    parser.add_argument("--plot", type=Path, help="write a bar chart here")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--smoke", action="store_true", help="check small cells on a CPU, and time nothing")
    parser.add_argument("--page", type=int, default=16, help="tokens of a page; FlashAttention 2 needs 256")
    options = parser.parse_args(arguments)
    names = options.backends.split(",")
    kinds = options.kinds.split(",") if options.kinds else None
    chosen = [
        dataclasses.replace(cell, page=options.page)
        for cell in (CORE if options.suite == "core" else SERVING)
        if (kinds is None or cell.kind in kinds) and (options.cells or "") in cell.name
    ]
    if not chosen:
        parser.error(
            f"--kinds {options.kinds} and --cells {options.cells} leave no cell of the suite {options.suite}"
        )
    if options.smoke:
        return smoke(chosen, [name for name in names if name not in ("peers", *PEERS)])
    if not torch.cuda.is_available():
        parser.error("needs a GPU that torch can use; --smoke needs none")
    ceilings = measure_ceilings()
    print(f"copy {ceilings['copy_tbps']:.2f} TB/s   matmul {ceilings['matmul_tflops']:.0f} TFLOP/s")
    result = report(ceilings, earlier_cells(options.json))
    for kind in dict.fromkeys(cell.kind for cell in chosen):
        part = [measure(cell, names, ceilings, options.repeats) for cell in chosen if cell.kind == kind]
        result["cells"] = with_part(result["cells"], [{**cell, "date": result["date"]} for cell in part])
        result["goals"] = goals_of(options.suite, result["cells"])
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n")
    for goal in result["goals"]:
        print(goal_in_words(goal))
    if options.plot:
        plot(result, options.plot)
    return 0


def earlier_cells(path: Path | None) -> list[dict[str, Any]]:
    """The cells of a file; SystemExit if another device or other versions measured them."""
    if path is None or not path.exists():
        return []
    before = json.loads(path.read_text())
    now = torch.cuda.get_device_name(), versions(*_MEASURED)
    if (before["device"], before["versions"]) != now:
        raise SystemExit(
            f"{path} is of {before['device']} with {before['versions']}, this is {now}: move it away"
        )
    return [{"date": before["date"], **cell} for cell in before["cells"]]


def with_part(cells: Sequence[dict[str, Any]], part: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`cells` with those of `part` instead of earlier ones of the same kind and name, in the order of the suites."""
    found = {(cell["kind"], cell["cell"]): cell for cell in (*cells, *part)}
    order = [(cell.kind, cell.name) for cell in (*CORE, *SERVING)]
    return sorted(found.values(), key=lambda cell: order.index((cell["kind"], cell["cell"])))


def goals_of(suite: str, cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The goals of each backend with times, as ratios of times of one run."""
    measured = dict.fromkeys(name for cell in cells for name in cell["us"])
    own = [name for name in measured if name not in PEERS and ", " not in name]
    if suite == "serving":
        judged = [(name, goal) for name in own for goal in judge_serving(cells, name)]
        # Further contenders have only the cells that were measured.
        return [goal for name, goal in judged if name == own[0] or goal["met"] is not None]
    goals = judge(cells) if "TRITON" in own else []
    return [*goals, *judge_libraries(cells, own)]


def goal_in_words(goal: dict[str, Any]) -> str:
    if goal["met"] is None:
        return f"{goal['name']:72}{'-':>8}  {goal['goal']:12}not measured"
    return f"{goal['name']:72}{goal['value']:8.3f}  {goal['goal']:12}{'met' if goal['met'] else 'MISSED'}"


def measure_ceilings() -> dict[str, float]:
    source = torch.randn(1 << 29, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    for _ in range(30):  # bring the clocks up
        torch.mm(a, b, out=out)
    # Not in a graph, where a copy is given to the copy engines, which are slower.
    copy = interleaved_us({"copy": lambda _: target.copy_(source)}, 8, graphs=False)["copy"]
    matmul = graph_us(lambda _: torch.mm(a, b, out=out), 8)
    return {"copy_tbps": 2 * source.nbytes / copy / 1e6, "matmul_tflops": 2 * 8192**3 / matmul / 1e6}


def smoke(cells: Sequence[Cell], names: Sequence[str]) -> int:
    """Whether small cells of all kinds are right; those that no backend here serves are named."""
    wrong = 0
    for cell in map(small, cells):
        # The interpreter multiplies bfloat16 as integers, and not all CPUs know 8-bit floats.
        layer = PagedLayer(cell, "cpu", copies=1)
        bound = TOLERANCE["fp8" if layer.spec.has_quantized_kv_cache else "bfloat16"]
        for name, call in contenders(layer, names).items():
            layer.output.fill_(torch.nan)
            error = layer.error(call(0))
            wrong += not error < bound
            print(
                f"{cell.kind:12}{cell.name:36}{name:44}error {error:.2g}{'' if error < bound else ', WRONG'}"
            )
    return 1 if wrong else 0


def contenders(layer: PagedLayer, names: Sequence[str]) -> dict[str, Callable[[int], torch.Tensor]]:
    calls: dict[str, Callable[[int], torch.Tensor]] = {}
    for name in names:
        if name == "peers" or name in PEERS:
            for peer in PEERS if name == "peers" else (name,):
                try:
                    call = PEERS[peer](layer)
                except Exception as problem:  # noqa: BLE001 - a peer that is absent or refuses the cell is shown
                    print(f"  {peer}: {str(problem).partition(chr(10))[0][:200]}", file=sys.stderr)
                    continue
                if call is not None:
                    calls[peer] = call
            continue
        named = name.partition(".")[0]
        given = parse_options([name], "--backends", None) if "=" in name else None
        decision = attnplug.explain(layer.spec, layer.device.type, backend=named, options=given)
        if not decision:
            print(f"  {name}: {decision.explanation()}", file=sys.stderr)
            continue
        backend, chosen = decision.get_backend_cls(), decision.get_options()
        calls[name] = layer.attend(backend, options=chosen, prefix=layer.cell.shared)
        if layer.cell.shared:
            calls[f"{name}, no cascade"] = layer.attend(backend, options=chosen)
        if layer.given[0] is not None:
            calls[f"{name}, keys given"] = layer.attend(backend, options=chosen, give_new=True)
    return calls


def measure(cell: Cell, names: Sequence[str], ceilings: dict[str, float], repeats: int) -> dict[str, Any]:
    layer = PagedLayer(cell)
    bound = TOLERANCE["fp8" if layer.spec.has_quantized_kv_cache else "bfloat16"]
    calls, wrong = {}, {}
    for name, call in contenders(layer, names).items():
        layer.output.fill_(torch.nan)
        try:
            error = layer.error(call(0))
        except Exception as problem:  # noqa: BLE001 - a peer that cannot run the cell is shown, not counted
            wrong[name] = str(problem).splitlines()[0][:120]
            continue
        if error < bound:
            calls[name] = call
        else:
            wrong[name] = f"error {error:.3g} is above {bound}"
    count = 1 if cell.is_prefill else 4 if cell.kv_bytes > 200_000_000 else 16
    times = interleaved_us(calls, count, repeats, graphs=not cell.is_prefill)
    rates = {
        name: cell.flops / us / 1e6 if cell.is_prefill else cell.kv_bytes / us / 1e6
        for name, us in times.items()
    }
    unit = "TF" if cell.is_prefill else "TB/s"
    ceiling = ceilings["matmul_tflops" if cell.is_prefill else "copy_tbps"]
    print(f"{cell.kind:8}{cell.name:28}" + "   ".join(
        f"{name} {us:.1f} us {rates[name]:.{0 if cell.is_prefill else 2}f} {unit} {rates[name] / ceiling:.0%}"
        for name, us in times.items()
    ) + "".join(f"   {name}: {why}" for name, why in wrong.items()))  # fmt: skip
    return {
        "cell": cell.name, "kind": cell.kind, "heads": cell.heads, "kv_bytes": cell.kv_bytes, "us": times,
        "rate": rates, "unit": unit, "of_ceiling": {name: rate / ceiling for name, rate in rates.items()},
        "not_measured": wrong,
    }  # fmt: skip


def judge(cells: Sequence[dict[str, Any]], name: str = "TRITON") -> list[dict[str, Any]]:
    """The goals, as ratios within this run; `met` is None where something was not measured."""
    found: list[dict[str, Any]] = []

    def goal(title: str, value: float | None, words: str, met: bool) -> None:
        if value is not None and not math.isnan(value):
            found.append({"name": title, "value": value, "goal": words, "met": met})

    by_name = {cell["cell"]: cell for cell in cells if name in cell["us"]}
    ratios = {}
    for cell in cells:
        peers = [us for peer, us in cell["us"].items() if peer in PEERS]
        if cell["kind"] == "decode" and peers and name in cell["us"]:
            ratios[cell["cell"]] = min(peers) / cell["us"][name]
    if ratios:
        mean, least = geometric(ratios.values()), min(ratios.values())
        goal("decode against the best peer, geometric mean", mean, ">= 1.00", mean >= 1)
        goal(
            f"decode against the best peer, least ({min(ratios, key=ratios.__getitem__)})",
            least,
            ">= 0.95",
            least >= 0.95,
        )
    large = [
        c["of_ceiling"][name]
        for c in cells
        if c["kind"] == "decode" and c["kv_bytes"] >= 256e6 and name in c["us"]
    ]
    if large:
        mean = geometric(large)
        goal("decode of >= 256 MB against copy, geometric mean", mean, ">= 0.97", mean >= 0.97)
    alone = by_name.get("Llama-3-8B 1 x 8k")
    if alone and name in alone["us"]:
        goal("decode 32/8/128, 1 x 8k, us", alone["us"][name], "<= 22", alone["us"][name] <= 22)
    for title, over, under, limit in (
        ("window 1024 at 32k against a 1k context", "window 1024 of 32k, 64", "1k context, 64", 1.25),
        ("skewed against even", "skewed, 64k and 15 x 4k", "even, 16 x 7.75k", 1.15),
        ("fp8 KV against bf16", "fp8 KV, 64 x 8k", "Llama-3-8B 64 x 8k", 0.60),
        ("soft cap, per byte", "soft cap, 64 x 8k", "Gemma-2-9B 64 x 8k", 1.05),
        ("sinks, per byte", "sinks, 64 x 8k", "gpt-oss-20B 64 x 8k", 1.05),
    ):
        if over in by_name and under in by_name:
            value = by_name[over]["us"][name] / by_name[under]["us"][name]
            goal(title, value, f"<= {limit}", value <= limit)
    if "window 4096 of 8k, 64" in by_name and "Llama-3-8B 64 x 8k" in by_name:
        window, full = by_name["window 4096 of 8k, 64"], by_name["Llama-3-8B 64 x 8k"]
        value = full["rate"][name] / window["rate"][name]
        goal("window, per byte", value, "<= 1.05", value <= 1.05)
    for cell in cells:
        peer = cell["us"].get("FlashAttention 4")
        if cell["kind"] != "prefill" or peer is None:
            continue
        limit = 0.60 if cell["heads"][2] == 256 else 0.70
        for each in (name, f"{name}, keys given"):
            if each in cell["us"]:
                value = peer / cell["us"][each]
                goal(
                    f"prefill {cell['cell']} against FA4 paged: {each}", value, f">= {limit}", value >= limit
                )
    halves = "60 decodes of 8k", "a prefill of 4k"
    if by_name.keys() >= {"both", *halves}:
        parts = sum(by_name[part]["us"][name] for part in halves)
        value = by_name["both"]["us"][name] / parts
        goal("mixed batch against its parts", value, "<= 1.05", value <= 1.05)
    return found


THROUGH = {"FLASHINFER": "FlashInfer", "FLASH_ATTN_4": "FlashAttention 4", "FLASH_ATTN_2": "FlashAttention 2"}
"""Backends, and the peer that calls their library directly."""


def judge_libraries(cells: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """The cost of going through attnplug, and whether a composite is as good as the better of its halves."""
    found: list[dict[str, Any]] = []

    def worst(title: str, ratios: dict[str, float], limit: float) -> None:
        if ratios:
            cell = max(ratios, key=ratios.__getitem__)
            met = ratios[cell] <= limit
            goal = {"name": f"{title} ({cell})", "value": ratios[cell], "goal": f"<= {limit}", "met": met}
            found.append(goal)

    for name in names:
        if name == "TRITON":
            continue  # has goals of its own
        of = {cell["cell"]: cell["us"] for cell in cells if name in cell["us"]}
        peer = THROUGH.get(name)
        direct = {cell: us[name] / us[peer] for cell, us in of.items() if peer in us}
        worst(f"{name} against {peer} directly, most", direct, 1.02)
        parts = [of[part][name] for part in ("60 decodes of 8k", "a prefill of 4k") if part in of]
        if "both" in of and len(parts) == 2:
            worst(f"{name}: mixed batch against its parts", {"both": of["both"][name] / sum(parts)}, 1.05)
        for kind in ("decode", "prefill") if "+" in name else ():
            of_kind = {
                cell["cell"]: cell["us"] for cell in cells if cell["kind"] == kind and name in cell["us"]
            }
            best = {
                cell: us[name] / min(us[each] for each in names if each in us) for cell, us in of_kind.items()
            }
            worst(f"{name}: {kind} against the best of {', '.join(names)}, most", best, 1.02)
    return found


def geometric(values: Any) -> float:
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values))


def report(ceilings: dict[str, float], cells: list[dict[str, Any]]) -> dict[str, Any]:
    """A run's file, with cells of earlier calls; the ceilings are those of this call."""
    return {
        "benchmark": "attention",
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "versions": versions(*_MEASURED),
        "ceilings": ceilings,
        "cells": cells,
        "goals": [],
    }


def plot(result: dict[str, Any], path: Path) -> None:
    """Bars of each cell as shares of its ceiling."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    cells = [cell for cell in result["cells"] if cell["kind"] in ("decode", "prefill")]
    names = list(dict.fromkeys(name for cell in cells for name in cell["us"]))
    figure, axis = plt.subplots(figsize=(9, 0.42 * len(cells) + 1.5))
    height = 0.8 / len(names)
    for number, name in enumerate(names):
        places = [row + (number - len(names) / 2) * height for row in range(len(cells))]
        axis.barh(places, [cell["of_ceiling"].get(name, 0) for cell in cells], height, label=name)
    axis.axvline(1.0, color="black", linewidth=1)
    axis.set_yticks(range(len(cells)), [f"{cell['kind']}: {cell['cell']}" for cell in cells], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("share of the ceiling: copy for decode, matrix product for prefill")
    axis.margins(y=0.01)
    figure.suptitle(f"{result['device']}, {result['date'][:10]}", fontsize=9)
    figure.legend(
        fontsize=8, loc="upper center", ncols=len(names), bbox_to_anchor=(0.5, 0.975), frameon=False
    )
    figure.tight_layout(rect=(0, 0, 1, 0.965))
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
