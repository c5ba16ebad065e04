"""The waits of a decode in vLLM: its kernels by time, how long the GPU is idle, and what the host does meanwhile.

python benchmarks/vllm_step.py ATTNPLUG --model examples/models/gpt-oss-20b.json --dense --json step.json

The engine, the model and the prompts are those of `examples/engines/vllm_demo.py`, with one choice of attention as there.
It needs vLLM and an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import collections
import cProfile
import json
import pstats
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "engines"))
import comparison
import lookup
import vllm_demo
import vllm_run

TOKENS, TIMED, PROFILED = 64, 24, 8
"""Tokens that each request draws, and the steps that are timed and profiled."""
FUNCTIONS = 60
"""Functions of Python that are kept."""
WAITS = ("Synchronize", "cudaMemcpy", "cuMemcpy")
"""Parts of the names of calls that can make the host wait."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each workload; 2 where vLLM or a GPU is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("choice", help="as of vllm_demo.py: NAME[=BACKEND][:OPTIONS]")
    parser.add_argument("--model", type=Path, default=comparison.MODELS / "qwen3-8b.json")
    parser.add_argument("--layers", type=int, help="so many layers; by default those of the model")
    parser.add_argument("--dense", action="store_true", help="gpt-oss with a dense block for its experts")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument(
        "--prompts",
        nargs="+",
        type=comparison.lengths,
        default=[(2048, 2048), (100, 14_000)],
        metavar="N|MIN-MAX",
        help="tokens of each prompt, a workload for each value (default: 2048 100-14000)",
    )
    parser.add_argument("--kernels", type=int, default=15, help="how many to print (default: %(default)s)")
    parser.add_argument("--functions", type=int, default=12, help="how many to print (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    problem = vllm_demo.missing()
    if problem:
        print(f"vllm_step: {problem}", file=sys.stderr)
        return 2
    name = vllm_run.prepare(options.choice)
    settings = {
        "model": str(options.model),
        "layers": options.layers,
        "dense": options.dense,
        "workloads": comparison.workloads(options.requests, options.prompts),
        "max_tokens": TOKENS,
        "memory": 0.8,
        "eager": False,
    }
    llm = vllm_run.build(name, settings)
    builders: list[float] = []
    if name.startswith("ATTNPLUG"):
        watch_builders(builders)
    found = {
        workload: measured(llm, lengths, builders) for workload, lengths in settings["workloads"].items()
    }
    for workload, figures in found.items():
        print("\n".join(lines(f"{options.choice}, {workload}", figures, options.kernels, options.functions)))
    if options.json:
        layers = vllm_run.layers(llm) if builders else []
        report = comparison.report("vllm", settings, {options.choice: {"workloads": found, "layers": layers}})
        options.json.write_text(json.dumps({**report, "benchmark": "vllm-step"}, indent=1) + "\n")
    return 0


def watch_builders(seconds: list[float]) -> None:
    """Add to the list how long each builder of attnplug takes."""
    from attnplug.integrations.vllm.builder import Builder

    build: Callable[..., Any] = Builder.build

    def watched(*given: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        try:
            return build(*given, **named)
        finally:
            seconds.append(time.perf_counter() - begin)

    Builder.build = watched  # type: ignore[method-assign]


def measured(llm: Any, lengths: Sequence[int], builders: list[float]) -> dict[str, Any]:
    """The figures of one workload, in microseconds of a step."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    plan = lookup.Plan.of(engine.vllm_config.model_config.hf_text_config)
    draw = random.Random(0)
    prompts = [{"prompt_token_ids": plan.prompt(length, draw)} for length in lengths]
    vllm_run.generate(llm, prompts, 1)  # fills the prefix cache
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    for index, prompt in enumerate(prompts):
        engine.add_request(f"{len(lengths)} {sum(lengths)} {index}", prompt, sampling)
    drawn: dict[str, int] = {}

    def step() -> float:
        begin = time.perf_counter()
        for output in engine.step():
            drawn[output.request_id] = len(output.outputs[0].token_ids)
        return 1e6 * (time.perf_counter() - begin)

    while len(drawn) < len(lengths) or min(drawn.values()) < 4:
        step()
    builders.clear()
    took = [step() for _ in range(TIMED)]
    building = 1e6 * sum(builders) / TIMED
    torch.cuda.synchronize()
    both = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=both) as profile:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    functions = cProfile.Profile()
    functions.enable()
    for _ in range(PROFILED):
        step()
    functions.disable()
    while engine.has_unfinished_requests():
        engine.step()
    return {
        "step_us": statistics.median(took),
        "fastest_step_us": min(took),
        "builders_us": building,
        **profiled(profile.events(), PROFILED),
        "functions": by_own_time(functions, PROFILED),
    }


def by_own_time(profile: cProfile.Profile, steps: int) -> dict[str, dict[str, float]]:
    """The functions of Python that took the most time themselves, in microseconds of a step; profiling slows them."""
    found: dict[str, dict[str, float]] = {}
    for (file, line, name), (_, calls, own, whole, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        place = name if file == "~" else f"{'/'.join(Path(file).parts[-2:])}:{line} {name}"
        figures = found.setdefault(place, {"us": 0.0, "calls": 0.0, "whole_us": 0.0})
        figures["us"] += 1e6 * own / steps
        figures["calls"] += calls / steps
        figures["whole_us"] += 1e6 * whole / steps
    return dict(sorted(found.items(), key=lambda item: -item[1]["us"])[:FUNCTIONS])


def profiled(events: Iterable[Any], steps: int) -> dict[str, Any]:
    """The sums of the events of torch's profiler, in microseconds of a step.

    Kernels that overlap count once in `gpu_busy_us`, and each by itself in `kernels`.
    """
    kernels: dict[str, list[float]] = collections.defaultdict(list)
    calls: dict[str, list[float]] = collections.defaultdict(list)
    spans = []
    for event in events:
        if getattr(event, "is_user_annotation", False):
            continue  # a range of the host's work, which lasts while the GPU is idle
        begin, end = event.time_range.start, event.time_range.end
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans.append((begin, end))
            kernels[event.name].append(end - begin)
        elif event.name.startswith("cu"):
            calls[event.name].append(end - begin)

    def each(groups: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
        ordered = sorted(groups.items(), key=lambda item: -sum(item[1]))
        return {name: {"us": sum(took) / steps, "calls": len(took) / steps} for name, took in ordered}

    busy = covered(spans)
    length = max((end for _, end in spans), default=0.0) - min((begin for begin, _ in spans), default=0.0)
    waits = sum(sum(took) for name, took in calls.items() if waits_for_gpu(name))
    return {
        "gpu_busy_us": busy / steps,
        "gpu_idle_us": (length - busy) / steps,
        "host_waits_us": waits / steps,
        "kernels": each(kernels),
        "host_calls": each(calls),
    }


def waits_for_gpu(name: str) -> bool:
    """Whether the call can make the host wait."""
    return any(part in name for part in WAITS) and "Async" not in name


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The time while at least one of the spans runs."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def lines(title: str, figures: Mapping[str, Any], kernels: int, functions: int) -> list[str]:
    """The printed lines of a workload."""
    named = ("step", "fastest_step", "gpu_busy", "gpu_idle", "builders", "host_waits")
    made = [
        title,
        "  " + ", ".join(f"{name.replace('_', ' ')} {figures[f'{name}_us']:,.0f} us" for name in named),
    ]
    for kind, most in (("kernels", kernels), ("host_calls", 6), ("functions", functions)):
        for name, each in list(figures[kind].items())[:most]:
            made.append(f"  {each['us']:9.1f} us in {each['calls']:5.1f} calls  {name[:100]}")
    return made


if __name__ == "__main__":
    sys.exit(main())
