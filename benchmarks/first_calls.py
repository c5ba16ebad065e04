"""The first calls of a process: seconds of a model's first steps with a cold and with a warm cache of kernels.

`python benchmarks/first_calls.py [CONFIG] [--jobs N] [--json FILE]` runs three processes: one with an empty cache, one
whose cache `attnplug warm` filled, and one that warms itself up first. Each begins when the model would be loaded: torch
and the layers' caches are there. The last one then draws random steps, and Triton's listener counts what compiles.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

MODEL = pathlib.Path(__file__).parents[1] / "examples" / "models" / "qwen3-8b.json"
MARK = "FOUND "
SEQS, TOKENS, LONGEST = 64, 4096, 8192
FIRST: Mapping[str, tuple[int, int, int]] = {
    "decode of 8 x 1,000": (8, 999, 1),
    "prompt of 100": (1, 0, 100),
    "prompt of 2,000": (1, 0, 2000),
    "500 more of 3,000": (1, 2500, 500),
    "60 more of 3,000": (1, 2940, 60),
    "decode of 8 x 1,000 again": (8, 999, 1),
}
"""Requests, their computed tokens, and their new ones."""


class Compiling:
    """Counts Triton's compilations, and loads from its cache, by kernel."""

    def __init__(self) -> None:
        from triton import knobs

        self.compiled: list[str] = []
        self.loaded: list[str] = []
        knobs.compilation.listener = self

    def __call__(self, *, src: Any, cache_hit: bool, **_: object) -> None:
        """As Triton's `CompilationListener`."""
        (self.loaded if cache_hit else self.compiled).append(getattr(src, "name", str(src)))

    def counts(self) -> dict[str, int]:
        """Both, and starts anew."""
        found = {"compiled": len(self.compiled), "loaded": len(self.loaded)}
        self.compiled, self.loaded = [], []
        return found


