"""Layers whose tokens several GPUs share, beside one GPU: outputs, capacity, times, and NCCL's own floor.

    python benchmarks/context_parallel.py --json benchmarks/results/context-parallel-h200x2.json
    python benchmarks/context_parallel.py --smoke      # two processes on the CPU, without times

It starts itself under torchrun, with a process for each of `--ranks`. Every cell is checked before it is timed: the
outputs of the ranks are those of one GPU. The exit code is 1 where an output is wrong or a time misses its limit.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sharded_runs import Cell, Steps, captured, error_of, outputs_of_model, timed_us, worst_of_ranks

import attnplug
from attnplug.core import Device, LayerSpec, MLADims
from attnplug.ops import ExchangeBuffers, combine_partials
from attnplug.runtime import AttentionRuntime, SharingCost, context_parallel

TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-5}
MOST_EXCHANGE_US, LEAST_CAPACITY = 40.0, 1.95
CELLS = [
    Cell("8 x 128k", (131_072,) * 8, 1.8),
    Cell("64 x 8k", (8192,) * 64, 1.65),
    Cell("1 x 128k", (131_072,), 1.25),
    Cell("8 x 8k", (8192,) * 8, 0.9),
    Cell("ragged", (131_072, 65_000, 8191, 8192, 700, 33, 1, 40_000), 0.9),
    Cell("8 x 32k, 4 new tokens", (32_768,) * 8, 0.0, new=4),
    Cell("prompt of 16k", (16_384,), 0.0, new=16_384, in_graph=False),
    Cell("8k after 120k", (131_072,), 0.0, new=8192, in_graph=False),
]
SMOKE_CELLS = [
    Cell("3 x 100", (100,) * 3, 0.0, in_graph=False),
    Cell("ragged", (70, 33, 1, 17), 0.0, in_graph=False),
    Cell("prompt of 48", (48,), 0.0, new=48, in_graph=False),
    Cell("40 after 60", (100,), 0.0, new=40, in_graph=False),
]
STEPS = (
    {"x": 1500, "y": 3000, "z": 40},
    {"x": 1, "y": 1, "z": 1},
    {"x": 1, "y": 1800, "z": 1},
    {"x": 4, "y": 4, "z": 4},
    {"x": 1, "y": 0, "z": 1},
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 1 where an output is wrong or, with times, a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--ranks", type=int, default=2, help="processes, each with a GPU (default: %(default)s)"
    )
    parser.add_argument("--layers", type=int, default=4, help="layers of a graph (default: %(default)s)")
    parser.add_argument("--interleave", type=int, default=1, help="tokens of a run (default: %(default)s)")
    parser.add_argument("--backend", help="of attnplug (default: the first that serves the layer)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts (default: all)")
    parser.add_argument("--json", type=Path, help="write the results there, after each part")
    parser.add_argument("--smoke", action="store_true", help="small cells on the CPU, without times")
    options = parser.parse_args(arguments)
    if "WORLD_SIZE" not in os.environ:
        given = sys.argv[1:] if arguments is None else list(arguments)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        script = [f"--nproc-per-node={options.ranks}", str(Path(__file__).resolve()), *given]
        os.execv(sys.executable, [*launch, *script])
    device = torch.device("cpu" if options.smoke else f"cuda:{os.environ['LOCAL_RANK']}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # NVLink multicast is shared by all tenants of a host.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    dist.init_process_group("gloo" if options.smoke else "nccl", timeout=dt.timedelta(minutes=5))
    failed = run(options, device)
    dist.barrier()
    dist.destroy_process_group()
    return failed


def run(options: argparse.Namespace, device: torch.device) -> int:
    """All parts; 1 if one failed."""
    report: dict[str, Any] = {
        "ranks": dist.get_world_size(),
        "interleave": options.interleave,
        "device": str(Device.current().name or device.type),
        "torch": torch.__version__,
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "failed": [],
    }
    for part in options.only:
        report[part] = []
        for each in PARTS[part](options, device):
            report[part].append(each)
            report["failed"] += [f"{part}: {each['name']}"] if each.get("ok") is False else []
            if dist.get_rank() == 0:
                print(", ".join(f"{name} {shown(value)}" for name, value in each.items()), flush=True)
                if options.json:
                    options.json.write_text(json.dumps(report, indent=1) + "\n")
    if dist.get_rank() == 0:
        print(f"failed: {'; '.join(report['failed'])}" if report["failed"] else "all within their limits")
    return int(bool(report["failed"]))


def shown(value: object) -> str:
    """A value for one line."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def models(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Prefills, extends and decodes of layers of models on the ranks, compared with one rank, and run twice."""
    place = context_parallel(dist.group.WORLD, options.interleave)
    steps = [{name: -(-count // 100) for name, count in step.items()} for step in STEPS]
    steps = steps if options.smoke else list(STEPS)
    for name, specs in model_layers(options.smoke).items():
        given = device, options.backend
        alone = outputs_of_model(specs, steps, None, *given)
        shared, again = (outputs_of_model(specs, steps, place, *given) for _ in range(2))
        differs = not all(map(torch.equal, shared, again))
        error, unlike = worst_of_ranks([error_of(shared, alone), float(differs)], device)
        dtype = next(iter(specs.values())).dtype
        ok = error <= TOLERANCE[dtype] and not unlike
        yield {"name": name, "error": error, "deterministic": not unlike, "ok": ok}


def model_layers(smoke: bool) -> dict[str, dict[str, LayerSpec]]:
    """Layers of Llama, of a hybrid with windows, and of latent attention."""
    llama, latent = (
        layer(smoke),
        LayerSpec(
            num_heads=16,
            num_kv_heads=1,
            head_size=576,
            dtype="bfloat16",
            mla=MLADims(
                q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
            ),
        ),
    )
    if smoke:
        dims = MLADims(
            q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12
        )
        latent = LayerSpec(num_heads=4, num_kv_heads=1, head_size=40, dtype="float32", mla=dims)
    gemma = llama if smoke else llama.replace(num_heads=16, head_size=256, head_size_v=256)
    window = 8 if smoke else 1024
    return {
        "llama": {"0": llama, "1": llama},
        "gemma": {"0": gemma, "1": gemma.replace(sliding_window=window)},
        "latents": {"0": latent},
    }


def layer(smoke: bool) -> LayerSpec:
    """The layer of Llama 8B, 32 heads over 8 of K and V; on the CPU a small one."""
    if smoke:
        return LayerSpec(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32")
    return LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, dtype="bfloat16")


def capacity(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """The tokens of one sequence in the same memory of each rank, whose caches are allocated."""
    place = context_parallel(dist.group.WORLD, options.interleave)
    specs = {str(index): layer(options.smoke) for index in range(options.layers)}
    memory = "64MiB" if options.smoke else "16GiB"
    tokens, allocated = [], []
    for each in (None, place):
        plan = attnplug.plan(
            specs, device.type, memory=memory, backend=options.backend, context_parallel=each
        )
        assert plan.budget is not None
        tokens.append(plan.budget.max_tokens or 0)
        with AttentionRuntime(plan, device=device) as runtime:
            # Layers of one group may be views of one allocation.
            storages = {c.untyped_storage().data_ptr(): c for c in runtime.kv_caches.values()}
            allocated.append(sum(c.untyped_storage().nbytes() for c in storages.values()))
    ratio = tokens[1] / tokens[0]
    yield {
        "name": f"{memory} a rank",
        "one_tokens": tokens[0],
        "ranks_tokens": tokens[1],
        "one_bytes": allocated[0],
        "ranks_bytes": allocated[1],
        "ratio": ratio,
        "ok": ratio >= LEAST_CAPACITY and allocated[0] == allocated[1],
    }


def cells(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Each cell's error and, with GPUs, the times of one GPU and of the ranks, beside the model of the plan."""
    place, spec = context_parallel(dist.group.WORLD, options.interleave), layer(options.smoke)
    for cell in SMOKE_CELLS if options.smoke else CELLS:
        outputs, times, cost = [], [], None
        for each in (None, place):
            with Steps(cell, spec, each, device, options.layers, options.backend) as steps:
                outputs.append(steps.run().float())
                cost = steps.plan.sharing_cost
                if device.type == "cuda":
                    times.append(steps.replay_us() if cell.in_graph else steps.eager_us())
                backends = dict.fromkeys((*steps.plan.backends, *_new_backends(steps)))
        error, *times = worst_of_ranks([error_of(outputs[1:], outputs[:1]), *times], device)
        result: dict[str, Any] = {"name": cell.name, "error": error, "backends": "+".join(backends)}
        ok = error <= TOLERANCE[spec.dtype]
        if times:
            result |= {"one_us": times[0], "ranks_us": times[1], "ratio": times[0] / times[1]}
            result["least"] = cell.least
            ok = ok and result["ratio"] >= cell.least
            if cost is not None and cell.new == 1:
                result["model_ratio"] = _modelled(cost, cell)
        yield result | {"ok": ok}


def _new_backends(steps: Steps) -> list[str]:
    return [str(decision.backend) for decision in steps.plan.new_tokens.values()]


def _modelled(cost: SharingCost, cell: Cell) -> float:
    tokens = sum(cell.lengths)
    return cost.attention_us(tokens) / cost.shared_us(len(cell.lengths), tokens)


def exchange(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Exchange and merge of 64 decodes in a graph, and NCCL's collectives of the same bytes alone."""
    if device.type != "cuda":
        return
    group, spec, size = dist.group.WORLD, layer(options.smoke), dist.get_world_size()
    tokens, heads, width = 64, spec.num_heads, spec.head_size
    rows, dtype = tokens * heads, torch.bfloat16
    out_bytes, lse_bytes = rows * width * 2, rows * 4

    def memory(count: int, ranks: int = 1) -> torch.Tensor:
        return torch.zeros(count * ranks, dtype=torch.uint8, device=device)

    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    both, sent = memory(out_bytes + lse_bytes, size), memory(out_bytes + lse_bytes)
    lses, lse = memory(lse_bytes, size), memory(lse_bytes)
    summed, own = memory(out_bytes).view(dtype), memory(out_bytes // size).view(dtype)
    split = sent.numel() // size * size
    floors: dict[tuple[str, bool], Callable[[], object]] = {
        ("a2a", False): lambda: gather(both, sent, group=group),
        ("a2a", True): lambda: dist.all_to_all_single(both[:split], sent[:split], group=group),
        ("ag_rs", False): lambda: (gather(lses, lse, group=group), dist.all_reduce(summed, group=group)),
        ("ag_rs", True): lambda: (gather(lses, lse, group=group), scatter(own, summed, group=group)),
    }
    for (backend, scatter_heads), floor in floors.items():
        buffers = ExchangeBuffers(device)
        part, part_lse = buffers.partial(tokens, heads, width, dtype, group)
        part.normal_()
        part_lse.normal_()
        given: dict[str, Any] = {"scatter_heads": scatter_heads, "backend": backend, "buffers": buffers}
        call = captured(
            lambda part=part, lse=part_lse, given=given: combine_partials(part, lse, group, **given)
        )
        us, alone = worst_of_ranks([timed_us(call) / 20, timed_us(captured(floor)) / 20], device)
        # The runtime sends partial results of this size whole, to all ranks.
        ok = us <= MOST_EXCHANGE_US if (backend, scatter_heads) == ("a2a", False) else None
        name = f"{backend}{', scattered heads' if scatter_heads else ''}"
        yield {"name": name, "us": us, "nccl_us": alone} | ({} if ok is None else {"ok": ok})


PARTS: dict[str, Callable[[argparse.Namespace, torch.device], Iterator[dict[str, Any]]]] = {
    "exchange": exchange,
    "models": models,
    "capacity": capacity,
    "cells": cells,
}

if __name__ == "__main__":
    sys.exit(main())
