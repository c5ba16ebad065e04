"""The example engine on a CPU: decoding against transformers' generate, and what attnplug itself costs.

A Llama of 4 layers, 512 wide, vocabulary 1,024; requests of about 256 tokens. Both sides of a ratio run in
turn in the same process, so that a busy machine disturbs both equally.

    python benchmarks/engine.py --quick
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import datetime as dt
import importlib.metadata
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "engine"))

from engine import Engine

SPEED_GOAL, OVERHEAD_GOAL, BEGIN_STEP_GOAL = 1.5, 0.15, 150.0
CONTEXT, BATCH, MANY = 256, 16, 256
BLOCK_SIZE = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """One number and the goal it is held to, with what it was computed from in milliseconds."""

    name: str
    value: float
    unit: str
    goal: str | None
    met: bool | None
    ours_ms: float
    baseline_ms: float | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 9")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="of torch, for both sides (default: 1; more measure who else uses the machine)",
    )
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[8, 2], help="of 8 heads (default: 8 2)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)

    figures = []
    for kv_heads in options.kv_heads:
        figures += decode(kv_heads, 3 if options.quick else 9, 32 if options.quick else 64)
    figures += begin_step(200 if options.quick else 1000)
    for figure in figures:
        baseline = "" if figure.baseline_ms is None else f" against {figure.baseline_ms:.2f} ms"
        goal = "" if figure.goal is None else f"goal {figure.goal}, {'met' if figure.met else 'missed'}"
        print(
            f"{figure.name:58}{figure.value:8.2f}{figure.unit:3}{figure.ours_ms:8.2f} ms{baseline:20} {goal}"
        )
    if options.json:
        options.json.write_text(json.dumps(report(figures), indent=2) + "\n")
    return 0


def llama(kv_heads: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        vocab_size=1024,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def decode(kv_heads: int, rounds: int, tokens: int) -> list[Figure]:
    """Steps of the engine, of the engine without its packed projections, and of generate."""
    model = llama(kv_heads)
    prompts = torch.randint(0, 1024, (BATCH, CONTEXT - tokens // 2))
    packed, plain = engine_of(copy.deepcopy(model)), engine_of(copy.deepcopy(model))
    for module in plain.model.modules():
        module.__dict__.pop("forward", None)
    run: dict[str, Callable[[], float]] = {
        "generate": lambda: generate_seconds(model, prompts, tokens),
        "engine": lambda: engine_seconds(packed, prompts, tokens),
        "plain": lambda: engine_seconds(plain, prompts, tokens),
    }
    times: dict[str, list[float]] = {name: [] for name in run}
    for round_ in range(rounds + 1):
        for name, call in run.items():
            seconds = call()
            if round_:
                times[name].append(1e3 * seconds / tokens)
    theirs = statistics.median(times["generate"])
    figures = []
    for name, what in (("engine", ""), ("plain", ", projections not packed")):
        # Each round has its own ratio: a machine that slows down slows both.
        ratio = statistics.median(a / b for a, b in zip(times["generate"], times[name], strict=True))
        each = statistics.median(times[name])
        title = f"decode, batch {BATCH}, 8/{kv_heads} heads{what}"
        figures.append(Figure(title, ratio, "x", f"{SPEED_GOAL}x", ratio >= SPEED_GOAL, each, theirs))
    return [*figures, overhead(packed, prompts, f"inside attnplug, outside its kernels, 8/{kv_heads} heads")]


def engine_of(model: LlamaForCausalLM) -> Engine:
    pages = BATCH * -(-2 * CONTEXT // BLOCK_SIZE)
    sizes = {"max_num_seqs": BATCH, "max_num_batched_tokens": BATCH * CONTEXT}
    return Engine(model, pages + 1, BLOCK_SIZE, **sizes, graphs=False)


def start(engine: Engine, prompts: torch.Tensor, tokens: int) -> None:
    """Compute the prompts, nothing shared with earlier rounds: what is left is decoding."""
    engine.pages._page_of.clear()
    for prompt in prompts.tolist():
        engine.add(prompt, max_tokens=tokens + 1)
    engine.step()


def engine_seconds(engine: Engine, prompts: torch.Tensor, tokens: int) -> float:
    start(engine, prompts, tokens)
    begin = time.perf_counter()
    for _ in engine.stream():
        pass
    return time.perf_counter() - begin


def generate_seconds(model: LlamaForCausalLM, prompts: torch.Tensor, tokens: int) -> float:
    """For the tokens after the first: generate's time less that for one token."""
    mask = torch.ones_like(prompts)
    seconds = []
    for count in (1, tokens + 1):
        begin = time.perf_counter()
        model.generate(prompts, attention_mask=mask, max_new_tokens=count, do_sample=False)
        seconds.append(time.perf_counter() - begin)
    return seconds[1] - seconds[0]


