"""Correct backends that serve little: TORCH with fewer declarations."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from catching import variant

from attnplug.backends.torch_native import TorchBackend
from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.core import AttentionBackend, Device, Feature, LayerSpec, Reason
from attnplug.core.blocks import MultipleOf
from attnplug.core.errors import BatchError, SpecError
from attnplug.core.spec import AttentionType, Phase

__all__ = ["NARROWS"]

_PLAIN: dict[str, Any] = {"features": Feature(0), "supported_kv_cache_dtypes": ("auto",)}
_NEEDED = {
    Feature.CROSS: Feature.NON_CAUSAL,
    Feature.ENCODER: Feature.NON_CAUSAL | Feature.DIRECT_KV,
}
"""Features without which no layer could ask for another."""
_OF_ONE_SIZE = TorchBackend.features & ~Feature.HEAD_SIZE_V


def alone(feature: Feature) -> type[AttentionBackend]:
    stored = ("auto", "fp8_e4m3") if feature is Feature.FP8_KV else ("auto",)
    return variant(
        f"ONLY_{feature.name}",
        features=feature | _NEEDED.get(feature, Feature(0)),
        supported_kv_cache_dtypes=stored,
    )


def always(feature: Feature) -> type[AttentionBackend]:
    """TORCH with all features that a layer can have beside this one, without which it serves none."""
    served = feature
    # The kit has no cross layers whose keys come with the call.
    unlike = {Feature.CROSS: Feature.DIRECT_KV, Feature.DIRECT_KV: Feature.CROSS}.get(feature, Feature(0))
    for other in TorchBackend.features & ~unlike:
        # Both orders, because one value of a field may ask for both features.
        for first, last in ((feature, other), (other, feature)):
            try:
                spec = LayerSpec(
                    num_heads=4, num_kv_heads=2, **{"head_size": 64, **first.fields(), **last.fields()}
                )
            except SpecError:
                continue
            is_served = not TorchBackend.validate_configuration(spec, Device("cpu"))
            served |= other if is_served and feature | other in spec.required_features() else Feature(0)
    stored = [name for name in TorchBackend.supported_kv_cache_dtypes if "fp8" in name]
    if feature is not Feature.FP8_KV:
        stored = ["auto", *(stored if Feature.FP8_KV in served else ())]
    return variant(
        f"ALWAYS_{feature.name}",
        features=served,
        supported_kv_cache_dtypes=tuple(stored),
        serves_dense=feature is not Feature.SPARSE,
        supports_combination=refusing(
            f"layers with {feature.name} only", lambda spec: feature not in spec.required_features()
        ),
    )


class DecodesFirst(TorchMetadataBuilder):
    """Refuses steps in any other order than that of its threshold."""

    build_key: Hashable = ()

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        assert self.reorder_batch_threshold is not None
        lens = common_attn_metadata.query_start_loc_cpu.diff()
        if (lens <= self.reorder_batch_threshold).int().diff().gt(0).any():
            raise BatchError("query_start_loc_cpu", lens.tolist(), "has decodes behind longer queries")
        return super().build(common_prefix_len, common_attn_metadata, fast_build)


def blocks(*sizes: int | MultipleOf) -> Any:
    return lambda cls, spec=None, device=None: sizes


def heads(*sizes: int | MultipleOf) -> Any:
    return lambda cls: sizes


def refusing(says: str, when: Any) -> Any:
    """A `supports_combination` that refuses layers of which `when` is true."""

    def supports_combination(cls: Any, spec: LayerSpec, device: Device) -> str | None:
        usual = TorchBackend.supports_combination.__func__(cls, spec, device)  # type: ignore[attr-defined]
        return usual or (says if when(spec) else None)

    return supports_combination


def plain(features: Feature, says: str = "", when: Any = None, **more: Any) -> dict[str, Any]:
    """Declares these features and no stored type, and refuses layers of which `when` is true."""
    refused = {"supports_combination": refusing(says, when)} if when else {}
    return {**_PLAIN, "features": features, **refused, **more}


def _validate(says: str, when: Any) -> Any:
    """A `validate_configuration` that adds a reason of the author's own."""

    def validate_configuration(
        cls: Any, spec: LayerSpec, device: Device, phase: Phase | None = None
    ) -> list[Reason]:
        usual = TorchBackend.validate_configuration.__func__(cls, spec, device, phase)  # type: ignore[attr-defined]
        return [*usual, Reason(says, code="combination")] if when(spec) else usual

    return validate_configuration


def _blocks_by_dtype(cls: Any, spec: LayerSpec | None = None, device: Device | None = None) -> Any:
    if spec is None:
        return (16, 32)
    return (32,) if spec.has_quantized_kv_cache else (16, 32)


def _blocks_by_head_size(cls: Any, spec: LayerSpec | None = None, device: Device | None = None) -> Any:
    if spec is None:
        return (16, 64, 128)
    return (16,) if spec.head_size > 128 else (64, 128)


