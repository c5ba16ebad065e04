"""Decode steps of equal layers on one runtime or several: the cells of a benchmark, their pages, and replays of graphs."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
from collections.abc import Callable
from typing import Any

import torch

import attnplug
from attnplug.core import BuilderConfig
from attnplug.runtime import (
    AttentionRuntime,
    GraphState,
    ModelPlan,
    SharedGraph,
    SharedGraphs,
    SharingPrices,
    StepBatch,
)

SIZE = 16
"""Tokens of a page."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One decode step.

    Args:
        prompts: the tokens and the readers of each shared prompt.
        own: the tokens of each request after its prompt.
        common: tokens before all prompts, which all requests share.
        heads: query heads, KV heads and head size.
    """

    prompts: tuple[tuple[int, int], ...]
    own: tuple[int, ...]
    common: int = 0
    heads: tuple[int, int, int] = (32, 8, 128)

    @property
    def requests(self) -> int:
        """Of the step."""
        return sum(readers for _, readers in self.prompts)

    @classmethod
    def even(cls, prompts: int, keys: int, readers: int, own: int, common: int = 0) -> Cell:
        """Prompts of `keys` tokens with `readers` requests each, of `own` more tokens."""
        return cls(((keys, readers),) * prompts, (own,) * (prompts * readers), common)


NAMED = {
    "8 x 4k, 16 readers, 128 own": Cell.even(8, 4096, 16, 128),
    "8 x 4k, 16 readers, 512 own": Cell.even(8, 4096, 16, 512),
    "16 x 16k, 8 readers, 1k own": Cell.even(16, 16384, 8, 1024),
    "1 x 8k, 64 readers, 256 own": Cell.even(1, 8192, 64, 256),
    "32 x 1k, 4 readers, 256 own": Cell.even(32, 1024, 4, 256),
    "4 x 2k, 4 readers, 512 own": Cell.even(4, 2048, 4, 512),
    "2 x 4k, 3 readers, 1k own": Cell.even(2, 4096, 3, 1024),
    "1k, then 8 x 3k, 16 readers, 512 own": Cell.even(8, 3072, 16, 512, 1024),
}


# One prefix of all requests, which TRITON's builder attends by a kernel of its own.
CASCADES = {
    "cascade, 64 share 16k, 1k own": Cell.even(1, 16384, 64, 1024),
    "cascade, 16 share 2k, 200 to 3k own": Cell(((2048, 16),), tuple(range(200, 3081, 192))),
    "cascade, 128 share 4k, 100 to 1k own, 8/1": Cell(
        ((4096, 128),), tuple(100 + 7 * at for at in range(128)), heads=(8, 1, 128)
    ),
}


def drawn(seed: int) -> Cell:
    """A random batch: ragged prompts and requests, of which some are strangers."""
    draw = random.Random(seed)
    heads = draw.choice([(32, 8, 128), (32, 8, 128), (8, 1, 128), (40, 8, 128), (32, 16, 128), (16, 8, 64)])
    longest, own_longest = draw.choice([1024, 4096, 16384]), draw.choice([256, 1024, 4096])
    prompts, left = [], draw.choice([8, 32, 128, 256])
    while left > 0:
        readers = min(left, draw.choice([1, 1, 2, 3, 4, 8, 16, 32, 64]))
        prompts.append((draw.randrange(16, longest), readers))
        left -= readers
    own = tuple(draw.randrange(1, own_longest) for _ in range(sum(readers for _, readers in prompts)))
    return Cell(tuple(prompts), own, draw.choice([0, 0, 0, 512, 2048]), heads)


def times_of(call: Callable[[], object], count: int = 200) -> list[float]:
    """Microseconds of each of `count` calls."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    return times


