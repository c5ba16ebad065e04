"""Launch parameters of TRITON's kernels on this GPU: every candidate of every cell, checked, then timed.

    python benchmarks/tune_triton.py --json tuned.json                # both of the next
    python benchmarks/tune_triton.py --shares --json shares.json      # the launches of equal shares, on real batches
    python benchmarks/tune_triton.py --prefill --json prefill.json    # prompts and extends, in about three minutes

Each cell prints its best candidates, and what `launch.py` or `share_launch.py` gives today.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from attention import CORE
from paged_layers import Cell, PagedLayer, graph_us
from serving import SERVING

from attnplug.backends.triton import TritonBackend, bindings
from attnplug.backends.triton.launch import (
    Gpu,
    PrefillLaunch,
    Specialized,
    prefill_launch,
    tile_parts,
    tile_side,
)
from attnplug.backends.triton.layout import tile_memory
from attnplug.backends.triton.share_launch import ShareLaunch, share_launch

SHARED_MEMORY = 230_000
H200 = Gpu(132, SHARED_MEMORY, has_warp_groups=True)
REGISTERS = 65_536


def decodes(heads: tuple[int, int, int], batch: int, length: int) -> Cell:
    return Cell(f"decode {heads} {batch} x {length}", "decode", heads, (1,) * batch, (length,) * batch)


def prefills(heads: tuple[int, int, int], batch: int, length: int) -> Cell:
    name = f"prefill {heads} {batch} x {length}"
    return Cell(name, "prefill", heads, (length,) * batch, (length,) * batch)


def main() -> int:
    parser = argparse.ArgumentParser(description="Tune the launches of TRITON on this GPU.")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cells", type=int, nargs="+", help="numbers of the cells")
    parser.add_argument("--shares", action="store_true", help="only equal shares")
    parser.add_argument("--prefill", action="store_true", help="only prompts and extends")
    parser.add_argument("--given", action="store_true", help="prefill of the keys given, not of pages")
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    cells = SHARED if options.shares else PREFILLED if options.prefill else SHARED + PREFILLED
    chosen = [cell for number, cell in enumerate(cells) if not options.cells or number in options.cells]
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        # Other processes fill Triton's cache on disk: compiling is most of the work.
        work = {(compiled_as(cell), candidate) for cell in chosen for candidate in candidates(cell)}
        list(pool.map(compile_one, *zip(*((*each, options.given) for each in work), strict=True)))
    for cell in chosen:
        rows = tune(cell, options.given)
        results += rows
        show(cell, rows)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    summarise(results)
    return 0


SHARED = [
    cell
    for cell in (*SERVING, *CORE)
    if cell.kind in ("ragged", "speculative", "single", "extend", "decode", "skew", "window")
    and not cell.is_prefill
] + [
    decodes((16, 2, 512), 64, 8192),
    decodes((16, 2, 512), 1, 8192),
    Cell("4 tokens (16, 2, 512) 32 x 8192", "speculative", (16, 2, 512), (4,) * 32, (8192,) * 32),
]
PREFILLED = [
    prefills((32, 8, 128), 1, 16384),
    prefills((64, 8, 64), 1, 16384),
    prefills((16, 8, 256), 1, 16384),
    *(cell for cell in SERVING if cell.kind in ("prefill", "extend") and cell.is_prefill),
    prefills((16, 2, 512), 1, 8192),
]


def candidates(cell: Cell) -> list[Any]:
    """Today's choice, then all others that fit the GPU."""
    return share_candidates(cell) if cell in SHARED else prefill_candidates(cell)


