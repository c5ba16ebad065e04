"""Decodes, prefills and writes of TRITON over each KV format, beside bfloat16 and fp8 in the same run, on one GPU.

    python benchmarks/kv_formats.py --json kv-formats.json
    python benchmarks/kv_formats.py --only "64 x 8k, 32/8/128" --rounds 3

Ratios of decodes are the time over bfloat16 pages over that of the format; those of prefills and writes are the format's
time over that of fp8_e4m3. Errors are those of the output, relative to float32 over what the pages give back. Decodes are
replayed as one graph, in turns. All kernels are compiled first, by one process for each of `--jobs`.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from installed import versions
from paged_layers import Cell, PagedLayer, interleaved_us

import attnplug
from attnplug.core import LayerTensors

FORMATS = ("auto", "fp8_e4m3", "int8_token_head", "nvfp4", "rotated4")
_RANDOM = random.Random(7)
_RAGGED = tuple(int(100 * 400 ** _RANDOM.random()) for _ in range(60))
_COUNT = 4
"""Calls of one graph."""


def _cell(name: str, heads: tuple[int, int, int], new: int, lens: tuple[int, ...], page: int = 64) -> Cell:
    title = f"{name}, {'/'.join(map(str, heads))}"
    return Cell(title, "decode" if new <= 16 else "prefill", heads, (new,) * len(lens), lens, page=page)


DECODES = (
    _cell("64 x 8k", (32, 8, 128), 1, (8192,) * 64),
    _cell("96 x 8k", (16, 4, 64), 1, (8192,) * 96),
    _cell("64 x 8k", (32, 4, 128), 1, (8192,) * 64),
    _cell("40 x 8k", (16, 4, 256), 1, (8192,) * 40),
    _cell("60 of 100 to 40k", (32, 8, 128), 1, _RAGGED),
    _cell("60 of 100 to 40k", (16, 4, 64), 1, _RAGGED),
    _cell("60 of 100 to 40k", (32, 4, 128), 1, _RAGGED),
    _cell("64 x 8k, 3 tokens", (32, 8, 128), 3, (8192,) * 64),
    _cell("64 x 8k, pages of 16", (32, 8, 128), 1, (8192,) * 64, 16),
    _cell("4 x 32k", (32, 8, 128), 1, (32768,) * 4),
)
PREFILLS = (
    _cell("1k more of 8k, 4", (32, 8, 128), 1024, (9216,) * 4),
    _cell("4 x 4k", (32, 8, 128), 4096, (4096,) * 4),
)
GOALS = {
    "64 x 8k, 32/8/128": (1.97, 1.85, 2.75, 3.0),
    "96 x 8k, 16/4/64": (1.75, 1.7, 2.4, 2.7),
    "64 x 8k, 32/4/128": (1.93, 1.85, 2.7, 3.0),
}
"""Least ratios of the formats after bfloat16."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--only", metavar="NAME", action="append", help="only these cells, or write")
    parser.add_argument("--formats", default=",".join(FORMATS), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=7, help="times of each, of which the median counts")
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile")
    parser.add_argument("--compile", metavar="I/N", help="only compile the I-th of N parts")
    given = parser.parse_args(arguments)
    formats = given.formats.split(",")
    wanted: Callable[[str], bool] = lambda name: not given.only or name in given.only  # noqa: E731
    cells = [cell for cell in (*DECODES, *PREFILLS) if wanted(cell.name)]
    if given.compile:
        part, parts = map(int, given.compile.split("/"))
        for cell, name in [(cell, name) for cell in cells for name in formats][part - 1 :: parts]:
            _compile(cell, name)
        return 0
    _compile_in_parts(sys.argv[1:] if arguments is None else arguments, given.jobs)
    found: dict[str, Any] = {
        "date": dt.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "versions": versions("attnplug", "torch", "triton"),
        "copy_tbps": _copy_tbps(),
        "cells": [],
    }
    print(f"{found['device']}, copies {found['copy_tbps']:.2f} TB/s", flush=True)
    for cell in cells:
        found["cells"].append(_measured(cell, formats, given.rounds, found["copy_tbps"]))
    if wanted("write"):
        found["cells"] += [_writes(tokens, formats, given.rounds) for tokens in (64, 1024)]
    found["goals"] = _judged(found["cells"])
    for goal in found["goals"]:
        print(f"{'met   ' if goal['met'] else 'MISSED'} {goal['name']}: {goal['value']:.3f} {goal['goal']}")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _as(cell: Cell, name: str, requests: int | None = None) -> Cell:
    count = requests or len(cell.seq_lens)
    fields = (("kv_cache_dtype", name),)
    return Cell(
        cell.name, cell.kind, cell.heads, cell.query_lens[:count], cell.seq_lens[:count], fields, cell.page
    )


def _compile(cell: Cell, name: str) -> None:
    layer = PagedLayer(_as(cell, name, 2), copies=1)
    layer.attend(attnplug.list_backends()["TRITON"])(0)
    torch.cuda.synchronize()


