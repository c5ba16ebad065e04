"""A model of state layers served by a runtime in random schedules, beside an oracle that computes each request alone."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
from families import FAMILIES, draw

import attnplug
from attnplug.core import BuilderConfig, LayerTensors
from attnplug.runtime import AttentionRuntime, StateStep, serving_states
from attnplug.testing.state_oracle import StateInputs, reference_states


def runtime_of(
    family: str, *, drafts: int = 0, block_size: int | None = None, num_states: int = 64, **more: Any
) -> Any:
    """A runtime of one layer "s" of a family, in float32."""
    specs = serving_states({"s": FAMILIES[family]}, drafts=drafts, block_size=block_size)
    plan = attnplug.plan(specs, "cpu", num_states=num_states)
    inputs = draw(family, 1)
    weights = (
        {"s": LayerTensors(conv_weight=inputs.weight.float(), conv_bias=inputs.bias.float())}
        if inputs.weight is not None and inputs.bias is not None
        else {}
    )
    return AttentionRuntime(plan, weights, config=BuilderConfig(max_model_len=4096), **more)


def forward_inputs(inputs: StateInputs, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The arguments of `AttentionRuntime.forward`."""
    return {name: None if each is None else each.to(dtype) for name, each in inputs.by_token().items()}


@dataclasses.dataclass
class Served:
    """A request: the inputs of all its tokens, the right outputs, its prefix, and how far it is."""

    inputs: StateInputs
    right: torch.Tensor
    prefix: int
    done: int = 0


_TOKENS, _SHARED, _BLOCK, _DRAFTS, _PAGES = 60, 30, 8, 3, 120


class Schedule:
    """A random schedule of chunks, decodes, drafts, shared prefixes, preemption and padding."""

    def __init__(self, family: str, seed: int, dtype: torch.dtype) -> None:
        self.family, self.spec, self.dtype, self.rng = family, FAMILIES[family], dtype, random.Random(seed)
        self.runtime = runtime_of(family, drafts=_DRAFTS, block_size=_BLOCK, num_states=_PAGES)
        self.layer = self.runtime._states.layers["s"]
        shape = self.layer.states.shape
        # Stale pages have NaN, which must reach nothing.
        self.layer.states = torch.full(shape, torch.nan, dtype=dtype)
        if dtype is torch.float64:
            # The dtypes of a layer end at float32, whose rounding would hide small mistakes.
            weights, impl = draw(family, 1), self.layer._impl
            given = {"conv_weight": weights.weight, "conv_bias": weights.bias}
            impl.tensors = dataclasses.replace(impl.tensors, **given)
            self.layer.check_call = lambda *_: None
        self.table = self.runtime.state_table(in_place=self.rng.random() < 0.5)
        self.kept: dict[tuple[int, int], int] = {}
        self.live: dict[str, Served] = {}
        self.serial, self.worst = 0, 0.0

    def admit(self) -> None:
        """Add a request, which may start from a checkpoint of another one with its prefix."""
        name, prefix = f"r{self.serial}", self.rng.randrange(3)
        self.serial += 1
        tail = draw(self.family, _TOKENS - _SHARED, seed=100 + self.serial)
        inputs = draw(self.family, _SHARED, seed=prefix).joined(tail)
        starts = [count for whose, count in self.kept if whose == prefix]
        start = self.rng.choice(starts) if starts and self.rng.random() < 0.7 else 0
        self.live[name] = Served(inputs, reference_states(self.spec, inputs)[0], prefix, start)
        self.table.add_request(name, start, self.kept[prefix, start] if start else None)

    def step(self) -> None:
        """Run one step of all requests, and compare its outputs."""
        counts = {
            name: min(self.rng.choice([0, 1, 1, 2, 5, 13]), _TOKENS - each.done)
            for name, each in self.live.items()
        }
        drafts = {
            name: self.rng.randint(1, min(_DRAFTS, count - 1))
            for name, count in counts.items()
            if count > 1 and self.rng.random() < 0.4
        }
        accepted = {n: self.rng.randint(c - drafts.get(n, 0), c) for n, c in counts.items()}
        parts = [self.part(name, count, accepted[name]) for name, count in counts.items()]
        step = self.table.step(counts, drafts)
        out = self.run(step, parts[0].joined(*parts[1:]))
        at = 0
        for name, count in counts.items():
            own, good = self.live[name], accepted[name]
            right = own.right[own.done : own.done + good]
            if good:
                scale = float(right.abs().max().clamp_min(1e-30))
                self.worst = max(
                    self.worst, float((out[at : at + good].double() - right).abs().max()) / scale
                )
            own.done, at = own.done + good, at + count
        self.table.finish_step(accepted)

    def part(self, name: str, count: int, good: int) -> StateInputs:
        """The next tokens of a request; rejected drafts are others than the right ones."""
        own = self.live[name]
        part = own.inputs.rows(list(range(own.done, own.done + count)))
        for tensor in (part.query, part.key, part.value):
            if tensor is not None:
                tensor[good:] = 7.0
        return part

    def run(self, step: StateStep, packed: StateInputs) -> torch.Tensor:
        """The outputs of a step with three rows of padding; foreign pages must stay as they are."""
        padded = forward_inputs(packed.joined(_nan_like(draw(self.family, 3))), self.dtype)
        before = self.layer.states.clone()
        self.runtime.begin_step(states=step)
        out = self.runtime.forward("s", **padded)[: packed.tokens]
        assert step.common.state_slots_cpu is not None
        others = sorted({*range(_PAGES)} - {*step.common.state_slots_cpu.tolist()})
        assert torch.equal(self.layer.states[others].nan_to_num(9.0), before[others].nan_to_num(9.0))
        if not step.overwrites:
            assert torch.equal(self.runtime.forward("s", **padded)[: packed.tokens], out)
        return out

    def retire(self) -> None:
        """Keep checkpoints for others, remove requests that are done, and preempt some."""
        for name, own in list(self.live.items()):
            found = self.table.checkpoints(name)
            for tokens, page in found.items():
                if tokens <= _SHARED and (own.prefix, tokens) not in self.kept:
                    self.kept[own.prefix, tokens] = page
                    self.runtime.state_pool.share([page])
            if own.done < _TOKENS and self.rng.random() < 0.9:
                continue
            last = max((each for each in found if each < own.done), default=0)
            self.runtime.state_pool.share([found[last]] if last else [])
            self.table.remove_request(name)
            if own.done == _TOKENS or not last:
                self.runtime.state_pool.free([found[last]] if last else [])
                del self.live[name]
                continue
            # Preempted, and resumed from its last checkpoint.
            self.table.add_request(name, last, found[last])
            self.runtime.state_pool.free([found[last]])
            own.done = last

    def close(self) -> None:
        """Give all pages back; none may be lost."""
        for name in list(self.live):
            self.table.remove_request(name)
        self.runtime.state_pool.free(self.kept.values())
        assert self.runtime.state_pool.num_free == _PAGES - 1
        self.runtime.close()


def schedule(family: str, seed: int, *, dtype: torch.dtype = torch.float64, steps: int = 14) -> float:
    """The largest relative error in a random schedule."""
    made = Schedule(family, seed, dtype)
    for _ in range(steps):
        while not made.live or (len(made.live) < 4 and made.rng.random() < 0.7):
            made.admit()
        made.step()
        made.retire()
    made.close()
    return made.worst


def _nan_like(inputs: StateInputs) -> StateInputs:
    changed: dict[str, Any] = {
        name: None if each is None else torch.full_like(each, torch.nan)
        for name, each in inputs.by_token().items()
    }
    return dataclasses.replace(inputs, **changed)
