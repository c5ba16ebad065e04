"""The cases of the kit: layers and batches for the features and sizes that a backend declares."""

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
from attnplug.testing.conformance.latent_sizes import fields_of, pair_of
from attnplug.testing.conformance.target import Target, of_phase
from attnplug.testing.design.compiling import compile_key, most_adding
from attnplug.testing.design.packing import packed_rows, served_pairs
from attnplug.testing.design.search import Row, Search
from attnplug.testing.design.sizes import spread
from attnplug.testing.oracle import COMPUTED

KINDS: dict[str, dict[str, Any]] = {
    "decoder": {},
    "non_causal": {"causal": False},
    "narrowed": {"causal": False},
    "direct": {"direct_kv": True},
    "encoder": {"attn_type": "encoder_only", "direct_kv": True},
    "encoder_half": {"attn_type": "encoder", "direct_kv": True},
    "cross": {"attn_type": "encoder_decoder"},
}
"""The roles of queries and keys, and the place of K and V. A narrowed layer is not causal, but its batch is."""

SHAPES = ("decode", "prefill", "extend", "mixed", "speculative", "one", "alike", "idle")
"""Kinds of batches. `one` is a single decode. `alike` has requests of equal lengths, so that a kernel that
swaps their pages fails. `idle` has requests without new tokens, and a query that sees no key. `lengths` knows
`ordered` too: `mixed` with the decodes first, so that both halves of a composite have work."""

_LONGEST = 300
_TILE = 128
_OF_PHASE: dict[Phase | None, tuple[str, ...]] = {
    None: SHAPES,
    Phase.DECODE: ("decode", "one", "alike", "idle"),
    Phase.PREFILL: ("mixed", "prefill", "extend", "speculative", "alike", "idle"),
}

