"""The cases of the kit: layers and batches for the features and sizes that a backend declares."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from attnplug.core.composite import CompositeBackend
from attnplug.core.errors import SpecError
from attnplug.core.features import Feature
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.core.sparse import SparseSpec
from attnplug.core.spec import LayerSpec, Phase
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.check import CheckSkipped, Level
from attnplug.testing.conformance.latent_sizes import fields_of, pair_of
from attnplug.testing.conformance.shapes import LONG, SHAPES, far_blocks, lengths
from attnplug.testing.conformance.target import Target, of_phase
from attnplug.testing.design.compiling import compile_key, most_adding
from attnplug.testing.design.packing import packed_rows, served_pairs
from attnplug.testing.design.search import Row, Search
from attnplug.testing.design.sizes import HEAD_SIZES, spread
from attnplug.testing.drawn_values import FP8_SCALES, Numbers
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
_LARGEST_HEAD = 512
"""A head size of models that few kernels serve."""
_MOST_BYTES = 1 << 29
"""Of a cache: a larger one takes seconds to fill."""
_OF_PHASE: dict[Phase | None, tuple[str, ...]] = {
    None: SHAPES,
    Phase.DECODE: ("decode", "one", "alike", "idle"),
    Phase.PREFILL: ("mixed", "prefill", "extend", "speculative", "draft", "alike", "idle"),
}

_HEADS = (
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
)
_TOGETHER: tuple[dict[str, Any], ...] = (
    {"shape": "idle", "needs_lse": True},
    {"shape": "alike", "needs_lse": True},
    {"has_sinks": True, "needs_lse": True},
    {"has_alibi": True, "needs_lse": True},
    {"logits_soft_cap": 3.0, "has_alibi": True},
    {"logits_soft_cap": 3.0, "scale": 0.15},
    {"logits_soft_cap": 50.0},
    {"scale": 1.0},
    {"logits_soft_cap": 3.0, "window": (6, 0)},
    {"mm_prefix": True, "window": (6, 0)},
    {"mm_prefix": True, "chunk_size": 24},
    {"mm_prefix": True, "kind": "direct", "window": (6, 0)},
    {"kind": "non_causal", "window": (40, 40)},
    {"kind": "non_causal", "window": (5, 11)},
    {"kind": "non_causal", "window": (15, -1)},
    {"kind": "non_causal", "window": (-1, 7)},
    {"kind": "direct", "chunk_size": 24},
    {"kind": "non_causal", "has_alibi": True},
    {"kind": "cross", "has_alibi": True},
    {"kind": "encoder", "has_alibi": True},
    {"kind": "encoder", "window": (5, 11)},
    {"kind": "direct", "has_sinks": True, "needs_lse": True},
    {"values": "smaller", "layout": "HND"},
    {"values": "larger", "layout": "HND"},
    {"numbers": Numbers.FAR, "has_sinks": True, "needs_lse": True},
    {"numbers": Numbers.SHARP, "has_sinks": True, "needs_lse": True},
    {"shape": "decode", "numbers": Numbers.FAR, "has_sinks": True},
)
"""Values whose order or scale a convention fixes, tried with plain values of all other axes."""
_LONG_WITH: tuple[dict[str, Any], ...] = (
    {"shape": "long-decode", "window": (149, 0)},
    {"shape": "long-decode", "chunk_size": 129},
    {"shape": "long-decode", "logits_soft_cap": 1.7},
    {"shape": "long-decode", "has_alibi": True},
    {"shape": "long-decode", "has_sinks": True, "needs_lse": True},
    {"shape": "long-decode", "window": (1030, 0), "has_sinks": True},
    {"shape": "long-decode", "chunk_size": 1031, "needs_lse": True},
    {"shape": "long-decode", "logits_soft_cap": 1.7, "needs_lse": True},
    {"shape": "long-decode", "kv_cache_dtype": "fp8"},
    {"shape": "long-decode", "heads": (14, 2)},
    {"shape": "long-decode", "sparse": SparseSpec("token_topk", 1024)},
    {"shape": "long-decode", "kind": "direct"},
    {"shape": "long-decode", "numbers": Numbers.SHARP},
    {"shape": "long-extend", "window": (1030, 0)},
    {"shape": "long-extend", "needs_lse": True},
    {"shape": "long-prompt", "window": (149, 0)},
    {"shape": "long-prompt", "kind": "direct"},
    {"shape": "long-prompt", "numbers": Numbers.SHARP},
    {"shape": "many-requests", "kind": "encoder"},
    {"shape": "many-requests", "kind": "cross"},
    {"shape": "many-requests", "kind": "direct"},
)
"""Paths that kernels take for long contexts or many requests only: decodes that split their keys, prompts of several
tiles, windows and chunks that 8 bits do not hold."""
_OWN_AXES = {"mla", "head_size_v", "kv_cache_dtype", "causal", "direct_kv", "attn_type"}
"""Fields that ask for a feature and have no axis of their name: `values`, the storage types and KINDS try them."""
_OF_BATCH = {"shape", "layout", "numbers"}
"""Axes of batches alone: layers differ in all others."""
_NO_FIELDS = _OF_BATCH | {"kind", "heads", "values"}
"""Axes whose name is no field of a layer."""
_MAX_COMPILE_KEYS = {Level.SMOKE: 6, Level.FULL: 24}


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One layer and one batch of a kind of SHAPES or LONG; a `narrowed` batch is causal though the layer is not."""

    spec: LayerSpec
    shape: str
    block_size: int
    layout: str
    narrowed: bool = False
    numbers: Numbers = Numbers.PLAIN

    @property
    def id(self) -> str:
        """The sizes and all values that are not plain: "decode-h4x2-d64-float32-b16-NHD-window7.0"."""
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
        parts += [str(spec.sparse).replace(" ", "_")] if spec.sparse else []
        flags = {"sinks": spec.has_sinks, "alibi": spec.has_alibi, "lse": spec.needs_lse}
        flags["spans"] = spec.mm_prefix
        parts += [name for name, is_set in flags.items() if is_set]
        return "-".join(parts if self.numbers is Numbers.PLAIN else [*parts, self.numbers])

    @property
    def kind(self) -> str:
        """The name in KINDS."""
        if self.narrowed:
            return "narrowed"
        return next(
            name
            for name, fields in reversed(KINDS.items())
            if name != "narrowed" and all(getattr(self.spec, field) == each for field, each in fields.items())
        )

    def batch(self, target: Target, *, seed: int = 0) -> Batch:
        """The batch, with its traps, on the target's device."""
        spec = self.spec
        new, tokens = of_phase(target.phase, *lengths(self.shape, spec, self.block_size))
        # Padding rows hold NaN, which no answer may contain.
        options: dict[str, Any] = {"padding": 3, "seed": seed, "causal": True if self.narrowed else None}
        options["numbers"] = self.numbers
        if not spec.direct_kv:
            options |= {"block_size": self.block_size, "layout": self.layout, "drop_window": True}
            options |= FP8_SCALES if spec.has_quantized_kv_cache else {}
            options |= {"skip_blocks": far_blocks(self.block_size)} if self.shape == "far-blocks" else {}
        elif new != tokens:
            # An engine's own cache drops the keys that a causal window or a chunk has passed.
            reach = spec.chunk_size or max(tokens, default=0)
            if spec.causal and spec.window[0] >= 0:
                reach = spec.window[0]
            options["key_lens"] = [
                min(count + reach, every) for count, every in zip(new, tokens, strict=True)
            ]
        return target.batch(spec, new, tokens, **options)


