"""Several processes that run one model: their groups, and the heads and tokens that each of them has."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from attnplug.core import ContextParallel, LayerSpec
from attnplug.errors import ModelConfigError
from attnplug.runtime import RankWatch, context_parallel


@dataclasses.dataclass(frozen=True, slots=True)
class Ranks:
    """The groups of this process: `heads` share the heads of each layer, `tokens` the tokens of each request.

    `watch` names a rank that dies, hangs or runs another step. A value without groups is one process alone.
    """

    heads: dist.ProcessGroup | None = None
    tokens: ContextParallel | None = None
    watch: RankWatch | None = None

    def step(self, *parts: object) -> contextlib.AbstractContextManager[None]:
        """Run the block as one step of all ranks, of which each has the same `parts`; see RankWatch."""
        return contextlib.nullcontext() if self.watch is None else self.watch.step(str(parts))

    def own_part(self, spec: LayerSpec) -> LayerSpec:
        """The layer with the heads of this rank."""
        if self.heads is None:
            return spec
        size = self.heads.size()
        # All heads share the latents, and each rank keeps them.
        split, kind = (
            (spec.num_kv_heads, "KV heads") if spec.mla is None else (spec.num_heads, "heads of latents")
        )
        if split % size:
            raise ModelConfigError(
                f"{size} ranks cannot split {split} {kind}; share tokens by --context-parallel"
            )
        kv_heads = spec.num_kv_heads // size if spec.mla is None else 1
        return spec.replace(num_heads=spec.num_heads // size, num_kv_heads=kv_heads)

    def split_heads(self, model: PreTrainedModel, layers: dict[str, LayerSpec]) -> None:
        """Keep only this rank's heads in the projections of attention; the outputs of all ranks are then summed."""
        if self.heads is None:
            return
        size, rank = self.heads.size(), self.heads.rank()
        for name, spec in layers.items():
            self.own_part(spec)  # for its error, before anything changes
            module, names = model.get_submodule(name), projections(spec)
            if any(not isinstance(getattr(module, each, None), torch.nn.Linear) for each in names):
                raise ModelConfigError(f"layer {name} has no {', '.join(names)} whose heads ranks can split")
            for each in names[:-1]:
                linear = getattr(module, each)
                linear.weight.data = part(linear.weight.data, 0, size, rank)
                if linear.bias is not None:
                    linear.bias.data = part(linear.bias.data, 0, size, rank)
            if getattr(module, "sinks", None) is not None:
                module.sinks.data = part(module.sinks.data, 0, size, rank)
            last = module.o_proj
            last.weight.data = part(last.weight.data, 1, size, rank)
            if last.bias is not None and rank:
                last.bias.data = torch.zeros_like(last.bias.data)  # it counts once in the sum
            module.o_proj = Summed(last, self.heads)


def projections(spec: LayerSpec) -> tuple[str, ...]:
    """The projections of a layer with outputs for each head, then the one with inputs of each."""
    if spec.mla is None:
        return "q_proj", "k_proj", "v_proj", "o_proj"
    return "q_proj" if spec.mla.q_lora_rank is None else "q_b_proj", "kv_b_proj", "o_proj"


class Summed(torch.nn.Module):
    """A projection whose inputs are shared among the ranks: its output is summed over the ranks."""

    def __init__(self, linear: torch.nn.Linear, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.linear, self.group = linear, group

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks."""
        output = self.linear(inputs)
        dist.all_reduce(output, group=self.group)
        return output


def part(tensor: torch.Tensor, dim: int, size: int, rank: int) -> torch.Tensor:
    """One rank's part of a weight."""
    return tensor.chunk(size, dim)[rank].contiguous()


@contextlib.contextmanager
def joined_ranks(
    tensor_parallel: int, context_parallel_size: int, interleave: int, device: torch.device, timeout: float
) -> Iterator[Ranks]:
    """The ranks of `torchrun`, one process each; alone where both sizes are 1.

    Raises:
        ModelConfigError: torchrun has started another number of processes.
    """
    size, found = tensor_parallel * context_parallel_size, int(os.environ.get("WORLD_SIZE", "1"))
    if found != size:
        asked = f"--tensor-parallel {tensor_parallel} --context-parallel {context_parallel_size}"
        raise ModelConfigError(
            f"{asked} needs {size} processes, not {found}: torchrun --nproc-per-node {size}"
        )
    if size == 1:
        yield Ranks()
        return
    # NCCL ends the process when its time is over, so the watch must be the first to give up.
    limit = dt.timedelta(seconds=2 * timeout if device.type == "cuda" else timeout)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=limit)
    # Ranks that share tokens are neighbours: they exchange most.
    by_tokens = [list(range(at, at + context_parallel_size)) for at in range(0, size, context_parallel_size)]
    by_heads = [list(each) for each in zip(*by_tokens, strict=True)]
    tokens, heads = (own_group(groups, limit) for groups in (by_tokens, by_heads))
    watch = RankWatch(dist.new_group(backend="gloo", timeout=limit), timeout, device)
    place = context_parallel(tokens, interleave) if context_parallel_size > 1 else None
    yield Ranks(heads if tensor_parallel > 1 else None, place, watch)
    # Not after an error, because the end of a group waits for its ranks.
    dist.destroy_process_group()


def own_group(groups: list[list[int]], limit: dt.timedelta) -> dist.ProcessGroup:
    """The group that has this process; all processes make all groups."""
    made = [dist.new_group(ranks, timeout=limit) for ranks in groups]
    return next(group for ranks, group in zip(groups, made, strict=True) if dist.get_rank() in ranks)
