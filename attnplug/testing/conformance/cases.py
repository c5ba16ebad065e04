"""The designed space: which layers and batches are tried, from what a backend declares."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from attnplug.core.composite import CompositeBackend
from attnplug.core.errors import SpecError
from attnplug.core.features import Feature
from attnplug.core.spec import LayerSpec, Phase
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.check import Level
from attnplug.testing.conformance.covering import Row, covering_rows
from attnplug.testing.conformance.phases import of_phase
from attnplug.testing.conformance.shapes import lengths, shapes_of
from attnplug.testing.conformance.target import Target
from attnplug.testing.oracle import COMPUTED

__all__ = ["KINDS", "Case", "axes", "designed_cases", "untried"]

KINDS: dict[str, dict[str, Any]] = {
    "decoder": {},
    "non_causal": {"causal": False},
    "narrowed": {"causal": False},
    "direct": {"direct_kv": True},
    "encoder": {"attn_type": "encoder_only", "direct_kv": True},
    "cross": {"attn_type": "encoder_decoder"},
}
"""Who attends whom, and where K and V are; a narrowed layer is not causal, but its batch is."""

_HEADS = ((4, 2), (2, 2), (4, 1), (8, 1), (5, 1), (16, 1), (6, 2), (8, 8), (32, 8))
_TOGETHER: tuple[Row, ...] = (
    {"shape": "idle", "needs_lse": True},
    {"shape": "alike", "needs_lse": True},
    {"has_sinks": True, "needs_lse": True},
    {"has_alibi": True, "needs_lse": True},
    {"logits_soft_cap": 3.0, "has_alibi": True},
    {"logits_soft_cap": 3.0, "scale": 0.15},
    {"logits_soft_cap": 3.0, "window": (6, 0)},
    {"kind": "non_causal", "window": (40, 40)},
)
"""What a convention ties together, and so must be tried with nothing else in the way."""
_NO_FIELDS = {"kind", "shape", "heads", "layout", "block_size", "values"}
"""Axes that name no field of a LayerSpec, or one that depends on others."""
_OTHER_AXES = {"kv_cache_dtype", "head_size_v", "causal", "direct_kv", "attn_type"}
"""Fields that ask for a feature on an axis of another name: storage dtypes, sizes of values, and kinds."""
_MAX_COMPILE_KEYS = {Level.SMOKE: 6, Level.FULL: 24}


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One layer and one batch.

    Args:
        spec: the layer.
        shape: of SHAPES.
        block_size: tokens per page.
        layout: physical order of the cache.
        narrowed: whether the batch is causal though the layer is not.
    """

    spec: LayerSpec
    shape: str
    block_size: int
    layout: str
    narrowed: bool = False

    @property
    def id(self) -> str:
        """All that is not plain, in a fixed order: "decode-h4x2-d64-float32-b16-NHD-window7.0"."""
        spec = self.spec
        parts = [self.shape, f"h{spec.num_heads}x{spec.num_kv_heads}", f"d{spec.head_size}"]
        parts += [f"v{spec.head_size_v}"] if spec.head_size_v != spec.head_size else []
        parts += [spec.dtype, *([spec.kv_cache_dtype] if spec.kv_cache_dtype != "auto" else [])]
        parts += [] if spec.direct_kv else [f"b{self.block_size}", self.layout]
        parts += [self.kind] if self.kind != "decoder" else []
        parts += [f"scale{spec.scale:g}"] if spec.scale != spec.replace(scale=None).scale else []
        if spec.is_windowed:
            parts.append("window{}.{}".format(*spec.window))
        parts += [f"chunk{spec.chunk_size}"] if spec.chunk_size else []
        parts += [f"cap{spec.logits_soft_cap:g}"] if spec.logits_soft_cap else []
        flags = {"sinks": spec.has_sinks, "alibi": spec.has_alibi, "lse": spec.needs_lse}
        return "-".join([*parts, *(name for name, is_set in flags.items() if is_set)])

    @property
    def kind(self) -> str:
        """Of KINDS."""
        if self.narrowed:
            return "narrowed"
        found = (name for name, fields in reversed(KINDS.items()) if _has(self.spec, fields))
        return next(name for name in found if name != "narrowed")

    def batch(self, target: Target, *, seed: int = 0) -> Batch:
        """The batch, with its traps, on the target's device."""
        spec = self.spec
        new, tokens = of_phase(target.phase, *lengths(self.shape, spec, self.block_size))
        options: dict[str, Any] = {"padding": 3, "seed": seed, "causal": True if self.narrowed else None}
        if not spec.direct_kv:
            options |= {"block_size": self.block_size, "layout": self.layout, "drop_window": True}
            options |= {"k_scale": 0.5, "v_scale": 2.0} if spec.has_quantized_kv_cache else {}
        elif new != tokens:
            options["key_lens"] = _held(spec, new, tokens)
        return target.batch(spec, new, tokens, **options)


