"""The axes of the kit's cases: the values of each that a backend declares."""

from __future__ import annotations

from typing import Any

from attnplug.core.features import Feature
from attnplug.core.spec import LayerSpec, Phase
from attnplug.testing.conformance.check import CheckSkipped, Level
from attnplug.testing.conformance.shapes import SHAPES
from attnplug.testing.conformance.target import Target
from attnplug.testing.design.sizes import spread
from attnplug.testing.drawn_values import Numbers
from attnplug.testing.oracle import COMPUTED

KINDS: dict[str, dict[str, Any]] = {
    "decoder": {},
    "non_causal": {"causal": False},
    "narrowed": {"causal": False},
    "direct": {"direct_kv": True},
    "direct_non_causal": {"direct_kv": True, "causal": False},
    "encoder": {"attn_type": "encoder_only", "direct_kv": True},
    "encoder_half": {"attn_type": "encoder", "direct_kv": True},
    "cross": {"attn_type": "encoder_decoder"},
}
"""The roles of queries and keys, and the place of K and V. A narrowed layer is not causal, but its batch is."""

_LAST_KIND = "direct_non_causal"
"""Its two halves are tried apart, unless the backend serves them only together."""
_OF_PHASE: dict[Phase | None, tuple[str, ...]] = {
    None: SHAPES,
    Phase.DECODE: ("decode", "one", "alike", "idle"),
    Phase.PREFILL: ("mixed", "prefill", "extend", "speculative", "draft", "alike", "idle"),
}

HEADS = (
    (4, 2),
    (2, 2),
    (9, 3),
    (14, 2),
    (4, 1),
    (8, 1),
    (5, 1),
    (9, 9),
    (27, 9),
    (16, 1),
    (21, 3),
    (8, 8),
    (32, 8),
    (96, 4),
    (6, 1),
    (12, 1),
    (18, 2),
    (32, 32),
    (48, 1),
)
_OWN_AXES = {"mla", "head_size_v", "kv_cache_dtype", "causal", "direct_kv", "attn_type"}
"""Fields that ask for a feature and have no axis of their name: `values`, the storage types and KINDS try them."""


def axes(target: Target) -> dict[str, list[Any]]:
    """The values of each axis to try with `target`, the plainest first."""
    few = target.level is Level.SMOKE
    tried, small = target.backend.features & COMPUTED, LayerSpec(num_heads=1, num_kv_heads=1, head_size=2)
    values: dict[str, list[Any]] = {
        "kind": [
            kind
            for kind, fields in KINDS.items()
            if small.replace(**fields).required_features() in tried
            and (kind != _LAST_KIND or not _serves_causal(target))
        ],
        "shape": list(_OF_PHASE[target.phase]),
        "numbers": list(Numbers),
        "head_size": spread(target.head_sizes, 6 if few else 12),
        "heads": list(HEADS[:8] if few else HEADS),
        "dtype": target.dtypes,
        "kv_cache_dtype": target.kv_cache_dtypes,
        "block_size": spread(target.block_sizes, 4 if few else 12),
        "layout": list(target.backend.supported_kv_cache_layouts()),
        # The default of no head size above, so that a case fails if the backend takes a default instead.
        "scale": [None, 0.15, *([] if few else [0.07])],
        "values": [None, *(["smaller", "larger"] if Feature.HEAD_SIZE_V in tried else [])],
    }
    if target.is_latent:
        values["heads"] = [(count, 1) for count in (4, 1, 12, 16, 20)]
    for flag in COMPUTED & ~Feature.MLA:
        field, samples = flag.ask.field, samples_of(target, flag)
        if field not in _OWN_AXES:
            most = max(len(samples) // 2, 1) if few else len(samples)
            plain = False if samples[0] is True else None
            values[field] = [plain, *(samples[:most] if flag in tried else ())]
    return values


def _serves_causal(target: Target) -> bool:
    try:
        target.spec(attn_type="decoder", causal=True, direct_kv=True)
    except CheckSkipped:
        return False
    return True


def samples_of(target: Target, flag: Feature) -> tuple[Any, ...]:
    """Values that ask for a feature: its samples, before them a page of tokens if no sample is whole pages.

    Kernels that read chunks as requests of their own begin each at a page. Sparse samples are of the served kinds,
    if there are any.
    """
    samples, size = flag.ask.values, target.block_sizes[0]
    if flag is Feature.CHUNKED_LOCAL and all(sample % size for sample in samples):
        return (size, *samples)
    if flag is Feature.SPARSE:
        served = target.backend.supported_sparse_kinds
        return tuple(sample for sample in samples if sample.kind in served) or samples
    return samples
