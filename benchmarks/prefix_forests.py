"""Steps whose requests share prefixes, or verify trees of drafts, beside plain ones; and the host's time to find prefixes.

`python benchmarks/prefix_forests.py` times the finding alone. `--device cuda` adds whole steps of some layers: plain, with
each block shared that two requests read, and by the prices of the backend. `--random N` draws batches. Of those that the prices
run plainly, the code is that of a plain step after the finding: only both are timed. `--json` keeps all, and a second run goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime as dt
import functools
import json
import pathlib
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from installed import versions

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
from attnplug.runtime.batch.forest import find_forest, may_share, reach_of
from attnplug.tuning.timers import timer_for

REQUESTS, BLOCKS, SIZE = 256, 2000, 16


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


def _tables() -> dict[str, npt.NDArray[np.int32]]:
    apart = np.arange(1, REQUESTS * BLOCKS + 1, dtype=np.int32).reshape(REQUESTS, BLOCKS)
    prompts, one = apart.copy(), apart.copy()
    one[:, :-1] = one[0, :-1]
    for first in range(0, REQUESTS, 32):
        prompts[first : first + 32, :256] = prompts[first, :256]
    return {"no block is shared": apart, "all blocks are shared": one, "8 prompts of 256 blocks": prompts}


def _saved(readers: int, rows: int, keys: int) -> float:
    return (readers - 1) * keys - 300 * rows


def _times(call: Callable[[], object], count: int = 200) -> list[float]:
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
        found["step"] = min(self._rounds(step, 4)) / count
        if self.device == "cpu":
            return found
        replay = self.replays(runtime, batch_of, parents, query_len)
        found["graph"] = min(self._rounds(replay, 4)) / count
        found["device"] = min(self._rounds(self._last.replay, 4)) / count
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

    def _rounds(self, call: Callable[[], None], steps: int, rounds: int = 4) -> list[float]:
        """Microseconds of a step, of `steps` that wait for the device once."""

        def run() -> None:
            for _ in range(steps):
                call()
            self.wait()

        return [each / steps for each in _times(run, rounds)]


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


def shared_step(cell: Cell, device: str, backend: str | None, layers: int) -> dict[str, object]:
    """One cell: microseconds of a layer, and the notes."""
    steps, tables = prepared(cell, device, backend, layers)
    found: dict[str, object] = {}
    outputs = {}
    kinds: dict[str, SharingPrices | bool] = {"plain": False, "shared": SharingPrices.free(), "ruled": True}
    for name, prices in kinds.items():
        with steps.runtime(prices) as runtime:
            batch_of = batches_of(runtime, tables, steps.longest)
            times = steps.time(runtime, batch_of)
            found |= {f"{name} {kind}": round(value, 2) for kind, value in times.items()}
            runtime.begin_step(batch_of())
            outputs[name] = runtime.forward(steps.names[-1], *steps.given).float()
            found[f"{name} note"] = runtime.step_notes[0] if runtime.step_notes else ""
    difference = max(float((outputs["plain"] - outputs[name]).abs().max()) for name in kinds)
    return found | {"difference": difference}


def cascade_step(cell: Cell, device: str, backend: str | None, layers: int) -> dict[str, object]:
    """One prefix of all requests, by the builder's own kernel and by the prices: a layer's microseconds of the device.

    Both take turns, without graphs, and the host's part is left out.
    """
    steps, tables = prepared(cell, device, backend, layers)
    timer, runs, notes = timer_for(steps.device), dict[str, Callable[[], float]](), dict[str, object]()
    with contextlib.ExitStack() as stack:
        for name, prices in {"cascade": False, "ruled": True}.items():
            runtime = stack.enter_context(steps.runtime(prices))
            runtime.begin_step(batches_of(runtime, tables, steps.longest)())
            notes[f"{name} note"] = runtime.step_notes[0] if runtime.step_notes else ""

            def call(index: int, runtime: AttentionRuntime = runtime) -> None:
                runtime.forward(steps.names[index % layers], *steps.given)

            runs[name] = timer.prepare(call, layers, graph=False)
        rounds = [{name: run() for name, run in runs.items()} for _ in range(5)]
    found = {name: min(each[name] for each in rounds) for name in runs}
    ratio = round(found["cascade"] / found["ruled"], 3)
    return {"timed": "layers without graphs, on the device alone"} | {
        **{name: round(us, 2) for name, us in found.items()},
        **notes,
        "cascade over ruled": ratio,
    }


def drawn_step(
    cell: Cell, device: str, backend: str | None, layers: int, arena: Arena | None = None
) -> dict[str, object]:
    """One batch as an engine runs it: microseconds of a layer, with the host's part, in turns.

    On a GPU these are replays of graphs, and on a CPU steps. If the prices share nothing, the step is a plain one after the host has
    looked for prefixes. Then only a plain one and the finding are timed, and their sum counts: as if the device waited.
    """
    steps, tables = prepared(cell, device, backend, layers, arena)
    graphs = device != "cpu"
    with steps.runtime(False) as plain, steps.runtime(True) as ruled:
        batches = [batches_of(runtime, tables, steps.longest) for runtime in (plain, ruled)]
        batch, sharing = batches[1](), ruled.prefix_sharing
        forests = [forest for _, forest in sharing.forests(batch, piece_rows=16 if graphs else 0)]
        is_plain = all(isinstance(forest, str) for forest in forests)
        runs = [steps.replays(plain, batches[0])]
        if not is_plain:
            runs.append(steps.replays(ruled, batches[1]))
        rounds = [[min(steps._rounds(run, 2, 1)) for run in runs] for _ in range(3)]
        times = [min(each) / layers for each in zip(*rounds, strict=True)]
        found: dict[str, object] = {"plain": round(times[0], 2), "prices share": not is_plain}
        if is_plain:
            finding = min(_times(lambda: list(sharing.forests(batch, piece_rows=16 if graphs else 0)), 20))
            times.append(times[0] + finding / layers)
            found |= {"timed": "a plain step, and the finding", "finding, us of a step": round(finding, 1)}
            found["note"] = str(forests[0]) if forests else ""
        else:
            found |= {"timed": "a plain step, and one by the prices", "ruled": round(times[1], 2)}
    return found | {"plain over ruled": round(times[0] / times[1], 4)}


def layers_of(cell: Cell, most: int, size: float = 64e9) -> int:
    """The layers of a step, so that their pages take at most `size` bytes."""
    tokens = cell.common + sum(keys for keys, _ in cell.prompts) + sum(cell.own)
    _, kv_heads, head_size = cell.heads
    return max(min(most, int(size / (4 * kv_heads * head_size * tokens))), 1)


def tree_step(
    trees: int, nodes: int, context: int, device: str, backend: str | None, layers: int
) -> dict[str, object]:
    """Trees of drafts beside chains of as many: microseconds of a layer."""
    sizes = trees * (context + nodes + 2 * SIZE), trees, trees * nodes, context + nodes
    steps = Steps((32, 8, 128), layers, device, backend, *sizes)
    parents = [(node - 2) // 2 if node > 1 else -1 for node in range(nodes)]
    held = [steps.first.block_pool.allocate(-(-(context + nodes) // SIZE)) for _ in range(trees)]
    found: dict[str, object] = {}
    with steps.runtime(True) as runtime:
        for name in ("chain", "tree"):
            builder = runtime.step_batch_builder(context + nodes)
            for index, blocks in enumerate(held):
                builder.add_request(str(index), [blocks], context)
            given = {str(index): parents for index in range(trees)} if name == "tree" else None
            tree = parents if given else None
            times = steps.time(runtime, lambda: builder.step(nodes, trees=given), tree, nodes)  # noqa: B023
            found |= {f"{name} {kind}": round(value, 2) for kind, value in times.items()}
    return found


def _finding() -> Iterator[tuple[str, dict[str, float]]]:
    computed, new = np.full(REQUESTS, BLOCKS * SIZE - 8), np.ones(REQUESTS, dtype=np.int64)
    for name, table in _tables().items():

        def find(table: npt.NDArray[np.int32] = table) -> object:
            return may_share(table) and find_forest(table, SIZE, new, reach_of(computed, new, SIZE), _saved)

        times = _times(find)
        yield name, {"least": round(min(times), 1), "median": round(statistics.median(times), 1)}


def main(arguments: list[str] | None = None) -> None:
    """Print the least and the median time to find each forest, and with a device those of whole steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", help="run steps there, such as cuda")
    parser.add_argument("--backend", help="of the layers; by default the one that attnplug chooses")
    parser.add_argument("--layers", type=int, default=8, help="of a step (default: 8)")
    parser.add_argument("--random", type=int, default=0, help="batches to draw besides the named ones")
    parser.add_argument("--seed", type=int, default=0, help="of the first batch that is drawn")
    parser.add_argument("--seconds", type=float, default=400.0, help="begin no further cell after this time")
    parser.add_argument("--only", default="", help="cells whose name has this text")
    parser.add_argument("--trees", action="store_true", help="trees of 64 drafts too")
    parser.add_argument("--memory", type=float, default=64.0, help="GB for pages (default: 64)")
    parser.add_argument("--json", type=pathlib.Path, help="the file to go on from, and to write")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    found: dict[str, Any] = {"finding, us": dict(_finding())}
    print(found)
    if options.device:
        device = torch.cuda.get_device_name() if options.device != "cpu" else "cpu"
        head = {
            "device": device,
            "versions": versions("attnplug", "torch", "triton"),
            "backend": options.backend,
            "layers": options.layers,
        }
        steps: dict[str, Any] = {}
        if options.json and options.json.exists():
            old = json.loads(options.json.read_text())
            if {name: old.get(name) for name in head} != head:
                raise SystemExit(
                    f"{options.json} has times of another device, backend or version; name another file"
                )
            steps = old["steps, us of a layer"]
        found |= head | {"date": str(dt.date.today()), "steps, us of a layer": steps}
        for name, measure in measurements(options):
            if name in steps or options.only not in name:
                continue
            if time.monotonic() - begin > options.seconds:
                break
            steps[name] = measure()
            print(name, steps[name], flush=True)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1) + "\n")
        summary = summary_of(steps)
        found["drawn"] = summary
        print("drawn:", summary)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def measurements(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], dict[str, object]]]]:
    """The cells with their measurements, in order."""
    device, backend, size = options.device, options.backend, options.memory * 1e9
    for sizes in ((16, 64, 8192), (4, 64, 8192), (16, 16, 2048)) if options.trees else ():
        name = "{} trees of {} after {}".format(*sizes)
        yield name, functools.partial(tree_step, *sizes, device, backend, options.layers)
    for kind, cells in ((shared_step, NAMED), (cascade_step, CASCADES)):
        for name, cell in cells.items():
            layers = layers_of(cell, options.layers, size)
            yield name, functools.partial(_about, kind, cell, device, backend, layers)
    arenas: list[Arena] = []

    def by_arena(cell: Cell, layers: int) -> dict[str, object]:
        # float32 pages of a CPU have memory of their own.
        if device != "cpu" and not arenas:
            arenas.append(Arena(int(1.1 * size), device))
        return _about(drawn_step, cell, device, backend, layers, *arenas)

    for seed in range(options.seed, options.seed + options.random):
        cell = drawn(seed)
        yield f"drawn {seed}", functools.partial(by_arena, cell, layers_of(cell, options.layers, size))


def _about(
    measure: Callable[..., dict[str, object]],
    cell: Cell,
    device: str,
    backend: str | None,
    layers: int,
    *more: Any,
) -> dict[str, object]:
    return {**dataclasses.asdict(cell), "layers": layers, **measure(cell, device, backend, layers, *more)}


def summary_of(steps: dict[str, Any]) -> dict[str, object]:
    """Of the drawn batches: how many the prices share, and the ratios of plain times to theirs."""
    drawn_ones = [each for name, each in steps.items() if name.startswith("drawn ")]
    ratios = {
        is_shared: [each["plain over ruled"] for each in drawn_ones if each["prices share"] is is_shared]
        for is_shared in (True, False)
    }
    found: dict[str, object] = {"batches": len(drawn_ones)}
    for name, each in (("shared", ratios[True]), ("plain, with the finding", ratios[False])):
        if each:
            mean = statistics.geometric_mean(each)
            found[name] = {"batches": len(each), "geometric mean": round(mean, 3), "least": min(each)}
            found[name] |= {"below 0.98": sum(ratio < 0.98 for ratio in each)}  # type: ignore[operator]
    return found


if __name__ == "__main__":
    main()