def _held(spec: LayerSpec, new: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """How many keys a cache of the engine's own still holds: what a causal window has passed is dropped."""
    if not spec.causal or spec.window[0] < 0:
        return list(tokens)
    return [min(every, count + spec.window[0]) for count, every in zip(new, tokens, strict=True)]


def axes(target: Target) -> dict[str, list[Any]]:
    """The values of each axis that `target` could be asked for, the plainest first."""
    few = target.level is Level.SMOKE
    sizes, blocks = target.head_sizes, target.block_sizes
    values: dict[str, list[Any]] = {
        "kind": [kind for kind, fields in KINDS.items() if _is_declared(target, fields)],
        "shape": list(shapes_of(target.phase)),
        "head_size": _spread(sizes, 4 if few else 12),
        "heads": list(_HEADS[:5] if few else _HEADS),
        "dtype": target.dtypes,
        "kv_cache_dtype": target.kv_cache_dtypes,
        "block_size": _spread(blocks, 3 if few else 12),
        "layout": list(target.backend.supported_kv_cache_layouts()),
        # No default of a head size in use, so that it shows where a backend takes that instead.
        "scale": [None, 0.15],
        "values": [None, *(["smaller", "larger"] if Feature.HEAD_SIZE_V in _tried(target) else [])],
    }
    for flag in COMPUTED:
        row = flag.ask
        if row.field not in _OTHER_AXES:
            sampled = (
                (row.values[: max(len(row.values) // 2, 1)] if few else row.values)
                if flag in _tried(target)
                else ()
            )
            values[row.field] = [False if row.values[0] is True else None, *sampled]
    return values


def _tried(target: Target) -> Feature:
    """The features that the backend declares and whose numbers the oracle knows."""
    return target.backend.features & COMPUTED


def untried(target: Target) -> Feature:
    """The declared features that the kit has no numeric case for."""
    return target.backend.features & ~COMPUTED


def _is_declared(target: Target, fields: Mapping[str, Any]) -> bool:
    """Whether the backend declares the features that `fields` ask; it refuses any others."""
    spec = LayerSpec(num_heads=1, num_kv_heads=1, head_size=2, **fields)
    return spec.required_features() in _tried(target)


def designed_cases(target: Target) -> list[Case]:
    """The cases that the backend accepts, always the same: of the axes' values every pair that it serves.

    Each feature stands alone in some; at the full level several designs differ in what else goes with a
    pair. Of a backend with `compile_key` the cases are kept whose keys cover most pairs: 24 keys, of smoke 6.
    """
    choices = axes(target)
    plain = {name: values[0] for name, values in choices.items()}
    shapes = [shape for shape in ("mixed", "decode", "speculative") if shape in choices["shape"]]
    # A mix in no order leaves a composite's decoding half nothing to do.
    few = 2 if issubclass(target.backend, CompositeBackend) else 1
    rows: list[Row] = [
        {**plain, "shape": shape, name: value}
        for shape in (shapes[:few] if target.level is Level.SMOKE else shapes)
        for name, values in choices.items()
        if name != "shape"
        for value in values
    ]
    rows += [{**plain, "shape": shapes[0], **fields} for fields in _TOGETHER]
    for seed in range(1 if target.level is Level.SMOKE else 3):
        rows += covering_rows(choices, lambda row: _accepted(target, row) is not None, seed=seed)
    cases: dict[str, tuple[Case, Row]] = {}
    for row in rows:
        case = _accepted(target, row)
        if case is not None:
            cases.setdefault(case.id, (case, row))
    return _within_keys(target, list(cases.values()))


def _within_keys(target: Target, designed: Sequence[tuple[Case, Row]]) -> list[Case]:
    """The cases of as many compile keys as the level allows: the plainest, and those that add most pairs."""
    keys = [target.backend.compile_key(case.spec) for case, _ in designed]
    pairs: dict[Hashable, set[Any]] = {key: set() for key in keys if key is not None}
    for key, (_, row) in zip(keys, designed, strict=True):
        if key is not None:
            pairs[key].update(itertools.combinations(row.items(), 2))
    chosen: set[Hashable] = {None}
    covered: set[Any] = set()
    while pairs and len(chosen) <= _MAX_COMPILE_KEYS[target.level]:
        # The first of equals, and the plainest of all, come first in the design.
        best = max(pairs, key=lambda key: len(pairs[key] - covered)) if covered else next(iter(pairs))
        covered |= pairs.pop(best)
        chosen.add(best)
    return [case for key, (case, _) in zip(keys, designed, strict=True) if key in chosen]


def _accepted(target: Target, row: Row) -> Case | None:
    """The case that a row describes, where it means something and the backend serves it."""
    fields = {name: row[name] for name in row.keys() - _NO_FIELDS if row[name] is not None}
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
    try:
        spec = LayerSpec(num_heads=heads, num_kv_heads=kv_heads, **fields, **KINDS[row["kind"]])
        spec = spec if spec.direct_kv else spec.replace(block_size=row["block_size"])
    except SpecError:
        return None
    if target.reasons(spec) or (row["kind"] == "encoder" and target.phase is Phase.DECODE):
        return None  # an encoder's tokens are never decoded
    return Case(spec, row["shape"], row["block_size"], row["layout"], row["kind"] == "narrowed")


def _has(spec: LayerSpec, fields: dict[str, Any]) -> bool:
    return all(getattr(spec, name) == value for name, value in fields.items())


def _spread(values: list[Any], count: int) -> list[Any]:
    """The first, the extremes, one that is no power of 2 and some more, at most `count`."""
    ordered = sorted(values)
    middle = [value for value in values if value & (value - 1)]
    return list(dict.fromkeys([values[0], ordered[0], ordered[-1], *middle[:1], *values]))[:count]
