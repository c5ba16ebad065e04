"""The example engine with backends chosen by measured times, beside those chosen by priority: tokens per second.

    python benchmarks/tuned_engine.py --table h200.json --json tuned-engine.json
    python benchmarks/tuned_engine.py --smoke                     # a small model on the CPU
    python benchmarks/tuned_engine.py --table h200.json --vllm    # vLLM with attnplug's adapter, too

A model has the layers of its configuration, but few of them, and random weights. Both engines serve the same prompts
in turn in one process, and draw the same number of tokens. A model that fails costs only itself, and the JSON is
written after each one. The exit code is 1 where a model failed, or the table makes it slower by more than 2 %.
"""

from __future__ import annotations

import argparse
import copy
import datetime as dt
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from installed import versions
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "engines"))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "engine"))
from engine import Engine
from tiny import shrink

MODELS = Path(__file__).parents[1] / "examples" / "models"
LAYERS = {"llama-3.1-8b": 4, "mistral-7b-v0.1": 4, "gemma-3-27b-text": 6}
"""The models, and how many of their layers run; the sixth of Gemma is the first that sees all tokens."""
VOCABULARY = 32_768
LEAST = 0.98
TABLE_VARIABLE = "ATTNPLUG_TUNED"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--table", type=Path, help="of attnplug tune (default: the one that selections find, as plans do)"
    )
    parser.add_argument(
        "--models", nargs="+", default=[*LAYERS], help="files of examples/models, without .json"
    )
    parser.add_argument("--requests", type=int, default=64, help="at once (default: %(default)s)")
    parser.add_argument(
        "--prompt", type=int, default=4096, help="tokens of each prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens", type=int, default=48, help="drawn for each request (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="of both engines in turn (default: %(default)s)"
    )
    parser.add_argument(
        "--memory", default="24GiB", help="for the pages of each engine (default: %(default)s)"
    )
    parser.add_argument("--per-phase", action="store_true", help="plan a backend for each phase")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures there, after each model")
    parser.add_argument("--smoke", action="store_true", help="small models on the CPU, with few tokens")
    parser.add_argument(
        "--vllm", action="store_true", help="then the adapter of vLLM, in processes of its own"
    )
    options = parser.parse_args(arguments)
    if options.smoke:
        options.device, options.memory = "cpu", "64MiB"
        options.requests, options.prompt, options.tokens = 3, 40, 6
    report = head(options)
    for run in (engine, vllm) if options.vllm else (engine,):
        for name in options.models:
            report["models"].append(row := {"model": name, "engine": run.__name__})
            try:
                row |= run(name, options)
            except Exception as error:  # noqa: BLE001  (of any model, which costs that model)
                traceback.print_exc()
                row["failed"] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            print(in_words(row), flush=True)
            if options.json:
                options.json.write_text(json.dumps(report, indent=1) + "\n")
            gc.collect()
            if options.device != "cpu":
                torch.cuda.empty_cache()
    return int(any("failed" in row or is_slower(row) for row in report["models"]))


def is_slower(row: dict[str, Any]) -> bool:
    """Whether a table makes a model slower than the priorities, beyond the noise."""
    return not row.get("same_backends") and min(row["ratio"].values()) < LEAST


def head(options: argparse.Namespace) -> dict[str, Any]:
    """The report without models."""
    packages = ("attnplug", "torch", "triton", "transformers", "vllm")
    settings = {name: getattr(options, name) for name in ("requests", "prompt", "tokens", "per_phase")}
    return {
        "benchmark": "tuned-engine",
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if options.device != "cpu" else "cpu",
        "versions": versions(*packages),
        "settings": settings,
        "models": [],
    }


