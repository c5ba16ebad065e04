"""forward does not modify its inputs, accepts strided views, and does not read past the batch's tokens.

Tensors that do not fit a layer are refused, also those that a library would broadcast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from attnplug.core.errors import BatchError, LayoutError, SpecError
from attnplug.core.features import Feature
from attnplug.core.impl import LayerTensors
from attnplug.registry.plugins.waiting import guarded_call
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.cases.steps import (
    of_each_storage,
    paged_scenarios,
    scenario_factory,
    scenarios,
)
from attnplug.testing.conformance.check import (
    Check,
    CheckSkipped,
    CheckTable,
    ConformanceError,
    SkipKind,
    checks_from,
)
from attnplug.testing.conformance.harness import Harness, blank_output, make_impl, raw_bytes
from attnplug.testing.conformance.mistakes.expectations import expect_correct
from attnplug.testing.conformance.target import Target

_LEARNED = {Feature.SINKS: ("sinks", "has_sinks"), Feature.ALIBI: ("alibi_slopes", "has_alibi")}


def checks(target: Target) -> Iterator[Check]:
    """The checks of inputs in each scenario, and of learned tensors that the backend declares."""
    for scenario in scenarios(target):
        yield from checks_from(_CHECKS, "tensors", target, scenario)
    for feature, (name, flag) in _LEARNED.items():
        if feature in target.backend.features:
            summary = f"{name} are not modified"
            yield Check.of(
                f"tensors/{name}-kept", summary, _check_unmodified, target, "mixed", **{flag: True}
            )
            summary = f"from_spec raises for a layer with {flag} without {name}"
            yield Check.of(f"tensors/{name}-required", summary, _check_required, target, name, flag)


def _check_unmodified(target: Target, scenario: str, **fields: Any) -> None:
    # Kernels fold scales into tensors of half precision more often than into those of float32.
    for dtype in dict.fromkeys([target.dtypes[0], target.dtypes[-1]]):
        batch = scenario_factory(target, scenario, dtype=dtype, **fields)()
        with inputs_kept(batch):
            Harness.of(target, batch).forward(batch)


@contextlib.contextmanager
def inputs_kept(batch: Batch) -> Iterator[None]:
    """Raise ConformanceError if an input of the batch, but for its cache, has other bytes at the end."""
    before = {name: raw_bytes(tensor) for name, tensor in _inputs(batch).items()}
    yield
    _expect_kept(batch, before, f", of {batch.spec.dtype}")


def _expect_kept(batch: Batch, before: Mapping[str, torch.Tensor], given: str = "") -> None:
    for name, tensor in _inputs(batch).items():
        after = raw_bytes(tensor)
        if after.shape != before[name].shape or not torch.equal(after, before[name]):
            shape = tuple(tensor.shape)
            raise ConformanceError(f"forward modified {name}, an input of the shape {shape}{given}")


def _inputs(batch: Batch) -> dict[str, torch.Tensor]:
    """The tensors that forward may read, except the cache, by name."""
    tensors: dict[str, object] = {"query": batch.query, "key": batch.key, "value": batch.value}
    tensors |= {field.name: getattr(batch.tensors, field.name) for field in dataclasses.fields(batch.tensors)}
    for field in dataclasses.fields(batch.common):
        if not field.name.startswith("_"):
            value = getattr(batch.common, field.name)
            tensors[f"common.{field.name}"] = (
                torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            )
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}


def _check_padding(target: Target, scenario: str) -> None:
    make = scenario_factory(target, scenario)
    for more in (0, 61):
        batch = _pad(make(), more)
        tokens = batch.common.num_actual_tokens
        for fill in (torch.nan, 7.0):
            found = Harness.of(target, batch).forward(batch, blank_output(batch, fill))
            given = blank_output(batch, fill)
            if not torch.equal(raw_bytes(found.output[tokens:]), raw_bytes(given.output[tokens:])):
                raise ConformanceError(f"output rows past num_actual_tokens={tokens} were written")
            what = f"with rows of NaN past num_actual_tokens={tokens}, which forward must not read"
            expect_correct(batch, found, what)


def _pad(batch: Batch, more: int) -> Batch:
    """The batch with `more` rows of NaN behind its queries, keys and values, with slot -1."""

    def longer(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, tensor.new_full((more, *tensor.shape[1:]), torch.nan)])

    slots = batch.common.slot_mapping
    common = dataclasses.replace(batch.common, slot_mapping=torch.cat([slots, slots.new_full((more,), -1)]))
    return dataclasses.replace(
        batch, common=common, query=longer(batch.query), key=longer(batch.key), value=longer(batch.value)
    )


def _check_strided(target: Target, scenario: str) -> None:
    _expect_views(target, scenario)
    for fields in of_each_storage(target)[1:]:
        with contextlib.suppress(CheckSkipped):
            _expect_views(target, scenario, **fields)


def _expect_views(target: Target, scenario: str, **fields: Any) -> None:
    refused = []
    for name, view in (
        ("of one packed projection", _pack),
        ("of wider tensors", lambda *tensors: tuple(map(_slice, tensors))),
        ("with the heads outside", lambda *tensors: tuple(map(_heads_outside, tensors))),
        ("of unlike strides", lambda query, key, value: (query, _slice(key), value)),
        ("with elements apart", lambda *tensors: tuple(map(_elements_apart, tensors))),
    ):
        batch = scenario_factory(target, scenario, **fields)()
        query, key, value = view(batch.query, batch.key, batch.value)
        batch = dataclasses.replace(batch, query=query, key=key, value=value)
        before = {name: raw_bytes(tensor) for name, tensor in _inputs(batch).items()}
        try:
            found = Harness.of(target, batch).forward(batch)
        except ConformanceError as problem:
            if not isinstance(problem.__cause__, (BatchError, LayoutError)):
                raise
            refused.append(f"views {name} are refused: {problem.__cause__}")
            continue
        strides = ", ".join(
            f"{name} strides {getattr(batch, name).stride()}" for name in ("query", "key", "value")
        )
        expect_correct(batch, found, f"with query, key and value as views {name} ({strides})")
        _expect_kept(batch, before, f", given as views {name}")
    if refused:
        raise CheckSkipped("; ".join(refused), SkipKind.ALLOWED)


def _pack(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Query, key and value as slices of one tensor, as after a fused projection; copies where they do not fit."""
    if len({(each.shape[0], each.shape[2]) for each in tensors}) > 1:
        return tensors
    heads = [each.shape[1] for each in tensors]
    packed, ends = torch.cat(tensors, 1), list(itertools.accumulate(heads))
    return tuple(packed[:, end - count : end] for count, end in zip(heads, ends, strict=True))


