"""Prompts and extends of TRITON beside FlashAttention 4, called directly, over pages and over the keys of the call.

    python benchmarks/prompts.py --json prompts.json
    python benchmarks/prompts.py --only "96 "

A process for each cell compiles both kernels; then one after the other times them in turns, as replayed graphs. Errors are
those of TRITON's last 64 queries, relative to float32.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import multiprocessing as mp
import statistics
import sys
from pathlib import Path
from typing import Any

from paged_layers import Cell, PagedLayer, interleaved_us

FOUR = (4096,) * 4
RAGGED = tuple(50 + 197 * number for number in range(16))
MOST_SECONDS = 600


def cell(
    heads: tuple[int, int, int], lens: tuple[int, ...], name: str, /, whole: int = 0, **fields: Any
) -> Cell:
    """New prompts of `lens` tokens, or the last `lens` of `whole` tokens each."""
    seq_lens = (whole,) * len(lens) if whole else lens
    kind = "extend" if whole else "prefill"
    title = f"{heads[2]} elements, {heads[0]}/{heads[1]}, {name}"
    return Cell(title, kind, heads, lens, seq_lens, tuple(fields.items()))


PAGED = [
    *(cell((32, 8, size), FOUR, "4 x 4k") for size in (64, 80, 96, 112, 128, 160, 192)),
    cell((16, 8, 256), FOUR, "4 x 4k"),
    cell((40, 8, 64), (5000,) * 3, "3 x 5000"),
    cell((40, 8, 128), (5000,) * 3, "3 x 5000"),
    *(cell((32, 8, size), (16384,), "1 x 16k") for size in (64, 128, 192)),
    cell((16, 8, 256), (16384,), "1 x 16k"),
    cell((24, 2, 128), (24000,), "1 x 24k"),
    *(cell((32, 8, size), RAGGED, "16 of 50 to 3005") for size in (64, 128)),
    *(cell((32, 8, size), FOUR, "4 x 4k, cap", logits_soft_cap=30.0) for size in (64, 128)),
    cell((16, 8, 256), FOUR, "4 x 4k, cap", logits_soft_cap=50.0),
    cell((16, 8, 256), FOUR, "4 x 4k, cap, window 2000", logits_soft_cap=50.0, sliding_window=2000),
    cell((64, 8, 64), FOUR, "4 x 4k, window 128", sliding_window=128),
    cell((40, 8, 64), FOUR, "4 x 4k, window 500", sliding_window=500),
    cell((32, 8, 128), FOUR, "4 x 4k, window 500", sliding_window=500),
    cell((32, 8, 128), (20000,), "1 x 20k, window 4096", sliding_window=4096),
    cell((16, 8, 256), FOUR, "4 x 4k, window 1024", sliding_window=1024),
    *(cell((32, 8, size), (1500,) * 3, "3 x 1500 of 9k", whole=9000) for size in (64, 96, 128)),
    cell((16, 8, 256), (1500,) * 3, "3 x 1500 of 9k", whole=9000),
]
CELLS = [(each, False) for each in PAGED] + [(each, True) for each in PAGED if each.kind == "prefill"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--only", default="", help="cells whose names begin so")
    options = parser.parse_args()
    chosen = [number for number, (each, _) in enumerate(CELLS) if each.name.startswith(options.only)]
    context = mp.get_context("spawn")
    compiled, turn, found = context.Barrier(len(chosen)), context.Lock(), context.Queue()
    workers = [context.Process(target=measure, args=(number, compiled, turn, found)) for number in chosen]
    for worker in workers:
        worker.start()
    rows = sorted((found.get(timeout=MOST_SECONDS) for _ in workers), key=lambda row: str(row["cell"]))
    for worker in workers:
        worker.join()
    print("| cell | keys | TRITON, us | FlashAttention 4, us | ratio |\n|---|---|---:|---:|---:|")
    for row in rows:
        shown = [f"{row[name]:.0f}" if name in row else "-" for name in ("TRITON", "FLASH_ATTN_4")]
        ratio = f"{row['ratio']:.3f}" if "ratio" in row else row.get("failed", "-")
        print(f"| {row['cell']} | {row['keys']} | {shown[0]} | {shown[1]} | {ratio} |")
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    if ratios:
        print(f"geometric mean {statistics.geometric_mean(ratios):.3f}, least {min(ratios):.3f}")
    if options.json:
        options.json.write_text(json.dumps(facts() | {"cells": rows}, indent=1) + "\n")
    return 0


def facts() -> dict[str, Any]:
    """Of the run."""
    import torch
    from installed import versions

    named = versions("attnplug", "torch", "triton", "flash-attn-4")
    return {"device": torch.cuda.get_device_name(), "versions": named, "date": str(dt.date.today())}


def measure(number: int, compiled: Any, turn: Any, found: Any) -> None:
    """Compile a cell's kernels, wait for all other processes, then time them."""
    from peers import flash_attention_4

    from attnplug.backends.flash_attn.backend import FlashAttn4Backend
    from attnplug.backends.flash_attn.tiles import why_not_over_pages
    from attnplug.backends.triton import TritonBackend
    from attnplug.core.device import Device

    each, given = CELLS[number]
    row: dict[str, Any] = {"cell": each.name, "keys": "of the call" if given else "pages"}
    calls: dict[str, Any] = {}
    try:
        layer = PagedLayer(each)
        calls["TRITON"] = layer.attend(TritonBackend, give_new=given)
        row["error"] = round(layer.error(calls["TRITON"](0)), 6)
        reason = None if given else why_not_over_pages(each.spec, Device.parse("sm90"))
        if reason is None:
            peer = layer.attend(FlashAttn4Backend, give_new=True) if given else flash_attention_4(layer)
            assert peer is not None
            peer(0)
            calls["FLASH_ATTN_4"] = peer
        else:
            # Its kernel would read other memory.
            row["failed"] = reason
    except Exception as problem:  # noqa: BLE001 - a peer that does not serve the cell
        row["failed"] = str(problem).splitlines()[0][:100]
    try:
        compiled.wait(MOST_SECONDS)
        with turn:
            row |= {name: round(us, 1) for name, us in interleaved_us(calls, 2, 6).items()}
        if len(calls) == 2:
            row["ratio"] = round(row["FLASH_ATTN_4"] / row["TRITON"], 3)
    except Exception as problem:  # noqa: BLE001 - the other cells go on
        row["failed"] = str(problem).splitlines()[0][:100]
    found.put(row)


if __name__ == "__main__":
    sys.exit(main())
