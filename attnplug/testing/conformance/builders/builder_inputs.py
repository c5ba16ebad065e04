"""Builders need no more of a step than they declare, and do not modify it.

Copies on the host that a step may lack are not needed, or their absence is a BatchError.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.batch import reorder_batch_to_split_decodes_and_prefills
from attnplug.core.errors import BatchError
from attnplug.core.features import Feature
from attnplug.core.metadata import AttentionMetadataBuilder, CommonAttentionMetadata
from attnplug.core.selection import Selection
from attnplug.testing.conformance.cases.steps import (
    BatchFactory,
    decode_lengths,
    layer_kinds,
    layer_of_kind,
    mixed_lengths,
    scenario_factory,
    step_factory,
    with_lengths,
)
from attnplug.testing.conformance.check import Check, CheckTable, ConformanceError, checks_from, error_context
from attnplug.testing.conformance.declared.attributes import HOST_LENGTHS
from attnplug.testing.conformance.harness import Harness
from attnplug.testing.conformance.mistakes.expectations import (
    StepMistake,
    expect_correct,
    expect_correct_step,
)
from attnplug.testing.conformance.target import Target, of_phase

# A `max_seq_len` that engines give where they do not know a step's lengths.
_LONGEST_OF_MODEL = 1 << 17


def checks(target: Target) -> Iterator[Check]:
    """The checks of builders' inputs, for each kind of layer that the backend declares."""
    for kind in layer_kinds(target):
        yield from checks_from(_CHECKS, "builder", target, kind)


def _check_common_unmodified(target: Target, kind: str) -> None:
    spec, size = layer_of_kind(target, kind)
    builds: dict[str, Callable[[AttentionMetadataBuilder[Any], CommonAttentionMetadata], object]] = {
        "build": lambda builder, common: builder.build(0, common),
        "build with fast_build=True": lambda builder, common: builder.build(0, common, True),
        "build_for_drafting": lambda builder, common: builder.build_for_drafting(common, 0),
    }
    for what, build in builds.items():
        for lengths in (mixed_lengths(size), decode_lengths(size)):
            batch = step_factory(target, spec, lengths)()
            harness, before = Harness.of(target, batch), _snapshot(batch.common)
            with error_context(what):
                build(harness.builder, batch.common)
            for name, value in _snapshot(batch.common).items():
                if not _same(value, before[name]):
                    problem = f"{what} changed common.{name}: {before[name]} became {value}"
                    raise ConformanceError(problem, name)


def _snapshot(common: CommonAttentionMetadata) -> dict[str, Any]:
    """A copy of every public field; private ones are caches."""
    names = (field.name for field in dataclasses.fields(common) if not field.name.startswith("_"))
    return {name: copy.deepcopy(getattr(common, name)) for name in names}


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, Selection):
        return torch.equal(one.positions, other.positions) and torch.equal(one.counts, other.counts)
    return bool(np.array_equal(one, other))


