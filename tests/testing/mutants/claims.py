"""Backends whose claims and answers disagree: what they declare, accept and do. Variants of TORCH."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, ClassVar

import torch

from attnplug.backends.torch_native import TorchBackend
from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core import Device, LayerSpec, LayerTensors, MultipleOf, Reason
from mutants.parts import Around, Call
from mutants.table import Table

table = Table("claims")
call = table.on(Around)
impl = table.on(TorchImpl)
builder = table.on(TorchMetadataBuilder)


_COUNT = itertools.count()

_SEEN: list[LayerSpec] = []

_ANSWERS: dict[Any, list[Reason]] = {}


def torch_says(cls: Any, spec: LayerSpec, device: Device, phase: Any = None) -> list[Reason]:
    return TorchBackend.validate_configuration.__func__(cls, spec, device, phase)  # type: ignore[attr-defined]


def changes_spec(cls: Any, spec: LayerSpec, device: Device, phase: Any = None) -> list[Reason]:
    """Writes its own scale to the layer."""
    if spec.logits_soft_cap:
        object.__setattr__(spec, "scale", 0.5)
    return torch_says(cls, spec, device, phase)


def once_only(cls: Any, spec: LayerSpec, device: Device, phase: Any = None) -> list[Reason]:
    """Refuses fp8 until it was asked about fp8 a hundred times."""
    if spec.has_quantized_kv_cache and next(_COUNT) < 100:
        return [Reason("kv_cache_dtype not supported", code="kv_cache_dtype")]
    return torch_says(cls, spec, device, phase)


def remembers_answers(cls: Any, spec: LayerSpec, device: Device, phase: Any = None) -> list[Reason]:
    """Keeps its answers by head size, dtype and features: the storage type and the device are not in the key."""
    at = cls, spec.head_size, spec.dtype, spec.required_features(), spec.attn_type
    if at not in _ANSWERS:
        _ANSWERS[at] = torch_says(cls, spec, device, phase)
    return list(_ANSWERS[at])


def by_identity(cls: Any, spec: LayerSpec, device: Device, phase: Any = None) -> list[Reason]:
    """Refuses an equal layer that is another object."""
    if spec.has_sinks:
        same = [each for each in _SEEN if each == spec]
        if same and not any(each is spec for each in same):
            return [Reason("sink not supported", code="sink")]
        _SEEN.append(spec)
    return torch_says(cls, spec, device, phase)


def refuses(field: str, code: str, asks: Any) -> Any:
    """A supports_combination that refuses each layer of a declared kind."""

    def supports_combination(cls: Any, spec: LayerSpec, device: Device) -> str | None:
        return f"{field} is not ready" if asks(spec) else None

    return supports_combination


def windowed_blocks(cls: Any, spec: Any = None, device: Any = None) -> Any:
    """Pages of 16, and for windows pages of 8, which the union leaves out."""
    return (MultipleOf(8),) if spec is not None and spec.is_windowed else (MultipleOf(16),)


def prefers_odd(cls: Any, spec: Any = None, device: Any = None, default: int = 16) -> int:
    """Prefers pages of 12 tokens for windows, which it does not read."""
    return 12 if spec is not None and spec.is_windowed else 16


def sixteens(cls: Any, spec: Any = None, device: Any = None) -> Any:
    return (MultipleOf(16),)


@call.attend("declared/head_size-72", "declares head_size 72")
def even_heads(right, self, layer, query, *args, **more):
    """Reads the first part of each head that is a multiple of 16."""
    whole = query.clone()
    whole[..., query.shape[-1] // 16 * 16 or 16 :] = 0
    return right(layer, whole, *args, **more)


@impl.update_kv_cache("cache/stored-float32", "gives back")
def rounds_float32(right, self, layer, key, value, kv_cache, slot_mapping):
    """Stores 16-bit values in pages that are declared to hold float32."""
    if self.spec.kv_cache_dtype == "float32":
        key, value = key.bfloat16().to(key.dtype), value.bfloat16().to(value.dtype)
    right(layer, key, value, kv_cache, slot_mapping)


@impl.update_kv_cache("cache/stored-fp8_e5m2", "gives back")
def one_fp8(right, self, layer, key, value, kv_cache, slot_mapping):
    """Stores e4m3 bytes in pages of e5m2."""
    right(layer, key, value, kv_cache, slot_mapping)
    if kv_cache.dtype == torch.float8_e5m2:
        k_scale, v_scale = self._scales(layer, kv_cache.dtype)
        slots = slot_mapping[slot_mapping >= 0]
        for half, rows, scale in ((0, key, k_scale), (1, value, v_scale)):
            bits = (rows[: slot_mapping.shape[0]][slot_mapping >= 0] / scale).clamp(-448, 448)
            pages = kv_cache[:, half].view(torch.uint8)
            size = pages.shape[1]
            pages[slots // size, slots % size] = bits.to(torch.float8_e4m3fn).view(torch.uint8)


class DropsOptions(TorchImpl):
    """from_spec forgets the options."""

    @classmethod
    def from_spec(cls, spec: Any, *, options: Any = None, **more: Any) -> Any:
        return super().from_spec(spec, options=None, **more)


class DefaultOptions(TorchImpl):
    """from_spec makes options of its own."""

    @classmethod
    def from_spec(cls, spec: Any, *, options: Any = None, **more: Any) -> Any:
        return super().from_spec(spec, options=Tiles(), **more)


class SharedOptions(TorchImpl):
    """All layers have the options of the layer made last."""

    kept: ClassVar[Any] = None

    @property
    def options(self) -> Any:
        return SharedOptions.kept

    @options.setter
    def options(self, given: Any) -> None:
        SharedOptions.kept = given


@table.part("correct/*fp8*", "output[")
class DropsScales(TorchImpl):
    """from_spec takes sinks and slopes, and forgets the scales."""

    @classmethod
    def from_spec(cls, spec: Any, *, tensors: Any = None, **more: Any) -> Any:
        kept = tensors and LayerTensors(tensors.sinks, tensors.alibi_slopes)
        return super().from_spec(spec, tensors=kept, **more)


@table.part("context_parallel/ranks-dcp", "impl.dcp_world_size is 1, not 3")
class DropsRanks(TorchImpl):
    """from_spec accepts groups of context parallelism and works as one rank."""

    @classmethod
    def from_spec(cls, spec: Any, *, dcp: Any = None, pcp: Any = None, **more: Any) -> Any:
        return super().from_spec(spec, **more)


@table.part("declared/supports_pcp", "declares supports_pcp")
class AnyPrefillRanks(TorchImpl):
    """Declares prefill context parallelism, and does nothing for it."""

    supports_pcp = True


@table.part("declared/supports_quant_query_input", "declares supports_quant_query_input")
class QuantisedQueries(TorchImpl):
    """Declares quantised queries, and reads them as they are."""

    supports_quant_query_input = True


# fmt: off
# Forgets the scale of a layer that states its own.
call._bind("correct/*-scale*", "softmax scale ignored",
    one_head_scale=lambda right, self, spec, *rest: right(spec.replace(scale=spec.head_size**-0.5), *rest))
# fmt: on


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Options of the next backends."""

    precise: bool = True
    tile: int = 64