NARROW: dict[str, dict[str, Any]] = {
    "PLAIN": _PLAIN,
    "HALF": {"supported_dtypes": ("float16",)},
    "BFLOAT": {"supported_dtypes": ("bfloat16",)},
    "SINGLE": {"supported_dtypes": ("float32",)},
    "SINGLE_OVER_BFLOAT": {
        "supported_dtypes": ("float32",),
        "supported_kv_cache_dtypes": ("bfloat16",),
        "features": TorchBackend.features & ~Feature.FP8_KV & ~Feature.DIRECT_KV & ~Feature.ENCODER,
    },
    "DECODES_FIRST": {"builder": DecodesFirst},
    "FP8_BY_ALIAS": {"supported_kv_cache_dtypes": ("fp8",)},
    "FP8_E5M2": {"supported_kv_cache_dtypes": ("fp8_e5m2",)},
    "STORED_AS_NAMED": {"supported_kv_cache_dtypes": ("bfloat16",), "features": Feature.SLIDING_WINDOW},
    "ONE_HEAD_SIZE": {"get_supported_head_sizes": heads(80), "features": _OF_ONE_SIZE},
    "ODD_HEAD_SIZE": {"get_supported_head_sizes": heads(20), "features": _OF_ONE_SIZE},
    "HEADS_OF_64": {"get_supported_head_sizes": heads(64), "features": _OF_ONE_SIZE},
    "HEADS_OF_512": {"get_supported_head_sizes": heads(512), "features": _OF_ONE_SIZE},
    "ONE_BLOCK_SIZE": {"get_supported_kernel_block_sizes": blocks(24)},
    "BLOCKS_OF_32": {"get_supported_kernel_block_sizes": blocks(MultipleOf(32))},
    "BLOCKS_OF_128": {"get_supported_kernel_block_sizes": blocks(128)},
    "BLOCKS_OF_256": {"get_supported_kernel_block_sizes": blocks(256)},
    "BLOCKS_OF_1": {"get_supported_kernel_block_sizes": blocks(1)},
    "BLOCKS_BY_STORAGE": {"features": Feature.FP8_KV, "get_supported_kernel_block_sizes": _blocks_by_dtype},
    "BLOCKS_BY_HEAD_SIZE": {
        "supported_kv_cache_dtypes": ("auto",),
        "features": Feature.HEAD_SIZE_V,
        "get_supported_kernel_block_sizes": _blocks_by_head_size,
    },
    "HND": {"supported_kv_cache_layouts": lambda cls: ("HND",)},
    "NHD": {"supported_kv_cache_layouts": lambda cls: ("NHD",)},
    "PREFILL": {"supported_phases": (Phase.PREFILL,)},
    "DECODE": {"supported_phases": (Phase.DECODE,)},
    "NO_LSE_NO_FP8": {"features": TorchBackend.features & ~Feature.LSE & ~Feature.FP8_KV, "supported_kv_cache_dtypes": ("auto",)},
    "SPARSE_ONLY": plain(Feature.SPARSE, serves_dense=False),
    "SPARSE_BLOCKS_ONLY": plain(Feature.SPARSE, serves_dense=False, supported_sparse_kinds=("block",)),
    "SPARSE_DECODE": plain(Feature.SPARSE, serves_dense=False, supported_phases=(Phase.DECODE,)),
    "DIRECT_ONLY": plain(Feature.DIRECT_KV, "only direct K and V", lambda spec: not spec.direct_kv),
    "DIRECT_NON_CAUSAL_ONLY": plain(
        Feature.DIRECT_KV | Feature.NON_CAUSAL,
        "only direct K and V that are not causal",
        lambda spec: not spec.direct_kv or spec.causal,
    ),
    "ENCODER_ONLY": plain(
        Feature.ENCODER | Feature.NON_CAUSAL | Feature.DIRECT_KV,
        supports_attn_type=lambda cls, attn_type: (
            attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
        ),
    ),
    "CROSS_ONLY": plain(Feature.CROSS | Feature.NON_CAUSAL, supports_attn_type=lambda cls, attn_type: attn_type == AttentionType.ENCODER_DECODER),
    "EIGHT_QUERIES_A_KV_HEAD": plain(Feature.CHUNKED_LOCAL, "at most 8 query heads per KV head", lambda spec: spec.num_heads > 8 * spec.num_kv_heads),
    "EQUAL_HEADS": plain(Feature.ALIBI, "as many KV heads as heads", lambda spec: spec.num_heads != spec.num_kv_heads),
    "SHARED_HEADS": plain(Feature.LSE, "fewer KV heads than heads", lambda spec: spec.num_heads == spec.num_kv_heads),
    "WINDOW_OR_CAP": plain(
        Feature.SLIDING_WINDOW | Feature.SOFT_CAP,
        "a window or a soft cap",
        lambda spec: spec.is_windowed and spec.logits_soft_cap is not None,
    ),
    "FP8_WITHOUT_MORE": {
        "features": Feature.FP8_KV | Feature.SLIDING_WINDOW | Feature.LSE,
        "supports_combination": refusing(
            "fp8 storage of plain layers only",
            lambda spec: (
                spec.has_quantized_kv_cache
                and bool(spec.required_features() & ~Feature.FP8_KV & ~Feature.LSE)
            ),
        ),
    },
    "ONE_KV_HEAD": plain(Feature.LSE | Feature.SINKS, "one KV head only", lambda spec: spec.num_kv_heads != 1),
    "GROUPS_OF_8": plain(Feature.SOFT_CAP, "8 query heads per KV head only", lambda spec: spec.num_heads != 8 * spec.num_kv_heads),
    "WINDOWS_ONLY": plain(Feature.SLIDING_WINDOW, "windows only", lambda spec: not spec.is_windowed),
    "SINKS_ONLY": plain(Feature.SINKS, "sinks only", lambda spec: not spec.has_sinks),
    "CAPS_ONLY": plain(Feature.SOFT_CAP, "soft caps only", lambda spec: spec.logits_soft_cap is None),
    "CHUNKS_ONLY": plain(Feature.CHUNKED_LOCAL, "chunks only", lambda spec: spec.chunk_size is None),
    "SLOPES_ONLY": plain(Feature.ALIBI, "slopes only", lambda spec: not spec.has_alibi),
    "SPANS_ONLY": plain(Feature.MM_PREFIX, "spans only", lambda spec: not spec.mm_prefix),
    "LSE_ONLY": plain(Feature.LSE, "with the LSE only", lambda spec: not spec.needs_lse),
    "NON_CAUSAL_ONLY": plain(Feature.NON_CAUSAL, "layers without a causal mask only", lambda spec: spec.causal),
    "OTHER_VALUES_ONLY": plain(Feature.HEAD_SIZE_V, "values of another size only", lambda spec: spec.head_size == spec.head_size_v),
    "HALF_OF_ENCODERS_ONLY": plain(
        Feature.ENCODER | Feature.NON_CAUSAL | Feature.DIRECT_KV,
        supports_attn_type=lambda cls, attn_type: attn_type == AttentionType.ENCODER,
    ),
    "WINDOWS_WITH_SINKS_ONLY": plain(
        Feature.SLIDING_WINDOW | Feature.SINKS,
        "windows with sinks only",
        lambda spec: not (spec.is_windowed and spec.has_sinks),
    ),
    "FP8_WINDOWS_WITH_CAPS_ONLY": {
        "supported_kv_cache_dtypes": ("fp8_e4m3",),
        "features": Feature.FP8_KV | Feature.SLIDING_WINDOW | Feature.SOFT_CAP,
        "supports_combination": refusing(
            "windows with soft caps only",
            lambda spec: not spec.is_windowed or spec.logits_soft_cap is None,
        ),
    },
    "DIRECT_OR_CROSS": plain(
        Feature.DIRECT_KV | Feature.CROSS | Feature.NON_CAUSAL,
        "direct K and V, or cross layers",
        lambda spec: not spec.direct_kv and spec.attn_type != AttentionType.ENCODER_DECODER,
    ),
    "WINDOW_TO_128": plain(Feature.SLIDING_WINDOW, "windows up to 128", lambda spec: max(spec.window) > 127),
    "LEFT_WINDOWS": plain(
        Feature.SLIDING_WINDOW | Feature.NON_CAUSAL,
        "windows to the left only",
        lambda spec: spec.is_windowed and spec.window[1] not in (0, -1),
    ),
    "CHUNKS_OF_PAGES": plain(
        Feature.CHUNKED_LOCAL,
        "chunks of whole blocks of 16",
        lambda spec: spec.chunk_size is not None and spec.chunk_size % 16 != 0,
        get_supported_kernel_block_sizes=blocks(16),
    ),
    "OWN_REASONS": {
        "features": Feature.FP8_KV,
        "validate_configuration": _validate(
            "no head sizes above 256 with fp8",
            lambda spec: spec.has_quantized_kv_cache and spec.head_size > 256,
        ),
    },
    "OWN_REASONS_FOR_SINKS": plain(
        Feature.SINKS | Feature.SLIDING_WINDOW,
        validate_configuration=_validate(
            "no sinks with windows", lambda spec: spec.has_sinks and spec.is_windowed
        ),
    ),
    "FP16_DECODE_64": {
        **_PLAIN,
        "supported_dtypes": ("float16",),
        "supported_phases": (Phase.DECODE,),
        "get_supported_head_sizes": heads(64),
        "get_supported_kernel_block_sizes": blocks(256),
        "supported_kv_cache_layouts": lambda cls: ("HND",),
    },
    "BF16_PREFILL_128": {
        **_PLAIN,
        "supported_dtypes": ("bfloat16",),
        "supported_phases": (Phase.PREFILL,),
        "get_supported_head_sizes": heads(128),
        "get_supported_kernel_block_sizes": blocks(128),
    },
    "FP8_ONLY": {"supported_kv_cache_dtypes": ("fp8_e4m3",), "features": Feature.FP8_KV},
}  # fmt: skip
NARROWS = {name: variant(name, **declared) for name, declared in NARROW.items()}
for feature in TorchBackend.features:
    NARROWS |= {f"ONLY_{feature.name}": alone(feature), f"ALWAYS_{feature.name}": always(feature)}
