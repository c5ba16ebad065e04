"""Backends that accept layers that they do not serve, or refuse wrongly: variants of TORCH."""

from __future__ import annotations

from typing import Any

from attnplug.backends.torch_native import TorchBackend
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core import Device, Feature, LayerSpec, MultipleOf, Reason
from attnplug.errors import BatchError
from mutants.table import Table

table = Table("refusals")
impl = table.on(TorchImpl)


ALL = TorchBackend.features


def lists_16(cls: Any, spec: Any = None, device: Any = None) -> Any:
    return (MultipleOf(16),)


@impl.attend("refused/never-after-acceptance", "is accepted, and then forward: raised BatchError")
def accepts_and_raises(right, self, *args, **kwargs):
    """Raises in forward for a layer that it should have refused."""
    if self.spec.has_alibi and self.spec.logits_soft_cap:
        raise BatchError("logits_soft_cap", self.spec.logits_soft_cap, "cannot be combined with ALiBi")
    return right(*args, **kwargs)


@table.method(TorchImpl, "__init__")("refused/never-after-acceptance", "raised NotImplementedError: chunks")
def accepts_and_cannot_be_made(right, self, *args, **kwargs):
    """Raises when it is made."""
    right(*args, **kwargs)
    if self.spec.chunk_size:
        raise NotImplementedError("chunks")