def prefill_candidates(cell: Cell) -> list[Any]:
    """The tiles of today, then those that Triton 3.6 compiles for Hopper with few spills or none in the loop over keys."""
    heads, kv_heads, size = cell.heads
    rows, new = max(cell.query_lens) * heads // kv_heads, cell.query_lens == cell.seq_lens
    most_keys = max(cell.seq_lens) if new else None
    width = 2 * sum(tile_parts(size))
    tiles = SHORT_TILES if most_keys is not None and most_keys <= 256 else TILES
    found: list[Any] = [
        launch
        for launch in (PrefillLaunch(*tile) for tile in tiles[min(most for most in tiles if width <= most)])
        if memory(launch, width) <= SHARED_MEMORY
    ]
    found += [
        PrefillLaunch(128, 64, 8, 3, Specialized(*tile)) for tile in SPECIALIZED.get(tile_side(size), ())
    ]
    if cell.kind == "extend":
        # Extends may divide their keys instead.
        found.append(share_launch(size, 2, rows, H200))
    now = prefill_launch(size, 2, rows, H200, most_keys)
    return [now, *(each for each in found if each != now)]


def memory(launch: PrefillLaunch, width: int) -> int:
    """Bytes of shared memory that the tiles of a launch take."""
    width_v = None if launch.columns is None else 2 * launch.columns
    return tile_memory(launch.block_m, launch.block_n, launch.num_stages, width, width_v)


# Rows, keys, warps and stages, by the bytes of a head; of wide heads also the columns of the values of a program.
TILES = {
    128: ((128, 64, 8, 3), (128, 128, 8, 2), (64, 128, 4, 2), (64, 64, 4, 3)),
    256: ((128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3), (256, 32, 8, 3), (64, 64, 4, 3)),
    384: ((128, 64, 8, 3), (128, 64, 8, 2), (128, 32, 8, 3), (64, 64, 4, 2), (64, 32, 4, 3)),
    512: ((128, 32, 8, 3), (128, 32, 8, 2), (64, 32, 4, 3)),
    1024: (
        (128, 32, 8, 2, None, 256),
        (128, 64, 8, 1, None, 256),
        (128, 32, 8, 2, None, 128),
        (64, 32, 4, 2, None, 256),
        (64, 32, 8, 2),
    ),
}
# Keys, stages and groups of the kernel with specialised warps, by a power of two of columns.
SPECIALIZED = {
    64: ((128, 2, 2), (128, 3, 2), (64, 3, 2), (64, 4, 3), (64, 3, 3)),
    128: ((128, 2, 2), (64, 3, 2), (64, 3, 3), (64, 4, 3)),
    256: ((64, 2, 2), (64, 3, 2), (32, 4, 2)),
}
SHORT_TILES = {
    512: (
        (64, 64, 4, 2),
        (64, 64, 4, 1),
        (64, 32, 4, 2),
        (64, 32, 4, 1),
        (128, 64, 8, 2),
        (128, 32, 8, 2),
        (32, 64, 4, 2),
    ),
}


