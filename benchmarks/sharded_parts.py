"""One rank of benchmarks/context_parallel.py: runs rows, and appends an event for each to a file.

It is started with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and the task as JSON. An error ends the
process: what it leaves on the device is unknown, and the other ranks may wait in an exchange.
"""

from __future__ import annotations

import datetime as dt
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from sharded_cells import CELLS, EXCHANGES, LEAST_CAPACITY, MOST_EXCHANGE_US, SMOKE_CELLS
from sharded_runs import Steps, captured, error_of, outputs_of_model, timed_us, worst_of_ranks

import attnplug
from attnplug.core import Device, LayerSpec, MLADims
from attnplug.ops import ExchangeBuffers, combine_partials
from attnplug.runtime import AttentionRuntime, SharingCost, context_parallel

TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-5}
STEPS = (
    {"x": 1500, "y": 3000, "z": 40},
    {"x": 1, "y": 1, "z": 1},
    {"x": 1, "y": 1800, "z": 1},
    {"x": 4, "y": 4, "z": 4},
    {"x": 1, "y": 0, "z": 1},
)


class Rank:
    """This process, with what all rows need."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        self.smoke, self.layers, self.backend = task["smoke"], task["layers"], task["backend"]
        local = int(os.environ["LOCAL_RANK"])
        if not self.smoke and torch.cuda.device_count() <= local:
            raise RuntimeError(f"rank {local} has no GPU: there are {torch.cuda.device_count()}")
        self.device = torch.device("cpu" if self.smoke else f"cuda:{local}")
        timeout = dt.timedelta(seconds=task["seconds"])
        if self.smoke:
            dist.init_process_group("gloo", timeout=timeout)
        else:
            torch.cuda.set_device(self.device)
            dist.init_process_group("nccl", device_id=self.device, timeout=timeout)
        self.group = dist.group.WORLD
        self.place = context_parallel(self.group, task["interleave"])

    def layer(self) -> LayerSpec:
        """The layer of Llama 8B, 32 heads over 8 of K and V; on the CPU a small one."""
        if self.smoke:
            return LayerSpec(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32")
        return LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, dtype="bfloat16")

    def models(self, name: str) -> dict[str, Any]:
        """Prefills, extends and decodes of layers of a model on the ranks, compared with one rank, and run twice."""
        specs, given = self._layers_of(name), (self.device, self.backend)
        steps = [{key: -(-count // 100) for key, count in step.items()} for step in STEPS]
        steps = steps if self.smoke else list(STEPS)
        alone = outputs_of_model(specs, steps, None, *given)
        shared, again = (outputs_of_model(specs, steps, self.place, *given) for _ in range(2))
        differs = not all(map(torch.equal, shared, again))
        error, unlike = worst_of_ranks([error_of(shared, alone), float(differs)], self.device)
        ok = error <= TOLERANCE[next(iter(specs.values())).dtype] and not unlike
        return {"error": error, "deterministic": not unlike, "ok": ok}

    def _layers_of(self, model: str) -> dict[str, LayerSpec]:
        """Layers of Llama, of a hybrid with windows, or of latent attention."""
        llama, smoke = self.layer(), self.smoke
        if model == "llama":
            return {"0": llama, "1": llama}
        if model == "gemma":
            gemma = llama if smoke else llama.replace(num_heads=16, head_size=256, head_size_v=256)
            return {"0": gemma, "1": gemma.replace(sliding_window=8 if smoke else 1024)}
        sizes = (32, 16, 8, 16) if smoke else (512, 128, 64, 128)
        names = "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
        dims = MLADims(q_lora_rank=None, **dict(zip(names, sizes, strict=True)))
        heads, dtype = (4, "float32") if smoke else (16, "bfloat16")
        return {
            "0": LayerSpec(
                num_heads=heads, num_kv_heads=1, head_size=sizes[0] + sizes[2], dtype=dtype, mla=dims
            )
        }

    def capacity(self, name: str) -> dict[str, Any]:
        """The tokens of one sequence in the same memory of each rank, whose caches are allocated."""
        specs = {str(index): self.layer() for index in range(self.layers)}
        memory, tokens, allocated, cost = name.split()[0], [], [], None
        for each in (None, self.place):
            asked: dict[str, Any] = {"backend": self.backend, "context_parallel": each}
            plan = attnplug.plan(specs, self.device.type, memory=memory, **asked)
            assert plan.budget is not None
            tokens.append(plan.budget.max_tokens or 0)
            cost = plan.sharing_cost
            with AttentionRuntime(plan, device=self.device) as runtime:
                # Layers of one group may be views of one allocation.
                storages = {c.untyped_storage().data_ptr(): c for c in runtime.kv_caches.values()}
                allocated.append(sum(c.untyped_storage().nbytes() for c in storages.values()))
        ratio = tokens[1] / tokens[0]
        return {
            "one_tokens": tokens[0],
            "ranks_tokens": tokens[1],
            "one_bytes": allocated[0],
            "ranks_bytes": allocated[1],
            "ratio": ratio,
            "plan": "" if cost is None else str(cost),
            "ok": ratio >= LEAST_CAPACITY and allocated[0] == allocated[1],
        }

    def cells(self, name: str) -> dict[str, Any]:
        """A cell's error and, with GPUs, the times of one GPU and of the ranks, beside the model of the plan."""
        spec, outputs, times, cost = self.layer(), [], [], None
        cell = next(each for each in (SMOKE_CELLS if self.smoke else CELLS) if each.name == name)
        backends: dict[str, None] = {}
        for each in (None, self.place):
            with Steps(cell, spec, each, self.device, self.layers, self.backend) as steps:
                outputs.append(steps.run().float())
                cost = steps.plan.sharing_cost
                if self.device.type == "cuda":
                    times.append(steps.replay_us() if cell.in_graph else steps.eager_us())
                new = (str(decision.backend) for decision in steps.plan.new_tokens.values())
                backends |= dict.fromkeys((*steps.plan.backends, *new))
        error, *times = worst_of_ranks([error_of(outputs[1:], outputs[:1]), *times], self.device)
        result: dict[str, Any] = {"error": error, "backends": "+".join(backends)}
        ok = error <= TOLERANCE[spec.dtype]
        if times:
            result |= {"one_us": times[0], "ranks_us": times[1], "ratio": times[0] / times[1]}
            result["least"] = cell.least
            ok = ok and result["ratio"] >= cell.least
            if cost is not None and cell.new == 1:
                result["model_ratio"] = _modelled(cost, cell.lengths)
        return result | {"ok": ok}

    def exchange(self, name: str) -> dict[str, Any]:
        """Exchange and merge of 64 decodes in a graph, and NCCL's collectives of the same bytes alone."""
        (backend, scatter_heads), spec, buffers = EXCHANGES[name], self.layer(), ExchangeBuffers(self.device)
        tokens, heads, width = 64, spec.num_heads, spec.head_size
        part, lse = buffers.partial(tokens, heads, width, torch.bfloat16, self.group)
        part.normal_()
        lse.normal_()
        given: dict[str, Any] = {"scatter_heads": scatter_heads, "backend": backend, "buffers": buffers}
        call = captured(lambda: combine_partials(part, lse, self.group, **given))
        alone = captured(self._collectives(backend, tokens * heads, width, scatter_heads=scatter_heads))
        us, nccl_us = worst_of_ranks([timed_us(call) / 20, timed_us(alone) / 20], self.device)
        # The runtime sends partial results of this size whole, to all ranks.
        ok = us <= MOST_EXCHANGE_US if (backend, scatter_heads) == ("a2a", False) else None
        return {"us": us, "nccl_us": nccl_us} | ({} if ok is None else {"ok": ok})

    def _collectives(
        self, backend: str, rows: int, width: int, *, scatter_heads: bool
    ) -> Callable[[], object]:
        """The calls of NCCL in an exchange, without a merge."""
        group, size, dtype = self.group, dist.get_world_size(), torch.bfloat16
        out_bytes, lse_bytes = rows * width * 2, rows * 4

        def memory(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.uint8, device=self.device)

        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        if backend == "a2a":
            sent = memory(out_bytes + lse_bytes)
            if scatter_heads:
                received = torch.empty_like(sent)
                return lambda: dist.all_to_all_single(received, sent, group=group)
            both = memory(size * sent.numel())
            return lambda: gather(both, sent, group=group)
        lses, lse = memory(size * lse_bytes), memory(lse_bytes)
        summed, own = memory(out_bytes).view(dtype), memory(out_bytes // size).view(dtype)

        def weighted() -> None:
            gather(lses, lse, group=group)
            if scatter_heads:
                scatter(own, summed, group=group)
            else:
                dist.all_reduce(summed, group=group)

        return weighted


def _modelled(cost: SharingCost, lengths: tuple[int, ...]) -> float:
    tokens = sum(lengths)
    return cost.attention_us(tokens) / cost.shared_us(len(lengths), tokens)


def main(task: Mapping[str, Any]) -> None:
    """Run the rows of a task."""
    rank, handle = int(os.environ["RANK"]), os.open(task["events"], os.O_WRONLY | os.O_APPEND)

    def tell(**event: Any) -> None:
        os.write(handle, f"{json.dumps(event)}\n".encode())

    try:
        own = Rank(task)
        if rank == 0:
            device = str(Device.current().name or own.device.type)
            tell(event="machine", facts={"device": device, "torch": torch.__version__})
        for part, name in task["rows"]:
            if rank == 0:
                tell(event="begin", part=part, name=name)
            figures = getattr(own, part)(name)
            if rank == 0:
                tell(event="row", part=part, row={"name": name} | figures)
            if not own.smoke:
                # A graph of the row must not outlive the group, and its memory is wanted.
                gc.collect()
                torch.cuda.empty_cache()
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001  (of any row, which costs that row)
        traceback.print_exc()
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        tell(event="failed", rank=rank, why=why)
        # The threads of a group that failed would keep the process.
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