class CaseSearch(Search):
    """Asks one target about cases."""

    def __init__(self, target: Target) -> None:
        self._target, self._phase = target, target.phase
        self._head_sizes = tuple(dict.fromkeys((*target.head_sizes, *HEAD_SIZES)))
        choices = axes(target)
        self._fields = tuple(name for name in choices if name not in _NO_FIELDS)
        self._asked = tuple(name for name in choices if name not in _OF_BATCH)
        self._of_rows: dict[tuple[Any, ...], Sequence[Any]] = {}
        self._of_layers: dict[LayerSpec, Sequence[Any]] = {}
        self.order = tuple(choices)
        super().__init__(choices)

    def complete(self, fixed: Mapping[str, Any]) -> Row | None:
        """The base with the fixed values; a kind whose K and V come with the call has no page sizes and layouts."""
        row: Row = {**self.base, **fixed}
        if not KINDS[row["kind"]].get("direct_kv"):
            return row
        pages = dict.fromkeys(("block_size", "layout"))
        return None if any(fixed.get(axis) for axis in pages) else {**row, **pages}

    def ask(self, row: Row) -> Sequence[Any]:
        """The backend's reasons against the layer, or the error if no layer has the values."""
        # Rows that differ in their batch alone have one layer.
        key = (*[row[name] for name in self._asked], row["numbers"] is Numbers.FAR)
        if key not in self._of_rows:
            try:
                self._of_rows[key] = self._reasons(self._layer(row))
            except SpecError as problem:
                # Values that exclude each other are a refusal too, so the search goes on to other values.
                self._of_rows[key] = (problem,)
        return self._of_rows[key]

    def _reasons(self, spec: LayerSpec) -> Sequence[Any]:
        found = self._of_layers.get(spec)
        if found is None:
            target = self._target
            found = target.backend.validate_configuration(spec, target.device, self._phase)
            self._of_layers[spec] = found
        return found

    def case(self, row: Row) -> Case:
        """The case of a served row."""
        target = self._target
        block_size = row["block_size"] or target.block_sizes[0]
        layout = row["layout"] or target.backend.supported_kv_cache_layouts()[0]
        narrowed = row["kind"] == "narrowed"
        return Case(self._layer(row), row["shape"], block_size, layout, narrowed, Numbers(row["numbers"]))

    def _layer(self, row: Row) -> LayerSpec:
        """The layer of a row; SpecError if its values exclude each other."""
        fields = {name: row[name] for name in self._fields if row[name] is not None} | KINDS[row["kind"]]
        size = row["head_size"]
        heads = dict(zip(("num_heads", "num_kv_heads"), row["heads"], strict=True))
        if row["values"] is not None:
            fields["head_size_v"] = self._value_size(row["values"], size, {**fields, **heads})
        fields |= heads
        if self._target.is_latent:
            fields |= fields_of(pair_of(self._target.backend, size))
        spec = LayerSpec(**fields)
        if row["window"] is not None and not spec.is_windowed:
            raise SpecError("window", row["window"], "limits nothing in a causal layer")
        if spec.mla and not spec.mla.qk_rope_head_dim and Numbers(row["numbers"]) is Numbers.FAR:
            raise SpecError("numbers", Numbers.FAR, "are of an element that W_UK leaves as it is")
        if row["mm_prefix"] and row["kind"] == "cross":
            raise SpecError("mm_prefix", True, "is for layers whose keys are their own tokens")
        if row["kind"] in ("encoder", "encoder_half") and self._target.phase is Phase.DECODE:
            raise SpecError("kind", row["kind"], "has no tokens to decode")
        return spec

    def _value_size(self, which: str, size: int, fields: Mapping[str, Any]) -> int:
        """A head size of values "smaller" or "larger" than `size`, if there is one that the backend accepts."""
        order = operator.lt if which == "smaller" else operator.gt
        candidates = [each for each in self._head_sizes if order(each, size)]
        if not candidates:
            raise SpecError("values", which, f"needs a head size other than {size}")
        # Kernels may serve one pair of sizes only, such as 192 and 128.
        served = (
            each for each in candidates if not self._reasons(LayerSpec(**{**fields, "head_size_v": each}))
        )
        return next(served, candidates[0])


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
        "heads": list(_HEADS[:8] if few else _HEADS),
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


