"""Tensors as engines keep them: filled anew for each step, parts of wider ones, and read by the engine too."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from attnplug.testing.conformance.cases.steps import (
    PAGED_SCENARIOS,
    BatchFactory,
    decode_lengths,
    mixed_lengths,
    paged_scenarios,
    scenario_factory,
    scenario_layer,
    scenarios,
    step_factory,
)
from attnplug.testing.conformance.check import Check, CheckSkipped, CheckTable, ConformanceError, checks_from
from attnplug.testing.conformance.harness import Harness, Output, blank_output, raw_bytes, refill
from attnplug.testing.conformance.mistakes.expectations import difference, expect_correct, wrong_answer
from attnplug.testing.conformance.target import Target

# A backend may take its buffers from a ring, so there are more calls than a ring of 128 has.
_CALLS = 140
_SCALES = ("_q_scale", "_k_scale", "_v_scale", "_prob_scale")


def checks(target: Target) -> Iterator[Check]:
    """The checks of an engine's tensors, in each scenario that has them."""
    for scenario in scenarios(target):
        yield from checks_from(_CHECKS, "tensors", target, scenario)
    for scenario in paged_scenarios(target):
        yield from checks_from(_PAGED, "tensors", target, scenario)
    if paged_scenarios(target):
        summary = "an impl gives the same bits at each of many calls"
        yield Check.of("tensors/same-each-call", summary, _check_calls, target)
    if target.scaled_kv_dtypes:
        summary = "the scales of the engine's layer are not modified"
        yield Check.of("tensors/scales-kept", summary, _check_scales, target)


def _two_steps(target: Target, scenario: str) -> tuple[BatchFactory, BatchFactory]:
    """Two steps of equal numbers of requests and tokens, with other values; over pages also with other lengths."""
    if scenario not in PAGED_SCENARIOS:
        return scenario_factory(target, scenario), scenario_factory(target, scenario, seed=1)
    spec = scenario_layer(target, scenario)
    size, lengths = target.block_size(spec), decode_lengths if scenario == "decode" else mixed_lengths
    return step_factory(target, spec, lengths(size)), step_factory(target, spec, lengths(size, 2), 1)


def _check_refilled(target: Target, scenario: str) -> None:
    make, make_other = _two_steps(target, scenario)
    batch, other = make(), make_other()
    harness, into = Harness.of(target, batch), blank_output(batch)
    output, lse = harness.forward(batch, into)
    first = Output(output.clone(), None if lse is None else lse.clone())
    expect_correct(batch, first, "the first of two steps")
    for tensor in into:
        if tensor is not None:
            tensor.fill_(torch.nan)
    filled = refill(batch, other)
    what = "the second of two steps, whose values were written to the tensors of the first"
    found = harness.forward(filled, into, what)
    if problem := difference(filled, found):
        again = Harness.of(target, filled).forward(make_other())
        kept = "values of an earlier step kept by the addresses of its tensors"
        raise wrong_answer(f"{what}: {problem}", None if difference(filled, again) else kept)


def _check_table(target: Target, scenario: str) -> None:
    batch = scenario_factory(target, scenario)()
    table = batch.common.block_table_tensor
    requests, columns = table.shape
    wide = table.new_full((requests, 2 * columns + 3), 0)
    wide[:, 1 : columns + 1] = table
    view = wide[:, 1 : columns + 1]
    changed = dataclasses.replace(batch, common=dataclasses.replace(batch.common, block_table_tensor=view))
    what = f"with a block table of the strides {view.stride()}, which is a part of a wider one"
    try:
        found = Harness.of(target, changed).forward(changed, what=what)
    except ConformanceError as problem:
        raise CheckSkipped(f"{target.name} refuses it: {problem}") from None
    expect_correct(changed, found, what)


def _check_calls(target: Target) -> None:
    spec = target.paged_spec()
    size = target.block_size(spec)
    batch = target.batch(spec, [1, 1], [size + 3, 5])
    harness = Harness.of(target, batch)
    first = harness.forward(batch)
    expect_correct(batch, first, "at the first call")
    for number in range(2, _CALLS + 1):
        found = harness.forward(batch)
        if not torch.equal(raw_bytes(found.output), raw_bytes(first.output)):
            problem = difference(batch, found) or "right within the tolerance, but of other bits"
            raise ConformanceError(
                f"call {number} of one impl with the same inputs gave another output: {problem}"
            )


def _check_scales(target: Target) -> None:
    batch = scenario_factory(target, "mixed", kv_cache_dtype=target.scaled_kv_dtypes[0])()
    batch = dataclasses.replace(batch, tensors=dataclasses.replace(batch.tensors, k_scale=0.37, v_scale=1.9))
    harness = Harness.of(target, batch)
    layer = harness.layers[0]
    names = [*_SCALES, *(f"{name}_float" for name in _SCALES)]
    before = {name: float(getattr(layer, name)) for name in names}
    harness.forward(batch)
    for name, value in before.items():
        if float(getattr(layer, name)) != value:
            found = f"{value:g} became {float(getattr(layer, name)):g}"
            raise ConformanceError(f"forward modified {name} of the engine's layer: {found}")


_CHECKS: CheckTable = {
    "refilled": (_check_refilled, "a step may come in the tensors of the step before, with other values"),
}
_PAGED: CheckTable = {
    "strided-table": (_check_table, "the block table may be a part of a wider one"),
}
