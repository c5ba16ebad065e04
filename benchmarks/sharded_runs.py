"""Runtimes of one rank and of several, with the same tokens in their pages: what benchmarks/context_parallel.py runs."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from sharded_cells import Cell

import attnplug
from attnplug.core import BuilderConfig, ContextParallel, LayerSpec, LayerTensors
from attnplug.core.batch import compute_slot_mapping
from attnplug.runtime import AttentionRuntime, GraphState, StepBatch

_CHUNK = 16_384
"""Tokens written at once."""
_REPLAY_ERROR = 1e-2
_SLEEP_CYCLES = 400_000
"""A fifth of a millisecond, enough for the host to issue the calls of a round."""
_ROUND_US = 2000.0
"""A round lasts about this long, so that what ranks differ in when they begin is small beside it."""


class Steps:
    """A runtime with the pages of a cell, ready for the new tokens of each request."""

    def __init__(
        self,
        cell: Cell,
        spec: LayerSpec,
        place: ContextParallel | None,
        device: torch.device,
        layers: int,
        backend: str | None,
    ) -> None:
        self.layers, self.device, self.new, requests = layers, device, cell.new, len(cell.lengths)
        specs = {str(index): spec for index in range(layers)}
        chosen: dict[str, Any] = {"backend": backend, "context_parallel": place}
        covered = attnplug.plan(specs, device.type, **chosen).tokens_per_block[0]
        blocks = [-(-length // covered) for length in cell.lengths]
        self.plan = attnplug.plan(specs, device.type, num_blocks=sum(blocks) + 1, **chosen)
        config = BuilderConfig(
            max_num_seqs=requests,
            max_num_batched_tokens=max(requests * cell.new, 16),
            max_model_len=max(cell.lengths),
            cudagraph_batch_sizes=(requests,) if cell.in_graph else (),
            num_speculative_tokens=cell.new - 1 if cell.in_graph else 0,
        )
        self.runtime = AttentionRuntime(self.plan, config=config, device=device)
        self.builder = self.runtime.step_batch_builder()
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        generator = torch.Generator(device).manual_seed(0)
        if device.type == "cuda":
            self.runtime.warm_up()
        at = 1
        for index, (length, count) in enumerate(zip(cell.lengths, blocks, strict=True)):
            numbers = list(range(at, at + count))
            self._fill(numbers, length - cell.new, place, spec, generator)
            self.builder.add_request(str(index), [numbers], length - cell.new)
            at += count
        rows = requests * cell.new
        shape = rows, spec.num_kv_heads, spec.head_size
        self.key, self.value = (self._random(shape, generator) for _ in range(2))
        self.query = self._random((rows, spec.num_heads, spec.head_size), generator)
        self.output = torch.empty_like(self.query)

    def __enter__(self) -> Steps:
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

    def forward(self) -> None:
        """All layers; it can be repeated, because it writes the same slots again."""
        for name in self.runtime.layers:
            self.runtime.forward(name, self.query, self.key, self.value, self.output)

    def run(self) -> torch.Tensor:
        """The output of the last layer, without a graph."""
        self.batch: StepBatch = self.builder.step(self.new)
        self.runtime.begin_step(self.batch)
        self.forward()
        return self.batch.in_former_order(self.output).clone()

    def eager_us(self) -> float:
        """Microseconds a layer, without a graph; `run` comes first."""
        return timed_us(self.forward, 5) / self.layers

    def replay_us(self) -> float:
        """Microseconds a layer, by graph replay; `run` comes first."""
        state, graph, expected = GraphState(self.runtime), torch.cuda.CUDAGraph(), self.output.clone()
        requests = self.batch.common.num_reqs
        with state.capture(requests, self.new):
            self.forward()
            torch.cuda.synchronize()
            # NCCL's own threads call CUDA meanwhile, which the default mode forbids.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.forward()
        buffers = state.get_graph_input_buffers(requests, self.new)
        state.prepare_graph_input_buffers(buffers, self.batch)
        self.output.zero_()
        graph.replay()
        if error_of([self.output], [expected]) > _REPLAY_ERROR:
            raise RuntimeError("a replay gave another output than the same step without a graph")
        return timed_us(graph.replay) / self.layers


def outputs_of_model(
    specs: dict[str, LayerSpec],
    steps: Sequence[dict[str, int]],
    place: ContextParallel | None,
    device: torch.device,
    backend: str | None,
) -> list[torch.Tensor]:
    """Each layer's output in each step, in the order of the requests; values are equal on all ranks."""
    names = sorted({name for step in steps for name in step})
    longest = {name: sum(step.get(name, 0) for step in steps) for name in names}
    plan = attnplug.plan(specs, device.type, backend=backend, context_parallel=place)
    needed = [-(-longest[name] // tokens) for name in names for tokens in plan.tokens_per_block]
    plan = dataclasses.replace(plan, num_blocks=sum(needed) + 1)
    config = BuilderConfig(
        max_model_len=max(longest.values()),
        max_num_seqs=len(names),
        max_num_batched_tokens=max(sum(step.values()) for step in steps),
    )
    generator, found = torch.Generator(device).manual_seed(1), []
    tensors = {name: _latent_tensors(spec, generator, device) for name, spec in specs.items()}
    with AttentionRuntime(plan, tensors, config=config, device=device) as runtime:
        builder, at = runtime.step_batch_builder(), 1
        for name in names:
            pages = []
            for tokens in plan.tokens_per_block:
                count = -(-longest[name] // tokens)
                pages.append(list(range(at, at + count)))
                at += count
            builder.add_request(name, pages)
        for step in steps:
            batch = builder.step(step)
            runtime.begin_step(batch)
            for name, spec in specs.items():
                shapes = (spec.num_heads, spec.query_size), (spec.num_kv_heads, spec.head_size)
                query, key = (_random(batch.common.num_actual_tokens, *s, spec, generator) for s in shapes)
                value = None if spec.mla is not None else key.flip(0)
                found.append(batch.in_former_order(runtime.forward(name, query, key, value)).clone())
            builder.finish_step()
    return found


def _random(rows: int, heads: int, size: int, spec: LayerSpec, generator: torch.Generator) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return torch.randn(rows, heads, size, generator=generator, device=generator.device, dtype=dtype)


def _latent_tensors(spec: LayerSpec, generator: torch.Generator, device: torch.device) -> LayerTensors:
    if spec.mla is None:
        return LayerTensors()
    rows = spec.num_heads * (spec.mla.qk_nope_head_dim + spec.mla.v_head_dim)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    shape = rows, spec.mla.kv_lora_rank
    weight = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
    return LayerTensors(kv_b_proj=(weight * spec.mla.kv_lora_rank**-0.5).to(dtype))


def error_of(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest relative error of a tensor, by Euclidean norms."""
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        norm = torch.linalg.vector_norm(other.float())
        worst = max(worst, float(torch.linalg.vector_norm(one.float() - other.float()) / norm))
    return worst


def worst_of_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """The largest of each value over the ranks."""
    worst = torch.tensor(values, device=device, dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    found: list[float] = worst.tolist()
    return found


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
    """The median time in us of a call, of several in a row if they are short; all ranks begin together."""
    times, calls = [], 1
    begin = torch.zeros(1, device="cuda")
    for number in range(repetitions + 2):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Hosts wake up at unlike times, so the GPUs wait for each other after the hosts have issued all calls.
        torch.cuda._sleep(_SLEEP_CYCLES)
        dist.all_reduce(begin)
        began.record()
        for _ in range(calls):
            call()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended) * 1e3 / calls)
        if number == 1:
            [slowest] = worst_of_ranks(times[1:], begin.device)
            calls = max(1, min(int(_ROUND_US / slowest), 20))
    return statistics.median(times[2:])
