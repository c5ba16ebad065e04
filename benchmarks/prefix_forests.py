"""Steps whose requests share prefixes, or verify trees of drafts, beside plain ones; and the host's time to find prefixes.

`python benchmarks/prefix_forests.py` times the finding alone. `--device cuda` adds whole steps of some layers: plain, with
each block shared that two requests read, and by the prices of the backend. `--random N` draws batches, and `--json` keeps all.
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

import numpy as np
import numpy.typing as npt
import torch
from installed import versions

import attnplug
from attnplug.core import BuilderConfig
from attnplug.core.kv_cache_spec import kv_cache_spec_for
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
from attnplug.runtime.batch.forest_prices import LayerPrices, prices_of

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
        first = AttentionRuntime(self.plan, config=self.config, debug=False, prefix_sharing=False)
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

        def layers() -> None:
            for name in self.names:
                runtime.forward(name, *self.given)

        def step() -> None:
            runtime.begin_step(batch_of())
            layers()

        for _ in range(2):
            step()
        self.wait()
        count, found = len(self.names), dict[str, float]()
        found["step"] = min(self._rounds(step, 4)) / count
        if self.device == "cpu":
            return found
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
            graphs[key].replay()

        replay()
        self.wait()
        used = shared.prepare(batch_of()) if len(graphs) > 1 else None
        found["graph"] = min(self._rounds(replay, 4)) / count
        found["device"] = min(self._rounds(graphs[used].replay, 4)) / count
        return found

    def _rounds(self, call: Callable[[], None], steps: int, rounds: int = 4) -> list[float]:
        """Microseconds of a step, of `steps` that wait for the device once."""

        def run() -> None:
            for _ in range(steps):
                call()
            self.wait()

        return [each / steps for each in _times(run, rounds)]


def shared_step(
    cell: Cell, device: str, backend: str | None, layers: int, only_ruled: bool = False
) -> dict[str, object]:
    """One cell: microseconds of a layer, and the notes."""

    def up(tokens: int) -> int:
        return -(-tokens // SIZE)

    requests = sum(readers for _, readers in cell.prompts)
    blocks = (
        up(cell.common) + sum(up(keys) for keys, _ in cell.prompts) + sum(up(own) + 2 for own in cell.own)
    )
    most = cell.common + max(keys for keys, _ in cell.prompts) + max(cell.own) + 2
    steps = Steps(cell.heads, layers, device, backend, (blocks + 1) * SIZE, requests, requests, most)
    common = steps.first.block_pool.allocate(cell.common // SIZE) if cell.common else []
    tables, own = [], iter(cell.own)
    for keys, readers in cell.prompts:
        prompt = steps.first.block_pool.allocate(keys // SIZE) if keys >= SIZE else []
        for _ in range(readers):
            tokens = (len(common) + len(prompt)) * SIZE + next(own)
            rest = steps.first.block_pool.allocate(up(tokens + 1) - len(common) - len(prompt))
            tables.append(([*common, *prompt, *rest], tokens))
    found: dict[str, object] = {}
    outputs = {}
    kinds: dict[str, SharingPrices | bool] = {"plain": False, "shared": SharingPrices.free(), "ruled": True}
    if only_ruled:
        del kinds["shared"]
    for name, prices in kinds.items():
        with steps.runtime(prices) as runtime:
            builder = runtime.step_batch_builder(steps.longest)
            for index, (held, tokens) in enumerate(tables):
                builder.add_request(str(index), [held], tokens)
            times = steps.time(runtime, lambda: builder.step(1))  # noqa: B023
            found |= {f"{name} {kind}": round(value, 2) for kind, value in times.items()}
            runtime.begin_step(builder.step(1))
            outputs[name] = runtime.forward(steps.names[-1], *steps.given).float()
            found[f"{name} note"] = runtime.step_notes[0] if runtime.step_notes else ""
    difference = max(float((outputs["plain"] - outputs[name]).abs().max()) for name in kinds)
    return found | {"difference": difference}


def layers_of(cell: Cell, most: int) -> int:
    """The layers of a step, at most 64 GB of pages."""
    tokens = cell.common + sum(keys for keys, _ in cell.prompts) + sum(cell.own)
    _, kv_heads, size = cell.heads
    return max(min(most, int(64e9 / (4 * kv_heads * size * tokens))), 4)


def would_share(cell: Cell, device: str, backend: str | None, layers: int) -> bool:
    """Whether a graph of the cell's step shares prefixes by the prices of the backend on the device."""
    query_heads, kv_heads, size = cell.heads
    spec = attnplug.LayerSpec(num_heads=query_heads, num_kv_heads=kv_heads, head_size=size)
    found = prices_of(torch.device(device), backend or str(attnplug.select(spec, device).backend))
    cache = kv_cache_spec_for(spec, SIZE)
    if found is None or cache is None:
        return False
    prices = LayerPrices.of(found, query_heads, cache)
    tables, count = list[tuple[list[int], int]](), 1

    def blocks(number: int) -> list[int]:
        nonlocal count
        count += number
        return list(range(count - number, count))

    common, own = blocks(cell.common // SIZE), iter(cell.own)
    for keys, readers in cell.prompts:
        prompt = blocks(keys // SIZE)
        for _ in range(readers):
            tokens = (len(common) + len(prompt)) * SIZE + next(own)
            tables.append(([*common, *prompt, *blocks(tokens // SIZE + 1)], tokens))
    table = np.zeros((len(tables), max(len(held) for held, _ in tables)), dtype=np.int32)
    for row, (held, _) in zip(table, tables, strict=True):
        row[: len(held)] = held
    computed, new = np.array([tokens for _, tokens in tables]), np.ones(len(tables), dtype=np.int64)
    saves = functools.partial(prices.saved, piece_rows=16)
    forest = find_forest(table, SIZE, new, reach_of(computed, new, SIZE), saves)
    saved = 0.0 if forest is None else forest.saved - new.size * prices.merge
    plain = prices.plain(int((computed + 1).sum()))
    return prices.pays(saved, plain) and not prices.waits(plain, layers)


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


def main() -> None:
    """Print the least and the median time to find each forest, and with a device those of whole steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", help="run steps there, such as cuda")
    parser.add_argument("--backend", help="of the layers; by default the one that attnplug chooses")
    parser.add_argument("--layers", type=int, default=8, help="of a step (default: 8)")
    parser.add_argument("--random", type=int, default=0, help="batches to draw besides the named ones")
    parser.add_argument("--seed", type=int, default=0, help="of the first batch that is drawn")
    parser.add_argument("--seconds", type=float, default=400.0, help="draw no further batch after this time")
    parser.add_argument("--only", default="", help="cells whose name has this text")
    parser.add_argument(
        "--only-shared", action="store_true", help="cells in which the prices share something"
    )
    parser.add_argument("--trees", action="store_true", help="trees of 64 drafts too")
    parser.add_argument("--json", type=pathlib.Path, help="write all figures here")
    options = parser.parse_args()
    begin = time.monotonic()

    def write() -> None:
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")

    found: dict[str, object] = {"finding, us": dict(_finding())}
    print(found)
    if options.device:
        given = options.device, options.backend, options.layers
        steps: dict[str, object] = {}
        name = torch.cuda.get_device_name() if options.device != "cpu" else "cpu"
        found |= {
            "device": name,
            "versions": versions("attnplug", "torch", "triton"),
            "date": str(dt.date.today()),
        }
        found |= {"layers": options.layers, "steps, us of a layer": steps}
        if options.trees:
            for trees, nodes, context in ((16, 64, 8192), (4, 64, 8192), (16, 16, 2048)):
                key = f"{trees} trees of {nodes} after {context}"
                steps[key] = tree_step(trees, nodes, context, *given)
                print(key, steps[key], flush=True)
        plain = 0
        cells = {
            **NAMED,
            **{f"drawn {seed}": drawn(seed) for seed in range(options.seed, options.seed + options.random)},
        }
        for name, cell in cells.items():
            if options.only not in name:
                continue
            if time.monotonic() - begin > options.seconds:
                break
            most = layers_of(cell, options.layers)
            if options.only_shared and not would_share(cell, options.device, options.backend, most):
                plain += 1
                continue
            cell_times = shared_step(cell, options.device, options.backend, most, options.only_shared)
            print(name, cell_times, flush=True)
            steps[name] = {**dataclasses.asdict(cell), "layers": most, **cell_times}
            write()
        found["drawn and plain by the prices"] = plain
    write()


if __name__ == "__main__":
    main()