class Model:
    """A runtime with the layers of a configuration, and calls of all of them."""

    def __init__(self, config: str, backend: str, device: str) -> None:
        import torch

        import attnplug
        from attnplug.core import BuilderConfig
        from attnplug.integrations.transformers import read_config
        from attnplug.runtime import AttentionRuntime

        self.device = torch.device(device)
        layers = read_config(config).layers
        plan = attnplug.plan(layers, device=device, backend=backend, num_blocks=SEQS * LONGEST // 16 + 1)
        limits = BuilderConfig(max_num_seqs=SEQS, max_num_batched_tokens=TOKENS, max_model_len=LONGEST)
        self.runtime = AttentionRuntime(plan, config=limits)
        self.builder = self.runtime.step_batch_builder()
        self.sizes = [each.kv_cache_spec.block_size for each in self.runtime.kv_cache_config.kv_cache_groups]
        self.given, tensors = {}, {}
        for name, layer in self.runtime.layers.items():
            spec = layer.spec
            heads = (spec.num_heads, spec.head_size), (spec.num_kv_heads, spec.head_size)
            shapes = spec.dtype, (*heads, (spec.num_kv_heads, spec.head_size_v))
            if shapes not in tensors:
                dtype = getattr(torch, spec.dtype)
                tensors[shapes] = [
                    torch.randn(TOKENS, *each, device=device, dtype=dtype) for each in shapes[1]
                ]
            self.given[name] = tensors[shapes]
        self.blocks: dict[str, list[list[int]]] = {}
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def add(self, name: str, tokens: int, computed: int = 0) -> None:
        """A request with blocks for `tokens`."""
        blocks = [self.runtime.block_pool.allocate(-(-tokens // size)) for size in self.sizes]
        self.blocks[name] = blocks
        self.builder.add_request(name, blocks, computed)

    def remove(self, name: str) -> None:
        """The request, and its blocks."""
        self.builder.remove_request(name)
        for blocks in self.blocks.pop(name):
            self.runtime.block_pool.free(blocks)

    def step(self, counts: dict[str, int]) -> float:
        """Seconds of all layers in one step, with the wait for the device."""
        import torch

        began = time.perf_counter()
        batch = self.builder.step(counts)
        self.runtime.begin_step(batch)
        rows = batch.common.num_actual_tokens
        for name, tensors in self.given.items():
            self.runtime.forward(name, *(each[:rows] for each in tensors))
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.builder.finish_step()
        return time.perf_counter() - began


def first_steps(model: Model, compiling: Compiling) -> dict[str, Any]:
    """Seconds of the first step of each kind, and what compiled or was loaded in it."""
    found = {}
    for kind, (requests, computed, new) in FIRST.items():
        names = [f"{kind} {number}" for number in range(requests)]
        for name in names:
            model.add(name, computed + new, computed)
        seconds = model.step(dict.fromkeys(names, new))
        found[kind] = {"seconds": round(seconds, 4)} | compiling.counts()
        for name in names:
            model.remove(name)
    return found


def random_steps(model: Model, steps: int) -> int:
    """Requests that come, compute their prompts in chunks, draw tokens and go, for so many steps; their new tokens."""
    draw, left, total = random.Random(0), dict[str, list[int]](), 0
    for number in range(steps):
        while len(left) < SEQS and draw.random() < 0.4:
            prompt, own = int((LONGEST // 2) ** draw.random()), draw.randrange(1, 60)
            name = f"request {number} {len(left)}"
            model.add(name, prompt + own)
            left[name] = [prompt, own]
        budget, counts = TOKENS, dict[str, int]()
        for name, (prompt, _) in left.items():
            new = min(prompt, budget, draw.choice([512, 2048, TOKENS])) if prompt else min(1, budget)
            counts[name], budget = new, budget - new
        total += sum(counts.values())
        if not any(counts.values()):
            continue
        model.step(counts)
        for name, new in counts.items():
            at = 0 if left[name][0] else 1
            left[name][at] -= new
            if not any(left[name]) or left[name][1] <= 0:
                model.remove(name)
                left[name] = []
        left = {name: each for name, each in left.items() if each}
    return total


def child(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one process."""
    compiling = Compiling()
    model = Model(options.config, options.backend, options.device)
    found: dict[str, Any] = {}
    if options.child == "warmed up":
        began = time.perf_counter()
        model.runtime.warm_up()
        found["seconds of the warm-up"] = round(time.perf_counter() - began, 2)
        found["in the warm-up"] = compiling.counts()
    found["first"] = first_steps(model, compiling)
    if options.child == "warmed up":
        began = time.perf_counter()
        tokens = random_steps(model, options.steps)
        seconds = round(time.perf_counter() - began, 1)
        found["random steps"] = {
            "steps": options.steps,
            "tokens": tokens,
            "seconds": seconds,
        } | compiling.counts()
    return found


def main() -> int:
    """Run the three processes and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", nargs="?", default=str(MODEL), help="a config.json (default: Qwen3-8B's)")
    parser.add_argument(
        "--backend", default="TRITON", help="rules, as --backend of attnplug (default: TRITON)"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", default="8", help="of attnplug warm (default: 8)")
    parser.add_argument("--steps", type=int, default=1000, help="random steps (default: 1000)")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures here")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(MARK + json.dumps(child(options)))
        return 0
    import torch
    from installed import versions

    device = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    found: dict[str, Any] = {"device": device, "versions": versions("attnplug", "torch", "triton")}
    found |= {"date": str(dt.date.today()), "config": pathlib.Path(options.config).name}
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("cold", "warm", "warmed up"):
            cache = f"{folder}/{kind[:4]}"
            environment = {**os.environ, "TRITON_CACHE_DIR": cache}
            if kind == "warm":
                limits = ["--max-num-seqs", str(SEQS), "--max-num-batched-tokens", str(TOKENS)]
                command = [
                    sys.executable,
                    "-m",
                    "attnplug",
                    "warm",
                    options.config,
                    "--backend",
                    options.backend,
                ]
                began = time.perf_counter()
                done = subprocess.run(
                    [*command, "--jobs", options.jobs, "--cache", cache, *limits],
                    capture_output=True, text=True, check=False,
                )  # fmt: skip
                seconds = round(time.perf_counter() - began, 1)
                found["attnplug warm"] = {"seconds": seconds, "said": done.stdout.strip().splitlines()[-1:]}
                if done.returncode:
                    print(done.stderr, file=sys.stderr)
                    return 1
            done = subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--child", kind],
                env=environment, capture_output=True, text=True, check=False,
            )  # fmt: skip
            said = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
            if not said:
                print(done.stderr, file=sys.stderr)
                return 1
            found[kind] = json.loads(said[-1].removeprefix(MARK))
            if options.json:
                options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