class OnlyDefault(Around):
    """Wrong unless its options are the default."""

    def after(self, call: Call) -> None:
        if not self.options.precise:
            call.rows.mul_(1.1)


class RefusesOptions(Around):
    """Refuses every option but the default when it runs."""

    def before(self, call: Call) -> None:
        if self.options.tile != 64:
            raise NotImplementedError("tile")


class LastOptions(Around):
    """All layers use the options of the layer made last."""

    last: ClassVar[Any] = None

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        LastOptions.last = self.options

    def after(self, call: Call) -> None:
        if LastOptions.last != self.options:
            call.rows.mul_(1.1)


class ChangesOptions(Around):
    """Writes to its frozen options."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        object.__setattr__(self.options, "tile", 32)


@dataclasses.dataclass(frozen=True)
class Clamped:
    """Changes what the user has set."""

    tile: int = 64

    def __post_init__(self) -> None:
        object.__setattr__(self, "tile", 64)


@builder.update_block_table(
    "builder/update_block_table-full",
    "raised TypeError: not here",
    state={"supports_update_block_table": True},
)
def never_updates(self, metadata, blk_table, slot_mapping):
    """Declares table swaps, and raises."""
    raise TypeError("not here")


# fmt: off
table.add("changes_spec | declaration/layers-unmodified | modified scale of a layer with logits_soft_cap", validate_configuration=changes_spec)
table.add("once_only | refused/withdrawn-fp8_kv | kv_cache_dtype not supported", validate_configuration=once_only)
table.add("remembers_answers | refused/kv-cache-dtype | 'unheard_of_3bit' is accepted", validate_configuration=remembers_answers)
table.add("refuses_equal_layers | declaration/order-of-questions | for an equal layer after other questions sink not supported",
    validate_configuration=by_identity)
table.add("refuses_sinks | declared/feature-sinks | every candidate layer was refused",
    supports_combination=refuses("sinks", "sink", lambda s: s.has_sinks))
table.add("refuses_half | declared/dtype-float16 | every candidate layer was refused",
    supports_combination=refuses("float16", "dtype", lambda s: s.dtype == "float16"))
table.add("refuses_fp8 | declared/feature-fp8_kv | every candidate layer was refused",
    supports_combination=refuses("fp8", "fp8", lambda s: s.has_quantized_kv_cache))
table.add("refuses_cross | declared/feature-cross | every candidate layer was refused",
    supports_combination=refuses("cross", "x", lambda s: s.attn_type == "encoder_decoder"))
table.add("refuses_heads | declared/head_size-80 | every candidate layer was refused", get_supported_head_sizes=lambda cls: (64, 80, 128),
    supports_combination=refuses("80", "x", lambda s: s.head_size == 80))
table.add("windowed_blocks | declaration/layer-block-sizes | is not in the union of all specs", get_supported_kernel_block_sizes=windowed_blocks)
table.add("prefers_odd | declaration/layer-block-sizes | for a layer with window=(6, 0) is 12", get_supported_kernel_block_sizes=sixteens,
    get_preferred_block_size=prefers_odd)
table.add("any_dtype | declaration/claims | supports_dtype('float64') is True", supports_dtype=lambda cls, dtype: True, supported_dtypes=("float32",))
table.add("any_storage | declaration/claims | supports_kv_cache_dtype('unheard_of_3bit') is True", supports_kv_cache_dtype=lambda cls, name: True)
table.add("no_storage | declared/kv_cache_dtype-float16 | every candidate layer was refused",
    supports_kv_cache_dtype=lambda cls, name: name in (None, "auto"))
table.add("no_block_of_32 | * | ", supports_block_size=lambda cls, size: size != 32)
table.add("only_default | options/precise=False | with the option precise=False", impl=OnlyDefault, Options=Tiles)
table.add("drops_options | options/held | impl.options is None: pass options on", impl=DropsOptions, Options=Tiles)
table.add("default_options | options/precise=False | impl.options has precise=True, not precise=False", impl=DefaultOptions, Options=Tiles)
table.add("refuses_options | options/tile=128 | raised NotImplementedError: tile", impl=RefusesOptions, Options=Tiles)
table.add("last_options | options/precise=False | and with the defaults, the one with the option precise=", impl=LastOptions, Options=Tiles)
table.add("shared_options | options/precise=False | given the option precise=False, and impl.options has precise=True", impl=SharedOptions,
    Options=Tiles)
table.add("changes_options | options/tile=128 | impl.options has tile=32, not tile=128", impl=ChangesOptions, Options=Tiles)
table.add("clamped_options | options/tile=128 | Clamped given the option tile=128 has tile=64", Options=Clamped)
table.add("fp8_shape | declaration/kv-shape-plain | cache_dtype='fp8' is (3, 2, 16, 2, 68)",
    get_kv_cache_shape=lambda cls, n, b, h, d, t="auto", v=None: ((n, 2, b, h, d + 4 * (t == "fp8")) if v in (None, d) else (n, b, h, d + v)))
table.add("watches_nothing | declaration/claims | watch_compiling() gave None", watch_compiling=lambda cls: None)
table.add("no_output | declaration/interface | accept_output_buffer is False", accept_output_buffer=False)
table.add("odd_sparse_kind | declaration/claims | 'tiles'; known are", supported_sparse_kinds=("token_topk", "tiles"))
table.add("truthy_capability | declaration/claims | is 'yes'; it must be True or False", supports_compute_capability=lambda cls, pair: "yes")
# fmt: on
