"""The designed space: which layers and batches are tried, from what a backend declares."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator
from typing import Any

from attnplug.core.errors import SpecError
from attnplug.core.spec import LayerSpec
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.check import Level
from attnplug.testing.conformance.covering import Row, covering_rows
from attnplug.testing.conformance.shapes import SHAPES, lengths
from attnplug.testing.conformance.target import Target

__all__ = ["KINDS", "Case", "axes", "designed_cases"]

KINDS: dict[str, dict[str, Any]] = {
    "decoder": {},
    "non_causal": {"causal": False},
    "direct": {"direct_kv": True},
    "encoder": {"attn_type": "encoder_only", "direct_kv": True},
    "cross": {"attn_type": "encoder_decoder"},
}
"""Who attends whom, and where K and V are."""

_HEADS = ((4, 2), (2, 2), (4, 1), (8, 1), (5, 1), (16, 1), (6, 2), (8, 8), (32, 8))
_MAX_COMPILE_KEYS = {Level.SMOKE: 6, Level.FULL: 24}


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One layer and one batch.

    Args:
        spec: the layer.
        shape: of SHAPES.
        block_size: tokens per page.
        layout: physical order of the cache.
    """

    spec: LayerSpec
    shape: str
    block_size: int
    layout: str

    @property
    def id(self) -> str:
        """All that is not plain, in a fixed order: "decode-h4x2-d64-float32-b16-NHD-window7.0"."""
        spec = self.spec
        parts = [self.shape, f"h{spec.num_heads}x{spec.num_kv_heads}", f"d{spec.head_size}"]
        parts += [f"v{spec.head_size_v}"] if spec.head_size_v != spec.head_size else []
        parts += [spec.dtype, *([spec.kv_cache_dtype] if spec.kv_cache_dtype != "auto" else [])]
        parts += [] if spec.direct_kv else [f"b{self.block_size}", self.layout]
        kind = next(name for name, fields in reversed(KINDS.items()) if _has(spec, fields))
        parts += [kind] if kind != "decoder" else []
        if spec.is_windowed:
            parts.append("window{}.{}".format(*spec.window))
        parts += [f"chunk{spec.chunk_size}"] if spec.chunk_size else []
        parts += [f"cap{spec.logits_soft_cap:g}"] if spec.logits_soft_cap else []
        flags = {"sinks": spec.has_sinks, "alibi": spec.has_alibi, "lse": spec.needs_lse}
        return "-".join([*parts, *(name for name, is_set in flags.items() if is_set)])

    def batch(self, target: Target, *, seed: int = 0) -> Batch:
        """The batch, with its traps, on the target's device."""
        quantized = self.spec.has_quantized_kv_cache and not self.spec.direct_kv
        scales: dict[str, Any] = {"k_scale": 0.5, "v_scale": 2.0} if quantized else {}
        return target.batch(
            self.spec,
            *lengths(self.shape, self.spec, self.block_size),
            block_size=self.block_size,
            layout=self.layout,
            padding=3,
            drop_window=True,
            seed=seed,
            **scales,
        )


def axes(target: Target) -> dict[str, list[Any]]:
    """The values of each axis that `target` could be asked for, the plainest first."""
    few = target.level is Level.SMOKE
    sizes, blocks = target.head_sizes, target.block_sizes
    return {
        "kind": list(KINDS),
        "shape": list(SHAPES),
        "head_size": _spread(sizes, 4) if few else sizes,
        "heads": list(_HEADS[:5] if few else _HEADS),
        "dtype": target.dtypes,
        "kv_cache_dtype": target.kv_cache_dtypes,
        "block_size": _spread(blocks, 3) if few else blocks,
        "layout": list(target.backend.supported_kv_cache_layouts()),
        "window": [None, (6, 0), (40, 40)] if few else [None, (6, 0), (0, 0), (40, 40), (15, -1), (-1, 7)],
        "chunk_size": [None, 24] if few else [None, 24, 64],
        "logits_soft_cap": [None, 3.0],
        "has_sinks": [False, True],
        "has_alibi": [False, True],
        "needs_lse": [False, True],
        "values": [None, "smaller", "larger"],
    }


def designed_cases(target: Target) -> Iterator[Case]:
    """The cases that the backend accepts: every pair of values of the axes, of which smoke has few.

    Each feature stands alone in some, and in full several designs differ in what else goes with a pair. A backend with `compile_key` is held to 24 keys, of smoke 6.
    """
    choices = axes(target)
    plain = {name: values[0] for name, values in choices.items()}
    rows: list[Row] = [
        {**plain, "shape": shape, name: value}
        for shape in (("mixed",) if target.level is Level.SMOKE else ("decode", "mixed", "speculative"))
        for name, values in choices.items()
        if name != "shape"
        for value in values
    ]
    for seed in range(1 if target.level is Level.SMOKE else 3):
        rows += covering_rows(choices, lambda row: _accepted(target, row) is not None, seed=seed)
    keys: set[Hashable] = set()
    seen: set[str] = set()
    for row in rows:
        case = _accepted(target, row)
        if case is None or case.id in seen:
            continue
        key = target.backend.compile_key(case.spec)
        if key is not None and key not in keys and len(keys) >= _MAX_COMPILE_KEYS[target.level]:
            continue
        keys.add(key)
        seen.add(case.id)
        yield case


def _accepted(target: Target, row: Row) -> Case | None:
    """The case that a row describes, where it means something and the backend serves it."""
    fields = {name: row[name] for name in ("head_size", "dtype", "kv_cache_dtype", "chunk_size")}
    fields |= {name: row[name] for name in ("logits_soft_cap", "has_sinks", "has_alibi", "needs_lse")}
    heads, kv_heads = row["heads"]
    size = row["head_size"]
    if row["values"] is not None:
        sizes = [
            each
            for each in target.head_sizes
            if (each < size) == (row["values"] == "smaller") != (each == size)
        ]
        if not sizes:
            return None
        fields["head_size_v"] = sizes[0]
    if row["window"] is not None:
        fields["window"] = row["window"]
    try:
        spec = LayerSpec(num_heads=heads, num_kv_heads=kv_heads, **fields, **KINDS[row["kind"]])
        spec = spec if spec.direct_kv else spec.replace(block_size=row["block_size"])
    except SpecError:
        return None
    if target.reasons(spec):
        return None
    return Case(spec, row["shape"], row["block_size"], row["layout"])


def _has(spec: LayerSpec, fields: dict[str, Any]) -> bool:
    return all(getattr(spec, name) == value for name, value in fields.items())


def _spread(values: list[Any], count: int) -> list[Any]:
    """The first, the extremes and some between, at most `count`."""
    ordered = sorted(values)
    middle = [value for value in ordered[1:-1] if value & (value - 1)]
    return list(dict.fromkeys([values[0], ordered[0], ordered[-1], *middle, *values]))[:count]
