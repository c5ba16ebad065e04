"""Launch parameters of TRITON's kernels on this GPU: every candidate of every cell, checked, then timed.

    python benchmarks/tune_triton.py --json tuned.json

Each cell prints its best candidates, and what `attnplug.backends.triton.launch` gives today.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnplug.backends.triton import TritonBackend
from attnplug.backends.triton import impl as triton_impl
from attnplug.backends.triton.launch import DecodeLaunch, PrefillLaunch, decode_launch, prefill_launch
from attnplug.core import BuilderConfig, CommonAttentionMetadata, LayerSpec
from attnplug.core.kv_cache_spec import kv_cache_spec_for

PAGE = 16
DECODES = [
    ((32, 8, 128), 64, 8192),
    ((32, 8, 128), 8, 32768),
    ((32, 8, 128), 1, 8192),
    ((32, 8, 128), 256, 1024),
    ((8, 1, 128), 8, 32768),
    ((16, 8, 256), 64, 8192),
    ((16, 8, 256), 1, 8192),
    ((64, 8, 64), 64, 8192),
    ((64, 8, 64), 1, 8192),
]
PREFILLS = [
    ((32, 8, 128), 1, 16384),
    ((32, 8, 128), 4, 4096),
    ((64, 8, 64), 1, 16384),
    ((16, 8, 256), 1, 16384),
]


POOL: ProcessPoolExecutor


class Layer:
    """One layer over a random paged cache, with copies of it until the L2 cannot hold them."""

    def __init__(
        self, heads: tuple[int, int, int], lens: Sequence[int], query_lens: Sequence[int], **fields: Any
    ):
        num_heads, kv_heads, size = heads
        self.spec = LayerSpec(
            num_heads=num_heads,
            num_kv_heads=kv_heads,
            head_size=size,
            dtype="bfloat16",
            block_size=PAGE,
            **fields,
        )
        pages = sum(-(-each // PAGE) for each in lens)
        stored = torch.float8_e4m3fn if self.spec.has_quantized_kv_cache else torch.bfloat16
        one = pages * PAGE * kv_heads * size * 2 * stored.itemsize
        self.kv_bytes = one
        copies = min(max(1, -(-200_000_000 // one)), 8)
        self.caches = [
            torch.randn(pages + 1, 2, PAGE, kv_heads, size, device="cuda", dtype=torch.bfloat16).to(stored)
            for _ in range(copies)
        ]
        tokens = sum(query_lens)
        self.query = torch.randn(tokens, num_heads, size, device="cuda", dtype=torch.bfloat16)
        self.output = torch.empty_like(self.query)
        self.given = (None, None)
        if os.environ.get("GIVEN"):
            self.given = tuple(self.caches[0][1:].transpose(0, 1).flatten(1, 2)[:, :tokens].contiguous())
        self.impl = TritonBackend.get_impl_cls().from_spec(self.spec, layer_name="layer")
        builder = TritonBackend.get_builder_cls()(
            kv_cache_spec_for(self.spec, PAGE), ["layer"], BuilderConfig(), torch.device("cuda")
        )
        self.builder, self.common = builder, common(lens, query_lens)
        self.metadata = builder.build(0, self.common)

    def run(self, index: int = 0) -> torch.Tensor:
        cache = self.caches[index % len(self.caches)]
        return self.impl.attend(None, self.query, *self.given, cache, self.metadata, self.output)

    def reset(self) -> None:
        self.builder._workspace._items.clear()
        self.metadata = self.builder.build(0, self.common)


def common(lens: Sequence[int], query_lens: Sequence[int]) -> CommonAttentionMetadata:
    counts = [-(-each // PAGE) for each in lens]
    pages = (torch.randperm(sum(counts)) + 1).int()
    table = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    for row, part in enumerate(pages.split(counts)):
        table[row, : len(part)] = part
    starts = torch.from_numpy(np.cumsum([0, *query_lens]).astype(np.int32))
    host = np.asarray(lens, dtype=np.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts.cuda(),
        query_start_loc_cpu=starts,
        seq_lens=torch.from_numpy(host).cuda(),
        num_reqs=len(lens),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(query_lens),
        max_seq_len=max(lens),
        block_table_tensor=table.cuda(),
        slot_mapping=torch.full((int(starts[-1]),), -1, dtype=torch.int64, device="cuda"),
        seq_lens_host=host,
    )


def graph_us(call: Callable[[int], object], count: int, repeats: int = 7) -> float:
    """Microseconds of one call, of `count` replayed in one graph; the median of `repeats`."""
    for index in range(count):
        call(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(count):
            call(index)
    times = []
    for _ in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / count)
    return statistics.median(times[1:])


@contextlib.contextmanager
def launching(**functions: Callable[..., Any]) -> Iterator[None]:
    kept = {name: getattr(triton_impl, name) for name in functions}
    for name, function in functions.items():
        setattr(triton_impl, name, function)
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(triton_impl, name, function)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=("decode", "prefill"))
    parser.add_argument("--cells", type=int, nargs="+", help="numbers of the cells")
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile")
    options = parser.parse_args()
    global POOL  # noqa: PLW0603
    POOL = ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn"))
    copy_rate = ceiling()
    print(f"copy {copy_rate:.2f} TB/s")
    results = []
    if options.only != "prefill":
        for number, (heads, batch, length) in enumerate(DECODES):
            if not options.cells or number in options.cells:
                results += tune_decode(heads, batch, length, copy_rate)
    if options.only != "decode":
        for number, (heads, batch, length) in enumerate(PREFILLS):
            if not options.cells or number in options.cells:
                results += tune_prefill(heads, batch, length)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0


def ceiling() -> float:
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / graph_us(lambda _: target.copy_(source), 4) / 1e6


def tune_decode(heads: tuple[int, int, int], batch: int, length: int, rate: float) -> list[dict[str, Any]]:
    layer = Layer(heads, [length] * batch, [1] * batch)
    expected = layer.run().clone()
    default = decode_launch(heads[2], 2, heads[1] * batch, 132)
    candidates = [default] + [
        DecodeLaunch(*each)
        for each in itertools.product((32, 64, 128), (4, 8), (2, 3, 4), (1, 2, 4), (128, 256, 512))
        if each[0] * heads[2] * 4 * each[2] <= 220_000
    ]
    count = 4 if layer.kv_bytes > 100_000_000 else 16
    rows = sweep("decode", layer, expected, "decode_launch", candidates, count)
    for row in rows:
        row |= {"heads": heads, "batch": batch, "length": length, "tbps": layer.kv_bytes / row["us"] / 1e6}
    show(
        f"decode {heads} {batch} x {length}",
        rows,
        lambda row: f"{row['tbps']:.2f} TB/s {row['tbps'] / rate:.0%}",
    )
    return rows


def tune_prefill(heads: tuple[int, int, int], batch: int, length: int) -> list[dict[str, Any]]:
    layer = Layer(heads, [length] * batch, [length] * batch)
    expected = layer.run().clone()
    default = prefill_launch(heads[2], 2, 1 << 20, "GIVEN" not in os.environ)
    candidates = [default] + [
        PrefillLaunch(*each)
        for each in itertools.product((64, 128, 256), (32, 64, 128), (4, 8), (2, 3))
        if each[1] * heads[2] * 4 * each[3] + each[0] * heads[2] * 2 <= 225_000
        and each[0] * heads[2] / each[2] <= 8192
    ]
    flops = 4 * heads[0] * heads[2] * batch * length * (length + 1) / 2
    rows = sweep("prefill", layer, expected, "prefill_launch", candidates, 1)
    for row in rows:
        row |= {"heads": heads, "batch": batch, "length": length, "tflops": flops / row["us"] / 1e6}
    show(f"prefill {heads} {batch} x {length}", rows, lambda row: f"{row['tflops']:.0f} TF")
    return rows


def sweep(
    kind: str, layer: Layer, expected: torch.Tensor, name: str, candidates: list[Any], count: int
) -> list[dict[str, Any]]:
    rows = []
    heads = layer.spec.num_heads, layer.spec.num_kv_heads, layer.spec.head_size
    # Other processes fill Triton's cache on disk: compiling is most of the work.
    list(POOL.map(functools.partial(compile_one, kind, heads, name), candidates))
    for candidate in candidates:
        with launching(**{name: lambda *_, candidate=candidate: candidate}):
            try:
                layer.reset()
                layer.output.fill_(torch.nan)
                found = layer.run()
                error = ((found - expected).float().norm() / expected.float().norm()).item()
                if not error < 1e-2:
                    print("WRONG", candidate, error)
                    continue
                us = graph_us(layer.run, count, 5)
            except Exception as problem:  # noqa: BLE001 - a candidate that does not fit the GPU
                print(f"  {candidate}: {str(problem).splitlines()[0][:100]}", file=sys.stderr)
                continue
        rows.append({"kind": kind, "us": us, "launch": str(candidate), "default": candidate == candidates[0]})
    return rows


def compile_one(kind: str, heads: tuple[int, int, int], name: str, candidate: Any) -> None:
    lens = [4096] * 2
    with launching(**{name: lambda *_: candidate}), contextlib.suppress(Exception):
        Layer(heads, lens, [1] * 2 if kind == "decode" else lens).run()
        torch.cuda.synchronize()


def show(title: str, rows: list[dict[str, Any]], rate: Callable[[dict[str, Any]], str]) -> None:
    print(title, "KV MB" if "decode" in title else "")
    for row in [*sorted(rows, key=lambda row: row["us"])[:4], *(row for row in rows[:1] if row["default"])]:
        mark = " (now)" if row["default"] else ""
        print(f"   {row['us']:9.1f} us {rate(row):>16}  {row['launch']}{mark}")


if __name__ == "__main__":
    sys.exit(main())
