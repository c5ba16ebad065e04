"""Sparse layers need a selection, and read its values when they run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch

from attnplug.core.features import Feature
from attnplug.core.selection import Selection
from attnplug.core.sparse import SPARSE_KINDS, SparseSpec
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.cases.steps import mixed_lengths, select_requests, step_factory, with_pages
from attnplug.testing.conformance.check import Check, CheckTable, ConformanceError, checks_from, error_context
from attnplug.testing.conformance.harness import Harness
from attnplug.testing.conformance.mistakes.expectations import (
    difference,
    expect_batch_refused,
    expect_correct,
)
from attnplug.testing.conformance.target import Target, in_phase

_SPARSE = {"token_topk": SparseSpec("token_topk", 12), "block": SparseSpec("block", 3, 8)}
"""A layer's keys by kind: fewer than the steps have."""


def checks(target: Target) -> Iterator[Check]:
    """The checks of selections, for each kind that the backend declares."""
    if Feature.SPARSE not in target.backend.features:
        return
    for kind in SPARSE_KINDS:
        if kind in target.backend.supported_sparse_kinds:
            yield from checks_from(_CHECKS, "selection", target, kind)


def _factory(target: Target, kind: str) -> Callable[[], Batch]:
    spec, size = with_pages(target, target.spec(sparse=_SPARSE[kind]))
    return step_factory(target, spec, _lengths(size))


def _lengths(size: int) -> tuple[list[int], list[int]]:
    # Over small pages, too, contexts are longer than the keys that a query may choose.
    return mixed_lengths(max(size, 32))


def _selection_of(batch: Batch) -> Selection:
    selection = batch.common.selection
    assert selection is not None  # noqa: S101 - batches of sparse layers have one
    return selection


def _check_required(target: Target, kind: str) -> None:
    batch = _factory(target, kind)()
    batch = dataclasses.replace(batch, common=dataclasses.replace(batch.common, selection=None))
    expect_batch_refused(target, batch, "a step without a selection")


def _check_late(target: Target, kind: str) -> None:
    make = _factory(target, kind)
    batch = make()
    selection = _selection_of(batch)
    picked = _copy(selection)
    selection.clear()
    harness = Harness.of(target, batch)
    with error_context("build before the indexer ran"):
        metadata = harness.builder.build(0, batch.common)
    fewer = (picked.counts + 1) // 2
    for what, counts in (
        ("with a selection that was written after build", fewer),
        ("with a selection that was written again, of more keys for the next layers", picked.counts),
        ("with a selection that was written again, of fewer keys for the next layers", fewer),
    ):
        _write(selection, picked.positions, counts)
        with error_context(what):
            found = harness.run(batch, metadata)
        expect_correct(batch, found, what, lambda: None)


def _check_order(target: Target, kind: str) -> None:
    batch = _factory(target, kind)()
    selection = _selection_of(batch)
    for row, count in enumerate(selection.counts.tolist()):
        if count > 0:
            selection.positions[row, :count] = selection.positions[row, :count].flip(0)
    what = "with the chosen keys in another order"
    expect_correct(batch, Harness.of(target, batch).forward(batch, what=what), what)


def _check_alone(target: Target, kind: str) -> None:
    batch = _factory(target, kind)()
    harness = Harness.of(target, batch)
    for index in range(len(batch.seq_lens)):
        one = select_requests(_factory(target, kind)(), [index])
        if not in_phase(target.phase, one.common.query_start_loc_cpu.diff().tolist()):
            continue
        what = f"request {index} of the batch alone, with its rows of the selection"
        expect_correct(one, harness.forward(one, what=what), what)


def _check_all(target: Target, kind: str) -> None:
    spec, size = with_pages(target, target.spec(sparse=_SPARSE[kind]))
    lengths = _lengths(size)
    sparse = dataclasses.replace(_SPARSE[kind], topk=max(lengths[1]))
    batch = step_factory(target, target.changed(spec, sparse=sparse), lengths)()
    selection, block = _selection_of(batch), sparse.block
    selection.clear()
    spans, row = batch.common.mm_prefix_spans_cpu, 0
    for new, length in zip(batch.common.query_start_loc_cpu.diff().tolist(), batch.seq_lens, strict=True):
        for position in range(length - new, length):
            end = position + 1 if batch.spec.causal else length
            count = -(-(end if spans is None else max(end, int(spans[row, 1]))) // block)
            selection.positions[row, :count] = torch.arange(count, dtype=torch.int32)
            selection.counts[row] = count
            row += 1
    what = "with all keys chosen"
    found = Harness.of(target, batch).forward(batch, what=what)
    expect_correct(batch, found, what)
    # The second side: the dense layer has the same numbers.
    dense = dataclasses.replace(batch, spec=batch.spec.replace(sparse=None))
    if problem := difference(dense, found):
        raise ConformanceError(f"{what}, which equals a layer that is not sparse: {problem}")


def _check_refused(target: Target, kind: str) -> None:
    if target.device.type != "cpu":
        return  # a check would wait for the device
    wrong: dict[str, Callable[[Selection], object]] = {
        "a selection that nobody gave": lambda chosen: chosen.clear(),
        "a position past the query's own": functools.partial(_put, value=1 << 20),
        "a position before 0": functools.partial(_put, value=-2),
        "a position that comes twice": lambda chosen: _put(chosen, int(chosen.positions[_row(chosen), 1])),
        "more positions than topk": lambda chosen: chosen.counts.fill_(_SPARSE[kind].topk + 1),
    }
    for what, change in wrong.items():
        batch = _factory(target, kind)()
        change(_selection_of(batch))
        expect_batch_refused(target, batch, what)


def _put(selection: Selection, value: int) -> None:
    selection.positions[_row(selection), 0] = value


def _row(selection: Selection) -> int:
    """The last query that chooses two keys."""
    return int((selection.counts >= 2).nonzero()[-1])


def _copy(selection: Selection) -> Selection:
    return Selection(selection.positions.clone(), selection.counts.clone())


def _write(selection: Selection, positions: torch.Tensor, counts: torch.Tensor) -> None:
    kept = torch.arange(positions.shape[1], device=positions.device) < counts[:, None]
    selection.positions.copy_(positions.masked_fill(~kept, -1))
    selection.counts.copy_(counts)


_CHECKS: CheckTable = {
    "required": (_check_required, "a step without a selection is a BatchError"),
    "late": (_check_late, "the selection is read when a layer runs, not when the step is built"),
    "order": (_check_order, "the order of the chosen keys does not change the result"),
    "alone": (
        _check_alone,
        "each request alone, with its rows of the selection, has its result of the batch",
    ),
    "all": (_check_all, "a selection of all keys gives the numbers of a layer that is not sparse"),
    "values": (_check_refused, "on a CPU, values that are not allowed are a BatchError"),
}
