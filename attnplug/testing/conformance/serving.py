"""A small model on one backend: it serves requests as an engine would, and knows what each layer must answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from attnplug.core.batch import reorder_batch_to_split_decodes_and_prefills
from attnplug.core.config import BuilderConfig
from attnplug.core.impl import LayerTensors
from attnplug.core.kv_cache_spec import SlidingWindowSpec
from attnplug.core.spec import LayerSpec
from attnplug.registry.decision import Decision
from attnplug.registry.gates import preferred_pages
from attnplug.registry.negotiation import negotiated
from attnplug.runtime.attention_runtime import AttentionRuntime
from attnplug.runtime.model_plan import ModelPlan
from attnplug.runtime.plan_pages import with_equal_pages
from attnplug.runtime.step_batch import StepBatch
from attnplug.testing.batches import layer_tensors
from attnplug.testing.conformance.target import Target
from attnplug.testing.oracle import attention_oracle, stored_values

__all__ = ["Call", "Served", "plan_on"]

_MOST_REQUESTS, _MOST_PAGES = 4, 6
_SLACK = 160
"""Tokens of a request beyond its whole pages, where pages are small."""


@dataclasses.dataclass(slots=True)
class _Request:
    """Computed tokens, pages by KV group, and by layer the keys and values so far."""

    computed: int
    blocks: list[list[int]]
    keys: dict[str, tuple[torch.Tensor, torch.Tensor]]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Call:
    """What a layer is called with in a step, and the oracle's answer; no key where it reads another's."""

    query: torch.Tensor
    key: torch.Tensor | None
    value: torch.Tensor | None
    expected: torch.Tensor


def plan_on(target: Target, specs: Mapping[str, LayerSpec], kv_sharing: Mapping[str, str]) -> ModelPlan:
    """The layers planned as if the target were the only backend there is; without a number of blocks.

    Raises:
        LayoutError: pages that cannot be made alike.
    """
    decisions = {}
    for name, spec in specs.items():
        size, layout = preferred_pages(target.backend, spec, target.device) or (None, None)
        said: dict[str, Any] = {
            "layer_name": name,
            "block_size": size,
            "kv_cache_layout": layout,
            "backend_cls": target.backend,
        }
        decisions[name] = Decision(spec, target.device, None, target.name, (), **said)
    return ModelPlan(with_equal_pages(negotiated(decisions)), target.device, dict(kv_sharing))


class Served:
    """Requests come by `add`, run by `begin`, `call` and `finish`, and go by `remove`.

    Args:
        target: the backend.
        specs: decoder layers by name.
        kv_sharing: layers that read another layer's pages.
        seed: of everything drawn, and how many blocks are left out, so that models have unlike tables.
        config: BuilderConfig's.
    """

    def __init__(
        self,
        target: Target,
        specs: Mapping[str, LayerSpec],
        kv_sharing: Mapping[str, str],
        *,
        seed: int = 0,
        **config: Any,
    ) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.seed = seed
        plan = plan_on(target, specs, kv_sharing)
        groups = plan.kv_cache_config.kv_cache_groups
        self.block_size = max(group.kv_cache_spec.block_size for group in groups)
        self.max_model_len = _MOST_PAGES * self.block_size + _SLACK
        blocks = sum(-(-self.max_model_len // group.kv_cache_spec.block_size) for group in groups)
        self.plan = dataclasses.replace(plan, num_blocks=1 + seed + _MOST_REQUESTS * blocks)
        self.groups = self.plan.kv_cache_config.kv_cache_groups
        """The KV groups."""
        self.tensors = {
            name: layer_tensors(spec, seed=seed + index, device=target.torch_device)
            for index, (name, spec) in enumerate(specs.items())
        }
        made = BuilderConfig(
            max_num_seqs=_MOST_REQUESTS,
            max_num_batched_tokens=_MOST_REQUESTS * self.max_model_len,
            max_model_len=self.max_model_len,
            **config,
        )
        self.runtime = AttentionRuntime(self.plan, self.tensors, config=made, debug=False)
        self.runtime.block_pool.allocate(seed)
        self.batches = self.runtime.step_batch_builder(self.max_model_len)
        self.num_scheduled_tokens: dict[str, int] = {}
        """Of the step that was begun, by request."""
        self._requests: dict[str, _Request] = {}

    def add(self, name: str) -> None:
        """A request without tokens."""
        blocks: list[list[int]] = [[] for _ in self.groups]
        self.batches.add_request(name, blocks)
        self._requests[name] = _Request(0, blocks, {})

    def remove(self, name: str) -> None:
        """End a request; its pages go to others."""
        self.batches.remove_request(name)
        for blocks in self._requests.pop(name).blocks:
            self.runtime.block_pool.free(blocks)

    def schedule(self, **scheduled: int) -> StepBatch:
        """Pages for the new tokens, requests in the order that the builders ask for, and the step's batch."""
        for name, count in scheduled.items():
            request, fresh = self._requests[name], []
            for held, group in zip(request.blocks, self.groups, strict=True):
                needed = -(-(request.computed + count) // group.kv_cache_spec.block_size)
                fresh.append(self.runtime.block_pool.allocate(max(needed - len(held), 0)))
                held.extend(fresh[-1])
            self.batches.append_blocks(name, fresh)
        self.num_scheduled_tokens = {name: scheduled.get(name, 0) for name in self.batches.req_ids}
        thresholds = [group.builder.reorder_batch_threshold for group in self.runtime.attention_groups]
        if any(threshold is not None for threshold in thresholds):
            least = min(threshold for threshold in thresholds if threshold is not None)
            reorder_batch_to_split_decodes_and_prefills(self.batches, self, least)
        return self.batches.step(self.num_scheduled_tokens)

    def begin(self, **scheduled: int) -> None:
        """Schedule a step and build its metadata."""
        self.runtime.begin_step(self.schedule(**scheduled))

    def call(self, layer: str) -> Call:
        """A layer's new queries, keys and values, drawn once per step and kept with the requests."""
        spec, target = self.plan.specs[layer], self.plan.kv_sharing.get(layer)
        queries, given, known = [], [], []
        for name in self.batches.req_ids:
            request, count = self._requests[name], self.num_scheduled_tokens[name]
            queries.append(2 * self._draw(spec, count, spec.num_heads, spec.head_size))
            if target is None:
                new = (
                    self._draw(spec, count, spec.num_kv_heads, spec.head_size),
                    self._draw(spec, count, spec.num_kv_heads, spec.head_size_v),
                )
                old = request.keys.get(layer, (new[0][:0], new[1][:0]))
                request.keys[layer] = torch.cat([old[0], new[0]]), torch.cat([old[1], new[1]])
                given.append(new)
            known.append(request.keys[target or layer])
        keys, values = ([stored_values(pair[half], spec) for pair in known] for half in (0, 1))
        lengths = [each.shape[0] for each in keys]
        tensors = self.tensors.get(layer, LayerTensors())
        expected = attention_oracle(spec, queries, keys, values, lengths, tensors=tensors).output
        key, value = (torch.cat([pair[half] for pair in given]) if given else None for half in (0, 1))
        query, device = torch.cat(queries), self.runtime.device
        if key is None or value is None:
            return Call(query.to(device), None, None, expected)
        return Call(query.to(device), key.to(device), value.to(device), expected)

    def run(self, layer: str, call: Call) -> torch.Tensor:
        """The layer's answer, in an output that was poisoned."""
        output = torch.full_like(call.expected, torch.nan, dtype=call.query.dtype, device=call.query.device)
        return self.runtime.forward(layer, call.query, call.key, call.value, output)

    def finish(self) -> None:
        """Count the tokens, and free the pages that windows have passed."""
        self.batches.finish_step()
        for name, count in self.num_scheduled_tokens.items():
            request = self._requests[name]
            request.computed += count
            for index, group in enumerate(self.groups):
                if isinstance(group.kv_cache_spec, SlidingWindowSpec):
                    passed = request.computed - group.kv_cache_spec.sliding_window + 1
                    self._free(name, index, max(passed, 0) // group.kv_cache_spec.block_size)

    def _free(self, name: str, group: int, count: int) -> None:
        held = self._requests[name].blocks[group]
        self.runtime.block_pool.free(held[:count])
        held[:count] = [0] * count
        self.batches.free_blocks(name, group, count)

    def _draw(self, spec: LayerSpec, count: int, heads: int, size: int) -> torch.Tensor:
        drawn = torch.randn(count, heads, size, generator=self._generator)
        return drawn.to(getattr(torch, spec.dtype))
