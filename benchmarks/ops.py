"""The Triton kernels of `attnplug.ops` on a GPU, against plain torch and against copying as many bytes.

Each call is checked first. Then every side is captured in a graph of calls over several sets of inputs, and the
graphs are replayed in turn in one process; what counts is the median. Needs a GPU.

    python benchmarks/ops.py --json benchmarks/results/ops-h200.json
    python benchmarks/ops.py --sweep
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import importlib.metadata
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from attnplug import ops
from attnplug.core.batch import compute_slot_mapping
from attnplug.ops import triton as kernels
from attnplug.ops.triton import kv_write, merging

KV_HEADS, HEADS, HEAD_SIZE, BLOCK_SIZE = 8, 32, 128, 16
SLOTS = 2**16
SCALES = (0.5, 2.0)  # powers of two: torch multiplies by 1 / scale on a GPU, and the bytes must agree
ROTATED_BYTES = 2**28
Call = Callable[[int], object]


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One operation of one size: its calls by the index of a set of inputs, and the bytes that it must move."""

    name: str
    bytes: int
    sets: int
    ours: Call
    torch: Call
    check: Callable[[], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """Medians in microseconds for a call; `spread` is (largest - smallest) / median of ours."""

    name: str
    bytes: int
    ours_us: float
    torch_us: float
    copy_us: float
    spread: float
    of_copy: float
    over_torch: float
    host_us: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--repeats", type=int, default=15, help="replays of each side; the median counts")
    parser.add_argument("--sweep", action="store_true", help="try tiles and warps of the kernels instead")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU: torch.cuda.is_available() is False")
    torch.manual_seed(0)
    if options.sweep:
        sweep(options.repeats)
        return 0
    print(f"{'':34}{'ours':>9}{'torch':>9}{'copy':>9}{'of copy':>9}{'x torch':>9}{'host':>9}")
    figures = []
    for cell in cells():
        cell.check()
        figure = measure(cell, options.repeats)
        figures.append(figure)
        print(
            f"{figure.name:34}{figure.ours_us:6.1f} us{figure.torch_us:6.1f} us{figure.copy_us:6.1f} us"
            f"{figure.of_copy:8.0%} {figure.over_torch:8.1f} {figure.host_us:6.1f} us"
        )
    if options.json:
        options.json.write_text(json.dumps(report(figures), indent=2) + "\n")
    return 0


def cells() -> Iterator[Cell]:
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        for tokens in (1, 16, 64, 256, 1024, 4096, 16384):
            yield kv_write_cell(tokens, dtype)
    for count in (2, 4, 8):
        for tokens in (1, 64, 4096):
            yield merge_cell(count, tokens)
    for requests, each in ((256, 1), (16, 1024)):
        yield slots_cell(requests, each)


def kv_write_cell(tokens: int, dtype: torch.dtype) -> Cell:
    """K and V of a fused projection into scattered slots of a cache in pages of 16."""
    width = KV_HEADS * HEAD_SIZE
    moved = tokens * width * 2 * (2 + dtype.itemsize)
    sets = rotation(moved)
    fused = torch.randn(sets, tokens, 6 * width, device="cuda", dtype=torch.bfloat16)
    keys, values = (fused[..., i * width : (i + 1) * width].unflatten(2, (KV_HEADS, -1)) for i in (4, 5))
    both = torch.zeros(SLOTS // BLOCK_SIZE, 2, BLOCK_SIZE, KV_HEADS, HEAD_SIZE, device="cuda").to(dtype)
    expected = both.clone()
    slots = torch.stack([torch.randperm(SLOTS, device="cuda")[:tokens] for _ in range(sets)])

    def ours(i: int) -> None:
        kernels.write_kv_cache(keys[i], values[i], both[:, 0], both[:, 1], slots[i], *SCALES)

    def plain(i: int) -> None:
        index_put(expected[:, 0], keys[i], slots[i], SCALES[0])
        index_put(expected[:, 1], values[i], slots[i], SCALES[1])

    def check() -> None:
        for i in range(sets):
            ours(i)
            plain(i)
            same = torch.equal(both.view(torch.uint8), expected.view(torch.uint8))
            require(same, f"kv write of {tokens} tokens as {dtype}")

    return Cell(f"kv write {str(dtype)[6:]} T={tokens}", moved, sets, ours, plain, check)


def index_put(pages: torch.Tensor, new: torch.Tensor, slots: torch.Tensor, scale: float) -> None:
    if pages.dtype.itemsize == 1:
        limit = torch.finfo(pages.dtype).max
        new = (new.float() / scale).clamp_(-limit, limit).to(pages.dtype).view(torch.uint8)
        pages = pages.view(torch.uint8)
    pages.index_put_((slots // BLOCK_SIZE, slots % BLOCK_SIZE), new)


def merge_cell(count: int, tokens: int) -> Cell:
    """Partials in bfloat16, a tenth of their rows unseen."""
    rows = tokens * HEADS
    moved = rows * ((count + 1) * 2 * HEAD_SIZE + (count + 1) * 4)
    sets = rotation(moved)
    outs = torch.randn(sets, count, tokens, HEADS, HEAD_SIZE, device="cuda", dtype=torch.bfloat16)
    lses = 3 * torch.randn(sets, count, tokens, HEADS, device="cuda")
    lses.masked_fill_(torch.rand_like(lses) < 0.1, -torch.inf)
    output, output_lse = torch.empty_like(outs[0, 0]), torch.empty_like(lses[0, 0])

    def ours(i: int) -> object:
        return kernels.merge_attn_states(outs[i].unbind(), lses[i].unbind(), output, output_lse)

    def plain(i: int) -> object:
        return ops.merge(outs[i], lses[i])

    def check() -> None:
        for i in range(sets):
            output.fill_(torch.nan)
            output_lse.fill_(torch.nan)
            ours(i)
            expected, expected_lse = ops.merge(outs[i], lses[i])
            same = torch.allclose(output.float(), expected.float(), rtol=1e-2, atol=1e-3)
            same &= torch.allclose(output_lse, expected_lse, rtol=1e-5, atol=1e-5)
            require(same, f"merge of {count} x {tokens}")

    return Cell(f"merge {count} partials T={tokens}", moved, sets, ours, plain, check)


def slots_cell(requests: int, each: int) -> Cell:
    """Slots of requests with `each` new tokens, from tables of 2048 pages."""
    new = torch.full((requests,), each, dtype=torch.int32, device="cuda")
    computed = torch.randint(0, 8192, (requests,), dtype=torch.int32, device="cuda")
    table = torch.randint(1, 2**16, (requests, 2048), dtype=torch.int32, device="cuda")
    loc = torch.arange(0, requests * each + 1, each, dtype=torch.int32, device="cuda")
    positions = (computed[:, None] + torch.arange(each, device="cuda")).flatten()
    total = requests * each
    out, expected = (torch.empty(total, dtype=torch.int64, device="cuda") for _ in range(2))

    def ours(_: int) -> object:
        return kernels.compute_slot_mapping(table, loc, positions, BLOCK_SIZE, out=out)

    def plain(_: int) -> object:
        return compute_slot_mapping(table, computed, new, BLOCK_SIZE, num_tokens=total, out=expected)

    def check() -> None:
        ours(0)
        plain(0)
        require(torch.equal(out, expected), f"slots of {requests} x {each}")

    return Cell(f"slots {requests} x {each}", total * 20, 1, ours, plain, check)


def rotation(moved: int) -> int:
    """The number of sets of inputs that keep a call from finding its own in the L2 cache; 64 at most."""
    return min(max(-(-ROTATED_BYTES // moved), 2), 64)


def require(same: bool, what: str) -> None:
    if not same:
        raise SystemExit(f"{what}: not what torch gives")


def measure(cell: Cell, repeats: int) -> Figure:
    size = max(cell.bytes // 2, 1)  # a copy reads and writes
    source = torch.randint(0, 256, (cell.sets, size), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    sides = (cell.ours, cell.torch, lambda i: target[i].copy_(source[i]))
    ours, theirs, copy = replayed([graph_of(side, cell.sets) for side in sides], cell.sets, repeats)
    mid, torch_mid, copy_mid = (statistics.median(times) for times in (ours, theirs, copy))
    spread = (max(ours) - min(ours)) / mid
    of_copy, over_torch = copy_mid / mid, torch_mid / mid
    host = host_time(cell.ours)
    return Figure(cell.name, cell.bytes, mid, torch_mid, copy_mid, spread, of_copy, over_torch, host)


def graph_of(call: Call, sets: int) -> torch.cuda.CUDAGraph:
    """One call for each set of inputs, compiled and warmed up before they are captured."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(sets):
            call(i)
    return graph


def replayed(graphs: Sequence[torch.cuda.CUDAGraph], sets: int, repeats: int) -> list[list[float]]:
    """Microseconds of a call in each graph, which are replayed in turn; the first two rounds warm up."""
    times: list[list[float]] = [[] for _ in graphs]
    for round_ in range(repeats + 2):
        for graph, kept in zip(graphs, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if round_ > 1:
                kept.append(1e3 * start.elapsed_time(end) / sets)
    return times


def host_time(call: Call, calls: int = 50) -> float:
    """Microseconds of host time to launch a call, the least of ten rounds, the GPU keeping up or not."""
    rounds = []
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call(0)
        rounds.append(1e6 * (time.perf_counter() - start) / calls)
    return min(rounds)


def sweep(repeats: int) -> None:
    """The share of a copy's rate for each tile and number of warps."""
    sizes = (1, 64, 1024, 16384)
    makers: list[tuple[object, list[Cell]]] = [
        (kv_write, [kv_write_cell(tokens, dtype) for tokens in sizes])
        for dtype in (torch.bfloat16, torch.float8_e4m3fn)
    ]
    makers.append((merging, [merge_cell(4, tokens) for tokens in (1, 64, 4096)]))
    for module, kinds in makers:
        print(", ".join(cell.name for cell in kinds))
        for tile in (256, 512, 1024, 2048, 4096, 8192):
            for warps in (1, 2, 4, 8):
                module._TILE, module._NUM_WARPS = tile, warps
                kv_write._tile.cache_clear()
                found = [measure(cell, repeats) for cell in kinds]
                print(f"{tile:6} {warps}", *(f"{each.ours_us:8.1f} us {each.of_copy:4.0%}" for each in found))


def report(figures: Sequence[Figure]) -> dict[str, object]:
    return {
        "benchmark": "ops",
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "device": {"type": "cuda", "name": torch.cuda.get_device_name(), "sm_clock": sm_clock()},
        "versions": {name: importlib.metadata.version(name) for name in ("attnplug", "torch", "triton")},
        "shape": {
            "num_kv_heads": KV_HEADS,
            "num_heads": HEADS,
            "head_size": HEAD_SIZE,
            "block_size": BLOCK_SIZE,
        },
        "figures": [dataclasses.asdict(each) for each in figures],
    }


def sm_clock() -> str | None:
    """The clock of the multiprocessors right after the last figure, where nvidia-smi is there to say."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=clocks.sm", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()[0]


if __name__ == "__main__":
    sys.exit(main())
