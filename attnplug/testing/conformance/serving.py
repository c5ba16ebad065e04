"""A small model on one backend that serves requests like an engine and has the oracle's answer for each layer."""

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
from attnplug.registry.selection.decision import Decision
from attnplug.registry.selection.gates import preferred_pages
from attnplug.registry.selection.negotiation import negotiated
from attnplug.runtime.attention_runtime import AttentionRuntime
from attnplug.runtime.batch.step_batch import StepBatch
from attnplug.runtime.plan.model_plan import ModelPlan
from attnplug.runtime.plan.plan_pages import with_equal_pages
from attnplug.testing.conformance.target import Target
from attnplug.testing.drawn_values import layer_tensors
from attnplug.testing.oracle import Spans, attention_oracle, stored_values
from attnplug.testing.spans import default_spans

_MOST_REQUESTS, _MOST_PAGES = 4, 6
_SLACK = 160
"""Tokens of a request beyond its whole pages, so that small pages allow long requests too."""


@dataclasses.dataclass(slots=True)
class _Request:
    """Computed tokens, spans, pages by KV group, and all keys and values so far by layer."""

    computed: int
    spans: Spans
    blocks: list[list[int]]
    keys: dict[str, tuple[torch.Tensor, torch.Tensor]]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A layer's inputs in a step and the oracle's answer; no key for a layer that reads another's pages."""

    query: torch.Tensor
    key: torch.Tensor | None
    value: torch.Tensor | None
    expected: torch.Tensor


def plan_on(target: Target, specs: Mapping[str, LayerSpec], kv_sharing: Mapping[str, str]) -> ModelPlan:
    """A plan of the layers with the target as the only backend, without a number of blocks.

    Raises:
        LayoutError: the pages cannot be made equal in size.
    """
    decisions = {}
    for name, spec in specs.items():
        size, layout = preferred_pages(target.backend, spec, target.device) or (None, None)
        decisions[name] = Decision(
            spec,
            target.device,
            None,
            target.name,
            (),
            layer_name=name,
            block_size=size,
            kv_cache_layout=layout,
            options=_by_name(target.own_options),
            backend_cls=target.backend,
        )
    return ModelPlan(with_equal_pages(negotiated(decisions)), target.device, dict(kv_sharing))


def _by_name(options: Any) -> tuple[tuple[str, Any], ...] | None:
    """Options as a decision has them."""
    if options is None:
        return None
    names = sorted(field.name for field in dataclasses.fields(options) if field.init)
    return tuple((name, getattr(options, name)) for name in names)


