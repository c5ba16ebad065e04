"""Decodes whose tokens several GPUs share, beside one GPU: outputs, times by graph replay, and NCCL's own floor.

    python benchmarks/context_parallel.py --json context-parallel.json
    python benchmarks/context_parallel.py --smoke      # two processes on the CPU, without times

It starts itself under torchrun, with a process for each of `--ranks`. Every cell is checked before it is timed: the
outputs of the ranks are those of one GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import attnplug
from attnplug.core import BuilderConfig, ContextParallel, LayerSpec
from attnplug.core.batch import compute_slot_mapping
from attnplug.ops import ExchangeBuffers, combine_partials
from attnplug.runtime import AttentionRuntime, GraphState, context_parallel

TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-5}
_CHUNK = 16_384
"""Tokens written at once."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A decode of requests of these lengths, and the least ratio of one GPU's time to that of the ranks."""

    name: str
    lengths: tuple[int, ...]
    least: float


CELLS = [
    Cell("8 x 128k", (131_072,) * 8, 1.8),
    Cell("64 x 8k", (8192,) * 64, 1.65),
    Cell("1 x 128k", (131_072,), 1.25),
    Cell("8 x 8k", (8192,) * 8, 0.9),
    Cell("ragged", (131_072, 65_000, 8191, 8192, 700, 33, 1, 40_000), 0.9),
]
SMOKE_CELLS = [Cell("3 x 100", (100,) * 3, 0.0), Cell("ragged", (70, 33, 1, 17), 0.0)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 1 where an output is wrong or, with times, a ratio is below its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--ranks", type=int, default=2, help="processes, each with a GPU (default: %(default)s)"
    )
    parser.add_argument("--layers", type=int, default=4, help="layers of a graph (default: %(default)s)")
    parser.add_argument("--interleave", type=int, default=1, help="tokens of a run (default: %(default)s)")
    parser.add_argument("--backend", help="of attnplug (default: the first that serves the layer)")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--smoke", action="store_true", help="small cells on the CPU, without times")
    options = parser.parse_args(arguments)
    if "WORLD_SIZE" not in os.environ:
        given = sys.argv[1:] if arguments is None else list(arguments)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        script = [f"--nproc-per-node={options.ranks}", str(Path(__file__).resolve()), *given]
        os.execv(sys.executable, [*launch, *script])
    device = torch.device("cpu" if options.smoke else f"cuda:{os.environ['LOCAL_RANK']}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if options.smoke else "nccl", timeout=dt.timedelta(minutes=5))
    failed = run(options, device)
    dist.barrier()
    dist.destroy_process_group()
    return failed


def run(options: argparse.Namespace, device: torch.device) -> int:
    """All cells; the number of those that fail, at most 1."""
    place, first = context_parallel(dist.group.WORLD, options.interleave), dist.get_rank() == 0
    spec = layer(options.smoke)
    found = []
    for cell in SMOKE_CELLS if options.smoke else CELLS:
        result = measure(cell, spec, place, options, device)
        found.append(result)
        if first:
            print(described(cell, result, place), flush=True)
    capacity = [
        attnplug.plan({"0": spec}, device.type, memory="1GiB", context_parallel=p) for p in (None, place)
    ]
    tokens = [plan.budget.max_tokens or 0 for plan in capacity if plan.budget is not None]
    report: dict[str, Any] = {"ranks": place.size, "interleave": place.interleave, "cells": found}
    report["capacity"] = tokens[1] / tokens[0]
    if not options.smoke:
        report["exchange"] = exchanges(spec, place, device)
    if first:
        print(f"capacity: {report['capacity']:.2f} x the {tokens[0]:,} tokens of one rank in 1 GiB")
        for each in report.get("exchange", ()):
            print(", ".join(f"{name} {value}" for name, value in each.items()))
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    wrong = [
        each
        for each in found
        if each["error"] > TOLERANCE[spec.dtype] or each.get("ratio", 9) < each["least"]
    ]
    return int(bool(wrong))


def layer(smoke: bool) -> LayerSpec:
    """The layer of Llama 8B, 32 heads over 8 of K and V; on the CPU a small one."""
    if smoke:
        return LayerSpec(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32")
    return LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, dtype="bfloat16")


def described(cell: Cell, result: dict[str, Any], place: ContextParallel) -> str:
    """One line."""
    text = f"{cell.name}: error {result['error']:.1e}"
    if "ratio" in result:
        text += f", one GPU {result['one_us']:.1f} us a layer, {place.size} ranks {result['ranks_us']:.1f} us"
        text += f", {result['ratio']:.2f}x (at least {cell.least}x)"
    return text


def measure(
    cell: Cell, spec: LayerSpec, place: ContextParallel, options: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """The error against one GPU, and with a GPU the times of both."""
    result: dict[str, Any] = {"cell": cell.name, "least": cell.least}
    outputs, times = [], []
    for each in (None, place):
        with Decodes(cell, spec, each, options, device) as decodes:
            outputs.append(decodes.run().float())
            if device.type == "cuda":
                times.append(decodes.replay_us())
    error = torch.linalg.vector_norm(outputs[1] - outputs[0]) / torch.linalg.vector_norm(outputs[0])
    # The worst rank counts.
    worst = torch.tensor([float(error), *times], device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    result["error"] = float(worst[0])
    if times:
        result["one_us"], result["ranks_us"] = worst[1:].tolist()
        result["ratio"] = result["one_us"] / result["ranks_us"]
    return result


class Decodes:
    """A runtime with the pages of a cell, ready for the last token of each request."""

    def __init__(
        self,
        cell: Cell,
        spec: LayerSpec,
        place: ContextParallel | None,
        options: argparse.Namespace,
        device: torch.device,
    ) -> None:
        self.layers, self.device, requests = options.layers, device, len(cell.lengths)
        specs = {str(index): spec for index in range(self.layers)}
        chosen = {"backend": options.backend, "context_parallel": place}
        covered = attnplug.plan(specs, device.type, **chosen).tokens_per_block[0]
        blocks = [-(-length // covered) for length in cell.lengths]
        plan = attnplug.plan(specs, device.type, num_blocks=sum(blocks) + 1, **chosen)
        sizes = () if device.type == "cpu" else (requests,)
        config = BuilderConfig(
            max_num_seqs=requests,
            max_num_batched_tokens=max(requests, 16),
            max_model_len=max(cell.lengths),
            cudagraph_batch_sizes=sizes,
        )
        self.runtime = AttentionRuntime(plan, config=config, device=device)
        self.builder = self.runtime.step_batch_builder()
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        generator = torch.Generator(device).manual_seed(0)
        self.runtime.warm_up()
        at = 1
        for index, (length, count) in enumerate(zip(cell.lengths, blocks, strict=True)):
            numbers = list(range(at, at + count))
            self._fill(numbers, length - 1, place, spec, generator)
            self.builder.add_request(str(index), [numbers], length - 1)
            at += count
        shape = requests, spec.num_kv_heads, spec.head_size
        self.key, self.value = (self._random(shape, generator) for _ in range(2))
        self.query = self._random((requests, spec.num_heads, spec.head_size), generator)
        self.output = torch.empty_like(self.query)

    def __enter__(self) -> Decodes:
        return self

    def __exit__(self, *_: object) -> None:
        self.runtime.close()

    def _random(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)

    def _fill(
        self,
        blocks: list[int],
        length: int,
        place: ContextParallel | None,
        spec: LayerSpec,
        generator: torch.Generator,
    ) -> None:
        """Write the computed tokens of a request, the same on all ranks, to the slots of this one."""
        table = torch.tensor([blocks])
        size = self.runtime.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        for start in range(0, length, _CHUNK):
            count = min(_CHUNK, length - start)
            span = torch.tensor([start]), torch.tensor([count])
            slots = compute_slot_mapping(table, *span, size, context_parallel=place).to(self.device)
            shape = count, spec.num_kv_heads, spec.head_size
            key, value = self._random(shape, generator), self._random(shape, generator)
            for each in self.runtime.layers.values():
                cache = each.kv_cache
                if cache is not None:
                    each.impl.update_kv_cache(each, key, value, cache, slots)

    def _forward(self) -> None:
        for name in self.runtime.layers:
            self.runtime.forward(name, self.query, self.key, self.value, self.output)

    def run(self) -> torch.Tensor:
        """The output of the last layer, without a graph."""
        self.batch = self.builder.step(1)
        self.runtime.begin_step(self.batch)
        self._forward()
        return self.batch.in_former_order(self.output).clone()

    def replay_us(self) -> float:
        """Microseconds a layer, by graph replay."""
        state, graph = GraphState(self.runtime), torch.cuda.CUDAGraph()
        requests = self.batch.common.num_reqs
        with state.capture(requests):
            self._forward()
            torch.cuda.synchronize()
            # NCCL's own threads call CUDA meanwhile, which the default mode forbids.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._forward()
        state.prepare_graph_input_buffers(state.get_graph_input_buffers(requests), self.batch)
        return timed_us(graph.replay) / self.layers


def exchanges(spec: LayerSpec, place: ContextParallel, device: torch.device) -> list[dict[str, Any]]:
    """Merges and exchanges of 64 decodes, captured, and NCCL's all-gather of the same bytes, in us."""
    group, found = dist.group.WORLD, []
    for backend in ("a2a", "ag_rs"):
        for scatter_heads in (False, True):
            buffers = ExchangeBuffers(device)
            out, lse = buffers.partial(64, spec.num_heads, spec.head_size, torch.bfloat16, group)
            out.normal_()
            lse.normal_()
            given: dict[str, Any] = {"scatter_heads": scatter_heads, "backend": backend, "buffers": buffers}
            call = captured(lambda out=out, lse=lse, given=given: combine_partials(out, lse, group, **given))
            found.append(
                {"exchange": backend, "scatter_heads": scatter_heads, "us": round(timed_us(call) / 20, 1)}
            )
    sent = torch.empty(64 * spec.num_heads * (2 * spec.head_size + 4), dtype=torch.uint8, device=device)
    taken = torch.empty(sent.numel() * place.size, dtype=torch.uint8, device=device)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    floor = timed_us(captured(lambda: gather(taken, sent, group=group))) / 20
    return [*found, {"exchange": "all-gather of NCCL alone", "us": round(floor, 1)}]


def captured(call: Callable[[], object], count: int = 20) -> Callable[[], None]:
    """A graph of `count` calls."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(count):
            call()
    return graph.replay


def timed_us(call: Callable[[], object], repetitions: int = 15) -> float:
    """The median time in us; all ranks begin together."""
    times = []
    for _ in range(repetitions + 2):
        dist.barrier()
        torch.cuda.synchronize()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        call()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended) * 1e3)
    return statistics.median(times[2:])


if __name__ == "__main__":
    sys.exit(main())
