"""Steps in a drawn order on one builder: each way to build meets each state, and each answer is the oracle's.

In each step two layers get their queries, keys and values in the same memory, one after the other.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch

from attnplug.core.features import Feature
from attnplug.core.metadata import AttentionMetadata, CommonAttentionMetadata
from attnplug.core.spec import AttentionType, LayerSpec
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

_T = TypeVar("_T")

_KINDS = {**LAYER_KINDS, "sparse": Feature.SPARSE, "two-sided": Feature.NON_CAUSAL}
_STEPS = {Level.SMOKE: 12, Level.FULL: 30}
_MACHINES = {Level.SMOKE: 2, Level.FULL: 6}
_MOST_DRAFTED = 3
_LEAST_UNIT = 8
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
    longest = 6 * _unit(size) + _MOST_DRAFTED
    limits = (-(-longest // size) * size, longest, longest + 1, None)
    config = {"num_speculative_tokens": _MOST_DRAFTED, "max_model_len": limits[seed % len(limits)]}
    # Sequences have numbers of their own, the same in each process.
    steps, cards = _Steps(target, spec, size, config), _Cards(f"{kind} {seed}")
    for number in range(_STEPS[target.level]):
        steps.run(_Step.drawn(cards, number, steps))


def _layer(target: Target, kind: str, seed: int) -> tuple[LayerSpec, int]:
    """A layer of the kind; each sequence is over pages of another size."""
    if kind == "sparse":
        spec, size = with_pages(target, target.paged_spec(sparse=samples_of(target, Feature.SPARSE)[0]))
    elif kind == "two-sided":
        spec, size = with_pages(target, target.paged_spec(causal=False, attn_type="decoder"))
    else:
        spec, size = layer_of_kind(target, kind, paged=True)
    # The preferred pages, the smallest, then larger ones.
    sizes = list(dict.fromkeys([size, *sorted(target.block_sizes)]))
    other = sizes[seed % len(sizes)]
    changed = spec.replace(block_size=other)
    return (spec, size) if seed == 0 or target.reasons(changed) else (changed, other)


def _unit(size: int) -> int:
    """Whole pages of some tokens, around which the lengths of requests are."""
    return -(-_LEAST_UNIT // size) * size


class _Cards:
    """Draws values without putting them back before all had their turn, so that none is rare."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)  # noqa: S311 - no secret
        self._left: dict[str, list[Any]] = {}

    def draw(self, name: str, values: Iterable[_T]) -> _T:
        """One of `values`, which are those of `name` each time."""
        left: list[_T] = self._left.setdefault(name, [])
        if not left:
            left.extend(values)
            self.random.shuffle(left)
        return left.pop()


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """The drawn values of a step.

    Args:
        number: of the step.
        way: "build", "fast", "draft" or "update".
        lengths: new and all tokens of each request.
        causal: of the batch.
        index: of a draft.
        form: of the lengths on the host, for a draft.
        shares: whether all requests share a prefix, for an update.
        columns: that the table of an update has more than that of the step's build.
    """

    number: int
    way: str
    lengths: tuple[list[int], list[int]]
    causal: bool | None
    index: int
    form: str
    shares: bool
    columns: int

    @classmethod
    def drawn(cls, cards: _Cards, number: int, steps: _Steps) -> _Step:
        """The next step."""
        way, shares = cards.draw("way", steps.ways), False
        # Keys of an encoder are no prefix, and have no order that could be narrowed.
        is_decoder = steps.spec.attn_type is AttentionType.DECODER
        if way == "update" and is_decoder and not (steps.spec.is_windowed or steps.spec.chunk_size):
            shares = cards.draw("shares", (True, False, True))
        least = 2 * _unit(steps.size) if shares else 0
        is_plain = is_decoder and steps.spec.sparse is None and not steps.spec.mm_prefix
        return cls(
            number,
            way,
            _lengths(cards, _unit(steps.size), least, is_draft=way == "draft"),
            cards.draw("causal", (None, True, steps.spec.causal)) if is_plain else None,
            cards.draw("index", (0, 1, 2, 3, 5)) if way == "draft" else 0,
            cards.draw("form", steps.forms) if way == "draft" else "exact",
            shares,
            cards.draw("columns", (-2, 0, 1)) if way == "update" else 0,
        )


def _lengths(cards: _Cards, size: int, least: int, *, is_draft: bool) -> tuple[list[int], list[int]]:
    """New and all tokens of some requests with at least `least` computed tokens, the short queries first."""
    kinds = ([1], [1 + _MOST_DRAFTED], [1, 2, 3], [0, 1, size + 3], [2 * size, 1, 5])
    counts = [1] if is_draft else cards.draw("new", kinds)
    new = sorted(cards.random.choice(counts) for _ in range(cards.draw("requests", range(1, 7))))
    # The last token of some requests is the last one of a page, or of a chunk of two pages.
    ends = (size - 1, size, size + 1, 2 * size, 4 * size, 3 * size + 2)
    return new, [max(cards.draw("end", ends), count + least) for count in new]