def _compile_in_parts(arguments: list[str], jobs: int) -> None:
    command = [sys.executable, __file__, *arguments, "--compile"]
    runs = [subprocess.Popen([*command, f"{part + 1}/{jobs}"]) for part in range(jobs)]
    if sum(run.wait() != 0 for run in runs):
        raise SystemExit("a process that compiles has failed")


def _measured(cell: Cell, formats: list[str], rounds: int, tbps: float) -> dict[str, Any]:
    triton = attnplug.list_backends()["TRITON"]
    layers = {name: PagedLayer(_as(cell, name), copies=1) for name in formats}
    calls = {name: layer.attend(triton) for name, layer in layers.items()}
    errors = {name: layer.error(calls[name](0)) for name, layer in layers.items()}
    us = interleaved_us(calls, _COUNT if cell.kind == "decode" else 1, rounds)
    row: dict[str, Any] = {"cell": cell.name, "kind": cell.kind, "us": us, "errors": errors}
    row["of_copy"] = {name: layer.cell.kv_bytes / us[name] / 1e6 / tbps for name, layer in layers.items()}
    against = "fp8_e4m3" if cell.kind == "prefill" else "auto"
    if against in us:
        turned = cell.kind == "prefill"
        row["ratios"] = {
            name: us[name] / us[against] if turned else us[against] / us[name] for name in formats
        }
    _show(row)
    return row


def _writes(tokens: int, formats: list[str], rounds: int) -> dict[str, Any]:
    """Keys and values of new tokens, 8 heads of 128, into pages of 16."""
    triton = attnplug.list_backends()["TRITON"]
    calls = {}
    for name in formats:
        layer = PagedLayer(_as(_cell("writes", (32, 8, 128), 1, (512,) * 64, 16), name), copies=1)
        impl = triton.get_impl_cls().from_spec(
            layer.spec, backend=triton, layer_name="layer", tensors=LayerTensors()
        )
        keys = torch.randn(2, tokens, 8, 128, device="cuda", dtype=torch.bfloat16)
        slots = torch.randperm(64 * 512, device="cuda")[:tokens] + 16
        cache = layer.caches[0]
        calls[name] = lambda _, impl=impl, keys=keys, cache=cache, slots=slots: impl.update_kv_cache(
            None, keys[0], keys[1], cache, slots
        )
    us = interleaved_us(calls, 20, rounds)
    row: dict[str, Any] = {"cell": f"write {tokens} tokens, 8 heads of 128", "kind": "write", "us": us}
    if "fp8_e4m3" in us:
        row["ratios"] = {name: each / us["fp8_e4m3"] for name, each in us.items()}
    _show(row)
    return row


def _show(row: dict[str, Any]) -> None:
    print(row["cell"])
    for name, us in row["us"].items():
        parts = [f"{us:9.1f} us"]
        if "ratios" in row:
            parts.append(f"ratio {row['ratios'][name]:.3f}")
        if "of_copy" in row:
            parts.append(f"{row['of_copy'][name]:.0%} of copy, error {row['errors'][name]:.1e}")
        print(f"  {name:16}", ", ".join(parts), flush=True)


def _copy_tbps() -> float:
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    into = torch.empty_like(source)
    us = interleaved_us({"copy": lambda _: into.copy_(source)}, 3, 5)["copy"]
    return 2 * source.numel() / us / 1e6


def _judged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each goal with its value, limit in words, and whether it is met."""
    goals: list[dict[str, Any]] = []

    def add(name: str, value: float, limit: float, at_least: bool) -> None:
        words = f"{'>=' if at_least else '<='} {limit:.3g}"
        goals.append(
            {
                "name": name,
                "value": value,
                "goal": words,
                "met": value >= limit if at_least else value <= limit,
            }
        )

    even = {row["cell"].split(", ")[-1]: row["ratios"] for row in rows if row["cell"] in GOALS}
    for row in rows:
        ratios = row.get("ratios", {})
        if row["cell"] in GOALS:
            for name, least in zip(FORMATS[1:], GOALS[row["cell"]], strict=True):
                if name in ratios:
                    add(f"{row['cell']}, {name} against bfloat16", ratios[name], least, True)
        elif row["kind"] == "decode" and ("100 to 40k" in row["cell"] or "3 tokens" in row["cell"]):
            for name, ratio in even.get(row["cell"].split(", ")[-1], {}).items():
                if name in ratios and name != "auto":
                    add(f"{row['cell']}, {name} against the even one", ratios[name] / ratio, 0.93, True)
        elif row["kind"] in ("prefill", "write"):
            limit = 1.15 if row["kind"] == "prefill" else 1.3
            for name in FORMATS[2:]:
                if name in ratios:
                    add(f"{row['cell']}, {name} against fp8", ratios[name], limit, False)
    return goals


if __name__ == "__main__":
    sys.exit(main())
