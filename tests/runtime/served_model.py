"""A model whose layers draw their q, k and v at random: it serves requests on a runtime, and checks every
layer of every step against the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from attnplug import plan
from attnplug.core import BuilderConfig, LayerSpec, LayerTensors
from attnplug.core.kv_cache_spec import CrossAttentionSpec, SlidingWindowSpec
from attnplug.core.spec import AttentionType
from attnplug.runtime import AttentionRuntime, ModelPlan, StepBatch
from attnplug.testing import assert_close, attention_oracle, layer_tensors, stored_values, tolerance
from attnplug.testing.drawn_values import stored_scale

Keys = dict[str, tuple[torch.Tensor, torch.Tensor]]


@dataclasses.dataclass
class Request:
    """Computed tokens, pages per KV group, and by layer the keys and values cached so far."""

    computed: int
    blocks: list[list[int]]
    keys: Keys
    encoder: Keys


@dataclasses.dataclass
class Drawn:
    """What one layer is called with, and what it must answer."""

    query: torch.Tensor
    key: torch.Tensor | None
    value: torch.Tensor | None
    expected: torch.Tensor


class ServedModel:
    """Requests come by `add`, run by `step`, and go by `remove`."""

    def __init__(
        self,
        specs: Mapping[str, LayerSpec],
        *,
        max_model_len: int = 64,
        max_encoder_len: int = 0,
        num_blocks: int = 128,
        scales: tuple[float, float] = (1.0, 1.0),
        debug: bool = True,
        seed: int = 0,
        planned: ModelPlan | None = None,
        device: str = "cpu",
        config: BuilderConfig | None = None,
        memory: Callable[[ModelPlan], dict[str, Any]] = lambda plan: {},
        **asked: Any,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.plan = planned or plan(specs, device, num_blocks=num_blocks, **asked)
        self.scales = scales
        self.tensors = {
            name: layer_tensors(spec, seed=index, k_scale=scales[0], v_scale=scales[1], device=device)
            for index, (name, spec) in enumerate(specs.items())
            if name not in self.plan.kv_sharing
        }
        config = config or BuilderConfig(max_num_seqs=8, max_num_batched_tokens=256)
        self.runtime = AttentionRuntime(
            self.plan, self.tensors, config=config, debug=debug, **memory(self.plan)
        )
        self.batches = self.runtime.step_batch_builder(max_model_len, max_encoder_len)
        self.groups = self.runtime.kv_cache_config.kv_cache_groups
        self.requests: dict[str, Request] = {}

    def add(self, name: str, encoder_len: int = 0, prefix: tuple[str, int] | None = None) -> None:
        """A new request; with a prefix, the pages of another's first tokens are shared."""
        blocks: list[list[int]] = [[] for _ in self.groups]
        computed, keys = 0, {}
        if prefix is not None:
            other, computed = self.requests[prefix[0]], prefix[1]
            for group, held in enumerate(other.blocks):
                blocks[group] = held[: computed // self._size(group)]
                self.runtime.block_pool.share(blocks[group])
            keys = {layer: (k[:computed], v[:computed]) for layer, (k, v) in other.keys.items()}
        for group, spec in enumerate(self.groups):
            if isinstance(spec.kv_cache_spec, CrossAttentionSpec):
                blocks[group] = self.runtime.block_pool.allocate(-(-encoder_len // self._size(group)))
        self.batches.add_request(name, blocks, computed, encoder_len)
        encoder = {
            layer: self._keys(spec, encoder_len)
            for layer, spec in self.plan.specs.items()
            if spec.attn_type is AttentionType.ENCODER_DECODER
        }
        self.requests[name] = Request(computed, blocks, keys, encoder)

    def remove(self, name: str) -> None:
        self.batches.remove_request(name)
        for blocks in self.requests.pop(name).blocks:
            self.runtime.block_pool.free(blocks)

    def step(self, accepted: Mapping[str, int] | None = None, **scheduled: int) -> StepBatch:
        """Run `scheduled` tokens of the requests named; of them count only those `accepted`."""
        batch = self.begin(**scheduled)
        for layer in self._order():
            self.check(layer, self.draw(layer, scheduled))
        self.finish(accepted, **scheduled)
        return batch

    def draft(self, index: int, **scheduled: int) -> StepBatch:
        """Run draft step `index`; its tokens are not verified, so windows free no page."""
        batch = self.begin(index, **scheduled)
        for layer in self._order():
            self.check(layer, self.draw(layer, scheduled))
        self.count(scheduled)
        return batch

    def rollback(self, **rejected: int) -> None:
        """Forget the last computed tokens of requests, and their keys."""
        self.batches.rollback({name: rejected.get(name, 0) for name in self.batches.req_ids})
        for name, count in rejected.items():
            self.requests[name].computed -= count
        self._forget()

    def begin(self, draft_index: int | None = None, /, **scheduled: int) -> StepBatch:
        """Pages for the tokens, and the step begun."""
        for name, count in scheduled.items():
            request = self.requests[name]
            fresh: list[list[int]] = [[] for _ in self.groups]
            for group, held in enumerate(request.blocks):
                if isinstance(self.groups[group].kv_cache_spec, CrossAttentionSpec):
                    continue
                missing = -(-(request.computed + count) // self._size(group)) - len(held)
                fresh[group] = self.runtime.block_pool.allocate(max(missing, 0))
                held += fresh[group]
            self.batches.append_blocks(name, fresh)
        self.first = {n for n, r in self.requests.items() if r.computed == 0 and scheduled.get(n)}
        batch = self.batches.step(scheduled)
        self.runtime.begin_step(batch, draft_index=draft_index)
        return batch

    def draw(self, layer: str, scheduled: Mapping[str, int]) -> Drawn:
        """A layer's q, k and v, kept with the requests, and the oracle's answer."""
        spec = self.plan.specs[layer]
        target = self.plan.kv_sharing.get(layer)
        cross = spec.attn_type is AttentionType.ENCODER_DECODER
        queries, keys, values, lengths = [], [], [], []
        given: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name in self.batches.req_ids:
            request, count = self.requests[name], scheduled.get(name, 0)
            shape = (count, spec.num_heads, spec.query_size)
            queries.append(2 * torch.randn(shape, generator=self.generator).to(getattr(torch, spec.dtype)))
            if cross:
                known = request.encoder[layer]
                given += [known] if name in self.first else []
            elif target is not None:
                known = request.keys[target]
            else:
                new = self._keys(spec, count)
                given.append(new)
                old = request.keys.get(layer)
                known = new if old is None else (torch.cat([old[0], new[0]]), torch.cat([old[1], new[1]]))
                request.keys[layer] = known
            keys.append(stored_values(known[0], spec, stored_scale(spec, self.scales[0])))
            values.append(stored_values(known[1], spec, stored_scale(spec, self.scales[1])))
            lengths.append(known[0].shape[0])
        tensors = self.tensors.get(layer, LayerTensors())
        expected = attention_oracle(spec, queries, keys, values, lengths, tensors=tensors)
        key, value = (
            (torch.cat([pair[0] for pair in given]), torch.cat([pair[1] for pair in given]))
            if given
            else (None, None)
        )
        # The value of a latent is a part of it.
        value = None if spec.mla is not None else value
        on_device = [None if t is None else t.to(self.runtime.device) for t in (key, value)]
        return Drawn(torch.cat(queries).to(self.runtime.device), *on_device, expected.output)

    def run(self, layer: str, drawn: Drawn) -> torch.Tensor:
        return self.runtime.forward(layer, drawn.query, drawn.key, drawn.value)

    def check(self, layer: str, drawn: Drawn) -> None:
        assert_close(self.run(layer, drawn), drawn.expected, tolerance(self.plan.specs[layer]).output, layer)

    def finish(self, accepted: Mapping[str, int] | None = None, **scheduled: int) -> None:
        """Count the tokens, forget the keys of those not accepted, and free what windows have passed."""
        self.count({name: (accepted or {}).get(name, count) for name, count in scheduled.items()})
        for name, request in self.requests.items():
            for group, spec in enumerate(self.groups):
                if isinstance(spec.kv_cache_spec, SlidingWindowSpec):
                    passed = request.computed - spec.kv_cache_spec.sliding_window + 1
                    self._free(name, group, max(passed, 0) // self._size(group))

    def count(self, kept: Mapping[str, int]) -> None:
        """Count tokens of the step as computed."""
        self.batches.finish_step(kept)
        for name, count in kept.items():
            self.requests[name].computed += count
        self._forget()

    def _forget(self) -> None:
        """Keep the keys of computed tokens only."""
        for request in self.requests.values():
            request.keys = {
                layer: (k[: request.computed], v[: request.computed])
                for layer, (k, v) in request.keys.items()
            }

    def _free(self, name: str, group: int, pages: int) -> None:
        held = self.requests[name].blocks[group]
        self.runtime.block_pool.free(held[:pages])
        held[:pages] = [0] * pages
        self.batches.free_blocks(name, group, pages)

    def _order(self) -> list[str]:
        """Layers whose pages are read come before those that read them, as in the plan."""
        return [name for name, spec in self.plan.specs.items() if not spec.direct_kv]

    def _size(self, group: int) -> int:
        return self.groups[group].kv_cache_spec.block_size

    def _keys(self, spec: LayerSpec, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = getattr(torch, spec.dtype)
        key = torch.randn(count, spec.num_kv_heads, spec.head_size, generator=self.generator).to(dtype)
        if spec.mla is not None:
            return key, key[..., : spec.head_size_v]
        value = torch.randn(count, spec.num_kv_heads, spec.head_size_v, generator=self.generator).to(dtype)
        return key, value
