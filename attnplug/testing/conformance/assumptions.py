"""Builders ask no more of a step than they declare, and leave it as it was."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.batch import reorder_batch_to_split_decodes_and_prefills
from attnplug.core.errors import BatchError
from attnplug.core.metadata import CommonAttentionMetadata
from attnplug.testing.conformance.check import Check, ConformanceError
from attnplug.testing.conformance.driving import Build, Driver
from attnplug.testing.conformance.phases import of_phase
from attnplug.testing.conformance.steps import Make, decodes, kinds, layer_of_kind, mixed, step_of
from attnplug.testing.conformance.target import Target
from attnplug.testing.conformance.verdicts import Misread, during, judge, with_lengths

__all__ = ["checks"]

_FORMS = ("none", "upper_bound", "exact")
"""Of host lengths, what says more comes later."""


def checks(target: Target) -> Iterator[Check]:
    """The checks of what builders are given, for each kind of layer that the backend declares."""
    for kind in kinds(target):
        for name, (run, summary) in _CHECKS.items():
            yield Check(f"builder/{name}-{kind}", functools.partial(run, target, kind), summary)


def _check_common_kept(target: Target, kind: str) -> None:
    spec = layer_of_kind(target, kind)
    size = target.block_size(spec)
    ways: Mapping[str, Build] = {
        "build": lambda builder, common: builder.build(0, common),
        "build with fast_build=True": lambda builder, common: builder.build(0, common, True),
        "build_for_drafting": lambda builder, common: builder.build_for_drafting(common, 0),
    }
    for what, build in ways.items():
        for lengths in (mixed(size), decodes(size)):
            batch = step_of(target, spec, lengths)()
            driver, before = Driver.of(target, batch), _snapshot(batch.common)
            with during(what):
                build(driver.builder, batch.common)
            for name, value in _snapshot(batch.common).items():
                if not _same(value, before[name]):
                    raise ConformanceError(
                        f"{what} changed common.{name}: {before[name]} became {value}", name
                    )


def _snapshot(common: CommonAttentionMetadata) -> dict[str, Any]:
    """Every field but the private ones, which are caches."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(common):
        if not field.name.startswith("_"):
            value = getattr(common, field.name)
            kept = value.clone() if isinstance(value, torch.Tensor) else value
            found[field.name] = value.copy() if isinstance(value, np.ndarray) else kept
    return found


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(np.array_equal(one, other))


def _check_host_lengths(target: Target, kind: str, form: str) -> None:
    spec = layer_of_kind(target, kind)
    size = target.block_size(spec)
    for each in (mixed(size), decodes(size)):
        lengths = of_phase(target.phase, *each)
        for more in (0, size):
            _check_host_form(
                target,
                step_of(target, spec, (lengths[0], lengths[1])),
                form,
                _page_ends(lengths[1], size) + more,
            )


def _check_host_form(target: Target, make: Make, form: str, bounds: npt.NDArray[np.int32]) -> None:
    batch = make()
    driver = Driver.of(target, batch)
    needs = driver.builder.needs_host_seq_lens
    if needs not in _FORMS:
        raise ConformanceError(f"needs_host_seq_lens={needs!r} is none of {', '.join(_FORMS)}")
    common = dataclasses.replace(
        batch.common,
        seq_lens_host=None if form == "none" else bounds,
        seq_lens_host_exact=False,
        max_seq_len=int(bounds.max()),
    )
    given = "seq_lens_host=None" if form == "none" else "upper bounds in seq_lens_host"
    what = f"with {given}, where needs_host_seq_lens={needs!r}"
    with during(what):
        try:
            found = driver.run(batch, driver.builder.build(0, common))
        except BatchError:
            if _FORMS.index(needs) > _FORMS.index(form):
                return
            raise
    likely: dict[str, Misread] = {
        "upper bounds taken for exact lengths": lambda c: with_lengths(c, torch.from_numpy(bounds))
    }
    judge(target, make, found, what, likely)


def _page_ends(seq_lens: Sequence[int], size: int) -> npt.NDArray[np.int32]:
    """Bounds that stay within the pages that the requests have."""
    return np.array([-(-length // size) * size for length in seq_lens], dtype=np.int32)


def _check_longest_bound(target: Target, kind: str) -> None:
    spec = layer_of_kind(target, kind)
    size = target.block_size(spec)
    for lengths in (mixed(size), decodes(size)):
        make, longest = step_of(target, spec, lengths), max(lengths[1])
        for bound in (-(-longest // size) * size, longest + size):
            batch, what = make(), "with max_seq_len above the longest sequence, as it may be"
            driver = Driver.of(target, batch)
            with during(what):
                common = dataclasses.replace(batch.common, max_seq_len=bound)
                found = driver.run(batch, driver.builder.build(0, common))
            likely: dict[str, Misread] = {
                "max_seq_len taken for the longest length": functools.partial(_lengthened, longest, bound)
            }
            judge(target, make, found, what, likely)


def _lengthened(longest: int, bound: int, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
    lengths = common.seq_lens.cpu()
    return with_lengths(common, torch.where(lengths == longest, bound, lengths))


@dataclasses.dataclass
class _Rows:
    """Requests as the runtime reorders them: new and computed tokens."""

    req_ids: list[str]
    num_scheduled_tokens: dict[str, int]
    num_computed_tokens_cpu: np.ndarray[Any, Any]

    def swap_states(self, i1: int, i2: int, /) -> None:
        for rows in (self.req_ids, self.num_computed_tokens_cpu):
            rows[i1], rows[i2] = rows[i2], rows[i1]


def _check_order(target: Target, kind: str, speculative: int) -> None:
    spec = layer_of_kind(target, kind)
    size = target.block_size(spec)
    driver = Driver.of(target, step_of(target, spec, mixed(size))(), num_speculative_tokens=speculative)
    threshold = driver.builder.reorder_batch_threshold
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
    make = step_of(target, spec, (ordered, (rows.num_computed_tokens_cpu + ordered).tolist()))
    batch, what = make(), f"requests in any order, as reorder_batch_threshold={threshold} promises"
    if threshold is not None:
        what = f"requests in the order that reorder_batch_threshold={threshold} asks for"
    with during(what):
        found = driver.run(batch, driver.builder.build(0, batch.common))
    judge(target, make, found, f"{what}, with {ordered} new tokens")


_CHECKS: dict[str, tuple[Callable[[Target, str], None], str]] = {
    "common-unmodified": (_check_common_kept, "a build does not modify the common metadata"),
    "host-lengths-none": (
        functools.partial(_check_host_lengths, form="none"),
        "without host lengths the answer is right, or the batch is refused as declared",
    ),
    "host-lengths-upper_bound": (
        functools.partial(_check_host_lengths, form="upper_bound"),
        "host lengths that are upper bounds are not taken for exact ones",
    ),
    "max_seq_len": (_check_longest_bound, "max_seq_len may be an upper bound"),
    "order": (
        functools.partial(_check_order, speculative=0),
        "requests in the order that reorder_batch_threshold asks for are served",
    ),
    "order-speculative": (
        functools.partial(_check_order, speculative=3),
        "so they are where several tokens are verified per decode",
    ),
}
