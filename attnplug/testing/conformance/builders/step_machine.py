"""Steps in a drawn order on one builder: each way to build meets each state, and each answer is the oracle's.

In each step two layers get their queries, keys and values in the same memory, one after the other.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from attnplug.core.features import Feature
from attnplug.core.metadata import AttentionMetadata, CommonAttentionMetadata
from attnplug.core.spec import LayerSpec
from attnplug.registry.plugins.waiting import guarded_call
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.cases.case_axes import samples_of
from attnplug.testing.conformance.cases.steps import LAYER_KINDS, layer_of_kind, paged_scenarios, with_pages
from attnplug.testing.conformance.check import Check, ConformanceError, Level, error_context
from attnplug.testing.conformance.harness import Harness
from attnplug.testing.conformance.mistakes.deviation import deviation
from attnplug.testing.conformance.mistakes.expectations import expect_own_slots, wrong_answer
from attnplug.testing.conformance.numbers.common_prefix import share_prefix
from attnplug.testing.conformance.target import Target
from attnplug.testing.drawn_values import layer_tensors

_KINDS = {**LAYER_KINDS, "sparse": Feature.SPARSE, "two-sided": Feature.NON_CAUSAL}
_STEPS = {Level.SMOKE: 10, Level.FULL: 30}
_MACHINES = {Level.SMOKE: 2, Level.FULL: 6}
_MOST_DRAFTED = 3
_EARLIER = "state of earlier steps"
_ADDRESS = "values kept by the address of a tensor, which the layer before filled"


def checks(target: Target) -> Iterator[Check]:
    """Some sequences of steps for each kind of layer over pages that the backend declares."""
    if not paged_scenarios(target):
        return
    summary = "steps in a drawn order, built in each way, are right on one builder"
    for kind, feature in _KINDS.items():
        if feature in target.backend.features:
            for seed in range(_MACHINES[target.level]):
                yield Check.of(f"builder/steps-{kind}-{seed}", summary, _check_steps, target, kind, seed)


def _check_steps(target: Target, kind: str, seed: int) -> None:
    spec, size = _layer(target, kind, seed)
    # Numbers of their own for each sequence, and the same in each process.
    drawn = random.Random(f"{kind} {seed}")  # noqa: S311 - no secret
    longest = 6 * size + _MOST_DRAFTED
    limits = (-(-longest // size) * size, longest, longest + 1, None)
    config = {"num_speculative_tokens": _MOST_DRAFTED, "max_model_len": limits[seed % len(limits)]}
    steps = _Steps(target, spec, size, drawn, config)
    for number in range(_STEPS[target.level]):
        steps.run(number)


def _layer(target: Target, kind: str, seed: int) -> tuple[LayerSpec, int]:
    """A layer of the kind; each sequence is over pages of another size."""
    if kind == "sparse":
        spec, size = with_pages(target, target.paged_spec(sparse=samples_of(target, Feature.SPARSE)[0]))
    elif kind == "two-sided":
        spec, size = with_pages(target, target.paged_spec(causal=False, attn_type="decoder"))
    else:
        spec, size = layer_of_kind(target, kind, paged=True)
    other = target.block_sizes[seed % len(target.block_sizes)]
    changed = spec.replace(block_size=other)
    return (spec, size) if seed == 0 or target.reasons(changed) else (changed, other)


class _Built(NamedTuple):
    """A step, its metadata, and how they were built."""

    batch: Batch
    metadata: AttentionMetadata
    words: str


class _Steps:
    """One builder with two layers, and the steps that it has built."""

    def __init__(
        self, target: Target, spec: LayerSpec, size: int, drawn: random.Random, config: dict[str, Any]
    ) -> None:
        self._target, self._spec, self._size, self._drawn, self._config = target, spec, size, drawn, config
        self._first = self._batch(0)
        self._harness = self._make(self._first)
        self._before: list[str] = []
        self._ways: tuple[Callable[[Harness, int], _Built], ...] = (self._plain, self._draft)
        if self._harness.builder.supports_update_block_table:
            self._ways += (self._updated,)

    def run(self, number: int) -> None:
        """Build one step in a drawn way, and run both layers with it."""
        way, state = self._drawn.choice(self._ways), self._drawn.getstate()
        try:
            self._try(self._harness, way, number)
        except ConformanceError as problem:
            self._drawn.setstate(state)
            _, alone = guarded_call(lambda: self._try(self._make(self._first), way, number))
            if alone is not None or not self._before:
                raise
            text = f"{problem}\nalone the step is right: {_EARLIER}: {'; '.join(self._before)}"
            raise ConformanceError(text, _EARLIER) from problem

    def _try(self, harness: Harness, way: Callable[[Harness, int], _Built], number: int) -> None:
        """Build a step and run both layers; ConformanceError if one is wrong."""
        what = f"step {number + 1} of one builder"
        with error_context(what):
            batch, metadata, words = way(harness, number)
        what = f"{what}: {words}"
        second = _second(batch, self._target)
        for place, each in enumerate((batch, second)):
            own = each
            if place:
                # The next layer of a model has its queries, keys and values where those of the layer before were.
                names = ("query", "key", "value")
                filled = {name: getattr(batch, name).copy_(getattr(each, name)) for name in names}
                own = dataclasses.replace(each, **filled)
            with error_context(what):
                found = harness.run(own, metadata, layer=place)
            if wrong := deviation(each, found):
                layer = "" if not place else ", the second layer, whose tensors have the addresses of the first's"
                is_kept = bool(place) and self._is_right_elsewhere(harness, second, metadata)
                raise wrong_answer(f"{what}{layer}: {wrong.problem}", _ADDRESS if is_kept else None, wrong)
        if harness is self._harness:
            self._before.append(words)

    def _is_right_elsewhere(self, harness: Harness, second: Batch, metadata: AttentionMetadata) -> bool:
        """Whether the second layer is right with tensors at other addresses."""
        found, error = guarded_call(lambda: harness.run(second, metadata, layer=1))
        return error is None and deviation(second, found) is None

    def _make(self, batch: Batch) -> Harness:
        return Harness.of(self._target, batch, _second(batch, self._target), **self._config)

    def _batch(self, seed: int, lengths: tuple[Sequence[int], Sequence[int]] | None = None) -> Batch:
        new, tokens = lengths or self._lengths()
        causal = self._drawn.choice((None, True, self._spec.causal))
        if self._spec.sparse is not None or self._spec.mm_prefix:
            causal = None
        made = self._target.batch(self._spec, new, tokens, causal=causal, padding=3, drop_window=True, seed=seed)
        return _with(made, causal=causal)

    def _lengths(self, *, context: int = 0) -> tuple[list[int], list[int]]:
        """New and all tokens of some requests with at least `context` computed tokens, the short queries first."""
        drawn, size = self._drawn, self._size
        counts = drawn.choice(([1], [1 + _MOST_DRAFTED], [1, 2, 3], [0, 1, size + 3], [2 * size, 1, 5]))
        new = sorted(drawn.choice(counts) for _ in range(drawn.randint(1, 6)))
        # The last token of some requests is the last one of a page, or of a chunk of two pages.
        ends = [size - 1, size, size + 1, 2 * size, 4 * size, 3 * size + 2]
        return new, [max(drawn.choice(ends), count + context) for count in new]

    def _plain(self, harness: Harness, number: int) -> _Built:
        batch, fast = self._batch(number), self._drawn.random() < 0.3
        words = _words(batch, "build with fast_build=True" if fast else "build")
        return _Built(batch, _own(harness.builder.build(0, batch.common, fast), batch, words), words)

    def _draft(self, harness: Harness, number: int) -> _Built:
        new, tokens = self._lengths()
        new = [1 for _ in new]
        batch, index = self._batch(number, (new, tokens)), self._drawn.choice((0, 1, 2, 3, 5))
        form = self._drawn.choice(_SERVED.get(harness.builder.needs_host_seq_lens, ["exact"]))
        given = _with_host_lengths(batch.common, form, self._size)
        words = _words(batch, f"build_for_drafting with draft_index={index} and {_FORMS[form]}")
        return _Built(batch, _own(harness.builder.build_for_drafting(given, index), batch, words), words)

    def _updated(self, harness: Harness, number: int) -> _Built:
        """Metadata of another KV group's table, of another width, from those of a build in a drawn way."""
        shares = self._drawn.random() < 0.7 and not (self._spec.is_windowed or self._spec.chunk_size)
        lengths = self._lengths(context=2 * self._size if shares else 0)
        state = self._drawn.getstate()
        first = self._batch(number, lengths)
        self._drawn.setstate(state)
        other = self._batch(number + 100, lengths)
        other = _with(other, selection=first.common.selection)
        computed = [a - b for a, b in zip(first.seq_lens, first.common.query_start_loc_cpu.diff().tolist(), strict=True)]
        blocks = min(computed) // self._size if shares else 0
        if blocks > 0:
            first, other = share_prefix(first, blocks, self._size), share_prefix(other, blocks, self._size)
        table = other.common.block_table_tensor
        wider = torch.cat([table, torch.full_like(table[:, :1], 2**30)], 1)
        table = self._drawn.choice((table, wider, table[:, :-2].contiguous()))
        other = _with(other, block_table_tensor=table)
        prefix = max(blocks, 0) * self._size
        source = harness.builder.build(prefix, first.common)
        words = _words(
            other,
            f"update_block_table with {table.shape[1]} columns, of metadata with "
            f"{first.common.block_table_tensor.shape[1]} and common_prefix_len={prefix}",
        )
        made = harness.builder.update_block_table(source, table, other.common.slot_mapping)
        return _Built(other, _own(made, other, words), words)


