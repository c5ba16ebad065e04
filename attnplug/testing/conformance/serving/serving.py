"""A small model on one backend that serves requests like an engine and has the oracle's answer for each layer.

A request's prompt in pieces and its decodes, step by step, for each kind of layer; cross layers read on.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from attnplug.core.batch import reorder_batch_to_split_decodes_and_prefills
from attnplug.core.config import BuilderConfig
from attnplug.core.features import Feature
from attnplug.core.impl import LayerTensors
from attnplug.core.kv_cache_spec import SlidingWindowSpec
from attnplug.core.spec import LayerSpec
from attnplug.registry.selection.decision import Decision
from attnplug.registry.selection.gates import preferred_pages
from attnplug.registry.selection.negotiation import negotiated
from attnplug.runtime.attention_runtime import AttentionRuntime
from attnplug.runtime.batch.step_batch import StepBatch
from attnplug.runtime.plan.grouping import with_equal_pages
from attnplug.runtime.plan.model_plan import ModelPlan
from attnplug.testing.batches import Batch
from attnplug.testing.comparison import tolerance
from attnplug.testing.conformance.cases.steps import with_lengths, with_pages
from attnplug.testing.conformance.check import Check, error_context
from attnplug.testing.conformance.harness import Harness, Output
from attnplug.testing.conformance.mistakes.expectations import expect_correct
from attnplug.testing.conformance.numbers.requests import piece
from attnplug.testing.conformance.target import Target
from attnplug.testing.drawn_values import layer_tensors
from attnplug.testing.oracle import Spans, attention_oracle, stored_values
from attnplug.testing.pages import default_spans

_MOST_REQUESTS, _MOST_PAGES = 4, 6
# Tokens of a request beyond its whole pages, so that small pages allow long requests too.
_SLACK = 160


@dataclasses.dataclass(slots=True)
class _ServedRequest:
    """Computed tokens, spans, pages by KV group, and all keys and values so far by layer."""

    computed: int
    spans: Spans
    blocks: list[list[int]]
    keys: dict[str, tuple[torch.Tensor, torch.Tensor]]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LayerCall:
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
        least_tokens: that a request can have; the default is some pages.
        config: fields of BuilderConfig.
    """

    def __init__(
        self,
        target: Target,
        specs: Mapping[str, LayerSpec],
        kv_sharing: Mapping[str, str],
        *,
        seed: int = 0,
        least_tokens: int = 0,
        **config: Any,
    ) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.seed, self._quantized = seed, target.backend.quantizes_queries
        plan = plan_on(target, specs, kv_sharing)
        groups = plan.kv_cache_config.kv_cache_groups
        self.block_size = max(group.kv_cache_spec.block_size for group in groups)
        self.max_model_len = max(_MOST_PAGES * self.block_size + _SLACK, least_tokens)
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
        self.causal: bool | None = None
        """Of the next steps: True narrows the layers that are not causal."""
        self._requests: dict[str, _ServedRequest] = {}

    def add(self, name: str, first: int = 0) -> None:
        """Add a request without tokens; for layers with mm_prefix it has spans in its `first` tokens."""
        blocks: list[list[int]] = [[] for _ in self.groups]
        spans = default_spans([first], [first])[0]
        images = [(start, stop - start) for start, stop in spans]
        self.batches.add_request(name, blocks, placeholders={"image": images} if images else None)
        self._requests[name] = _ServedRequest(0, spans, blocks, {})

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
        batch = self.batches.step(self.num_scheduled_tokens)
        if self.causal is None:
            return batch
        return dataclasses.replace(batch, common=batch.common.changed(causal=self.causal))

    def begin(self, **scheduled: int) -> None:
        """Schedule a step and build its metadata."""
        self.runtime.begin_step(self.schedule(**scheduled))

    def call(self, layer: str) -> LayerCall:
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
        expected = attention_oracle(
            spec, queries, keys, values, lengths, tensors=tensors, spans=spans, causal=self.causal
        ).output
        key, value = (torch.cat([pair[half] for pair in given]) if given else None for half in (0, 1))
        query, device = torch.cat(queries), self.runtime.device
        if key is None or value is None:
            return LayerCall(query.to(device), None, None, expected)
        return LayerCall(query.to(device), key.to(device), value.to(device), expected)

    def bound(self, layer: str) -> float:
        """The bound of the errors of a layer's outputs."""
        return tolerance(self.plan.specs[layer], quantized_queries=self._quantized).output

    def run(self, layer: str, call: LayerCall) -> torch.Tensor:
        """The layer's answer, written to an output of NaN."""
        output = torch.full_like(call.expected, torch.nan, dtype=call.query.dtype, device=call.query.device)
        return self.runtime.forward(layer, call.query, call.key, call.value, output)

    def finish(self, **accepted: int) -> None:
        """Count the new tokens, and free the pages that windows no longer reach.

        Only so many tokens count of a request in `accepted`; later steps write the others again.
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


_LAYERS: dict[str, tuple[Feature, dict[str, Any]]] = {
    "full": (Feature(0), {}),
    "window": (Feature.SLIDING_WINDOW, {"window": (6, 0)}),
    "wide-window": (Feature.SLIDING_WINDOW, {"window": (21, 0)}),
    "chunk": (Feature.CHUNKED_LOCAL, {"chunk_size": 32}),
    "cap": (Feature.SOFT_CAP, {"logits_soft_cap": 3.7}),
    "slopes": (Feature.ALIBI, {"has_alibi": True}),
    "sinks": (Feature.SINKS, {"has_sinks": True}),
    "window-sinks": (Feature.SLIDING_WINDOW | Feature.SINKS, {"window": (9, 0), "has_sinks": True}),
    "fp8": (Feature.FP8_KV, {"kv_cache_dtype": "fp8"}),
}


def checks(target: Target) -> Iterator[Check]:
    """The check of each of these layers, in each dtype, and of cross layers."""
    if target.phase is None:
        for name, (needed, fields) in _LAYERS.items():
            if needed in target.backend.features:
                summary = (
                    "a prompt in pieces, then decodes and verified drafts, give the result of one prefill"
                )
                yield Check.of(f"batch/chain-{name}", summary, _check_chain, target, **target.storing(fields))
        for dtype in target.dtypes[1:]:
            summary = f"so do those of a {dtype} layer"
            yield Check.of(f"batch/chain-{dtype}", summary, _check_chain, target, dtype=dtype)
    if Feature.CROSS | Feature.NON_CAUSAL in target.backend.features and target.phase is None:
        summary = "later steps of a cross layer read the encoder's tokens that its first step wrote"
        yield Check.of("batch/cross-steps", summary, _check_cross, target)


def _check_chain(target: Target, **fields: Any) -> None:
    if "chunk_size" in fields:
        fields["chunk_size"] = 2 * target.backend.get_preferred_block_size()
    spec, size = with_pages(target, target.paged_spec(attn_type="decoder", causal=True, **fields))
    # Pieces around the ends of pages, single decodes across one, and steps that verify two or three tokens.
    counts = [max(size - 1, 1), 3, size, *[1] * (size // 2), 2, 2, 3, *[1] * 4, 2, size + 1, *[1] * 3]
    ends = list(itertools.accumulate(counts))
    scales: dict[str, Any] = {"k_scale": 0.37, "v_scale": 1.9} if spec.has_kv_scales else {}
    # A span is computed as a whole, so these pieces have none.
    spans: list[Any] | None = [[]] if spec.mm_prefix else None
    whole = target.batch(spec, [ends[-1]], [ends[-1]], exact=True, spans=spans, **scales)
    harness = Harness.of(target, whole, num_speculative_tokens=2)
    outputs = []
    for number, (start, end) in enumerate(itertools.pairwise((0, *ends)), 1):
        what = f"step {number} of a chain, tokens {start} .. {end - 1}"
        # A step with drafts that are rejected comes first; the next one writes their slots again.
        if end - start == 2:
            drafts = piece(whole, start, end)
            drafts = dataclasses.replace(drafts, key=drafts.key.flip(-1) + 1, value=drafts.value.flip(-1) + 1)
            with error_context(f"{what}, as drafts that are rejected"):
                harness.run(drafts, harness.builder.build(0, drafts.common))
        step = piece(whole, start, end)
        outputs.append(harness.forward(step, what=what).output)
    lengths = "+".join(map(str, counts[:3]))
    what = (
        f"a prompt in pieces of {lengths} tokens, then decodes, with drafts that were rejected between them"
    )
    expect_correct(whole, Output(torch.cat(outputs), None), what)


def _check_cross(target: Target) -> None:
    spec = target.spec(attn_type="encoder_decoder")
    size = target.block_size(spec)
    most = [5, 2 * size, 9, size + 3]
    # Requests by step: the encoder's tokens of those that write them now, and the queries of all, short ones first.
    # The later ones follow others in their places, with as many tokens, with fewer, and with more.
    steps: tuple[tuple[dict[int, int], list[int]], ...] = (
        ({3: size + 3, 2: 9}, [0, 0, 1, 4]),
        ({1: 2 * size}, [0, 1, 1, 7]),
        ({}, [0, 1, 1, 1]),
        ({0: 5}, [1, 1, 1, 2]),
        ({}, [1, 1, 1, 1]),
        ({2: 9}, [1, 1, 1, 3]),
        ({1: max(size - 1, 1), 3: 2}, [1, 1, 1, 4]),
        ({}, [1, 1, 1, 1]),
        ({1: size + 1, 2: 9, 3: 2}, [1, 1, 2, 3]),
        ({3: size + 3, 0: 1}, [1, 1, 1, 2]),
        ({}, [1, 1, 3, 5]),
    )
    first = target.batch(spec, steps[0][1], most)
    harness = Harness.of(target, first)
    served = _Encoders(
        [0] * len(most), [each[:0] for each in first.keys], [each[:0] for each in first.values]
    )
    for number, (writers, queries) in enumerate(steps, 1):
        followers = [
            f"request {row} follows another in its place, with {_more(count, served.lengths[row])} encoder tokens"
            for row, count in writers.items()
            if served.lengths[row]
        ]
        batch = served.step(target, first, queries, writers, number)
        what = (
            f"step {number} of a cross layer, in which {len(writers)} requests write their encoder's tokens"
        )
        what = "; ".join([what, *followers])
        with error_context(what):
            metadata = harness.builder.build(0, batch.common)
            found = harness.run(batch, metadata, writes=bool(writers))
        expect_correct(batch, found, what)


def _more(count: int, before: int) -> str:
    return "as many" if count == before else "more" if count > before else "fewer"


@dataclasses.dataclass(slots=True)
class _Encoders:
    """The encoder's tokens of each request: how many, and their keys and values."""

    lengths: list[int]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def step(
        self, target: Target, first: Batch, queries: list[int], writers: Mapping[int, int], seed: int
    ) -> Batch:
        """A step over the pages of `first` with new queries; `writers` give the keys of their encoders now."""
        # Requests of length 0 have no encoder tokens yet.
        drawn = target.batch(first.spec, queries, first.seq_lens, seed=seed)
        starts = [0, *itertools.accumulate(first.seq_lens)]
        for row, count in writers.items():
            self.lengths[row] = count
            self.keys[row], self.values[row] = drawn.keys[row][:count], drawn.values[row][:count]
        own = [token for row in sorted(writers) for token in range(starts[row], starts[row] + writers[row])]
        rows = torch.tensor(own, dtype=torch.int64, device=first.key.device)
        common = dataclasses.replace(
            with_lengths(drawn.common, torch.tensor(self.lengths)),
            block_table_tensor=first.common.block_table_tensor,
            slot_mapping=first.common.slot_mapping[rows],
        )
        return dataclasses.replace(
            drawn,
            common=common,
            kv_cache=first.kv_cache,
            key=drawn.key[rows],
            value=drawn.value[rows],
            keys=list(self.keys),
            values=list(self.values),
            seq_lens=list(self.lengths),
        )