def designed_cases(target: Target) -> list[Case]:
    """The cases to run, equal in every process: each pair of values that the backend serves is in one.

    Each value is also tried with the plainest values of the other axes. The full level has three designs,
    which differ in the values that go with a pair. If the backend has compile keys, only the cases of those
    keys are kept that cover most pairs: 6 keys, at the full level 24.
    """
    search = CaseSearch(target)
    few = target.level is Level.SMOKE
    shapes = [shape for shape in ("mixed", "decode", "speculative") if shape in search.axes["shape"]]
    # A mixed batch in no order leaves no work for the decoding half of a composite.
    plain_shapes = shapes[: 2 if issubclass(target.backend, CompositeBackend) else 1] if few else shapes
    alone: list[dict[str, Any]] = [
        {"shape": shape, axis: value}
        for shape in plain_shapes
        for axis, values in search.axes.items()
        if axis != "shape"
        for value in values
    ]
    alone += [{"shape": shapes[0], axis: value} for axis, value in _further(target, search)]
    alone += [{"shape": shapes[0], **fields} for fields in _TOGETHER]
    alone += _long_rows(search, few)
    rows = [row for fixed in alone if (row := search.complete(fixed)) and not search.reasons(row)]
    served = served_pairs(search)
    for seed in range(1 if few else 3):
        rows += packed_rows(search, served, seed=seed)
    cases: dict[str, tuple[Case, Row]] = {}
    for row in rows:
        case = search.case(row)
        if _cache_bytes(case) <= _MOST_BYTES:
            cases.setdefault(case.id, (case, row))
    return _within_keys(target, list(cases.values()))