class _Steps:
    """One builder with two layers, and the steps that it has built."""

    def __init__(self, target: Target, spec: LayerSpec, size: int, config: dict[str, Any]) -> None:
        self.spec, self.size = spec, size
        self._target, self._config = target, config
        self._first = target.batch(spec, [1, 1], [size, 2 * size + 1], padding=3)
        self._harness = self._make()
        self._before: list[str] = []
        builder = self._harness.builder
        self.forms = _SERVED.get(builder.needs_host_seq_lens, ["exact"])
        updates = ("update", "update") if builder.supports_update_block_table else ()
        self.ways = ("build", "fast", "draft", "draft", *updates)

    def run(self, step: _Step) -> None:
        """Build a step and run both layers with it; ConformanceError if one is wrong."""
        try:
            words = self._try(self._harness, step)
        except ConformanceError as problem:
            _, alone = guarded_call(lambda: self._try(self._make(), step))
            if alone is not None or not self._before:
                raise
            text = f"{problem}\nalone the step is right: {_EARLIER}: {'; '.join(self._before)}"
            raise ConformanceError(text, _EARLIER) from problem
        self._before.append(words)

    def _make(self) -> Harness:
        return Harness.of(self._target, self._first, _second(self._first, self._target), **self._config)

    def _try(self, harness: Harness, step: _Step) -> str:
        what = f"step {step.number + 1} of one builder"
        with error_context(what):
            built: _Built = getattr(self, f"_{step.way}")(harness, step)
            batch, metadata, words = built
            expect_own_slots(metadata, batch.common, words)
        what, second = f"{what}: {words}", _second(batch, self._target)
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
                layer = (
                    "" if not place else ", the second layer, whose tensors have the addresses of the first's"
                )
                is_kept = bool(place) and self._is_right_elsewhere(harness, second, metadata)
                raise wrong_answer(f"{what}{layer}: {wrong.problem}", _ADDRESS if is_kept else None, wrong)
        return words

    def _is_right_elsewhere(self, harness: Harness, second: Batch, metadata: AttentionMetadata) -> bool:
        """Whether the second layer is right with tensors at other addresses."""
        found, error = guarded_call(lambda: harness.run(second, metadata, layer=1))
        return error is None and deviation(second, found) is None

    def _batch(self, step: _Step, seed: int = 0) -> Batch:
        options: dict[str, Any] = {"padding": 3, "drop_window": True, "seed": step.number + seed}
        made = self._target.batch(self.spec, *step.lengths, causal=step.causal, **options)
        return _with(made, causal=step.causal)

    def _build(self, harness: Harness, step: _Step, fast: bool = False) -> _Built:
        batch = self._batch(step)
        words = _words(batch, "build with fast_build=True" if fast else "build")
        return _Built(batch, harness.builder.build(0, batch.common, fast), words)

    def _fast(self, harness: Harness, step: _Step) -> _Built:
        return self._build(harness, step, True)

    def _draft(self, harness: Harness, step: _Step) -> _Built:
        batch = self._batch(step)
        words = _words(batch, f"build_for_drafting with draft_index={step.index} and {_FORMS[step.form]}")
        given = _with_host_lengths(batch.common, step.form, self.size)
        return _Built(batch, harness.builder.build_for_drafting(given, step.index), words)

    def _update(self, harness: Harness, step: _Step) -> _Built:
        """Metadata of another KV group's table, from those of a build with or without a prefix."""
        first, other = self._batch(step), self._batch(step, 100)
        other = _with(other, selection=first.common.selection)
        new = first.common.query_start_loc_cpu.diff().tolist()
        computed = (length - count for count, length in zip(new, first.seq_lens, strict=True))
        blocks = max(min(computed), 0) // self.size if step.shares else 0
        if blocks:
            first, other = (share_prefix(each, blocks, self.size) for each in (first, other))
        table = other.common.block_table_tensor
        more = torch.full_like(table[:, :1], 2**30)
        table = torch.cat([table, more], 1)[:, : table.shape[1] + step.columns].contiguous()
        other, prefix = _with(other, block_table_tensor=table), blocks * self.size
        source = harness.builder.build(prefix, first.common)
        made = harness.builder.update_block_table(source, table, other.common.slot_mapping)
        of = f"{first.common.block_table_tensor.shape[1]} columns and common_prefix_len={prefix}"
        words = _words(other, f"update_block_table with {table.shape[1]} columns, of metadata with {of}")
        return _Built(other, made, words)


class _Built(NamedTuple):
    """A step, its metadata, and how they were built."""

    batch: Batch
    metadata: AttentionMetadata
    words: str


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