class ServedModel:
    """A model and its requests. A step is `begin`, then `call` and `run` for each layer, then `finish`.

    Args:
        target: the backend.
        specs: decoder layers by name.
        kv_sharing: layers that read another layer's pages.
        seed: for all random values; also the number of unused blocks, so that models have different tables.
        config: fields of BuilderConfig.
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
        """New tokens of the current step, by request."""
        self._requests: dict[str, _Request] = {}

    def add(self, name: str, first: int = 0) -> None:
        """Add a request without tokens; for layers with mm_prefix it has spans in its `first` tokens."""
        blocks: list[list[int]] = [[] for _ in self.groups]
        spans = default_spans([first], [first])[0]
        images = [(start, stop - start) for start, stop in spans]
        self.batches.add_request(name, blocks, placeholders={"image": images} if images else None)
        self._requests[name] = _Request(0, spans, blocks, {})

    def remove(self, name: str) -> None:
        """Remove a request and free its pages."""
        self.batches.remove_request(name)
        for blocks in self._requests.pop(name).blocks:
            self.runtime.block_pool.free(blocks)

    def schedule(self, **scheduled: int) -> StepBatch:
        """Allocate pages for the new tokens, reorder the requests for the builders, and return the step's batch."""
        for name, count in scheduled.items():
            request, fresh = self._requests[name], []
            for blocks, group in zip(request.blocks, self.groups, strict=True):
                needed = -(-(request.computed + count) // group.kv_cache_spec.block_size)
                fresh.append(self.runtime.block_pool.allocate(max(needed - len(blocks), 0)))
                blocks.extend(fresh[-1])
            self.batches.append_blocks(name, fresh)
        self.num_scheduled_tokens = {name: scheduled.get(name, 0) for name in self.batches.req_ids}
        thresholds = [group.builder.reorder_batch_threshold for group in self.runtime.attention_groups]
        if numbers := [threshold for threshold in thresholds if threshold is not None]:
            reorder_batch_to_split_decodes_and_prefills(self.batches, self, min(numbers))
        return self.batches.step(self.num_scheduled_tokens)

    def begin(self, **scheduled: int) -> None:
        """Schedule a step and build its metadata."""
        self.runtime.begin_step(self.schedule(**scheduled))

    def call(self, layer: str) -> Call:
        """Random new queries, keys and values of a layer, which are kept for later steps; call it once per step."""
        spec, target = self.plan.specs[layer], self.plan.kv_sharing.get(layer)
        queries, given, known = [], [], []
        for name in self.batches.req_ids:
            request, count = self._requests[name], self.num_scheduled_tokens[name]
            queries.append(2 * self._draw(spec, count, spec.num_heads, spec.query_size))
            if target is None:
                drawn = self._draw(spec, count, spec.num_kv_heads, spec.head_size)
                new = (
                    drawn,
                    self._draw(spec, count, spec.num_kv_heads, spec.head_size_v)
                    if spec.mla is None
                    else drawn[..., : spec.head_size_v].contiguous(),
                )
                old = request.keys.get(layer, (new[0][:0], new[1][:0]))
                request.keys[layer] = torch.cat([old[0], new[0]]), torch.cat([old[1], new[1]])
                given.append(new)
            known.append(request.keys[target or layer])
        keys, values = ([stored_values(pair[half], spec) for pair in known] for half in (0, 1))
        lengths = [each.shape[0] for each in keys]
        tensors = self.tensors.get(layer, LayerTensors())
        spans = [self._requests[name].spans for name in self.batches.req_ids]
        expected = attention_oracle(spec, queries, keys, values, lengths, tensors=tensors, spans=spans).output
        key, value = (torch.cat([pair[half] for pair in given]) if given else None for half in (0, 1))
        query, device = torch.cat(queries), self.runtime.device
        if key is None or value is None:
            return Call(query.to(device), None, None, expected)
        return Call(query.to(device), key.to(device), value.to(device), expected)

    def run(self, layer: str, call: Call) -> torch.Tensor:
        """The layer's answer, written to an output of NaN."""
        output = torch.full_like(call.expected, torch.nan, dtype=call.query.dtype, device=call.query.device)
        return self.runtime.forward(layer, call.query, call.key, call.value, output)

    def finish(self, **accepted: int) -> None:
        """Count the new tokens, and free the pages that windows no longer reach.

        Of a request in `accepted`, only so many tokens count; later steps write the others again.
        """
        counts = self.num_scheduled_tokens | accepted
        self.batches.finish_step(counts)
        for name, count in counts.items():
            request = self._requests[name]
            request.computed += count
            kept = slice(request.computed)
            request.keys = {layer: (k[kept], v[kept]) for layer, (k, v) in request.keys.items()}
            for index, group in enumerate(self.groups):
                if isinstance(group.kv_cache_spec, SlidingWindowSpec):
                    passed = request.computed - group.kv_cache_spec.sliding_window + 1
                    blocks, freed = request.blocks[index], max(passed, 0) // group.kv_cache_spec.block_size
                    self.runtime.block_pool.free(blocks[:freed])
                    blocks[:freed] = [0] * freed
                    self.batches.free_blocks(name, index, freed)

    def _draw(self, spec: LayerSpec, count: int, heads: int, size: int) -> torch.Tensor:
        drawn = torch.randn(count, heads, size, generator=self._generator)
        return drawn.to(getattr(torch, spec.dtype))