_FORMS = {
    "exact": "exact lengths on the host",
    "upper_bound": "upper bounds of lengths on the host",
    "none": "no lengths on the host",
}
_SERVED = {"none": [*_FORMS], "upper_bound": ["exact", "upper_bound"], "exact": ["exact"]}
"""The forms of lengths that a builder serves, by its `needs_host_seq_lens`."""


def _with_host_lengths(common: CommonAttentionMetadata, form: str, size: int) -> CommonAttentionMetadata:
    """The step with lengths on the host in one of _FORMS; rejected drafts make them shorter than the host knows."""
    if form == "exact" or common.seq_lens_host is None:
        return common
    bounds = -(-common.seq_lens_host // size) * size
    host = None if form == "none" else bounds
    most = int(bounds.max(initial=0))
    return dataclasses.replace(common, seq_lens_host=host, seq_lens_host_exact=False, max_seq_len=most)


def _own(metadata: AttentionMetadata, batch: Batch, words: str) -> AttentionMetadata:
    expect_own_slots(metadata, batch.common, words)
    return metadata


def _with(batch: Batch, **changes: Any) -> Batch:
    return dataclasses.replace(batch, common=dataclasses.replace(batch.common, **changes))


def _words(batch: Batch, built: str) -> str:
    new = batch.common.query_start_loc_cpu.diff().tolist()
    return f"{built}, causal={batch.common.causal}, {new} new of {batch.seq_lens} tokens"


def _second(batch: Batch, target: Target) -> Batch:
    """Another layer of the same step: with queries, keys and values of its own, and another scale if it is served."""
    spec = batch.spec.replace(scale=batch.spec.scale / 2)
    spec = batch.spec if target.reasons(spec) else spec
    cache = batch.kv_cache
    assert cache is not None  # noqa: S101 - these layers have pages
    return dataclasses.replace(
        batch,
        spec=spec,
        tensors=layer_tensors(spec, device=target.torch_device),
        query=batch.query.flip(1),
        queries=[each.flip(1) for each in batch.queries],
        key=-batch.key,
        value=-batch.value,
        # torch negates no fp8 values.
        kv_cache=(-cache.float()).to(cache.dtype),
        keys=[-keys for keys in batch.keys],
        values=[-values for values in batch.values],
    )
