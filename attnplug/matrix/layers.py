"""The layer that a cell stands for."""

from __future__ import annotations

import functools
from typing import Any

from attnplug.core.errors import SpecError
from attnplug.core.features import Feature
from attnplug.core.spec import LayerSpec, MLADims, Phase
from attnplug.matrix.axes import FEATURES, LATENT, PLAIN, ROPE
from attnplug.matrix.model import Cell

__all__ = ["phase_of", "spec_of"]

_LEAST_CHUNK = 24
_FIELDS: dict[str, dict[str, Any]] = {
    "sliding_window": {"window": (6, 0)},
    "soft_cap": {"logits_soft_cap": 3.0},
    "sinks": {"has_sinks": True},
    "alibi": {"has_alibi": True},
    "sparse": {"sparse": True},
    "mm_prefix": {"mm_prefix": True},
    "lse": {"needs_lse": True},
    "non_causal": {"causal": False},
    "direct_kv": {"direct_kv": True},
    "cross": {"attn_type": "encoder_decoder"},
    "encoder": {"attn_type": "encoder_only", "direct_kv": True},
}
"""What a feature sets, with the values of the conformance kit; what also depends on sizes is set below."""


def phase_of(cell: Cell) -> Phase | None:
    """The phase for which the layer is validated: None, both, for a mixed batch."""
    return None if cell.phase == "mixed" else Phase(cell.phase)


def spec_of(cell: Cell) -> LayerSpec:
    """The layer that a cell stands for: 4 query heads over 2, or over 1 with MLA, and the one feature.

    A chunk is a whole number of pages, at least 24 tokens: kernels that read chunks as requests of their own
    begin each at a page. Values of another size have 64 elements for keys of 65 to 128, else 128.
    Sparse attention of LATENT is that of MLA, as models have it.

    Raises:
        SpecError: a feature that is not known here, or values that no layer can have together.
    """
    return _spec(cell.feature, cell.head_size, cell.dtype, cell.kv_cache_dtype, cell.block_size)


@functools.lru_cache(maxsize=16_384)
def _spec(feature: str, head_size: int, dtype: str, kv_cache_dtype: str, block_size: int | None) -> LayerSpec:
    if feature not in FEATURES:
        raise SpecError("feature", feature, f"must be one of {', '.join(FEATURES)}")
    spec = LayerSpec(
        num_heads=4,
        head_size=head_size,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        **{"num_kv_heads": 2, **_asked(feature, head_size, block_size)},
    )
    if feature != PLAIN and Feature[feature.upper()] not in spec.required_features():
        raise SpecError("kv_cache_dtype", kv_cache_dtype, f"does not go with the feature {feature}")
    return spec


def _asked(feature: str, head_size: int, block_size: int | None) -> dict[str, Any]:
    fields = _FIELDS.get(feature, {})
    if feature == "chunked_local":
        page = block_size or 1
        fields = {"chunk_size": -(-_LEAST_CHUNK // page) * page}
    elif feature == "head_size_v":
        fields = {"head_size_v": 64 if 64 < head_size <= 128 else 128}
    if feature == "mla" or (feature == "sparse" and head_size == LATENT):
        fields = {**fields, "num_kv_heads": 1, "mla": _mla(head_size)}
    return fields


def _mla(head_size: int) -> MLADims:
    if head_size <= ROPE:
        raise SpecError("head_size", head_size, f"must be more than {ROPE} with the feature mla")
    return MLADims(
        q_lora_rank=1536,
        kv_lora_rank=head_size - ROPE,
        qk_nope_head_dim=128,
        qk_rope_head_dim=ROPE,
        v_head_dim=128,
    )