def share_candidates(cell: Cell) -> list[Any]:
    """The choice of share_launch.py today, then all others that fit the GPU, with tiles of one height and of half of it."""
    heads, kv_heads, size = cell.heads
    itemsize = 1 if cell.spec.has_quantized_kv_cache else 2
    rows, width = max(cell.query_lens) * heads // kv_heads, tile_side(size) * itemsize
    now = share_launch(size, itemsize, rows, H200)
    leasts = (1, 2) if sum(cell.seq_lens) <= 8192 else (2,)
    found = [
        ShareLaunch(m, n, warps, stages, waves, least, now.ahead, registers(warps, waves))
        for m, n, warps, stages, waves, least in itertools.product(
            {now.block_m, max(now.block_m // 2, 16)},
            (16, 32, 64, 128),
            (4, 8),
            (2, 3, 4),
            (1, 2, 3, 4),
            leasts,
        )
        if waves * (m + 2 * n * (stages - 1)) * width <= SHARED_MEMORY
        and n // warps >= (8 if size <= 256 else 4)
    ]
    return [now, *(now._replace(least=least) for least in (1, 4, 8)), *found]


def registers(warps: int, resident: int | None) -> int | None:
    """Registers of a thread with which as many programs run at once on a multiprocessor."""
    return None if resident is None else min(REGISTERS // (warps * 32 * resident) // 8 * 8, 255)


def compiled_as(cell: Cell) -> Cell:
    """A small cell that the same kernels serve: few keys, and of decodes as many requests."""
    lens = (256,) * (1 if cell.is_prefill else len(cell.seq_lens))
    query_lens = lens if cell.is_prefill else cell.query_lens
    if cell.kind == "extend" and cell.is_prefill:
        query_lens, lens = (64,), (256,)
    kind = "extend" if query_lens != lens else cell.kind
    return dataclasses.replace(cell, name="", kind=kind, query_lens=query_lens, seq_lens=lens)


@contextlib.contextmanager
def launching(candidate: Any) -> Iterator[None]:
    names = {PrefillLaunch: "prefill_launch", ShareLaunch: "share_launch"}
    # A launch of shares is measured where prefill's would be chosen too.
    is_whole = not isinstance(candidate, ShareLaunch)
    with (
        mock.patch.object(bindings, names[type(candidate)], return_value=candidate),
        mock.patch.object(bindings.BoundLayer, "fills_gpu", return_value=is_whole),
    ):
        yield


def compile_one(cell: Cell, candidate: Any, given: bool) -> None:
    with launching(candidate), contextlib.suppress(Exception):
        PagedLayer(cell).attend(TritonBackend, give_new=given)(0)
        torch.cuda.synchronize()


def tune(cell: Cell, given: bool) -> list[dict[str, Any]]:
    layer, rows = PagedLayer(cell), []
    count = 1 if cell.is_prefill else 4 if cell.kv_bytes > 100_000_000 else 16
    bound = 5e-2 if layer.spec.has_quantized_kv_cache else 1e-2
    for number, candidate in enumerate(candidates(cell)):
        with launching(candidate):
            try:
                layer.output.fill_(torch.nan)
                call = layer.attend(TritonBackend, give_new=given)
                error = layer.error(call(0))
                if not error < bound:
                    print("WRONG", candidate, error)
                    continue
                us = graph_us(call, count, 5)
            except Exception as problem:  # noqa: BLE001 - a candidate that does not fit the GPU
                print(f"  {candidate}: {str(problem).splitlines()[0][:100]}", file=sys.stderr)
                continue
        rate = cell.flops / us / 1e6 if cell.is_prefill else cell.kv_bytes / us / 1e6
        rows.append({"cell": cell.name, "us": us, "rate": rate, "launch": str(candidate), "now": number == 0})
    return rows


def show(cell: Cell, rows: list[dict[str, Any]]) -> None:
    unit: Callable[[float], str] = (
        (lambda rate: f"{rate:.0f} TF") if cell.is_prefill else (lambda rate: f"{rate:.2f} TB/s")
    )
    print(f"{cell.name}: {len(rows)} candidates")
    for row in [*sorted(rows, key=lambda row: row["us"])[:5], *(row for row in rows if row["now"])]:
        mark = " (now)" if row["now"] else ""
        print(f"   {row['us']:9.1f} us {unit(row['rate']):>10}  {row['launch']}{mark}", flush=True)


def summarise(results: list[dict[str, Any]]) -> None:
    """The best launch of each cell beside today's, a line for each."""
    by_cell: dict[str, list[dict[str, Any]]] = {}
    for row in results:
        by_cell.setdefault(row["cell"], []).append(row)
    print("| cell | today, us | best, us | faster | best launch |")
    print("|---|---:|---:|---:|---|")
    for cell, rows in by_cell.items():
        best = min(rows, key=lambda row: row["us"])
        now = next((row["us"] for row in rows if row["now"]), None)
        shown = ("-", "-") if now is None else (f"{now:.1f}", f"{now / best['us']:.3f}x")
        print(f"| {cell} | {shown[0]} | {best['us']:.1f} | {shown[1]} | `{best['launch']}` |")


if __name__ == "__main__":
    sys.exit(main())
