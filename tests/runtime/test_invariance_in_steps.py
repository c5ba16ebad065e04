"""A request of layers that ask for `invariance` has equal bits in the runtime, alone and beside any others."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

import attnplug
from attnplug.core import BuilderConfig, LayerSpec
from attnplug.runtime import AttentionRuntime

FULL = LayerSpec(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32", invariance=("batch",))
LAYERS = {
    "layers.0": FULL.replace(sliding_window=24),
    "layers.1": FULL.replace(logits_soft_cap=5.0, needs_lse=True),
    "layers.2": FULL,
}
MOST = 200


class Tokens:
    """The random queries, keys and values of a request, for each layer."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.of = {
            name: [torch.randn(MOST, heads, 32, generator=generator) for heads in (4, 2, 2)]
            for name in LAYERS
        }


class Engine:
    def __init__(self, plan: Any) -> None:
        config = BuilderConfig(max_num_seqs=16, max_num_batched_tokens=512, max_model_len=MOST)
        self.runtime = AttentionRuntime(plan, config=config)
        self.requests = self.runtime.step_batch_builder()
        groups = plan.kv_cache_config.kv_cache_groups
        self.sizes = [group.kv_cache_spec.block_size for group in groups]

    def add(self, name: str, end: int) -> None:
        pool = self.runtime.block_pool
        blocks = [pool.allocate(-(-end // size)) for size in self.sizes]
        self.requests.add_request(name, blocks, num_computed_tokens=0)

    def step(self, parts: Mapping[str, tuple[Tokens, int, int]]) -> dict[str, list[torch.Tensor]]:
        """The outputs and LSE of each request's tokens `first` to `end`."""
        batch = self.requests.step({name: end - first for name, (_, first, end) in parts.items()})
        self.runtime.begin_step(batch)
        order = [name for name in batch.req_ids if name in parts]
        found: dict[str, list[torch.Tensor]] = {name: [] for name in parts}
        for layer in LAYERS:
            rows = [
                torch.cat([parts[name][0].of[layer][part][parts[name][1] : parts[name][2]] for name in order])
                for part in range(3)
            ]
            output = torch.empty_like(rows[0])
            lse = torch.empty(rows[0].shape[:2]) if LAYERS[layer].needs_lse else None
            self.runtime.forward(layer, *rows, output=output, output_lse=lse)
            start = 0
            for name in order:
                count = parts[name][2] - parts[name][1]
                found[name] += [each[start : start + count] for each in (output, lse) if each is not None]
                start += count
        self.requests.finish_step()
        return found


def cuts(chance: random.Random, total: int) -> list[tuple[int, int]]:
    """The steps of a request: pieces of its prompt, then decodes."""
    prompt = chance.randint(1, total - 1)
    ends = sorted({prompt, *chance.sample(range(1, prompt + 1), chance.randint(0, min(2, prompt - 1)))})
    ends += range(prompt + 1, min(total, prompt + 4) + 1)
    return list(zip([0, *ends], ends, strict=False))


@pytest.mark.parametrize("seed", range(6))
def test_a_request_has_the_same_bits_alone_and_beside_others(seed: int) -> None:
    chance = random.Random(seed)
    plan = attnplug.plan(LAYERS, "cpu", num_blocks=512)
    lengths = [chance.randint(2, MOST) for _ in range(5)]
    # Decodes of almost equal length are those that kernels pad.
    lengths += [min(lengths[0] + more, MOST) for more in (1, 7)]
    requests = {f"r{number}": Tokens(100 * seed + number) for number in range(len(lengths))}
    steps = {name: cuts(chance, length) for name, length in zip(requests, lengths, strict=True)}
    together: dict[str, list[list[torch.Tensor]]] = {name: [] for name in requests}
    engine = Engine(plan)
    for name, length in zip(requests, lengths, strict=True):
        engine.add(name, length)
    for number in range(max(map(len, steps.values()))):
        here = {name: own for name, own in steps.items() if number < len(own)}
        parts = {name: (requests[name], *own[number]) for name, own in here.items()}
        for name, rows in engine.step(parts).items():
            together[name].append(rows)
    for name, own in steps.items():
        alone = Engine(plan)
        alone.add(name, max(end for _, end in own))
        for number, (first, end) in enumerate(own):
            rows = alone.step({name: (requests[name], first, end)})[name]
            expect_equal_bits(rows, together[name][number], f"{name}, tokens {first} to {end - 1}")


def expect_equal_bits(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], what: str) -> None:
    for one, other in zip(found, expected, strict=True):
        bits = [each.contiguous().view(torch.int32) for each in (one, other)]
        assert torch.equal(*bits), what
