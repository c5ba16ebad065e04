"""TORCH on a CPU: prefill against one dense attention call, decode against copying the KV bytes once.

Both sides of a ratio run in turn in the same process, so that a busy machine disturbs both equally.

    python benchmarks/torch_native.py --json figures.json
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import importlib.metadata
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.nn import functional

from attnplug.backends.torch_native.backend import TorchBackend
from attnplug.core import BuilderConfig, FullAttentionSpec, LayerSpec
from attnplug.testing import Batch, paged_batch

PREFILL_GOAL = 1.3
DECODE_GOAL = 12.0
BLOCK_SIZE = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """One ratio: medians in milliseconds, and the goal it is held to."""

    name: str
    heads: str
    head_size: int
    ours_ms: float
    baseline_ms: float
    ratio: float
    goal: float
    baseline: str


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--repeats", type=int, default=15, help="runs of each side; the median counts")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the prefill")
    parser.add_argument("--requests", type=int, default=64, help="requests of the decode")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each decoding request")
    options = parser.parse_args(arguments)

    figures = []
    for heads, kv_heads in ((8, 8), (32, 8)):
        for head_size in (64, 128):
            spec = LayerSpec(num_heads=heads, num_kv_heads=kv_heads, head_size=head_size, dtype="float32")
            if heads == kv_heads:
                figures.append(prefill(spec, options.tokens, options.repeats))
            figures += decode(spec, options.requests, options.context, options.repeats)
    figures.sort(key=lambda figure: figure.name, reverse=True)
    for figure in figures:
        print(
            f"{figure.name:22} {figure.heads:>5} heads of {figure.head_size:<4}"
            f"{figure.ours_ms:9.2f} ms / {figure.baseline_ms:8.2f} ms = {figure.ratio:5.2f}"
            f"   (goal {figure.goal}, against {figure.baseline})"
        )
    if options.json:
        options.json.write_text(json.dumps(report(figures), indent=2) + "\n")
    return 0


def prefill(spec: LayerSpec, tokens: int, repeats: int) -> Figure:
    """One new request through `impl.forward`, cache writes included, against one causal dense call."""
    batch = paged_batch(spec, [tokens], [tokens], block_size=BLOCK_SIZE)
    run = forward(batch)
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (batch.query, batch.key, batch.value))

    def dense() -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    ours, theirs = interleaved((run, dense), repeats)
    return figure("prefill", spec, ours, theirs, PREFILL_GOAL, "one dense call")


def decode(spec: LayerSpec, requests: int, context: int, repeats: int) -> list[Figure]:
    """One token per request, against copying the KV bytes that it reads: in a later layer of a step, and the first."""
    batch = paged_batch(spec, [1] * requests, [context] * requests, block_size=BLOCK_SIZE)
    if batch.kv_cache is None:
        raise SystemExit("the decode batch has no cache")
    blocks = requests * -(-context // BLOCK_SIZE)
    source = batch.kv_cache[:blocks]
    target = torch.zeros_like(source)
    later, first = forward(batch), forward(batch, rebuilds=True)
    ours, first_layer, theirs = interleaved((later, first, lambda: target.copy_(source)), repeats)
    return [
        figure("decode", spec, ours, theirs, DECODE_GOAL, "one copy"),
        figure("decode, first layer", spec, first_layer, theirs, DECODE_GOAL, "one copy"),
    ]


def forward(batch: Batch, *, rebuilds: bool = False) -> Callable[[], object]:
    """A layer's call; with `rebuilds` the metadata, and the plan made with it, are new each time."""
    spec = batch.spec
    cache_spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=spec.num_kv_heads, head_size=spec.head_size, dtype=spec.dtype
    )
    builder = TorchBackend.get_builder_cls()(cache_spec, ["layer"], BuilderConfig(), torch.device("cpu"))
    impl = TorchBackend.get_impl_cls().from_spec(
        spec, backend=TorchBackend, layer_name="layer", tensors=batch.tensors
    )
    impl.process_weights_after_loading(getattr(torch, spec.dtype))
    output = torch.empty_like(batch.query)
    built = builder.build(0, batch.common)

    def call() -> object:
        metadata = builder.build(0, batch.common) if rebuilds else built
        return impl.forward(None, batch.query, batch.key, batch.value, batch.kv_cache, metadata, output)

    return call


def interleaved(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """The median milliseconds of each call, run in turn `repeats` times after one warm-up."""
    times: list[list[float]] = [[] for _ in calls]
    for round_ in range(repeats + 1):
        for call, kept in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            if round_:
                kept.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(kept) for kept in times]


def figure(name: str, spec: LayerSpec, ours: float, theirs: float, goal: float, baseline: str) -> Figure:
    heads = f"{spec.num_heads}/{spec.num_kv_heads}"
    return Figure(name, heads, spec.head_size, ours, theirs, ours / theirs, goal, baseline)


def report(figures: Sequence[Figure]) -> dict[str, object]:
    return {
        "benchmark": "torch_native",
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "device": {
            "type": "cpu",
            "machine": platform.machine(),
            "name": cpu_name(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        },
        "versions": {
            "attnplug": importlib.metadata.version("attnplug"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "figures": [dataclasses.asdict(each) for each in figures],
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


if __name__ == "__main__":
    sys.exit(main())