def _further(target: Target, search: Search) -> list[tuple[str, Any]]:
    """Numbers of heads, a head size and values of features that no pair has at the smoke level: each is tried alone."""
    samples = {flag.ask.field: samples_of(target, flag) for flag in target.backend.features & COMPUTED}
    every = {"heads": (*_HEADS, (1, 1)), "head_size": (_LARGEST_HEAD,), **samples}
    return [
        (axis, value)
        for axis, tried in search.axes.items()
        for value in every.get(axis, ())
        if value not in tried
    ]


def _long_rows(search: Search, few: bool) -> list[dict[str, Any]]:
    """The values to try with LONG: none, those of _LONG_WITH, and at the full level each alone with two of them."""
    least = min((size for size in search.axes["block_size"] if size), default=None)
    far = {"shape": "far-blocks", "block_size": least}
    found: list[dict[str, Any]] = [far if shape == "far-blocks" else {"shape": shape} for shape in LONG]
    found += _LONG_WITH
    if not few:
        found += [
            {"shape": shape, axis: value}
            for shape in ("long-decode", "long-prompt")
            for axis, values in search.axes.items()
            if axis != "shape"
            for value in values[1:]
        ]
        found += [{**far, "layout": layout} for layout in search.axes["layout"]]
    return found


def _cache_bytes(case: Case) -> int:
    """The bytes of the cache of a case with far blocks, else 0."""
    if case.shape != "far-blocks":
        return 0
    pages = kv_cache_spec_for(case.spec, case.block_size)
    return 0 if pages is None else far_blocks(case.block_size) * pages.page_size_bytes


def _within_keys(target: Target, designed: Sequence[tuple[Case, Row]]) -> list[Case]:
    """The cases of as many compile keys as the level allows: the plainest key, and those that add most pairs."""
    keys = [compile_key(target.backend, case.spec) for case, _ in designed]
    pairs: dict[Hashable, set[Any]] = {key: set() for key in keys if key is not None}
    for key, (_, row) in zip(keys, designed, strict=True):
        if key is not None:
            pairs[key].update(itertools.combinations(row.items(), 2))
    plainest = next(iter(pairs), None)
    covered = pairs.pop(plainest, set())
    chosen = {None, plainest, *most_adding(pairs, covered)[: _MAX_COMPILE_KEYS[target.level] - 1]}
    return [case for key, (case, _) in zip(keys, designed, strict=True) if key in chosen]
