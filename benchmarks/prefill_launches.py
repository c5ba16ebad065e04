"""Prompts and extends of TRITON on Hopper with each launch of the kernel with specialised warps, and with the one it chooses.

    python benchmarks/prefill_launches.py --json launches.json
    python benchmarks/prefill_launches.py --heads 64/8/64                            # some 30 s

A process for each number of heads compiles all launches; then one after the other times them in turns, as replayed graphs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from paged_layers import Cell, PagedLayer, interleaved_us
from prompts import facts

HEADS = [(32, 8, 128), (28, 4, 128), (16, 2, 128), (64, 8, 64), (32, 8, 64), (32, 8, 96), (24, 8, 80)]
# New tokens, and all tokens.
EXTENDS = [
    ((64,) * 16, 8192),
    ((512,), 32768),
    ((700,) * 3, 5000),
    ((256,) * 8, 4096),
    ((1024,), 8192),
    ((512,) * 4, 4096),
    ((2048,) * 2, 8192),
    ((300,), 16384),
    ((32,) * 64, 2048),
    ((1500,) * 3, 9000),
    ((128,) * 4, 8192),
    ((200,) * 32, 1000),
]
PROMPTS = [
    *(
        (length,) * count
        for count, length in ((4, 1500), (1, 2000), (2, 1000), (8, 500), (16, 400), (3, 5000))
    ),
    *((length,) * count for count, length in ((1, 8192), (1, 20000), (32, 300), (6, 700), (4, 1024))),
    *((length,) * count for count, length in ((90, 100), (200, 40))),
    (3000, 1000, 500, 2000),
    tuple(50 + 197 * number for number in range(16)),
]
MOST_SECONDS = 400


def launches(size: int) -> dict[str, Any]:
    """Keys per tile, tiles in flight, and groups of 64 rows; None for the kernel without specialised warps."""
    from attnplug.backends.triton.launch import Specialized

    stages = 4 if size <= 96 else 3
    tried = [(64, stages, 3), (64, 3, 2), (128, 3 if size <= 64 else 2, 2)]
    tried += [(128, 3, 3)] if size <= 64 else []
    found = {
        f"{keys} keys, {stages} stages, {groups} groups": Specialized(keys, stages, groups)
        for keys, stages, groups in tried
    }
    if 64 < size <= 96:
        for name in list(found)[:2]:
            found[f"{name}, queries in registers, in turn"] = found[name]._replace(in_turn=True, held=True)
    for name in list(found)[:2]:
        found[f"{name}, by rows"] = found[name]._replace(by_blocks=False)
    return found | {"without specialised warps": None}


def cells(heads: tuple[int, int, int]) -> Iterator[tuple[Cell, bool]]:
    """Cells, and whether the keys come with the call."""
    for new, whole in EXTENDS:
        yield Cell(f"{len(new)} x {new[0]} of {whole}", "extend", heads, new, (whole,) * len(new)), False
    for lens in PROMPTS:
        name = (
            f"{len(lens)} x {lens[0]}"
            if len(set(lens)) == 1
            else f"{len(lens)} of {min(lens)} to {max(lens)}"
        )
        for given in (True, False):
            yield Cell(name, "prefill", heads, lens, lens), given


def calls(layer: PagedLayer, given: bool) -> dict[str, Callable[[int], object]]:
    """The call of each launch, and of the chosen one."""
    import dataclasses

    from attnplug.backends.triton import TritonBackend, bindings

    choose = bindings.prefill_launch

    def forced(special: Any) -> Callable[[int], object]:
        call = layer.attend(TritonBackend, give_new=given)

        def launch(*sizes: Any, **more: Any) -> Any:
            found = choose(*sizes, **more)
            return (
                found
                if found.specialized is None
                else dataclasses.replace(found, specialized=special, fewer_rows=None)
            )

        def run(index: int) -> object:
            with mock.patch.object(bindings, "prefill_launch", launch):
                return call(index)

        return run

    def alone() -> Callable[[int], object]:
        call = layer.attend(TritonBackend, give_new=given)

        def run(index: int) -> object:
            with mock.patch.object(bindings, "can_overlap", return_value=False):
                return call(index)

        return run

    tried = {name: forced(special) for name, special in launches(layer.cell.heads[2]).items()}
    return tried | {
        "chosen, after the kernel before": alone(),
        "chosen": layer.attend(TritonBackend, give_new=given),
    }


def measure(heads: tuple[int, int, int], compiled: Any, turn: Any, found: Any) -> None:
    """Compile what the cells need, wait for all other processes, then time the cells."""
    every = list(cells(heads))
    for cell, given in (every[0], *every[-2:]):
        for call in calls(PagedLayer(cell), given).values():
            call(0)
    compiled.wait(MOST_SECONDS)
    rows = []
    with turn:
        for cell, given in every:
            us = interleaved_us(calls(PagedLayer(cell), given), 2, 5)
            keys = "of the call" if given else "pages"
            rows.append(
                {
                    "heads": cell.heads,
                    "cell": cell.name,
                    "kind": cell.kind,
                    "keys": keys,
                    "us": {name: round(each, 1) for name, each in us.items()},
                }
            )
    found.put(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    known = {"/".join(map(str, heads)): heads for heads in HEADS}
    parser.add_argument("--heads", choices=known, action="append", help="these heads alone, such as 64/8/64")
    options = parser.parse_args()
    chosen = [known[name] for name in options.heads or known]
    context = mp.get_context("spawn")
    compiled, turn, found = context.Barrier(len(chosen)), context.Lock(), context.Queue()
    workers = [context.Process(target=measure, args=(heads, compiled, turn, found)) for heads in chosen]
    for worker in workers:
        worker.start()
    rows = [row for _ in workers for row in found.get(timeout=MOST_SECONDS)]
    losses = []
    for row in rows:
        us = row["us"]
        losses.append(us["chosen"] / min(us.values()) - 1)
        print(f"{row['heads']} {row['cell']}, {row['keys']}: {us}")
    print(
        f"the chosen launch takes {100 * statistics.mean(losses):.1f} % longer than the fastest, at most {100 * max(losses):.0f} %"
    )
    if options.json:
        options.json.write_text(json.dumps(facts() | {"cells": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
