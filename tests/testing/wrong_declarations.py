"""Backends that declare what means nothing, or refuse and accept wrongly: variants of TORCH."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from asks_torch import AsksTorch, Raises
from catching import Wrong, variant
from imports_torch import ImportsTorch

from attnplug.backends.torch_native import TorchBackend
from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core import AttentionImpl, AttentionType, Device, Feature, LayerSpec, MultipleOf, Reason
from attnplug.errors import BatchError

__all__ = ["WRONG_DECLARATIONS"]

ALL = TorchBackend.features
_CALLS = itertools.count()


@dataclasses.dataclass
class Loose:
    """Options that anybody may change."""

    tile: int = 64


@dataclasses.dataclass(frozen=True)
class Demanding:
    """Options that the user must set."""

    tile: int


class RaisesLate(TorchImpl):
    """Finds out in forward what should have been refused."""

    def attend(self, *args: Any, **kwargs: Any) -> Any:
        if self.spec.has_alibi and self.spec.logits_soft_cap:
            raise BatchError("logits_soft_cap", self.spec.logits_soft_cap, "cannot stand with ALiBi")
        return super().attend(*args, **kwargs)


class RaisesEarly(TorchImpl):
    """Finds it out when it is made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.spec.chunk_size:
            raise NotImplementedError("chunks")


class Unfinished(AttentionImpl[Any]):
    """Lacks what runs a layer."""


@dataclasses.dataclass(frozen=True)
class Unreadable:
    """Options of a type that there is not."""

    tile: "Tile | None" = None  # type: ignore[name-defined]  # noqa: F821, UP037