class NoLatents(TorchImpl):
    """Raises late for MLA."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.spec.mla is not None:
            raise NotImplementedError("mla")


@table.part("refused/never-after-acceptance", "the numbers of a known mistake: soft cap ignored")
class AcceptsAndIgnores(TorchImpl):
    """Accepts a soft cap beside sinks, and drops it."""

    @classmethod
    def from_spec(cls, spec: LayerSpec, **given: Any) -> Any:
        return super().from_spec(spec.replace(logits_soft_cap=None) if spec.has_sinks else spec, **given)


@impl.attend(
    "refused/never-after-acceptance", "head_size=1 is accepted, and then runs with wrong numbers: output"
)
def accepts_tiny_heads(right, self, *args, **kwargs):
    """Reads at least two elements of each head."""
    found = right(*args, **kwargs)
    return found.mul_(2) if self.spec.head_size == 1 else found


def accepts_all(cls: Any, spec: LayerSpec, device: Device, phase: Any = None) -> list[Reason]:
    return []


def but(**answers: Any) -> Any:
    """A validate_configuration with another answer where TORCH refuses."""

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


def twice(cls: Any, spec: LayerSpec, device: Device, phase: Any = None) -> list[Reason]:
    return TorchBackend.validate_configuration(spec, device, phase) * 2


def hard_coded(cls: Any, spec: LayerSpec, device: Device, phase: Any = None) -> list[Reason]:
    """Validates with the features of TORCH instead of its own."""
    return TorchBackend.validate_configuration(spec, device, phase)


def lets_pass(code: str, where: Any) -> Any:
    """A validate_configuration that leaves out the reasons with `code` for some layers."""

    def answer(cls: Any, spec: LayerSpec, device: Device, phase: Any = None) -> list[Reason]:
        found = TorchBackend.validate_configuration.__func__(cls, spec, device, phase)  # type: ignore[attr-defined]
        return [each for each in found if each.code != code or not where(spec)]

    return answer


# fmt: off
table.add(
    "accepts_large_caps | refused/feature-soft_cap | a layer with logits_soft_cap=1000.0 is accepted, though soft_cap is not declared",
    features=ALL & ~Feature.SOFT_CAP,
    validate_configuration=lets_pass("feature.soft_cap", lambda spec: (spec.logits_soft_cap or 0) > 100),
)
table.add(
    "accepts_large_windows | refused/feature-sliding_window | a layer with window=(131071, 0) is accepted, though sliding_window is not declared",
    features=ALL & ~Feature.SLIDING_WINDOW,
    validate_configuration=lets_pass("feature.sliding_window", lambda spec: spec.window[0] > 8192),
)
table.add(
    "accepts_sinks_of_large_layers | refused/feature-sinks | a layer with num_heads=512, num_kv_heads=8, has_sinks=True is accepted, though sinks",
    features=ALL & ~Feature.SINKS,
    validate_configuration=lets_pass("sink", lambda spec: spec.num_heads > 256),
)
table.add("accepts_spans_of_windows | refused/feature-mm_prefix | is accepted, though mm_prefix is not declared", features=ALL & ~Feature.MM_PREFIX,
    validate_configuration=lets_pass("mm_prefix", lambda spec: spec.is_windowed))
table.add(
    "accepts_a_dtype_beside_sinks | refused/dtype | dtype='float16' beside has_sinks=True is accepted, though dtype='float16' alone is refused",
    supported_dtypes=("float32",),
    validate_configuration=lets_pass("dtype", lambda spec: spec.has_sinks),
)
table.add("accepts_blocks_of_fp8 | refused/block-size | alone is refused", get_supported_kernel_block_sizes=lists_16,
    validate_configuration=lets_pass("block_size", lambda spec: spec.has_quantized_kv_cache))
table.add("ignores_mla | refused/feature-mla | it would be ignored", validate_configuration=accepts_all)
table.add("ignores_a_dtype | refused/dtype | dtype='float16' is accepted", supported_dtypes=("float32",), validate_configuration=accepts_all)
table.add("ignores_storage | refused/kv-cache-dtype | 'unheard_of_3bit' is accepted", validate_configuration=accepts_all)
table.add("ignores_head_sizes | refused/head-size | head_size=1 is accepted", get_supported_head_sizes=lambda cls: (64,),
    validate_configuration=accepts_all)
table.add("ignores_block_sizes | refused/block-size | block_size=1 is accepted", get_supported_kernel_block_sizes=lists_16,
    validate_configuration=accepts_all)
table.add("ignores_kinds | refused/attn-type | 'encoder' is accepted", features=ALL & ~Feature.ENCODER, validate_configuration=accepts_all)
table.add("ignores_devices | refused/device-type | the device tpu is accepted", validate_configuration=accepts_all)
table.add(
    "ignores_capability | refused/compute-capability | the device sm10 is accepted",
    supports_compute_capability=lambda cls, pair: pair >= (8, 0),
    validate_configuration=accepts_all,
)
table.add("ignores_phases | refused/phase | the phase prefill is accepted", supported_phases=("decode",), validate_configuration=accepts_all)
table.add("hard_coded | refused/withdrawn-soft_cap | once features lacks it, is accepted", validate_configuration=hard_coded)
table.add("wrong_code | refused/feature-mla | not with the code mla: dtype", validate_configuration=but(refused=[Reason("no", code="dtype")]))
table.add("says_only_true | refused/any-layer | gave True; it must give a list", validate_configuration=but(refused=True))
table.add("says_nothing | refused/any-layer | '', which is not a Reason", validate_configuration=but(refused=[""]))
table.add("blank_reason | refused/any-layer | without a sentence", validate_configuration=but(refused=[Reason(" ", code="dtype")]))
table.add("unknown_code | refused/any-layer | unknown code 'because'", validate_configuration=but(refused=[Reason("no", code="because")]))
table.add("validate_raises | refused/any-device | on cuda: raised AssertionError: which GPU?", validate_configuration=raises_for_devices)
table.add("twice_for_one_cause | refused/one-reason-per-cause | refused twice", validate_configuration=twice)
table.add("forgets_a_phase | refused/both-phases | decode alone is refused", validate_configuration=per_phase)
table.add("empty_sentence | refused/combination | returned ''", supports_combination=lambda cls, spec, device: "")
table.add("unheeded | refused/combination | is accepted, though supports_combination says: odd", supports_combination=lambda cls, spec, device: "odd",
    validate_configuration=accepts_all)
table.add(
    "any_bare_device | refused/compute-capability | of unknown capability is accepted",
    supports_compute_capability=lambda cls, pair: pair >= (8, 0),
    validate_configuration=any_bare_device,
)
table.add("both_is_more | refused/both-phases | phase=None is refused with phase, no phase alone is", validate_configuration=both_is_more)
table.add("accepts_latents_and_raises | refused/never-after-acceptance | from_spec: raised NotImplementedError: mla", impl=NoLatents,
    validate_configuration=takes_mla)
# fmt: on
