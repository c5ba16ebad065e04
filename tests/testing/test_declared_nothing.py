"""Whatever a backend declares and does not do is caught, and what cannot be tried here is reported by name."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from catching import variant
from mutants.numbers import misread
from mutants.parts import Around, Call

from attnplug.backends.torch_native import TorchBackend
from attnplug.backends.torch_native.backend import TorchMLABackend
from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.core import AttentionBackend, AttentionCGSupport, Device, Feature, LayerSpec
from attnplug.testing.conformance.builders import builders
from attnplug.testing.conformance.calls import outputs as quantised_outputs
from attnplug.testing.conformance.check import Check, CheckUntested, ConformanceError
from attnplug.testing.conformance.declared import declared_values, options
from attnplug.testing.conformance.declared import declared_values as untested
from attnplug.testing.conformance.target import Target
from attnplug.testing.oracle import COMPUTED

GROUPS = (
    declared_values.checks,
    untested.untested_checks,
    options.checks,
    quantised_outputs.quantised_output_checks,
    builders.checks,
)
# A layer that ignores `invariance` has right numbers, and `invariance/*` compares its bits.
FLAGS = list(COMPUTED & TorchBackend.features & ~(Feature.SPARSE | Feature.INVARIANCE))


def check(backend: type[AttentionBackend], check_id: str) -> Check:
    target = Target(backend, Device("cpu"))
    found = (each for group in GROUPS for each in group(target))
    return next(each for each in found if each.id == check_id)


def declared_ids(backend: type[AttentionBackend] = TorchBackend) -> list[str]:
    return [each.id for each in declared_values.checks(Target(backend, Device("cpu")))]


class Zeros(Around):
    """Writes zeros, whatever the layer."""

    def after(self, call: Call) -> None:
        call.output.zero_()


ZEROS = variant("ZEROS", impl=Zeros)


@pytest.mark.parametrize("check_id", declared_ids())
def test_zeros_are_no_answer_to_any_declared_value(check_id: str) -> None:
    with pytest.raises(ConformanceError, match=r"declares .* is wrong: "):
        check(ZEROS, check_id)()


IGNORED: dict[Feature, Callable[[LayerSpec], Any]] = {
    Feature.SLIDING_WINDOW: lambda spec: (-1, -1),
    Feature.CHUNKED_LOCAL: lambda spec: None,
    Feature.SOFT_CAP: lambda spec: None,
    Feature.SINKS: lambda spec: False,
    Feature.ALIBI: lambda spec: False,
    Feature.MM_PREFIX: lambda spec: False,
    Feature.LSE: lambda spec: False,
    Feature.HEAD_SIZE_V: lambda spec: spec.head_size,
    Feature.NON_CAUSAL: lambda spec: True,
    Feature.DIRECT_KV: lambda spec: False,
    Feature.FP8_KV: lambda spec: "auto",
    Feature.CROSS: lambda spec: "decoder",
    Feature.ENCODER: lambda spec: "decoder",
}


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.names()[0])
def test_a_feature_that_is_declared_and_ignored_is_caught(flag: Feature) -> None:
    changes = {flag.ask.field: IGNORED[flag]}
    if flag in (Feature.CROSS, Feature.ENCODER):
        changes["causal"] = lambda spec: True
    wrong = variant("IGNORES", impl=misread(**changes))
    with pytest.raises(ConformanceError, match=f"declares feature {flag.names()[0]}"):
        check(wrong, f"declared/feature-{flag.names()[0]}")()


def test_a_selection_that_is_ignored_is_caught() -> None:
    wrong = variant("DENSE", impl=misread(sparse=lambda spec: None))
    for kind in TorchBackend.supported_sparse_kinds:
        with pytest.raises(ConformanceError, match=f"declares supported_sparse_kinds {kind}"):
            check(wrong, f"declared/supported_sparse_kinds-{kind}")()


REFUSED: dict[str, Callable[[LayerSpec], bool]] = {
    **{
        f"declared/feature-{flag.names()[0]}": functools.partial(
            lambda flag, spec: flag in spec.required_features(), flag
        )
        for flag in FLAGS
    },
    "declared/supported_sparse_kinds-block": lambda spec: (
        spec.sparse is not None and spec.sparse.kind == "block"
    ),
    "declared/serves_dense": lambda spec: spec.sparse is None,
    "declared/attn_type-encoder": lambda spec: spec.attn_type == "encoder",
    "declared/attn_type-decoder": lambda spec: spec.attn_type == "decoder",
    "declared/dtype-bfloat16": lambda spec: spec.dtype == "bfloat16",
    "declared/kv_cache_dtype-fp8_e5m2": lambda spec: spec.kv_cache_dtype == "fp8_e5m2",
    "declared/head_size-80": lambda spec: 80 in (spec.head_size, spec.head_size_v),
    "declared/block_size-64": lambda spec: spec.block_size == 64,
    "declared/can_return_lse_for_decode": lambda spec: spec.needs_lse,
    "declared/any-layer": lambda spec: True,
}


@pytest.mark.parametrize("check_id", REFUSED)
def test_a_declared_value_that_every_layer_is_refused_for_is_caught(check_id: str) -> None:
    def refuses(cls: Any, spec: LayerSpec, device: Device) -> str | None:
        return "comes with version 2" if REFUSED[check_id](spec) else None

    wrong = variant(
        "REFUSES",
        supports_combination=refuses,
        supports_attn_type=lambda cls, kind: True,
        get_supported_head_sizes=lambda cls: (64, 80, 128),
        get_supported_kernel_block_sizes=lambda cls, spec=None, device=None: (16, 64),
    )
    with pytest.raises(
        ConformanceError, match=r"declares .*(refused|no layer at all): .*comes with version 2"
    ):
        check(wrong, check_id)()


def test_a_value_that_only_another_device_is_served_with_is_untested() -> None:
    def refuses(cls: Any, spec: LayerSpec, device: Device) -> str | None:
        return "needs sm89" if spec.kv_cache_dtype == "fp8_e5m2" and device.capability != (8, 9) else None

    backend = variant("ELSEWHERE", supports_combination=refuses)
    with pytest.raises(
        CheckUntested, match=r"kv_cache_dtype fp8_e5m2: served on sm89, and not on cpu: .*needs sm89"
    ):
        check(backend, "declared/kv_cache_dtype-fp8_e5m2")()


class Flags(Zeros):
    """Declares what the kit cannot compute."""

    supports_pcp = True
    supports_quant_query_input = True


class QuantisesAnything(Zeros):
    """Declares every quantisation of outputs."""

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return True


class QuantisesWindows(Around):
    """Declares fp8 outputs for layers with windows, and writes zeros to these."""

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return quant_key == "fp8_e4m3" and self.spec.is_windowed

    def after(self, call: Call) -> None:
        if call.output.dtype == torch.float8_e4m3fn:
            call.output[: call.metadata.num_actual_tokens] = 0.0

    def before(self, call: Call) -> None:
        if call.more.get("output_scale") is not None and not self.spec.is_windowed:
            raise NotImplementedError("output_scale")


class SwapsNothing(TorchMetadataBuilder):
    """Declares update_block_table, and returns what it is given."""

    supports_update_block_table = True

    def update_block_table(self, metadata: Any, blk_table: Any, slot_mapping: Any) -> Any:
        return metadata


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Options of all types."""

    fast: bool = False
    form: Literal["split", "whole"] = "whole"
    splits: int = dataclasses.field(default=1, metadata={"conformance": (1, 8)})
    tile: int = 64