class NoLatents(TorchImpl):
    """Finds out late that it has no latent attention."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.spec.mla is not None:
            raise NotImplementedError("mla")


class CapturesAll(TorchMetadataBuilder):
    """Says with a number what it captures."""

    cudagraph_support: Any = 7


class MaybeUpdates(TorchMetadataBuilder):
    """Says neither yes nor no."""

    supports_update_block_table: Any = "if you like"


class Elsewhere(TorchMetadataBuilder):
    """Says of host lengths what nobody knows."""

    needs_host_seq_lens: Any = "sometimes"


def accepts_all(cls: Any, spec: LayerSpec, device: Device, phase: Any = None) -> list[Reason]:
    return []


def but(**answers: Any) -> Any:
    """A validate_configuration that says something else where TORCH refuses."""

    def answer(cls: Any, spec: LayerSpec, device: Device, phase: Any = None) -> Any:
        found = TorchBackend.validate_configuration.__func__(cls, spec, device, phase)  # type: ignore[attr-defined]
        return answers["refused"] if found else found

    return answer


def raises_for_devices(cls: Any, spec: LayerSpec, device: Device, phase: Any = None) -> list[Reason]:
    major, _ = device.capability or (0, 0)
    if device.type == "cuda" and not major:
        raise AssertionError("which GPU?")
    return TorchBackend.validate_configuration(spec, device, phase)


def per_phase(cls: Any, spec: LayerSpec, device: Device, phase: Any = None) -> list[Reason]:
    if str(phase) == "decode" and spec.has_alibi:
        return [Reason("phase not supported", code="phase")]
    return TorchBackend.validate_configuration(spec, device, phase)


def both_is_more(cls: Any, spec: LayerSpec, device: Device, phase: Any = None) -> list[Reason]:
    if phase is None and spec.has_sinks:
        return [Reason("phase not supported", code="phase")]
    return TorchBackend.validate_configuration(spec, device, phase)


def takes_mla(cls: Any, spec: LayerSpec, device: Device, phase: Any = None) -> list[Reason]:
    return [] if spec.mla is not None else TorchBackend.validate_configuration(spec, device, phase)


def any_bare_device(cls: Any, spec: LayerSpec, device: Device, phase: Any = None) -> list[Reason]:
    found = TorchBackend.validate_configuration.__func__(cls, spec, device, phase)  # type: ignore[attr-defined]
    return [each for each in found if device.capability or each.code != "compute_capability"]


def imports_kernels(cls: Any) -> Any:
    raise ImportError("libkernels.so: no version information available")


def order_of(*orders: tuple[int, ...]) -> Any:
    """A stride order that is the first of these by default, then those of NHD and HND."""

    def get_kv_cache_stride_order(
        cls: Any, layers: bool = False, *, layout: Any = None, spec: Any = None
    ) -> Any:
        if layout is None:
            return orders[0]
        return TorchBackend.get_kv_cache_stride_order(layers, layout=layout, spec=spec)

    return get_kv_cache_stride_order


def twice(cls: Any, spec: LayerSpec, device: Device, phase: Any = None) -> list[Reason]:
    return TorchBackend.validate_configuration(spec, device, phase) * 2


def hard_coded(cls: Any, spec: LayerSpec, device: Device, phase: Any = None) -> list[Reason]:
    return TorchBackend.validate_configuration(spec, device, phase)


def lists_16(cls: Any, spec: Any = None, device: Any = None) -> Any:
    return (MultipleOf(16),)


def wrong(name: str, check: str, says: str, **parts: Any) -> Wrong:
    return Wrong(name, variant(name, **parts), check, says)


WRONG_DECLARATIONS = [
    Wrong("imports_torch", ImportsTorch, "declaration/light-import", "imports_torch.py:5"),
    Wrong("asks_torch", AsksTorch, "declaration/light-methods", "asks_torch.py:17"),
    Wrong("raises_when_asked", Raises, "declaration/light-methods", "OSError: no configuration file"),
    wrong("no name", "declaration/name", "'no name'"),
    wrong("odd_family", "declaration/name", "family is 7", family=7),
    wrong("odd_requirement", "declaration/requires", "'triton >>3'", requires=("triton >>3",)),
    wrong("text_for_devices", "declaration/device-types", "device_types is 'cpu'", device_types="cpu"),
    wrong("shouts_devices", "declaration/device-types", "'CPU'", device_types=("cpu", "CPU")),
    wrong(
        "odd_phase", "declaration/phases", "'decoding'", supported_phases=("decode", "prefill", "decoding")
    ),
    wrong("odd_dtype", "declaration/dtypes", "'float64'", supported_dtypes=("float32", "float64")),
    wrong("number_for_dtype", "declaration/dtypes", "must be a dtype name", supported_dtypes=(32,)),
    wrong(
        "odd_storage",
        "declaration/kv-cache-dtypes",
        "cannot be sized",
        supported_kv_cache_dtypes=("auto", "fq3"),
    ),
    wrong("fp8_by_half", "declaration/kv-cache-dtypes", "lacks FP8_KV", features=ALL & ~Feature.FP8_KV),
    wrong("fp8_in_name", "declaration/kv-cache-dtypes", "names no fp8", supported_kv_cache_dtypes=("auto",)),
    wrong(
        "two_head_sizes",
        "declaration/head-sizes",
        "supports_head_size(80)",
        supports_head_size=lambda cls, n: n != 80,
    ),
    wrong("no_head_size", "declaration/head-sizes", "has 0", get_supported_head_sizes=lambda cls: (0, 64)),
    wrong(
        "no_blocks",
        "declaration/block-sizes",
        "names no size",
        get_supported_kernel_block_sizes=lambda cls, *a: (),
    ),
    wrong(
        "narrow_union",
        "declaration/block-sizes",
        "block size 1 is supported",
        get_supported_kernel_block_sizes=lambda cls, spec=None, device=None: (MultipleOf(1 if spec else 16),),
    ),
    wrong(
        "prefers_what_it_cannot_read",
        "declaration/preferred-block-size",
        "get_preferred_block_size(default=1) is 1, which it cannot read",
        get_supported_kernel_block_sizes=lists_16,
        get_preferred_block_size=lambda cls, spec=None, device=None, default=16: default,
    ),
    wrong("half_a_sink", "declaration/features", "supports_sink() is False", supports_sink=lambda cls: False),
    wrong(
        "hidden_encoder",
        "declaration/features",
        "lacks CROSS",
        features=ALL & ~Feature.CROSS,
        supports_attn_type=lambda cls, kind: True,
    ),
    wrong(
        "no_encoder",
        "declaration/features",
        "has ENCODER",
        supports_attn_type=lambda cls, kind: kind is AttentionType.DECODER,
    ),
    wrong("number_of_features", "declaration/features", "must be a Feature", features=7),
    wrong("first_of_all", "declaration/priority", "get_priority is 1000", get_priority=lambda cls, *a: 1000),
    wrong("true_priority", "declaration/priority", "get_priority is True", get_priority=lambda cls, *a: True),
    wrong("loose_options", "declaration/options", "is not frozen", Options=Loose),
    wrong("demanding_options", "declaration/options", "without arguments", Options=Demanding),
    wrong("no_options", "declaration/options", "must be None or a frozen dataclass", Options=int),
    wrong(
        "odd_layout",
        "declaration/kv-layouts",
        "NHD, HND or both",
        supported_kv_cache_layouts=lambda cls: ("NDH",),
    ),
    wrong(
        "requires_another",
        "declaration/kv-layouts",
        "is 'HND'",
        get_required_kv_cache_layout=lambda cls: "HND",
    ),
    wrong(
        "takes_any_layout",
        "declaration/kv-layouts",
        "must raise LayoutError",
        get_kv_cache_stride_order=lambda cls, layers=False, *, layout=None, spec=None: (0, 1, 2, 3, 4),
    ),
    wrong(
        "shape_of_others",
        "declaration/kv-shape-plain",
        "the contract has",
        get_kv_cache_shape=lambda cls, n, b, h, d, *a: (2, n, b, h, d),
    ),
    wrong(
        "order_that_is_none",
        "declaration/kv-stride-order-plain",
        "no permutation",
        get_kv_cache_stride_order=lambda cls, layers=False, *, layout=None, spec=None: (0, 1, 2, 2, 4),
    ),
    wrong(
        "one_order_for_both",
        "declaration/kv-stride-order-plain",
        "HND has the token inside",
        get_kv_cache_stride_order=lambda cls, layers=False, *, layout=None, spec=None: (
            tuple(range(5 + layers)) if not layers else (1, 0, 2, 3, 4, 5)
        ),
    ),
    wrong(
        "layers_outside",
        "declaration/kv-stride-order-plain",
        "must lie together",
        supported_kv_cache_layouts=lambda cls: ("NHD",),
        get_kv_cache_stride_order=lambda cls, layers=False, *, layout=None, spec=None: tuple(
            range(5 + layers)
        ),
    ),
    wrong(
        "copies_pages",
        "declaration/kv-views-plain",
        "a copy of K",
        split_kv=lambda cls, cache, spec: (cache[:, 0].clone(), cache[:, 1]),
    ),
    wrong(
        "one_page_for_both",
        "declaration/kv-views-plain",
        "over each other",
        split_kv=lambda cls, cache, spec: (cache[:, 0], cache[:, 0]),
    ),
    wrong("class_of_nothing", "declaration/impl-class", "must be a subclass of AttentionImpl", impl=int),
    wrong("unfinished", "declaration/impl-class", "lacks attend, update_kv_cache", impl=Unfinished),
    wrong("host_lengths", "declaration/builder-class", "'sometimes' must be one of", builder=Elsewhere),
    wrong(
        "moody", "declaration/stable", "get_priority changed", get_priority=lambda cls, *a: next(_CALLS) % 500
    ),
    wrong(
        "list_for_a_key",
        "declaration/compile-key",
        "unhashable",
        compile_key=lambda cls, spec: [spec.head_size],
    ),
    wrong(
        "ignores_sparse", "refused/feature-sparse", "it would be ignored", validate_configuration=accepts_all
    ),
    wrong(
        "ignores_a_dtype",
        "refused/dtype",
        "dtype='float16' is accepted",
        supported_dtypes=("float32",),
        validate_configuration=accepts_all,
    ),
    wrong(
        "ignores_storage",
        "refused/kv-cache-dtype",
        "'unheard_of_3bit' is accepted",
        validate_configuration=accepts_all,
    ),
    wrong(
        "ignores_head_sizes",
        "refused/head-size",
        "head_size=1 is accepted",
        get_supported_head_sizes=lambda cls: (64,),
        validate_configuration=accepts_all,
    ),
    wrong(
        "ignores_block_sizes",
        "refused/block-size",
        "block_size=1 is accepted",
        get_supported_kernel_block_sizes=lists_16,
        validate_configuration=accepts_all,
    ),
    wrong(
        "ignores_kinds",
        "refused/attn-type",
        "'encoder' is accepted",
        features=ALL & ~Feature.ENCODER,
        validate_configuration=accepts_all,
    ),
    wrong(
        "ignores_devices",
        "refused/device-type",
        "the device tpu is accepted",
        validate_configuration=accepts_all,
    ),
    wrong(
        "ignores_capability",
        "refused/compute-capability",
        "the device sm10 is accepted",
        supports_compute_capability=lambda cls, pair: pair >= (8, 0),
        validate_configuration=accepts_all,
    ),
    wrong(
        "ignores_phases",
        "refused/phase",
        "the phase prefill is accepted",
        supported_phases=("decode",),
        validate_configuration=accepts_all,
    ),
    wrong(
        "hard_coded",
        "refused/withdrawn-soft_cap",
        "once features lacks it, is accepted",
        validate_configuration=hard_coded,
    ),
    wrong(
        "wrong_code",
        "refused/feature-mla",
        "not with the code mla: dtype",
        validate_configuration=but(refused=[Reason("no", code="dtype")]),
    ),
    wrong(
        "says_only_true",
        "refused/any-layer",
        "gave True; it must give a list",
        validate_configuration=but(refused=True),
    ),
    wrong(
        "says_nothing",
        "refused/any-layer",
        "'', which is no Reason",
        validate_configuration=but(refused=[""]),
    ),
    wrong(
        "blank_reason",
        "refused/any-layer",
        "without a sentence",
        validate_configuration=but(refused=[Reason(" ", code="dtype")]),
    ),
    wrong(
        "unknown_code",
        "refused/any-layer",
        "unknown code 'because'",
        validate_configuration=but(refused=[Reason("no", code="because")]),
    ),
    wrong(
        "validate_raises",
        "refused/any-device",
        "on cuda: raised AssertionError: which GPU?",
        validate_configuration=raises_for_devices,
    ),
    wrong(
        "twice_for_one_cause", "refused/one-reason-per-cause", "refused twice", validate_configuration=twice
    ),
    wrong(
        "forgets_a_phase", "refused/both-phases", "decode alone is refused", validate_configuration=per_phase
    ),
    wrong(
        "empty_sentence", "refused/combination", "gave ''", supports_combination=lambda cls, spec, device: ""
    ),
    wrong(
        "unheeded",
        "refused/combination",
        "is accepted, though supports_combination says: odd",
        supports_combination=lambda cls, spec, device: "odd",
        validate_configuration=accepts_all,
    ),
    wrong(
        "accepts_and_raises",
        "refused/never-after-acceptance",
        "is accepted, and then forward: raised BatchError",
        impl=RaisesLate,
    ),
    wrong(
        "accepts_and_cannot_be_made",
        "refused/never-after-acceptance",
        "raised NotImplementedError: chunks",
        impl=RaisesEarly,
    ),
    wrong("unreadable_options", "declaration/options", "reading the annotations", Options=Unreadable),
    wrong(
        "text_for_sizes",
        "declaration/head-sizes",
        "must be a sequence of sizes",
        get_supported_head_sizes=lambda cls: "64",
    ),
    wrong(
        "another_default",
        "declaration/kv-stride-order-plain",
        "not that of NHD, the first",
        get_kv_cache_stride_order=order_of((0, 1, 3, 2, 4)),
    ),
    wrong(
        "flat_pages",
        "declaration/kv-views-plain",
        "gives K of the shape (3, 16, 128), not (3, 16, 2, 64)",
        split_kv=lambda cls, cache, spec: (cache[:, 0].flatten(2), cache[:, 1].flatten(2)),
        supported_kv_cache_layouts=lambda cls: ("NHD",),
    ),
    wrong(
        "bytes_for_pages",
        "declaration/kv-views-plain",
        "gives torch.int32, torch.int32, not torch.float32",
        split_kv=lambda cls, cache, spec: (cache[:, 0].view(torch.int32), cache[:, 1].view(torch.int32)),
    ),
    wrong("kernels_missing", "declaration/impl-class", "raised ImportError", get_impl_cls=imports_kernels),
    wrong(
        "new_class_each_time",
        "declaration/impl-class",
        "another class at each call",
        get_impl_cls=lambda cls: type("Impl", (TorchImpl,), {}),
    ),
    wrong("number_of_captures", "declaration/builder-class", "cudagraph_support=7", builder=CapturesAll),
    wrong("maybe_updates", "declaration/builder-class", "must be True or False", builder=MaybeUpdates),
    wrong(
        "any_bare_device",
        "refused/compute-capability",
        "of a capability not known is accepted",
        supports_compute_capability=lambda cls, pair: pair >= (8, 0),
        validate_configuration=any_bare_device,
    ),
    wrong(
        "both_is_more",
        "refused/both-phases",
        "phase=None is refused with phase, no phase alone is",
        validate_configuration=both_is_more,
    ),
    wrong(
        "accepts_latents_and_raises",
        "refused/never-after-acceptance",
        "from_spec: raised NotImplementedError: mla",
        impl=NoLatents,
        validate_configuration=takes_mla,
    ),
]
