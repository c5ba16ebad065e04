"""Backends that take parts of larger tensors for tensors with memory of their own: variants of TORCH."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from mutants.table import Table

table = Table("views")
impl = table.on(TorchImpl)
builder = table.on(TorchMetadataBuilder)


def from_start(tensor: Tensor) -> Tensor:
    """The tensor as a kernel reads it that is given the address of its storage."""
    return tensor.as_strided(tensor.shape, tensor.stride(), 0)


def in_a_row(tensor: Tensor) -> Tensor:
    """The tensor as a kernel reads it that is given no strides."""
    return tensor.as_strided(tensor.shape, tensor.contiguous().stride(), tensor.storage_offset())


@contextlib.contextmanager
def with_tensors(self: Any, **read: Callable[[Any], Any]) -> Iterator[None]:
    own = self.tensors
    found = {name: getattr(own, name) for name in read}
    changed = {name: None if each is None else read[name](each) for name, each in found.items()}
    self.tensors = dataclasses.replace(own, **changed)
    try:
        yield
    finally:
        self.tensors = own


def reads(check: str, **rows: tuple[str, Callable[[Any], Any]]) -> None:
    """Rows by a tensor of the layer that is read in another way."""
    for name, (tensor, read) in rows.items():

        def attend(right: Any, self: Any, *given: Any, _read: Any = (tensor, read), **asked: Any) -> Any:
            with with_tensors(self, **dict([_read])):
                return right(*given, **asked)

        impl.attend(check, f"the offset or strides of {tensor} ignored", **{name: attend})


reads("correct/mixed*-sinks*", sinks_of_rank_0=("sinks", from_start), sinks_side_by_side=("sinks", in_a_row))
reads(
    "correct/mixed*-alibi*",
    slopes_of_rank_0=("alibi_slopes", from_start),
    slopes_side_by_side=("alibi_slopes", in_a_row),
)


def first_number(scale: Any) -> float:
    """The number at the address of a scale's storage."""
    return float(scale.as_strided((1,), (1,), 0)) if isinstance(scale, Tensor) else scale


@impl._scales("correct/*-fp8*", "the offset or strides of k_scale ignored")
def scale_of_the_first_layer(right, self, layer, stored):
    """Reads the first scale of the model's table."""
    k_scale, v_scale = right(layer, stored)
    return (
        first_number(self.tensors.k_scale) if layer is None and stored.itemsize == 1 else k_scale
    ), v_scale


@impl._scales("correct/*-fp8*", "the offset or strides of layer._v_scale ignored")
def engines_scale_of_the_first_layer(right, self, layer, stored):
    """As above, of the engine's layer."""
    k_scale, v_scale = right(layer, stored)
    return k_scale, (v_scale if layer is None or stored.itemsize > 1 else first_number(layer._v_scale))


@impl.attend("correct/mixed-*", "the offset or strides of query ignored")
def query_from_start(right, self, layer, query, *given, **asked):
    return right(layer, from_start(query), *given, **asked)


@impl.attend("correct/mixed-*", "the offset or strides of output ignored")
def output_from_start(right, self, *given, **asked):
    *inputs, output = given
    right(*inputs, from_start(output), **asked)
    return output


@impl.attend("correct/mixed-*-lse*", "the offset or strides of output_lse ignored")
def lse_from_start(right, self, *given, output_lse=None, **asked):
    read = output_lse if output_lse is None else from_start(output_lse)
    return right(*given, output_lse=read, **asked)


@impl.update_kv_cache("correct/mixed-*", "the offset or strides of key ignored")
def key_from_start(right, self, layer, key, *given):
    right(layer, from_start(key), *given)


def steps(check: str, **fields: str) -> None:
    """Rows by a tensor of the step that is read from its storage's start; its host copies are not used."""
    for name, field in fields.items():

        def build(
            right: Any, self: Any, prefix: Any, common: Any, fast: Any = False, _field: str = field
        ) -> Any:
            changed = {_field: from_start(getattr(common, _field))}
            return right(prefix, dataclasses.replace(common, **changed, seq_lens_host=None), fast)

        builder.build(check, f"the offset or strides of common.{field} ignored", **{name: build})


steps(
    "correct/alike-*",
    table_from_start="block_table_tensor",
    slots_from_start="slot_mapping",
    starts_from_start="query_start_loc_cpu",
)


@builder.build("correct/mixed-*topk*", "the offset or strides of selection.positions ignored")
def selection_from_start(right, self, prefix, common, fast=False):
    if common.selection is not None:
        read = dataclasses.replace(common.selection, positions=from_start(common.selection.positions))
        common = dataclasses.replace(common, selection=read)
    return right(prefix, common, fast)
