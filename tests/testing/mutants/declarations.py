"""Backends with invalid or contradicting declarations: variants of TORCH."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from asks_torch import AsksTorch, Raises
from imports_torch import ImportsTorch

from attnplug.backends.torch_native import TorchBackend
from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core import AttentionImpl, AttentionType, Feature, MultipleOf
from mutants.table import MUTANTS, Mutant, Table

table = Table("declarations")


ALL = TorchBackend.features

_CALLS = itertools.count()


@dataclasses.dataclass
class Loose:
    """Options that are not frozen."""

    tile: int = 64


@dataclasses.dataclass(frozen=True)
class Demanding:
    """Options that the user must set."""

    tile: int


@table.part("declaration/impl-class", "lacks attend, update_kv_cache")
class Unfinished(AttentionImpl[Any]):
    """Lacks attend and update_kv_cache."""


@dataclasses.dataclass(frozen=True)
class Unreadable:
    """Options with an unknown type."""

    tile: "Tile | None" = None  # type: ignore[name-defined]  # noqa: F821, UP037


@table.part("declaration/builder-class", "cudagraph_support=7")
class NumberOfCaptures(TorchMetadataBuilder):
    """Declares a number as its capture level."""

    cudagraph_support: Any = 7


@table.part("declaration/builder-class", "must be True or False")
class MaybeUpdates(TorchMetadataBuilder):
    """Declares neither True nor False."""

    supports_update_block_table: Any = "if you like"


@table.part("declaration/builder-class", "'sometimes' must be one of")
class HostLengths(TorchMetadataBuilder):
    """Declares an unknown need for host lengths."""

    needs_host_seq_lens: Any = "sometimes"


def imports_kernels(cls: Any) -> Any:
    raise ImportError("libkernels.so: no version information available")


def order_of(*orders: tuple[int, ...]) -> Any:
    """A stride order with a wrong default, and the right ones of NHD and HND."""

    def get_kv_cache_stride_order(
        cls: Any, layers: bool = False, *, layout: Any = None, spec: Any = None
    ) -> Any:
        if layout is None:
            return orders[0]
        return TorchBackend.get_kv_cache_stride_order(layers, layout=layout, spec=spec)

    return get_kv_cache_stride_order


def lists_16(cls: Any, spec: Any = None, device: Any = None) -> Any:
    return (MultipleOf(16),)


# fmt: off
MUTANTS.extend(
    Mutant(name, table.family, backend, check, says)
    for name, backend, check, says in (
        ("imports_torch", ImportsTorch, "declaration/light-import", "imports_torch.py:5"),
        ("asks_torch", AsksTorch, "declaration/light-methods", "asks_torch.py:17"),
        ("raises_when_asked", Raises, "declaration/light-methods", "OSError: no configuration file"),
    )
)
table.add("no name | declaration/name | 'no name'")
table.add("odd_family | declaration/name | family is 7", family=7)
table.add("odd_requirement | declaration/requires | 'triton >>3'", requires=("triton >>3",))
table.add("text_for_devices | declaration/device-types | device_types is 'cpu'", device_types="cpu")
table.add("shouts_devices | declaration/device-types | 'CPU'", device_types=("cpu", "CPU"))
table.add("odd_phase | declaration/phases | 'decoding'", supported_phases=("decode", "prefill", "decoding"))
table.add("odd_dtype | declaration/dtypes | 'float64'", supported_dtypes=("float32", "float64"))
table.add("number_for_dtype | declaration/dtypes | must be a dtype name", supported_dtypes=(32,))
table.add("odd_storage | declaration/kv-cache-dtypes | cannot be sized", supported_kv_cache_dtypes=("auto", "fq3"))
table.add("fp8_by_half | declaration/kv-cache-dtypes | lacks FP8_KV", features=ALL & ~Feature.FP8_KV)
table.add("fp8_in_name | declaration/kv-cache-dtypes | names no fp8", supported_kv_cache_dtypes=("auto",))
table.add("two_head_sizes | declaration/head-sizes | supports_head_size(80)", supports_head_size=lambda cls, n: n != 80)
table.add("no_head_size | declaration/head-sizes | has 0", get_supported_head_sizes=lambda cls: (0, 64))
table.add("no_blocks | declaration/block-sizes | names no size", get_supported_kernel_block_sizes=lambda cls, *a: ())
table.add("narrow_union | declaration/block-sizes | block size 1 is supported",
    get_supported_kernel_block_sizes=lambda cls, spec=None, device=None: (MultipleOf(1 if spec else 16),))
table.add(
    "prefers_what_it_cannot_read | declaration/preferred-block-size | get_preferred_block_size(default=1) is 1; supported are multiples of 16",
    get_supported_kernel_block_sizes=lists_16,
    get_preferred_block_size=lambda cls, spec=None, device=None, default=16: default,
)
table.add("half_a_sink | declaration/features | supports_sink() is False", supports_sink=lambda cls: False)
table.add("hidden_encoder | declaration/features | lacks CROSS", features=ALL & ~Feature.CROSS, supports_attn_type=lambda cls, kind: True)
table.add("no_encoder | declaration/features | has ENCODER", supports_attn_type=lambda cls, kind: kind is AttentionType.DECODER)
table.add("number_of_features | declaration/features | must be a Feature", features=7)
table.add("first_of_all | declaration/priority | get_priority is 1000", get_priority=lambda cls, *a: 1000)
table.add("text_for_ranges | declaration/step-priorities | which must be a tuple or list of StepPriority", get_step_priorities=lambda cls, *a: ["draft"])
table.add("true_priority | declaration/priority | get_priority is True", get_priority=lambda cls, *a: True)
table.add("loose_options | declaration/options | is not frozen", Options=Loose)
table.add("demanding_options | declaration/options | without arguments", Options=Demanding)
table.add("no_options | declaration/options | must be None or a frozen dataclass", Options=int)
table.add("odd_layout | declaration/kv-layouts | NHD, HND or both", supported_kv_cache_layouts=lambda cls: ("NDH",))
table.add("requires_another | declaration/kv-layouts | is 'HND'", get_required_kv_cache_layout=lambda cls: "HND")
table.add("takes_any_layout | declaration/kv-layouts | must raise LayoutError",
    get_kv_cache_stride_order=lambda cls, layers=False, *, layout=None, spec=None: (0, 1, 2, 3, 4))
table.add("shape_of_others | declaration/kv-shape-plain | the contract has", get_kv_cache_shape=lambda cls, n, b, h, d, *a: (2, n, b, h, d))
table.add("order_that_is_none | declaration/kv-stride-order-plain | not a permutation",
    get_kv_cache_stride_order=lambda cls, layers=False, *, layout=None, spec=None: (0, 1, 2, 2, 4))
table.add("one_order_for_both | declaration/kv-stride-order-plain | HND has the token inside",
    get_kv_cache_stride_order=lambda cls, layers=False, *, layout=None, spec=None: (tuple(range(5 + layers)) if not layers else (1, 0, 2, 3, 4, 5)))
table.add("layers_outside | declaration/kv-stride-order-plain | must be adjacent", supported_kv_cache_layouts=lambda cls: ("NHD",),
    get_kv_cache_stride_order=lambda cls, layers=False, *, layout=None, spec=None: tuple(range(5 + layers)))
table.add("copies_pages | declaration/kv-views-plain | a copy of K", split_kv=lambda cls, cache, spec: (cache[:, 0].clone(), cache[:, 1]))
table.add("one_page_for_both | declaration/kv-views-plain | split_kv overlap", split_kv=lambda cls, cache, spec: (cache[:, 0], cache[:, 0]))
table.add(
    "values_before_keys | declaration/kv-views-plain | K of split_kv is not the first part of the cache, [:, 0], for 1 KV heads",
    split_kv=lambda cls, cache, spec: TorchBackend.split_kv(cache, spec)[
        :: -1 if spec.num_kv_heads == 1 and spec.head_size == spec.head_size_v else 1
    ],
)
table.add("class_of_nothing | declaration/impl-class | must be a subclass of AttentionImpl", impl=int)
table.add("moody | declaration/stable | get_priority changed", get_priority=lambda cls, *a: next(_CALLS) % 500)
table.add("list_for_a_key | declaration/compile-key | unhashable", compile_key=lambda cls, spec: [spec.head_size])
table.add("unreadable_options | declaration/options | reading the annotations", Options=Unreadable)
table.add("text_for_sizes | declaration/head-sizes | must be a sequence of sizes", get_supported_head_sizes=lambda cls: "64")
table.add("another_default | declaration/kv-stride-order-plain | not that of NHD, the first", get_kv_cache_stride_order=order_of((0, 1, 3, 2, 4)))
table.add(
    "flat_pages | declaration/kv-views-plain | gives K of the shape (3, 16, 128), not (3, 16, 2, 64)",
    split_kv=lambda cls, cache, spec: (cache[:, 0].flatten(2), cache[:, 1].flatten(2)),
    supported_kv_cache_layouts=lambda cls: ("NHD",),
)
table.add("bytes_for_pages | declaration/kv-views-plain | gives torch.int32, torch.int32, not torch.float32",
    split_kv=lambda cls, cache, spec: (cache[:, 0].view(torch.int32), cache[:, 1].view(torch.int32)))
table.add("kernels_missing | declaration/impl-class | raised ImportError", get_impl_cls=imports_kernels)
table.add("new_class_each_time | declaration/impl-class | another class at each call", get_impl_cls=lambda cls: type("Impl", (TorchImpl,), {}))
# fmt: on
