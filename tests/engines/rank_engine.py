"""An engine of ranks that share the tokens of each request, as vLLM's do, and the right answers; vLLM is not needed."""

from __future__ import annotations

import dataclasses
import datetime as dt
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

from attnplug.core.batch.context_parallel import get_dcp_local_seq_lens

BLOCK = 16


@dataclasses.dataclass
class Request:
    """A request: the keys of all its tokens, its blocks, and how many tokens are computed."""

    keys: torch.Tensor
    values: torch.Tensor
    blocks: list[int]
    computed: int = 0


class Engine:
    """The pages of one rank, filled by vLLM's rule for the slots of ranks."""

    local_lengths = staticmethod(get_dcp_local_seq_lens)
    """The tokens of each request on a rank."""

    def __init__(self, rank: int, size: int, interleave: int, kv_sizes: tuple[int, int]) -> None:
        self.rank, self.size, self.interleave, self.kv_sizes = rank, size, interleave, kv_sizes
        # All ranks draw the same numbers.
        self.random = torch.Generator().manual_seed(7)
        self.requests: dict[str, Request] = {}
        self.free = list(range(1, 64))

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random)

    def add(self, name: str, tokens: int, like: str | None = None, blocks: int = 0) -> None:
        """A request of up to `tokens` tokens, whose first blocks may be another's, from a prefix cache."""
        drawn = (self.draw(tokens, size) for size in self.kv_sizes)
        # Values that 8 bits can store with a scale of 2, so that such caches change none.
        made = Request(*((each * (each.abs() > 0.05)).to(torch.float8_e4m3fn).float() for each in drawn), [])
        if like is not None:
            other, made.computed = self.requests[like], blocks * BLOCK * self.size
            for mine, theirs in ((made.keys, other.keys), (made.values, other.values)):
                mine[: made.computed] = theirs[: made.computed]
            made.blocks = other.blocks[:blocks]
        while len(made.blocks) * BLOCK * self.size < tokens:
            made.blocks.append(self.free.pop(len(made.blocks) % 3))
        self.requests[name] = made

    def slot(self, request: Request, position: int) -> int:
        """The slot of a token on this rank by vLLM's rule for blocks that all ranks share; -1 on another rank."""
        block, inside = divmod(position, BLOCK * self.size)
        if inside // self.interleave % self.size != self.rank:
            return -1
        turn = inside // (self.size * self.interleave)
        return request.blocks[block] * BLOCK + turn * self.interleave + inside % self.interleave

    def step(
        self, new: dict[str, int], padding: int = 0
    ) -> tuple[SimpleNamespace, list[tuple[Request, int]]]:
        """A step with so many new tokens of each request, by vLLM's names, and the request and place of each token."""
        rows = [
            (request, request.computed + token)
            for name, count in new.items()
            for request in [self.requests[name]]
            for token in range(count)
        ]
        for name, count in new.items():
            self.requests[name].computed += count
        reqs = len(new) + padding
        counts = [*new.values(), *[0] * padding]
        lens = torch.tensor([*(self.requests[name].computed for name in new), *[0] * padding]).int()
        starts = torch.tensor(np.cumsum([0, *counts])).int()
        table = torch.zeros(reqs, 12, dtype=torch.int32)
        for row, name in enumerate(new):
            blocks = self.requests[name].blocks
            table[row, : len(blocks)] = torch.tensor(blocks).int()
        slots = [*(self.slot(*row) for row in rows), *[-1] * padding]
        local = self.local_lengths(lens, self.size, self.rank, self.interleave)
        common = SimpleNamespace(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lens,
            num_reqs=reqs,
            num_actual_tokens=len(rows) + padding,
            max_query_len=max(counts),
            max_seq_len=int(lens.max()),
            block_table_tensor=table,
            slot_mapping=torch.tensor(slots),
            seq_lens_cpu_upper_bound=lens,
            dcp_local_seq_lens=local,
            dcp_local_seq_lens_cpu=local,
            causal=True,
            logits_indices_padded=None,
            num_logits_indices=None,
            encoder_seq_lens=None,
            encoder_seq_lens_cpu=None,
        )
        return common, rows


def steps(engine: Engine) -> Iterator[tuple[SimpleNamespace, list[tuple[Request, int]]]]:
    """Prompts, mixed steps with a prefix hit and a cut prompt, and decodes; some ranks have no key of short requests."""
    prefix = BLOCK * engine.size
    engine.add("long", prefix + 45)
    engine.add("one", 8)
    engine.add("short", 9)
    yield engine.step({"one": 1, "long": prefix + 21, "short": 3})
    engine.add("hit", prefix + 30, like="long", blocks=1)
    engine.add("cut", 50)
    yield engine.step({"one": 1, "long": 1, "short": 1, "hit": 20, "cut": 30})
    yield engine.step({"long": 1, "short": 1, "hit": 1, "cut": 18})
    yield engine.step({"long": 1, "one": 1, "short": 1, "hit": 1, "cut": 1})
    yield engine.step({"one": 1, "long": 1, "cut": 1}, padding=2)
    # Short prompts after computed tokens.
    yield engine.step({"one": 3, "short": 2, "hit": 5})
    engine.add("new", 19)
    yield engine.step({"new": 19})


def answer(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """`[H, Dv]` of one token `query [H, D]` over the keys `[S, D]` before it and its own, in float64."""
    logits = query.double() @ keys.double().T * scale
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    extra = logits.new_empty(logits.shape[0], 0) if sinks is None else sinks.double()[:, None]
    weights = torch.cat((logits, extra), dim=1).softmax(-1)[:, : logits.shape[1]]
    return weights @ values.double()


@dataclasses.dataclass(eq=False)
class Group:
    """What vLLM's GroupCoordinator has."""

    world_size: int
    rank_in_group: int
    device_group: dist.ProcessGroup | None = None


def run_ranks(size: int, run: Callable[[Group], None]) -> None:
    """Run the ranks of a gloo group in threads, each with its group as vLLM's GroupCoordinator shows it."""
    store, failed = dist.HashStore(), list[BaseException]()

    def one(rank: int) -> None:
        try:
            group = dist.ProcessGroup(store, rank, size)
            gloo = dist.ProcessGroupGloo(store, rank, size, dt.timedelta(seconds=20))
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
            run(Group(size, rank, group))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