def engine(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Both engines on a model of few layers."""
    model, torch_device = made(name, options), torch.device(options.device)
    if options.smoke:
        torch.set_num_threads(1)
    # The default is a plan without times; the other one finds its table as any plan does.
    planning = {"default": False, "tuned": options.table}
    engines = {
        variant: served(copy.deepcopy(model), {"tuned": tuned, "per_phase": options.per_phase}, options)
        for variant, tuned in planning.items()
    }
    del model
    plans = {variant: each.runtime.plan for variant, each in engines.items()}
    chosen = {v: [(d.backend, d.block_size) for d in plan.decisions.values()] for v, plan in plans.items()}
    row: dict[str, Any] = {
        "layers": len(plans["default"].decisions),
        "table": plans["tuned"].tuned,
        "same_backends": chosen["default"] == chosen["tuned"],
        "backends": {variant: backends_of(plan) for variant, plan in plans.items()},
    }
    generator = torch.Generator().manual_seed(0)
    sizes = options.requests, options.prompt
    prompts = torch.randint(0, engines["default"].vocab_size, sizes, generator=generator).tolist()
    found: dict[str, list[tuple[float, float]]] = {variant: [] for variant in engines}
    # The first round warms up.
    for number in range(options.rounds + 1):
        for variant in sorted(engines, reverse=bool(number % 2)):
            rates = rates_of(engines[variant], prompts, options.tokens, torch_device)
            found[variant] += [rates] if number else []
    row["ratio"] = {}
    for place, phase in enumerate(("prefill", "decode")):
        # Each round has its own ratio, because a device that slows down slows both; the rates are of the same round.
        rounds = [
            {"default": one[place], "tuned": other[place]}
            for one, other in zip(found["default"], found["tuned"], strict=True)
        ]
        rounds.sort(key=lambda rates: rates["tuned"] / rates["default"])
        row[f"{phase}_tokens_s"] = middle = rounds[len(rounds) // 2]
        row["ratio"][phase] = middle["tuned"] / middle["default"]
    return row


def made(name: str, options: argparse.Namespace) -> PreTrainedModel:
    """A model with random weights, and as wide as it is."""
    config = AutoConfig.from_pretrained(MODELS / f"{name}.json", local_files_only=True)
    if options.smoke:
        config, dtype = shrink(config), torch.float32
    else:
        count, dtype = LAYERS.get(name, 4), torch.bfloat16
        config.num_hidden_layers, config.vocab_size = count, min(config.vocab_size, VOCABULARY)
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:count]
        config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    torch.manual_seed(0)
    with torch.device(options.device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def served(model: PreTrainedModel, planning: dict[str, Any], options: argparse.Namespace) -> Engine:
    """An engine with as many pages as the memory holds."""
    return Engine(
        model,
        max_num_seqs=options.requests,
        max_num_batched_tokens=max(16 * options.prompt, options.requests),
        planning={**planning, "num_blocks": None, "memory": options.memory},
        graphs=False,
    )


def rates_of(
    engine: Engine, prompts: Sequence[list[int]], tokens: int, device: torch.device
) -> tuple[float, float]:
    """Prompt tokens per second until each request has its first token, and tokens per second afterwards."""
    # Prompts of an earlier round must not be found.
    engine.pages._page_of.clear()
    requests = [engine.add(prompt, max_tokens=tokens) for prompt in prompts]
    times = [time.perf_counter()]
    while not all(request.output or request.error for request in requests):
        engine.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    times.append(time.perf_counter())
    before = sum(len(request.output) for request in requests)
    while engine.running or engine.waiting:
        engine.step()
    times.append(time.perf_counter())
    errors = [request.error for request in requests if request.error]
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(requests)} requests ended with: {errors[0]}")
    if engine.preemptions:
        raise RuntimeError("requests were preempted, because their pages do not fit: give more --memory")
    drawn = sum(len(request.output) for request in requests) - before
    return sum(map(len, prompts)) / (times[1] - times[0]), drawn / (times[2] - times[1])


def backends_of(plan: Any) -> list[str]:
    """For each kind of layers its number, backend, and why."""
    kinds: dict[tuple[str, str], int] = {}
    for decision in plan.decisions.values():
        by = "by priority" if decision.measured is None else str(decision.measured)
        kinds[str(decision.backend), by] = kinds.get((str(decision.backend), by), 0) + 1
    return [f"{count} on {backend}, {why}" for (backend, why), count in kinds.items()]


def vllm(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The engine of vLLM with attnplug's backend, without a table and with it, each in a process of its own."""
    import choice_process
    import comparison
    import vllm_demo

    if problem := vllm_demo.missing():
        raise RuntimeError(problem)
    workload = comparison.workloads(options.requests, [(options.prompt, options.prompt)])
    settings = {
        "model": str(MODELS / f"{name}.json"),
        "layers": LAYERS.get(name, 4),
        "dense": False,
        "workloads": workload,
        "max_tokens": options.tokens,
        "rounds": 1,
        "memory": 0.6,
        "eager": False,
    }
    row: dict[str, Any] = {"layers": settings["layers"], "backends": {}}
    given = "" if options.table is None else str(options.table.resolve())
    kept = os.environ.get(TABLE_VARIABLE)
    for variant, table in (("default", ""), ("tuned", given or kept or "")):
        os.environ[TABLE_VARIABLE] = table
        try:
            result = choice_process.run(vllm_demo.RUN, "ATTNPLUG", settings, 200.0)
        finally:
            if kept is None:
                del os.environ[TABLE_VARIABLE]
            else:
                os.environ[TABLE_VARIABLE] = kept
        if "error" in result:
            raise RuntimeError(f"{variant}: {result['error']}")
        row["backends"][variant] = result["layers"]
        [figures] = result["workloads"].values()
        for phase in ("prefill", "decode"):
            row.setdefault(f"{phase}_tokens_s", {})[variant] = figures[f"{phase}_tokens_per_s"]
    rates = {phase: row[f"{phase}_tokens_s"] for phase in ("prefill", "decode")}
    return row | {"ratio": {phase: each["tuned"] / each["default"] for phase, each in rates.items()}}


def in_words(row: dict[str, Any]) -> str:
    """A row as lines."""
    title = f"{row['model']}, {row['engine']}"
    if "failed" in row:
        return f"{title}: failed: {row['failed']}"
    lines = [f"{title}, {row['layers']} layers"]
    if row.get("same_backends"):
        lines.append("  the table chooses the backends of the priorities, so both are one engine in two runs")
    for phase, ratio in row["ratio"].items():
        rates = row[f"{phase}_tokens_s"]
        lines.append(
            f"  {phase}: {rates['tuned']:,.0f} tokens/s, {rates['default']:,.0f} by priority: {ratio:.3f}x"
        )
    lines += [f"  {variant}: {'; '.join(map(str, each))}" for variant, each in row["backends"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