def _heads_outside(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def _elements_apart(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with NaN between its elements."""
    return torch.stack([tensor, torch.full_like(tensor, torch.nan)], -1)[..., 0]


def _slice(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a slice of a larger one with NaN beside it."""
    rows, heads, size = tensor.shape
    packed = tensor.new_full((rows, 3 * heads, size), torch.nan)
    packed[:, heads : 2 * heads] = tensor
    return packed[:, heads : 2 * heads]


def _check_required(target: Target, name: str, flag: str) -> None:
    spec = target.spec(**{flag: True})
    try:
        make_impl(target.backend, spec, LayerTensors(), options=target.own_options)
    except (SpecError, CheckSkipped):
        return
    except Exception as error:
        found = f"raised {type(error).__name__}: {error}"
        raise ConformanceError(
            f"from_spec with {flag}=True and no {name} {found}; expected a SpecError"
        ) from error
    raise ConformanceError(f"from_spec accepts {flag}=True without {name}: they would be ignored")


_CHECKS: CheckTable = {
    "inputs-kept": (_check_unmodified, "query, key, value and the step's tensors are not modified"),
    "padding-rows": (_check_padding, "rows past num_actual_tokens are neither read nor written"),
    "strided-inputs": (_check_strided, "query, key and value may be strided views"),
}


_Misfits = dict[str, torch.Tensor]


def misfit_checks(target: Target) -> Iterator[Check]:
    """The misfit_checks of layers over pages."""
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
    tensors = {"query": batch.query, "output": blank_output(batch).output}
    misfits: dict[str, _Misfits] = {"an output of half the size": {"output": _halve(tensors["output"])}}
    misfits["queries of half the size"] = {"query": _halve(tensors["query"])}
    if batch.spec.num_heads > 1:
        misfits["an output of one head"] = {"output": tensors["output"][:, :1]}
    for what, given in misfits.items():
        harness, used = Harness.of(target, batch), tensors | given
        metadata = harness.build(batch)
        tail = used["query"], batch.key, batch.value, batch.kv_cache, metadata, used["output"]
        _, error = guarded_call(harness.impl.attend, harness.layers[0], *tail)
        _expect_refused(error, f"attend with {what}", batch)


def _halve(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[..., : tensor.shape[-1] // 2]


def _expect_refused(error: BaseException | None, what: str, batch: Batch) -> None:
    if error is None:
        spec = batch.spec
        raise ConformanceError(
            f"{what} was accepted; it must raise a BatchError: the layer has {spec.num_heads} heads over "
            f"{spec.num_kv_heads} KV heads of {spec.head_size}, and the step {batch.query.shape[0]} rows"
        )
