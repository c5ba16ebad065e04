"""The layer of a cell."""

from __future__ import annotations

import functools
from typing import Any

from attnplug.core.errors import SpecError
from attnplug.core.features import Feature
from attnplug.core.spec import LayerSpec, Phase
from attnplug.matrix.axes import FEATURES, LATENT, PLAIN, ROPE
from attnplug.matrix.model import Cell


def phase_of(cell: Cell) -> Phase | None:
    """The phase that the layer is validated for: None, which is both, for a mixed batch."""
    return None if cell.phase == "mixed" else Phase(cell.phase)


def spec_of(cell: Cell) -> LayerSpec:
    """The layer of a cell: 4 query heads over 2, or over 1 with MLA, and the one feature.

    Sparse attention over LATENT elements is also MLA, because models combine the two.

    Raises:
        SpecError: the feature is unknown, or the values exclude each other.
    """
    return _spec(cell.feature, cell.head_size, cell.dtype, cell.kv_cache_dtype, cell.block_size)


@functools.lru_cache(maxsize=16_384)
def _spec(feature: str, head_size: int, dtype: str, kv_cache_dtype: str, block_size: int | None) -> LayerSpec:
    if feature not in FEATURES:
        raise SpecError("feature", feature, f"must be one of {', '.join(FEATURES)}")
    sizes = {"head_size": head_size, "kv_cache_dtype": kv_cache_dtype}
    spec = LayerSpec(
        num_heads=4,
        dtype=dtype,
        block_size=block_size,
        **{"num_kv_heads": 2, **_asked(feature, head_size, block_size), **sizes},
    )
    if feature != PLAIN and Feature[feature.upper()] not in spec.required_features():
        raise SpecError("kv_cache_dtype", kv_cache_dtype, f"does not go with the feature {feature}")
    return spec


def _asked(feature: str, head_size: int, block_size: int | None) -> dict[str, Any]:
    if feature == PLAIN:
        return {}
    if feature == "mla" and head_size <= ROPE:
        raise SpecError("head_size", head_size, f"must be more than {ROPE} with the feature mla")
    fields = Feature[feature.upper()].fields(head_size, block_size)
    if feature == "sparse" and head_size == LATENT:
        fields |= Feature.MLA.fields(head_size)
    return fields