def overhead(engine: Engine, prompts: torch.Tensor, name: str) -> Figure:
    """Time in attnplug's calls that is in no torch operation of a layer, as a share of decoding steps.

    Torch's profiler takes the times, and what it costs itself counts as attnplug's.
    """
    runtime, builder = engine.runtime, engine.builder
    layers = [layer.self_attn for layer in engine.model.model.layers]
    kept = [(layer, "paged_forward") for layer in layers]
    kept += [(runtime, "begin_step"), (builder, "step"), (builder, "finish_step")]
    calls = [getattr(*each) for each in kept]
    start(engine, prompts, 20)
    for (owner, method), call in zip(kept, calls, strict=True):
        setattr(owner, method, recorded("layer" if method == "paged_forward" else "batch", call))
    engine.step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(15):
            with record_function("whole step"):
                engine.step()
    for (owner, method), call in zip(kept, calls, strict=True):
        setattr(owner, method, call)
    for _ in engine.stream():
        pass
    inside = total = 0.0
    for event in profiler.events():
        spent = event.time_range.elapsed_us()
        if event.name == "whole step":
            total += spent
        elif event.name == "batch":
            inside += spent
        elif event.name == "layer":
            inside += spent - sum(child.time_range.elapsed_us() for child in event.cpu_children)
    share = inside / total
    goal = f"{OVERHEAD_GOAL:.0%}"
    return Figure(name, 100 * share, "%", goal, share < OVERHEAD_GOAL, inside / 15e3, total / 15e3)


def recorded(name: str, call: Callable[..., object]) -> Callable[..., object]:
    def wrapper(*args: object, **kwargs: object) -> object:
        with record_function(name):
            return call(*args, **kwargs)

    return wrapper


def begin_step(repeats: int) -> list[Figure]:
    """Building a decode step's metadata for 256 requests of 256 tokens, in medians."""
    engine = Engine(llama(8), 2, BLOCK_SIZE, max_num_seqs=MANY, max_num_batched_tokens=MANY, graphs=False)
    runtime = engine.runtime
    builder = runtime.step_batch_builder(2 * CONTEXT)
    pages = -(-CONTEXT // BLOCK_SIZE)
    for index in range(MANY):
        # All share the blocks that they read, and each has its own for its new token.
        builder.add_request(str(index), [[*range(1, pages), pages + index]], CONTEXT - 1)
    begin, step = [], []
    for _ in range(repeats):
        before = time.perf_counter()
        batch = builder.step(1)
        between = time.perf_counter()
        runtime.begin_step(batch)
        begin.append(time.perf_counter() - between)
        step.append(between - before)
    median = 1e3 * statistics.median(begin)
    batch_ms = 1e3 * statistics.median(step)
    goal = f"{BEGIN_STEP_GOAL:.0f} us"
    return [
        Figure(f"begin_step, B = {MANY}", 1e3 * median, "us", goal, 1e3 * median < BEGIN_STEP_GOAL, median),
        Figure(f"StepBatchBuilder.step, B = {MANY}", 1e3 * batch_ms, "us", None, None, batch_ms),
    ]


def report(figures: list[Figure]) -> dict[str, object]:
    packages = ("attnplug", "torch", "transformers")
    return {
        "benchmark": "engine",
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "device": {
            "type": "cpu",
            "machine": platform.machine(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        },
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "figures": [dataclasses.asdict(figure) for figure in figures],
    }


if __name__ == "__main__":
    sys.exit(main())