_HEADS = ((4, 2), (2, 2), (4, 1), (8, 1), (5, 1), (16, 1), (6, 2), (8, 8), (32, 8))
_TOGETHER: tuple[dict[str, Any], ...] = (
    {"shape": "idle", "needs_lse": True},
    {"shape": "alike", "needs_lse": True},
    {"has_sinks": True, "needs_lse": True},
    {"has_alibi": True, "needs_lse": True},
    {"logits_soft_cap": 3.0, "has_alibi": True},
    {"logits_soft_cap": 3.0, "scale": 0.15},
    {"logits_soft_cap": 3.0, "window": (6, 0)},
    {"mm_prefix": True, "window": (6, 0)},
    {"mm_prefix": True, "chunk_size": 24},
    {"mm_prefix": True, "kind": "direct", "window": (6, 0)},
    {"kind": "non_causal", "window": (40, 40)},
)
"""Values whose order or scale a convention fixes, tried with plain values of all other axes."""
_OWN_AXES = {"mla", "head_size_v", "kv_cache_dtype", "causal", "direct_kv", "attn_type"}
"""Fields that ask for a feature and have no axis of their name: `values`, the storage types and KINDS try them."""
_MAX_COMPILE_KEYS = {Level.SMOKE: 6, Level.FULL: 24}


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One layer and one batch of a kind of SHAPES; a `narrowed` batch is causal though the layer is not."""

    spec: LayerSpec
    shape: str
    block_size: int
    layout: str
    narrowed: bool = False

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
        return "-".join([*parts, *(name for name, is_set in flags.items() if is_set)])

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
        if not spec.direct_kv:
            options |= {"block_size": self.block_size, "layout": self.layout, "drop_window": True}
            # The scales differ from 1 and from each other, so scales left out or swapped change the answer.
            options |= {"k_scale": 0.5, "v_scale": 2.0} if spec.has_quantized_kv_cache else {}
        elif new != tokens:
            # An engine's own cache drops the keys that a causal window has passed.
            reach = spec.window[0] if spec.causal and spec.window[0] >= 0 else max(tokens, default=0)
            options["key_lens"] = [
                min(count + reach, every) for count, every in zip(new, tokens, strict=True)
            ]
        return target.batch(spec, new, tokens, **options)


def lengths(shape: str, spec: LayerSpec, block_size: int) -> tuple[list[int], list[int]]:
    """The new tokens and all tokens of each request of a batch of kind `shape`.

    The lengths are near multiples of the block size, of windows, chunks and tiles of 128 keys. For a cross
    layer the second list counts the encoder's tokens. Encoders compute all their tokens at once.
    """
    marks = [block_size, 2 * block_size, _TILE, spec.chunk_size or 0]
    # A window of `side` keys and the query's own key are `side + 1` keys.
    marks += [side + 1 for side in spec.window if side >= 0]
    # Lengths one below, at and one above each mark find off-by-one mistakes at its end.
    edges = sorted({mark + step for mark in marks if 0 < mark < _LONGEST for step in (-1, 0, 1)} | {1, 40})
    ends = [edge for edge in edges if edge > 0]
    if spec.is_encoder:
        counts = {"one": ends[-1:], "decode": [1, *ends[-2:]], "alike": ends[-1:] * 3, "idle": [*ends[:3], 0]}
        return counts.get(shape, ends[-5:]), counts.get(shape, ends[-5:])
    if shape == "decode":
        return [1] * len(ends), ends
    if shape == "one":
        return [1], ends[-1:]
    if shape == "prefill":
        return ends[-4:], ends[-4:]
    if shape == "speculative":
        # Three drafted tokens follow the verified one, so the first query ends at the edge.
        return [4] * len(ends), [end + 3 for end in ends]
    if shape == "alike":
        return [3] * 4, ends[-1:] * 4
    new = [max(end // 3, 1) for end in ends]
    if shape == "extend":
        return new[-5:], ends[-5:]
    if shape == "idle":
        return [0, 1, 0, 1, new[-1], 0], [ends[-1], ends[-2], 0, 0, ends[-1], 1]
    # Decodes, extends and prefills in no order.
    mixed = [new[-1], 1, ends[0], 1, new[-2], ends[-1]]
    all_tokens = [ends[-1], ends[-2], ends[0], ends[-1], ends[-2], ends[-1]]
    if shape == "ordered":
        order = sorted(range(len(mixed)), key=lambda request: mixed[request] > 1)
        return [mixed[request] for request in order], [all_tokens[request] for request in order]
    return mixed, all_tokens


class CaseSearch(Search):
    """Asks one target about cases."""

    def __init__(self, target: Target) -> None:
        self._target = target
        choices = axes(target)
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
        try:
            return self._target.reasons(self._layer(row))
        except SpecError as problem:
            # Values that exclude each other are a refusal too, so the search goes on to other values.
            return (problem,)

    def case(self, row: Row) -> Case:
        """The case of a served row."""
        target = self._target
        block_size = row["block_size"] or target.block_sizes[0]
        layout = row["layout"] or target.backend.supported_kv_cache_layouts()[0]
        return Case(self._layer(row), row["shape"], block_size, layout, row["kind"] == "narrowed")

    def _layer(self, row: Row) -> LayerSpec:
        """The layer of a row; SpecError if its values exclude each other."""
        names = self.axes.keys() - {"kind", "shape", "heads", "layout", "values"}
        fields = {name: row[name] for name in names if row[name] is not None} | KINDS[row["kind"]]
        size, heads = row["head_size"], row["heads"]
        if row["values"] is not None:
            smaller = row["values"] == "smaller"
            sizes = [each for each in self._target.head_sizes if each != size and (each < size) == smaller]
            if not sizes:
                raise SpecError("values", row["values"], f"needs a head size other than {size}")
            fields["head_size_v"] = sizes[0]
        fields |= {"num_heads": heads[0], "num_kv_heads": heads[1]}
        if self._target.is_latent:
            fields |= fields_of(pair_of(self._target.backend, size))
        spec = LayerSpec(**fields)
        if row["window"] is not None and not spec.is_windowed:
            raise SpecError("window", row["window"], "limits nothing in a causal layer")
        if row["mm_prefix"] and row["kind"] == "cross":
            raise SpecError("mm_prefix", True, "is for layers whose keys are their own tokens")
        if row["kind"] in ("encoder", "encoder_half") and self._target.phase is Phase.DECODE:
            raise SpecError("kind", row["kind"], "has no tokens to decode")
        return spec


def axes(target: Target) -> dict[str, list[Any]]:
    """The values of each axis to try with `target`, the plainest first."""
    few = target.level is Level.SMOKE
    tried, small = target.backend.features & COMPUTED, LayerSpec(num_heads=1, num_kv_heads=1, head_size=2)
    values: dict[str, list[Any]] = {
        "kind": [
            kind for kind, fields in KINDS.items() if small.replace(**fields).required_features() in tried
        ],
        "shape": list(_OF_PHASE[target.phase]),
        "head_size": spread(target.head_sizes, 4 if few else 12),
        "heads": list(_HEADS[:5] if few else _HEADS),
        "dtype": target.dtypes,
        "kv_cache_dtype": target.kv_cache_dtypes,
        "block_size": spread(target.block_sizes, 3 if few else 12),
        "layout": list(target.backend.supported_kv_cache_layouts()),
        # The default of no head size above, so that a case fails if the backend takes a default instead.
        "scale": [None, 0.15],
        "values": [None, *(["smaller", "larger"] if Feature.HEAD_SIZE_V in tried else [])],
    }
    if target.is_latent:
        values["heads"] = [(count, 1) for count in (4, 1, 12, 16, 20)]
    for flag in COMPUTED & ~Feature.MLA:
        field, samples = flag.ask.field, flag.ask.values
        if field not in _OWN_AXES:
            most = max(len(samples) // 2, 1) if few else len(samples)
            plain = False if samples[0] is True else None
            values[field] = [plain, *(samples[:most] if flag in tried else ())]
    return values


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
    alone += [{"shape": shapes[0], **fields} for fields in _TOGETHER]
    rows = [row for fixed in alone if (row := search.complete(fixed)) and not search.reasons(row)]
    served = served_pairs(search)
    for seed in range(1 if few else 3):
        rows += packed_rows(search, served, seed=seed)
    cases: dict[str, tuple[Case, Row]] = {}
    for row in rows:
        case = search.case(row)
        cases.setdefault(case.id, (case, row))
    return _within_keys(target, list(cases.values()))


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