def breaks(option: str, value: Any) -> type[Zeros]:
    class Breaks(Around):
        def after(self, call: Call) -> None:
            if getattr(self.options, option) == value:
                call.output.zero_()

    return Breaks


def tuned(option: str, value: Any) -> type[AttentionBackend]:
    return variant("TUNED", impl=breaks(option, value), Options=Tuning)


WRONG = {
    "pcp": (variant("PCP", impl=Flags), "declared/supports_pcp", "no numeric case"),
    "queries": (variant("QUERIES", impl=Flags), "declared/supports_quant_query_input", "no numeric case"),
    "int8": (variant("INT8", supported_kv_cache_dtypes=("auto", "fp8", "int8")), "declared/kv_cache_dtype-int8", "no numeric case"),
    "int8-by-method": (variant("INT8M", supports_kv_cache_dtype=lambda cls, name: True), "declared/kv_cache_dtype-int8", "no numeric case"),
    "sparse-kind": (
        variant("KINDS", supported_sparse_kinds=("token_topk", "stripes")),
        "declared/supported_sparse_kinds-stripes",
        "no SparseSpec has it",
    ),
    "any-quantisation": (variant("QUANTISES", impl=QuantisesAnything), "tensors/quantised-output-others", "'int8'.* no numeric case"),
    "quantised-zeros": (variant("QUANTISED", impl=QuantisesAnything), "tensors/quantised-output-fp8_e5m2", "elements are wrong"),
    "quantised-windows": (variant("WINDOWS", impl=QuantisesWindows), "tensors/quantised-output-fp8_e4m3", "window.*elements are wrong"),
    "swaps": (variant("SWAPS", builder=SwapsNothing), "builder/update_block_table-full", "slot_mapping"),
    "option-flag": (tuned("fast", True), "options/fast=True", "option fast=True"),
    "option-literal": (tuned("form", "split"), "options/form=split", "option form="),
    "option-listed": (tuned("splits", 8), "options/splits=8", "option splits=8"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_other_declarations_without_a_deed_are_caught(name: str) -> None:
    backend, check_id, says = WRONG[name]
    with pytest.raises(ConformanceError, match=f"(?s){says}"):
        check(backend, check_id)()


class Captures(TorchMetadataBuilder):
    """Declares graphs."""

    cudagraph_support = AttentionCGSupport.UNIFORM_BATCH


UNTESTED = {
    "graphs": (variant("GRAPHS", builder=Captures), "declared/cudagraph_support", "UNIFORM_BATCH.* need a GPU"),
    "step_safe": (variant("SAFE", step_safe=True), "declared/step_safe", "is about GPUs"),
    "devices": (variant("DEVICES", device_types=("cpu", "cuda", "tpu")), "declared/device-types", "cuda, tpu"),
    "alternative": (
        variant("OR", requires=(("torch>=2", "acme-kernels>=3"),)),
        "declared/requires-acme-kernels>=3",
        "acme-kernels>=3: it is not installed",
    ),
    "option": (tuned("tile", 0), "options/tile", "option tile: only its default"),
    "sizes": (
        variant("SIZES", get_supported_head_sizes=lambda cls: tuple(range(8, 4008, 8))),
        "declared/head_size-others",
        "484 values of head_size: level smoke tries 16 of the 500",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNTESTED)
def test_what_cannot_be_tried_here_is_said(name: str) -> None:
    backend, check_id, says = UNTESTED[name]
    with pytest.raises(CheckUntested, match=says):
        check(backend, check_id)()


def test_an_option_that_holds_is_accepted() -> None:
    check(tuned("tile", 0), "options/form=split")()


class LatentZeros(TorchMLABackend.get_impl_cls()):  # type: ignore[misc]
    """Latent attention that writes zeros."""

    def forward(self, *given: Any, **more: Any) -> Any:
        return super().forward(*given, **more).zero_()


LATENT_ZEROS = type(
    "LATENT_ZEROS", (TorchMLABackend,), {"get_impl_cls": classmethod(lambda cls: LatentZeros)}
)


@pytest.mark.parametrize(
    "name", ["any-layer", "feature-mla", "feature-fp8_kv", "phase-decode", "dtype-bfloat16"]
)
def test_zeros_are_no_answer_to_latent_attention(name: str) -> None:
    with pytest.raises(ConformanceError):
        check(LATENT_ZEROS, f"declared/{name}")()
