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
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from forest_steps import (
    CASCADES,
    NAMED,
    SIZE,
    Arena,
    Cell,
    Steps,
    batches_of,
    drawn,
    prepared,
    times_of,
)
from installed import versions

from attnplug.runtime import (
    AttentionRuntime,
    SharingPrices,
)
from attnplug.runtime.batch.forest import find_forest, may_share, reach_of
from attnplug.tuning.timers import timer_for

REQUESTS, BLOCKS = 256, 2000


def _tables() -> dict[str, npt.NDArray[np.int32]]:
    apart = np.arange(1, REQUESTS * BLOCKS + 1, dtype=np.int32).reshape(REQUESTS, BLOCKS)
    prompts, one = apart.copy(), apart.copy()
    one[:, :-1] = one[0, :-1]
    for first in range(0, REQUESTS, 32):
        prompts[first : first + 32, :256] = prompts[first, :256]
    return {"no block is shared": apart, "all blocks are shared": one, "8 prompts of 256 blocks": prompts}


def _saved(readers: int, rows: int, keys: int) -> float:
    return (readers - 1) * keys - 300 * rows


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
        rounds = [[min(steps.rounds(run, 2, 1)) for run in runs] for _ in range(3)]
        times = [min(each) / layers for each in zip(*rounds, strict=True)]
        found: dict[str, object] = {"plain": round(times[0], 2), "prices share": not is_plain}
        if is_plain:
            # Of 64 decodes of the same requests one looks; the others know what it found.
            times_of_steps = times_of(
                lambda: list(sharing.forests(batch, piece_rows=16 if graphs else 0)), 640
            )
            finding = statistics.fmean(times_of_steps)
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

        times = times_of(find)
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
