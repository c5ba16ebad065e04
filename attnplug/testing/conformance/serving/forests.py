"""Random forests of shared prefixes and random trees of drafts, as a runtime serves them on a backend with LSE."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
import torch

from attnplug.core.config import BuilderConfig
from attnplug.core.features import Feature
from attnplug.core.impl import LayerTensors
from attnplug.core.prefix_sharing import sharing_refusal, tree_refusal
from attnplug.core.spec import LayerSpec
from attnplug.runtime.attention_runtime import AttentionRuntime
from attnplug.runtime.batch.forest_prices import SharingPrices
from attnplug.runtime.batch.step_batch import StepBatch
from attnplug.testing.comparison import assert_close, tolerance
from attnplug.testing.conformance.cases.steps import with_pages
from attnplug.testing.conformance.check import (
    Check,
    CheckSkipped,
    ConformanceError,
    Level,
    SkipKind,
    error_context,
)
from attnplug.testing.conformance.serving.serving import plan_on
from attnplug.testing.conformance.target import Target
from attnplug.testing.drawn_values import layer_tensors, stored_scale
from attnplug.testing.oracle import attention_oracle, stored_values

_NAME = "layers.0"
_LAYERS: dict[str, tuple[Feature, dict[str, Any]]] = {
    "full": (Feature(0), {}),
    "cap-sinks": (Feature.SOFT_CAP | Feature.SINKS, {"logits_soft_cap": 3.0, "has_sinks": True}),
    "window": (Feature.SLIDING_WINDOW, {"window": (1, 0)}),
    "chunk": (Feature.CHUNKED_LOCAL, {"chunk_size": 1}),
    "fp8": (Feature.FP8_KV, {"kv_cache_dtype": "fp8"}),
    "head-scales": (Feature.HEAD_SCALES, {"kv_cache_dtype": "fp8", "head_scales": True}),
}
"""Layers by name; a window and chunks are given in blocks."""


def checks(target: Target) -> Iterator[Check]:
    """The checks of shared prefixes and of draft trees, where the backend declares LSE and serves both phases."""
    features = target.backend.features
    if Feature.LSE not in features or target.phase is not None or target.is_latent:
        return
    kinds = {name: fields for name, (needed, fields) in _LAYERS.items() if needed in features}
    kinds |= {dtype: {"dtype": dtype} for dtype in target.dtypes[1:][-1:]}
    for name, fields in kinds.items():
        summary = "requests that read shared prefixes together have the answers that each has alone"
        yield Check.of(f"forest/{name}", summary, _check_forests, target, **target.storing(fields))
        summary = "each node of a draft tree sees the context, its ancestors and itself"
        yield Check.of(f"tree/{name}", summary, _check_trees, target, **target.storing(fields))


@dataclasses.dataclass(frozen=True, slots=True)
class ForestRequest:
    """Blocks, computed tokens, new tokens, and the parents of these in a tree."""

    blocks: list[int]
    computed: int
    new: int
    parents: list[int] | None = None

    def paths(self) -> list[list[int]]:
        """The new tokens that each new token sees; without a tree those up to itself."""
        found: list[list[int]] = []
        for node in range(self.new):
            parent = node - 1 if self.parents is None else self.parents[node]
            found.append([*(found[parent] if parent >= 0 else ()), node])
        return found


def _layer(target: Target, fields: dict[str, Any]) -> tuple[LayerSpec, int]:
    size = target.backend.get_preferred_block_size()
    sized = dict(fields)
    if "window" in fields:
        sized["window"] = (2 * size, 0)
    if "chunk_size" in fields:
        sized["chunk_size"] = 3 * size
    spec = target.paged_spec(attn_type="decoder", causal=True, **sized)
    spec, size = with_pages(target, spec)
    return spec, size


def _check_forests(target: Target, **fields: Any) -> None:
    spec, size = _layer(target, fields)
    _skip_refused(target, sharing_refusal(target.backend, spec, target.device, size))
    shared = 0
    for seed in range(2 if target.level is Level.SMOKE else 40):
        rng = random.Random(seed)  # noqa: S311
        requests = random_forest(rng, size)
        notes = _serve(target, spec, requests, seed, f"forest {seed}")
        shared += any("shared prefixes" in note for note in notes)
    if not shared:
        raise ConformanceError("no forest was shared although all prices are 0")


def _check_trees(target: Target, **fields: Any) -> None:
    spec, size = _layer(target, fields)
    _skip_refused(target, tree_refusal(target.backend, spec, target.device, size))
    for seed in range(2 if target.level is Level.SMOKE else 30):
        rng = random.Random(seed)  # noqa: S311
        requests = [
            dataclasses.replace(each, parents=random_tree(rng, each.new)) if rng.random() < 0.6 else each
            for each in random_forest(rng, size, most_new=12)
        ]
        _serve(target, spec, requests, seed, f"trees {seed}")


def _skip_refused(target: Target, reason: str | None) -> None:
    if reason is not None:
        raise CheckSkipped(f"{target.name}: {reason}", SkipKind.LAYER)


def random_tree(rng: random.Random, nodes: int) -> list[int]:
    """The parents of the nodes of a tree; some follow the computed tokens."""
    return [-1, *(rng.randint(max(-1, node - rng.choice((1, 3, 9))), node - 1) for node in range(1, nodes))]


def random_forest(rng: random.Random, size: int, most_new: int = 3, count: int = 7) -> list[ForestRequest]:
    """Requests that branch from two stems and from each other, at unequal depths, and a stranger."""
    blocks = iter(range(1, 1 << 20))
    stems = [[next(blocks) for _ in range(rng.randint(3, 4))] for _ in range(2)]
    stems.append([*stems[0][:2], *(next(blocks) for _ in range(2))])
    requests = []
    for number in range(count):
        # Two readers have the whole first stem, and the last request shares nothing.
        stem = stems[0] if number < 2 else [] if number == count - 1 else rng.choice(stems)
        stem = stem[: rng.randint(1, len(stem))] if number > 2 and stem else stem
        new = rng.choice((1, 1, rng.randint(1, most_new)))
        # Computed tokens at the end of a block let windows begin at one.
        computed = len(stem) * size + rng.choice((0, 0, rng.randint(0, size + 1)))
        own = -(-(computed + new) // size) - len(stem)
        requests.append(ForestRequest([*stem, *(next(blocks) for _ in range(own))], computed, new))
    return requests


def _serve(
    target: Target, spec: LayerSpec, requests: list[ForestRequest], seed: int, what: str
) -> tuple[str, ...]:
    """One step of the requests over drawn pages, checked by the oracle; gives its notes."""
    most = max(max(each.blocks) for each in requests)
    size = preferred_size(target, spec)
    limits = (
        len(requests),
        sum(each.new for each in requests),
        max(len(each.blocks) for each in requests) * size,
    )
    with ForestModel(target, spec, most + 1, *limits, seed) as model:
        return model.check(requests, seed, what)


def preferred_size(target: Target, spec: LayerSpec) -> int:
    """The tokens of a block of the layer."""
    return plan_on(target, {_NAME: spec}, {}).kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size


class ForestModel:
    """One layer on a runtime that shares all that it can; each step has other requests over other pages.

    Args:
        target: the backend.
        spec: the layer.
        num_blocks: of the pool.
        requests: the most of a step.
        tokens: the most new tokens of a step.
        longest: tokens of the longest request.
        seed: for sinks.
    """

    def __init__(
        self,
        target: Target,
        spec: LayerSpec,
        num_blocks: int,
        requests: int,
        tokens: int,
        longest: int,
        seed: int = 0,
    ) -> None:
        self._spec, self._longest, self._blocks = spec, longest, num_blocks
        plan = dataclasses.replace(plan_on(target, {_NAME: spec}, {}), num_blocks=num_blocks)
        self.block_size = plan.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._scales: dict[str, Any] = {"k_scale": 0.37, "v_scale": 1.9} if spec.has_kv_scales else {}
        self._tensors = layer_tensors(spec, seed=seed, device=target.torch_device, **self._scales)
        config = BuilderConfig(max_num_seqs=requests, max_num_batched_tokens=tokens, max_model_len=longest)
        free = SharingPrices.free()
        self._runtime = AttentionRuntime(
            plan, {_NAME: self._tensors}, config=config, debug=False, prefix_sharing=free
        )
        self._bound = tolerance(spec, quantized_queries=target.backend.quantizes_queries).output

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runtime.close()

    def check(
        self, requests: list[ForestRequest], seed: int, what: str, *, poison: bool = False
    ) -> tuple[str, ...]:
        """One step of the requests over drawn pages, compared with the oracle; gives its notes.

        Args:
            requests: of the step.
            seed: for queries, keys and values.
            what: begins the text of an error.
            poison: put NaN into all slots that no request has.

        Raises:
            ConformanceError: a row differs, or the runtime raises.
        """
        runtime, spec, size = self._runtime, self._spec, self.block_size
        generator = torch.Generator().manual_seed(seed)
        with error_context(what):
            batches = runtime.step_batch_builder(self._longest)
            for number, request in enumerate(requests):
                batches.add_request(str(number), [request.blocks], request.computed)
            dtype, slots = getattr(torch, spec.dtype), torch.arange(size, self._blocks * size)
            drawn = [
                torch.randn(slots.shape[0] + size, spec.num_kv_heads, width, generator=generator).to(dtype)
                for width in (spec.head_size, spec.head_size_v)
            ]
            if poison:
                is_foreign = torch.ones(drawn[0].shape[0], dtype=torch.bool)
                for each in requests:
                    is_foreign[torch.as_tensor(_slots(each, np.arange(each.computed + each.new), size))] = (
                        False
                    )
                for values in drawn:
                    values[is_foreign] = torch.nan
            layer = runtime.layers[_NAME]
            if layer.kv_cache is not None:
                key, value = (each[size:].to(runtime.device) for each in drawn)
                layer.impl.update_kv_cache(layer, key, value, layer.kv_cache, slots.to(runtime.device))
            trees = {str(n): each.parents for n, each in enumerate(requests) if each.parents is not None}
            counts = {str(n): each.new for n, each in enumerate(requests)}
            batch = batches.step(counts, trees=trees or None)
            runtime.begin_step(batch)
            tokens = batch.common.num_actual_tokens
            query = torch.randn(tokens, spec.num_heads, spec.query_size, generator=generator).to(dtype)
            own = _own_slots(batch, requests, size)
            key, value = (each[own].to(runtime.device) for each in drawn)
            output = torch.full((tokens, spec.num_heads, spec.output_size), torch.nan, dtype=dtype)
            found = runtime.forward(_NAME, query.to(runtime.device), key, value, output.to(runtime.device))
            given = batch, requests, query, drawn, size, self._scales
            expected = _expected(spec, self._tensors, *given)
            try:
                assert_close(found.cpu(), expected, self._bound)
            except AssertionError as problem:
                raise ConformanceError(f"{what} of {len(requests)} requests: {problem}") from None
            return runtime.step_notes


def _own_slots(batch: StepBatch, requests: list[ForestRequest], size: int) -> torch.Tensor:
    """The slot of each new token, in the order of the batch."""
    slots = [
        torch.as_tensor(_slots(requests[int(name)], np.arange(each.computed, each.computed + each.new), size))
        for name in batch.req_ids
        for each in (requests[int(name)],)
    ]
    return torch.cat(slots)


def _slots(request: ForestRequest, places: np.ndarray[Any, np.dtype[Any]], size: int) -> Any:
    return np.array(request.blocks)[places // size] * size + places % size


def _expected(
    spec: LayerSpec,
    tensors: LayerTensors,
    batch: StepBatch,
    requests: list[ForestRequest],
    query: torch.Tensor,
    drawn: list[torch.Tensor],
    size: int,
    scales: dict[str, float],
) -> torch.Tensor:
    """The oracle's answer: each new token is a request of one row over the keys that it sees."""
    stored = [
        stored_values(each, spec, stored_scale(spec, scale))
        for each, scale in zip(drawn, (scales.get("k_scale", 1.0), scales.get("v_scale", 1.0)), strict=True)
    ]
    keys, values, lengths = list[torch.Tensor](), list[torch.Tensor](), list[int]()
    for name in batch.req_ids:
        request = requests[int(name)]
        for path in request.paths():
            places = np.concatenate([np.arange(request.computed), request.computed + np.array(path)])
            slots = torch.as_tensor(_slots(request, places, size))
            keys.append(stored[0][slots])
            values.append(stored[1][slots])
            lengths.append(places.size)
    rows = [query[row : row + 1] for row in range(query.shape[0])]
    return attention_oracle(spec, rows, keys, values, lengths, tensors=tensors).output
