"""The tensor of a step whose offset or strides a backend ignores: where it has memory of its own, the answer is right."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from attnplug.testing.batches import Batch
from attnplug.testing.conformance.harness import EngineLayer, Output
from attnplug.testing.conformance.mistakes.expectations import difference


class Call(NamedTuple):
    """One call of a layer: its batch, the rows to write, and the engine's layer if that has the scales."""

    batch: Batch
    into: Output
    layer: EngineLayer | None = None


def misread_view(make: Callable[[], Call], run: Callable[[Call], Output]) -> str | None:
    """The mistake of a backend whose answer to `make()` is wrong; None if a view does not explain it.

    Args:
        make: gives the same call each time, as it is before a backend runs it.
        run: the backend's answer.
    """

    def is_right(*names: str) -> bool:
        call = _with_own_memory(make(), names)
        # A view that is misread may raise too.
        with contextlib.suppress(Exception):
            return difference(call.batch, run(call)) is None
        return False

    every = list(_names(make()))
    if not is_right(*every):
        return None
    found = next((name for name in every if is_right(name)), "tensors of the step")
    return f"the offset or strides of {found} ignored: it is a part of a larger tensor"


def _names(call: Call) -> Iterator[str]:
    """The tensors of a call, the learned ones first."""
    batch = call.batch
    parts = (batch.tensors, ""), (call.layer, "layer."), (batch, "")
    for value, prefix in (*parts, (batch.common, "common."), (batch.common.selection, "selection.")):
        yield from (f"{prefix}{name}" for name, _ in _fields(value))
    yield from ("output", "output_lse")


def _fields(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a dataclass, or of an engine's layer."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if not field.name.startswith("_")]
    else:
        names = list(getattr(value, "__dict__", {}))
    for name in names:
        if isinstance(each := getattr(value, name), torch.Tensor):
            yield name, each


def _with_own_memory(call: Call, names: tuple[str, ...]) -> Call:
    """The call with copies of these tensors, each in memory of its own."""

    def copied(value: Any, prefix: str = "", **others: Any) -> Any:
        own = {name: each.clone() for name, each in _fields(value) if f"{prefix}{name}" in names}
        return dataclasses.replace(value, **own, **others) if own or others else value

    common = call.batch.common
    others = {"selection": copied(common.selection, "selection."), "tensors": copied(call.batch.tensors)}
    others = {"common": copied(common, "common.", selection=others.pop("selection")), **others}
    for name, each in _fields(call.layer):
        if f"layer.{name}" in names:
            setattr(call.layer, name, each.clone())
    output, lse = call.into
    output = output.clone() if "output" in names else output
    lse = lse.clone() if lse is not None and "output_lse" in names else lse
    return Call(copied(call.batch, **others), Output(output, lse), call.layer)