class Arena:
    """Memory of random 16-bit numbers, which the pages of one cell after another use: filling them takes seconds."""

    def __init__(self, size: int, device: str) -> None:
        self._numbers = torch.empty(size // 2, dtype=torch.bfloat16, device=device)
        for part in self._numbers.split(1 << 28):
            part.normal_()
        self._used = 0

    def restarted(self) -> Callable[[int, torch.device], torch.Tensor]:
        """An allocator that begins at the start of the memory."""
        self._used = 0
        return self._take

    def _take(self, size: int, _: torch.device) -> torch.Tensor:
        begin, self._used = self._used, self._used + -(-size // 256) * 256
        return self._numbers.view(torch.uint8)[begin : begin + size]


class Steps:
    """Steps of equal layers over one pool of pages, by runtimes that share prefixes or do not.

    Args:
        heads: query heads, KV heads and head size.
        layers: their number.
        device: of the layers.
        backend: of the layers; None for the one that attnplug chooses.
        tokens: of all pages.
        requests: the most of a step.
        rows: the most new tokens of a step.
        longest: tokens of the longest request.
        arena: memory of random numbers for the pages; None for memory of their own.
    """

    def __init__(
        self,
        heads: tuple[int, int, int],
        layers: int,
        device: str,
        backend: str | None,
        tokens: int,
        requests: int,
        rows: int,
        longest: int,
        arena: Arena | None = None,
    ) -> None:
        query_heads, kv_heads, size = heads
        dtype = "bfloat16" if device != "cpu" else "float32"
        spec = attnplug.LayerSpec(num_heads=query_heads, num_kv_heads=kv_heads, head_size=size, dtype=dtype)
        self.names = [f"layer.{index}" for index in range(layers)]
        self.plan: ModelPlan = attnplug.plan(
            dict.fromkeys(self.names, spec), device, num_blocks=tokens // SIZE + 1, backend=backend
        )
        self.longest = longest
        self.config = BuilderConfig(
            max_num_seqs=requests,
            max_num_batched_tokens=max(rows, 64),
            max_model_len=longest,
            cudagraph_batch_sizes=(requests,),
        )
        self.device = device
        generator = torch.Generator(device).manual_seed(0)
        given: dict[str, Any] = {} if arena is None else {"allocator": arena.restarted()}
        first = AttentionRuntime(self.plan, config=self.config, debug=False, prefix_sharing=False, **given)
        if arena is None:
            for cache in {cache.data_ptr(): cache for cache in first.kv_caches.values()}.values():
                cache.normal_(generator=generator)
        self.first, self.pages = first, dict(first.kv_caches)
        kind = getattr(torch, dtype)
        shapes = ((rows, query_heads, size), (rows, kv_heads, size), (rows, kv_heads, size))
        self.given = [torch.randn(shape, device=device, dtype=kind, generator=generator) for shape in shapes]

    def runtime(self, prices: SharingPrices | bool) -> AttentionRuntime:
        """Another runtime over the same pages."""
        return AttentionRuntime(
            self.plan, config=self.config, debug=False, prefix_sharing=prices, kv_caches=self.pages
        )

    def wait(self) -> None:
        """Wait for the device."""
        if self.device != "cpu":
            torch.cuda.synchronize()

    def time(
        self,
        runtime: AttentionRuntime,
        batch_of: Callable[[], StepBatch],
        parents: list[int] | None = None,
        query_len: int = 1,
    ) -> dict[str, float]:
        """Microseconds of a layer: `step` with the host's part, `graph` of a replay with it, and `device` of the replay alone."""

        def step() -> None:
            runtime.begin_step(batch_of())
            for name in self.names:
                runtime.forward(name, *self.given)

        for _ in range(2):
            step()
        self.wait()
        count, found = len(self.names), dict[str, float]()
        found["step"] = min(self.rounds(step, 4)) / count
        if self.device == "cpu":
            return found
        replay = self.replays(runtime, batch_of, parents, query_len)
        found["graph"] = min(self.rounds(replay, 4)) / count
        found["device"] = min(self.rounds(self._last.replay, 4)) / count
        return found

    def replays(
        self,
        runtime: AttentionRuntime,
        batch_of: Callable[[], StepBatch],
        parents: list[int] | None = None,
        query_len: int = 1,
    ) -> Callable[[], None]:
        """A function that runs a step by the graph that the runtime would choose; on a CPU without one."""

        def layers() -> None:
            for name in self.names:
                runtime.forward(name, *self.given)

        def step() -> None:
            runtime.begin_step(batch_of())
            layers()

        if self.device == "cpu":
            return step
        state = GraphState(runtime, self.longest, query_len)
        shared, requests = SharedGraphs(runtime, state), self.config.max_num_seqs
        graphs: dict[SharedGraph | None, torch.cuda.CUDAGraph] = {}

        def capture(step: contextlib.AbstractContextManager[object], key: SharedGraph | None) -> None:
            graphs[key] = torch.cuda.CUDAGraph()
            with step:
                layers()
                with torch.cuda.graph(graphs[key]):
                    layers()

        capture(state.capture(requests, query_len), None)
        if runtime.prefix_sharing.layers[0].prices is not None or parents is not None:
            nodes = None if parents is None else tuple(parents)
            capture(shared.capture(requests, parents), SharedGraph(requests, nodes))
        buffers = state.get_graph_input_buffers(requests, query_len)

        def replay() -> None:
            batch = batch_of()
            key = shared.prepare(batch) if len(graphs) > 1 else None
            if key is None and parents is None:
                state.prepare_graph_input_buffers(buffers, batch)
            self._last = graphs[key]
            self._last.replay()

        replay()
        self.wait()
        return replay

    def rounds(self, call: Callable[[], None], steps: int, rounds: int = 4) -> list[float]:
        """Microseconds of a step, of `steps` that wait for the device once."""

        def run() -> None:
            for _ in range(steps):
                call()
            self.wait()

        return [each / steps for each in times_of(run, rounds)]


Tables = list[tuple[list[int], int]]
"""The blocks and the computed tokens of each request."""


def prepared(
    cell: Cell, device: str, backend: str | None, layers: int, arena: Arena | None = None
) -> tuple[Steps, Tables]:
    """The steps of a cell and the blocks of its requests."""

    def up(tokens: int) -> int:
        return -(-tokens // SIZE)

    blocks = (
        up(cell.common) + sum(up(keys) for keys, _ in cell.prompts) + sum(up(own) + 2 for own in cell.own)
    )
    most = cell.common + max(keys for keys, _ in cell.prompts) + max(cell.own) + 2
    sizes = (blocks + 1) * SIZE, cell.requests, cell.requests, most
    steps = Steps(cell.heads, layers, device, backend, *sizes, arena)
    pool = steps.first.block_pool
    common, tables, own = (
        pool.allocate(cell.common // SIZE) if cell.common else [],
        list[Any](),
        iter(cell.own),
    )
    for keys, readers in cell.prompts:
        prompt = pool.allocate(keys // SIZE) if keys >= SIZE else []
        for _ in range(readers):
            tokens = (len(common) + len(prompt)) * SIZE + next(own)
            rest = pool.allocate(up(tokens + 1) - len(common) - len(prompt))
            tables.append(([*common, *prompt, *rest], tokens))
    return steps, tables


def batches_of(runtime: AttentionRuntime, tables: Tables, longest: int) -> Callable[[], StepBatch]:
    """A function that gives the decode of all requests."""
    builder = runtime.step_batch_builder(longest)
    for index, (held, tokens) in enumerate(tables):
        builder.add_request(str(index), [held], tokens)
    return lambda: builder.step(1)
