"""Tensors that do not fit a layer are refused, also those that a library would broadcast."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attnplug.registry.plugins.waiting import guarded_call
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.check import Check, CheckSkipped, ConformanceError
from attnplug.testing.conformance.harness import Harness, blank_answer
from attnplug.testing.conformance.steps import paged_scenarios, scenario_factory
from attnplug.testing.conformance.target import Target

_Misfits = dict[str, torch.Tensor]


def checks(target: Target) -> Iterator[Check]:
    """The checks of layers over pages."""
    if scenarios := paged_scenarios(target):
        summary = "keys and values that do not fit the layer or the slots are not written"
        yield Check.of("tensors/misfits-written", summary, _check_written, target, scenarios[0])
        summary = "queries and outputs that do not fit the layer are refused"
        yield Check.of("tensors/misfits-attended", summary, _check_attended, target, scenarios[0])


def _check_written(target: Target, scenario: str) -> None:
    batch = scenario_factory(target, scenario)()
    # Views of whole tensors, so that a kernel without a check reads no memory of others.
    tensors = {"key": batch.key, "value": batch.value}
    misfits: dict[str, _Misfits] = {
        "one row of keys and values": {name: tensor[:1] for name, tensor in tensors.items()}
    }
    if batch.spec.num_kv_heads > 1:
        misfits |= {f"a {name} of one head": {name: tensor[:, :1]} for name, tensor in tensors.items()}
    for what, given in misfits.items():
        harness = Harness.of(target, batch)
        slots, used = harness.build(batch).slot_mapping, tensors | given
        if batch.kv_cache is None or slots.numel() < 2:
            raise CheckSkipped("the step has no pages")
        _, error = guarded_call(
            harness.impl.update_kv_cache,
            harness.layers[0],
            used["key"],
            used["value"],
            batch.kv_cache,
            slots,
        )
        _expect_refused(error, f"update_kv_cache with {what}", batch)


def _check_attended(target: Target, scenario: str) -> None:
    batch = scenario_factory(target, scenario)()
    tensors = {"query": batch.query, "output": blank_answer(batch).output}
    misfits: dict[str, _Misfits] = {"an output of half the size": {"output": _halved(tensors["output"])}}
    misfits["queries of half the size"] = {"query": _halved(tensors["query"])}
    if batch.spec.num_heads > 1:
        misfits["an output of one head"] = {"output": tensors["output"][:, :1]}
    for what, given in misfits.items():
        harness, used = Harness.of(target, batch), tensors | given
        metadata = harness.build(batch)
        tail = used["query"], batch.key, batch.value, batch.kv_cache, metadata, used["output"]
        _, error = guarded_call(harness.impl.attend, harness.layers[0], *tail)
        _expect_refused(error, f"attend with {what}", batch)


def _halved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[..., : tensor.shape[-1] // 2]


def _expect_refused(error: BaseException | None, what: str, batch: Batch) -> None:
    if error is None:
        spec = batch.spec
        raise ConformanceError(
            f"{what} was accepted; it must raise a BatchError: the layer has {spec.num_heads} heads over "
            f"{spec.num_kv_heads} KV heads of {spec.head_size}, and the step {batch.query.shape[0]} rows"
        )
