"""The host's time in a step of a whole model on TRITON: the batch, the metadata of all KV groups, and a graph's inputs.

Run as `python benchmarks/steps.py [--quick] [--against CHECKOUT] [--json FILE]`. With `--against`, another checkout of
this repository measures the same cells in turn with this one, and each cell has both figures and their ratio. A
figure is the CPU time of a call: the least over rounds of the mean of a few. No kernel runs, and copies go to torch's
"meta" device, so that only the host's part of them counts. One request in 16 gets a block before each step with copies.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.metadata
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # so that kernels take a CPU's tensors; triton reads it when imported

import numpy as np
import torch

import attnplug
from attnplug.core import BuilderConfig, LayerSpec
from attnplug.runtime import (
    AttentionRuntime,
    GraphState,
    StepBatchBuilder,
    build_attn_metadata,
)

SIZES = 1, 64, 256, 512, 1024
KINDS = "decode", "speculative", "mixed"
PAGE, CONTEXT = 16, 8192
MOST_BLOCKS = 1 << 22
FULL = LayerSpec(num_heads=2, num_kv_heads=1, head_size=16, dtype="float32")
WINDOW, CHUNK = FULL.replace(window=(1023, 0)), FULL.replace(chunk_size=2048)
MODELS = {
    "1 KV group": [FULL] * 4,
    "gemma-3, 2 KV groups": [WINDOW, FULL] * 4,
    "gemma-3, 6 KV groups": ([WINDOW] * 5 + [FULL]) * 4,
    "llama-4, 4 KV groups": ([CHUNK] * 3 + [FULL]) * 4,
    "3 kinds, 3 KV groups": [CHUNK, WINDOW, FULL] * 4,
}
Key = tuple[str, str, int, str]


def counts(kind: str, requests: int) -> tuple[Any, Any]:
    """New and computed tokens of each request."""
    context = np.random.default_rng(requests).integers(64, CONTEXT - 512, requests)
    if kind == "mixed":
        # Decodes, chunks of prompts, and prompts that begin.
        new = np.where(np.arange(requests) < requests // 2, 1, 64)
        context[-(-3 * requests // 4) :] = 0
        return new, context
    return np.full(requests, 4 if kind == "speculative" else 1), context


def filled(builder: StepBatchBuilder, new: Any, context: Any) -> StepBatchBuilder:
    groups, shared = len(builder.block_sizes), len(new) + CONTEXT // PAGE
    own = 1 + groups * shared
    for row, (tokens, computed) in enumerate(zip(new.tolist(), context.tolist(), strict=True)):
        written = -(-(tokens + computed) // PAGE) - computed // PAGE
        blocks = []
        for group in range(groups):
            # Requests share the blocks that they read, which keeps the pool small, and write to their own.
            first = 1 + group * shared + row
            blocks.append([*range(first, first + computed // PAGE), *range(own, own + written)])
            own += written
        builder.add_request(str(row), blocks, num_computed_tokens=computed)
    return builder


def appending(builder: StepBatchBuilder) -> Callable[[], None]:
    """Gives one request in 16 a block, each time to others, as steps of single tokens need it."""
    fresh, turn = itertools.count(MOST_BLOCKS // 2), itertools.count()

    def append() -> None:
        for name in builder.req_ids[next(turn) % 16 :: 16]:
            builder.append_blocks(name, [[next(fresh)] for _ in builder.block_sizes])

    return append


def calls(
    model: str, kind: str, requests: int
) -> Iterator[tuple[str, Callable[[], object], Callable[[], None] | None]]:
    """The call to time, and the one to make before it, untimed."""
    new, context = counts(kind, requests)
    specs = {f"layers.{index}": spec for index, spec in enumerate(MODELS[model])}
    pool = 1 + len(set(specs.values())) * 6 * (requests * 6 + CONTEXT // PAGE)
    plan = attnplug.plan(specs, device="cpu", backend="TRITON", num_blocks=pool)
    config = BuilderConfig(
        max_num_seqs=requests,
        max_num_batched_tokens=64 * requests,
        max_model_len=CONTEXT,
        num_speculative_tokens=3,
        cudagraph_batch_sizes=(requests,),
    )
    runtime = AttentionRuntime(plan, config=config)
    groups = runtime.kv_cache_config.kv_cache_groups
    cpu = filled(runtime.step_batch_builder(), new, context)
    meta = StepBatchBuilder(
        max_num_seqs=requests,
        max_num_batched_tokens=64 * requests,
        max_model_len=2 * CONTEXT,
        block_sizes=[group.kv_cache_spec.block_size for group in groups],
        kv_cache_specs=[group.kv_cache_spec for group in groups],
        reorder_batch_thresholds=cpu.reorder_batch_thresholds,
        cascade_groups=(),
        num_blocks=MOST_BLOCKS,
        device="meta",
    )
    filled(meta, new, context)
    batch = cpu.step(new)
    yield "StepBatchBuilder.step", lambda: cpu.step(new), None
    append = appending(meta)
    yield "StepBatchBuilder.step, with copies", lambda: meta.step(new), append
    if kind == "decode":
        yield "append_blocks, 1 request in 16", append, None
    built = runtime.attention_groups, batch, runtime.kv_cache_config
    yield "build_attn_metadata", lambda: build_attn_metadata(*built), None
    yield "AttentionRuntime.begin_step", lambda: runtime.begin_step(batch), None
    if kind != "mixed":
        graphs = GraphState(runtime)
        inputs = graphs.get_graph_input_buffers(requests, int(new[0]))
        prepare = graphs.prepare_graph_input_buffers
        yield "prepare_graph_input_buffers", lambda: prepare(inputs, batch), None


def least(call: Callable[[], object], before: Callable[[], None] | None, rounds: int) -> float:
    """Microseconds of CPU time."""
    call()
    began = time.process_time()
    call()
    repeats = max(3, min(50, int(2e-3 / (time.process_time() - began + 1e-6))))
    if before:
        rounds, repeats = 10 * rounds, 1
    found = []
    for _ in range(rounds):
        if before:
            before()
        began = time.process_time()
        for _ in range(repeats):
            call()
        found.append((time.process_time() - began) / repeats)
    return min(found) * 1e6


def measure(quick: bool) -> Iterator[tuple[Key, float]]:
    for model in MODELS:
        for requests in (512,) if quick else SIZES:
            for kind in KINDS:
                for function, call, before in calls(model, kind, requests):
                    yield (function, kind, requests, model), least(call, before, 3 if quick else 5)


def measured_in(checkout: Path, quick: bool) -> dict[Key, float]:
    """The cells in a new process, by the attnplug of a checkout."""
    command = [sys.executable, __file__, "--cells", *(["--quick"] if quick else [])]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return {tuple(key): value for key, value in json.loads(done.stdout)}  # type: ignore[misc]


def smaller(first: dict[Key, float], second: dict[Key, float]) -> dict[Key, float]:
    return {key: min(value, second[key]) for key, value in first.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--against", type=Path, metavar="CHECKOUT", help="also measure that checkout, in turn"
    )
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--quick", action="store_true", help="only 512 requests, fewer rounds")
    parser.add_argument("--cells", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.cells:
        print(json.dumps(list(measure(chosen.quick))))
        return
    places = [Path(__file__).resolve().parent.parent]
    if chosen.against:
        places.append(chosen.against.resolve())
    kept = [measured_in(place, chosen.quick) for place in places]
    again = [measured_in(place, chosen.quick) for place in places]
    kept = [smaller(first, second) for first, second in zip(kept, again, strict=True)]
    figures = []
    print(f"{'':36} {'model':22} {'batch':>12} {'B':>5} {'us':>8} {'before':>8} {'ratio':>6}")
    for key, now in kept[0].items():
        function, kind, requests, model = key
        figure = {"function": function, "model": model, "kind": kind, "requests": requests, "measured": now}
        row = f"{function:36} {model:22} {kind:>12} {requests:>5} {now:8.1f}"
        if chosen.against:
            before = kept[1][key]
            figure |= {"before": before, "ratio": now / before}
            row += f" {before:8.1f} {now / before:6.2f}"
        figures.append(figure)
        print(row)
    if chosen.json:
        data = {
            "date": dt.datetime.now(dt.UTC).date().isoformat(),
            "python": platform.python_version(),
            "machine": platform.machine(),
            "torch": torch.__version__,
            "attnplug": importlib.metadata.version("attnplug"),
            "unit": "us of CPU time",
            "figures": figures,
        }
        chosen.json.write_text(json.dumps(data, indent=2) + "\n")


if __name__ == "__main__":
    main()