def _check_host_lengths(target: Target, kind: str, form: str) -> None:
    spec, size = layer_of_kind(target, kind)
    for lengths in (mixed_lengths(size), decode_lengths(size)):
        new, tokens = of_phase(target.phase, *lengths)
        # Bounds within the pages that the requests have, and a page beyond them.
        page_ends = np.array([-(-length // size) * size for length in tokens], dtype=np.int32)
        for bounds in (page_ends, page_ends + size):
            _check_host_form(target, step_factory(target, spec, (new, tokens)), form, bounds)


def _check_host_form(target: Target, make: BatchFactory, form: str, bounds: npt.NDArray[np.int32]) -> None:
    batch = make()
    harness = Harness.of(target, batch)
    needs = harness.builder.needs_host_seq_lens
    if needs not in HOST_LENGTHS:
        raise ConformanceError(f"needs_host_seq_lens={needs!r} must be one of {', '.join(HOST_LENGTHS)}")
    common = dataclasses.replace(
        batch.common,
        seq_lens_host=None if form == "none" else bounds,
        seq_lens_host_exact=False,
        max_seq_len=int(bounds.max()),
    )
    given = "seq_lens_host=None" if form == "none" else "upper bounds in seq_lens_host"
    what = f"with {given}, where needs_host_seq_lens={needs!r}"
    with error_context(what):
        try:
            found = harness.run(batch, harness.builder.build(0, common))
        except BatchError:
            if HOST_LENGTHS.index(needs) > HOST_LENGTHS.index(form):
                return
            raise
    mistakes: dict[str, StepMistake] = {
        "upper bounds taken for exact lengths": lambda c: with_lengths(c, torch.from_numpy(bounds))
    }
    expect_correct_step(target, make, found, what, mistakes)


def _check_longest_bound(target: Target, kind: str) -> None:
    spec, size = layer_of_kind(target, kind)
    alone = ([1], [size + 1]), ([size + 3], [size + 3])
    for lengths in (mixed_lengths(size), decode_lengths(size), *alone):
        make, longest = step_factory(target, spec, lengths), max(lengths[1])
        for bound in (-(-longest // size) * size, longest + size, _LONGEST_OF_MODEL):
            batch, what = make(), f"with max_seq_len={bound}, above the longest sequence, which is allowed"
            harness = Harness.of(target, batch)
            with error_context(what):
                common = dataclasses.replace(batch.common, max_seq_len=bound)
                found = harness.run(batch, harness.builder.build(0, common))
            mistakes: dict[str, StepMistake] = {
                "max_seq_len taken for the longest length": functools.partial(_lengthen, longest, bound)
            }
            expect_correct_step(target, make, found, what, mistakes)


def _lengthen(longest: int, bound: int, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
    lengths = common.seq_lens.cpu()
    return with_lengths(common, torch.where(lengths == longest, bound, lengths))


@dataclasses.dataclass
class _Rows:
    """New and computed tokens of each request, in the form that the runtime's reordering takes."""

    req_ids: list[str]
    num_scheduled_tokens: dict[str, int]
    num_computed_tokens_cpu: np.ndarray[Any, Any]

    def swap_states(self, i1: int, i2: int, /) -> None:
        for rows in (self.req_ids, self.num_computed_tokens_cpu):
            rows[i1], rows[i2] = rows[i2], rows[i1]


def _check_order(target: Target, kind: str, speculative: int) -> None:
    spec, size = layer_of_kind(target, kind)
    harness = Harness.of(
        target, step_factory(target, spec, mixed_lengths(size))(), num_speculative_tokens=speculative
    )
    threshold = harness.builder.reorder_batch_threshold
    if threshold is not None and (type(threshold) is not int or threshold < 1):
        limit = "must be None or an integer of at least 1"
        raise ConformanceError(f"reorder_batch_threshold={threshold!r} {limit}")
    edge = 1 + speculative if threshold is None else threshold
    new = [size + 3, 1, edge + 1, edge, edge + 4, 1, edge]
    rows = _Rows(
        [str(index) for index in range(len(new))],
        {str(index): count for index, count in enumerate(new)},
        np.array([0, size, 9, 2 * size - 1, 0, size + 4, 7]),
    )
    if threshold is not None:
        reorder_batch_to_split_decodes_and_prefills(rows, rows, threshold)
    ordered = [rows.num_scheduled_tokens[name] for name in rows.req_ids]
    make = step_factory(target, spec, (ordered, (rows.num_computed_tokens_cpu + ordered).tolist()))
    batch, what = make(), f"requests in any order, as reorder_batch_threshold={threshold} promises"
    if threshold is not None:
        what = f"requests in the order for reorder_batch_threshold={threshold}"
    with error_context(what):
        found = harness.run(batch, harness.builder.build(0, batch.common))
    expect_correct_step(target, make, found, f"{what}, with {ordered} new tokens")
    if harness.builder.reorder_batch_threshold != threshold:
        now = harness.builder.reorder_batch_threshold
        raise ConformanceError(
            f"a build changed reorder_batch_threshold from {threshold} to {now}; an engine reads it before"
        )


_CHECKS: CheckTable = {
    "common-unmodified": (_check_common_unmodified, "a build does not modify the common metadata"),
    "host-lengths-none": (
        functools.partial(_check_host_lengths, form="none"),
        "without host lengths the answer is right, or the builder refuses as declared",
    ),
    "host-lengths-upper_bound": (
        functools.partial(_check_host_lengths, form="upper_bound"),
        "host lengths that are upper bounds are not read as exact ones",
    ),
    "max_seq_len": (_check_longest_bound, "max_seq_len may be an upper bound"),
    "order": (
        functools.partial(_check_order, speculative=0),
        "requests in the order for reorder_batch_threshold are served",
    ),
    "order-speculative": (
        functools.partial(_check_order, speculative=3),
        "they are served with several verified tokens per decode",
    ),
}


_COPIES: dict[str, tuple[Feature, tuple[str, ...], dict[str, bool]]] = {
    "key_start_loc_cpu": (Feature.DIRECT_KV, ("direct",), {}),
    "mm_prefix_spans_cpu": (Feature.MM_PREFIX, ("decode", "mixed"), {"mm_prefix": True}),
}
"""Optional fields of a step, the feature that needs each, and the scenarios and layers that have it."""


def host_copy_checks(target: Target) -> Iterator[Check]:
    """One check for each copy that the backend may read."""
    for name, (feature, scenarios, fields) in _COPIES.items():
        if feature in target.backend.features:
            for scenario in scenarios:
                summary = f"a step without {name} gives the same result, or is a BatchError"
                check_id = f"builder/no-{name}-{scenario}"
                yield Check.of(check_id, summary, _check_absent, target, name, scenario, **fields)


def _check_absent(target: Target, name: str, scenario: str, **fields: bool) -> None:
    batch = scenario_factory(target, scenario, **fields)()
    device = name.removesuffix("_cpu")
    absent: dict[str, Any] = {name: None}
    batch = dataclasses.replace(batch, common=dataclasses.replace(batch.common, **absent))
    what = f"with {name}=None in a step that has {device} on the device"
    try:
        found = Harness.of(target, batch).forward(batch, what=what)
    except ConformanceError as problem:
        if isinstance(problem.__cause__, BatchError):
            return
        raise
    expect_correct(batch, found, what)
