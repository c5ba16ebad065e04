"""The cases to run with a backend: every value alone, every pair of values, and long ones.

Designed cases that one process searched for and another takes over: the listing's, for its workers.
"""

from __future__ import annotations

import itertools
import pickle
import types
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from attnplug.core.composite import CompositeBackend
from attnplug.core.features import Feature
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.core.kv_format import kv_format
from attnplug.core.mla.dims import MLADims
from attnplug.core.sparse import SparseSpec
from attnplug.core.spec import LayerSpec, Phase
from attnplug.registry.plugins.waiting import guarded_call
from attnplug.testing.conformance.cases.case_axes import HEADS, LATENT, LONG, far_blocks, samples_of
from attnplug.testing.conformance.cases.cases import Case, CaseSearch
from attnplug.testing.conformance.cases.model_sizes import FAR, FAR_LIMITS, MODELS, of_models
from attnplug.testing.conformance.check import Level
from attnplug.testing.conformance.target import GPU_TYPES, Target
from attnplug.testing.design.search import (
    Row,
    Search,
    compile_key,
    crossed_rows,
    most_adding,
    packed_rows,
    served_pairs,
)
from attnplug.testing.drawn_values import Numbers
from attnplug.testing.oracle import COMPUTED

# Head sizes that few kernels serve.
_HEADS_OF_FEW = (512, 40, 160)
# A larger cache takes seconds to fill.
_MOST_BYTES = 1 << 29
"""Bytes of the largest cache."""
_TOGETHER: tuple[dict[str, Any], ...] = (
    {"shape": "draft"},
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
    {"shape": "speculative", "numbers": Numbers.FAR, "dtype": "bfloat16"},
    {"shape": "mixed", "numbers": Numbers.FAR, "dtype": "bfloat16"},
    {"shape": "mixed", "numbers": Numbers.SHARP, "dtype": "bfloat16"},
    {"shape": "decode", "numbers": Numbers.WIDE, "dtype": "bfloat16"},
    {"shape": "mixed", "numbers": Numbers.WIDE, "dtype": "bfloat16"},
    *(
        {"numbers": numbers, "needs_lse": with_lse, **shape}
        for numbers in (Numbers.ZEROS, Numbers.EQUAL, Numbers.NEGATIVE, Numbers.TINY, Numbers.EACH)
        for with_lse, shape in ((False, {}), (True, {"shape": "decode"}))
    ),
    {"numbers": Numbers.NEGATIVE, "has_sinks": True, "needs_lse": True},
    {"numbers": Numbers.EQUAL, "has_sinks": True, "needs_lse": True},
    {"numbers": Numbers.ZEROS, "has_alibi": True},
    {"numbers": Numbers.EACH, "dtype": "float16"},
    {"shape": "decode", "numbers": Numbers.BEYOND, "scale": 2.0**-16, "dtype": "float16"},
    {"numbers": Numbers.BEYOND, "scale": 2.0**-16, "dtype": "float16"},
    {"numbers": Numbers.BEYOND, "scale": 2.0**-16, "dtype": "bfloat16"},
    {"shape": "decode", "numbers": Numbers.TINY, "dtype": "float16"},
)
"""Values whose order or scale a convention fixes, tried with plain values of all other axes."""
# Paths that kernels take for long contexts or many requests only: decodes that split
# their keys, prompts of several tiles, windows and chunks that 8 bits do not hold, windows of whole tiles.
_LONG_WITH: tuple[dict[str, Any], ...] = (
    {"shape": "long-decode", "window": (149, 0)},
    {"shape": "long-decode", "chunk_size": 129},
    {"shape": "long-decode", "logits_soft_cap": 1.7},
    {"shape": "long-decode", "has_alibi": True},
    {"shape": "long-decode", "has_sinks": True, "needs_lse": True},
    {"shape": "long-decode", "window": (1030, 0), "has_sinks": True},
    {"shape": "long-decode", "chunk_size": 1031, "needs_lse": True},
    {"shape": "long-decode", "logits_soft_cap": 1.7, "needs_lse": True},
    {"shape": "long-decode", "heads": (14, 2)},
    {"shape": "long-decode", "sparse": SparseSpec("token_topk", 1024)},
    {"shape": "long-decode", "kind": "direct"},
    {"shape": "long-decode", "kind": "cross"},
    {"shape": "long-decode", "dtype": "bfloat16"},
    {"shape": "long-decode", "dtype": "float16", "has_alibi": True},
    {"shape": "long-decode", "numbers": Numbers.SHARP},
    {"shape": "long-decode", "numbers": Numbers.EQUAL, "dtype": "float16"},
    {"shape": "long-extend", "numbers": Numbers.EQUAL, "dtype": "float16"},
    {"shape": "long-extend", "window": (1030, 0)},
    {"shape": "long-extend", "window": (511, 0)},
    {"shape": "long-extend", "needs_lse": True},
    {"shape": "long-prompt", "window": (149, 0)},
    {"shape": "long-extend", "kind": "non_causal"},
    {"shape": "long-prompt", "kind": "direct"},
    {"shape": "long-prompt", "kind": "encoder"},
    {"shape": "long-prompt", "kind": "encoder", "window": (64, 64)},
    {"shape": "long-prompt", "numbers": Numbers.SHARP},
    {"shape": "many-requests", "kind": "encoder"},
    {"shape": "many-requests", "kind": "cross"},
    {"shape": "many-requests", "kind": "direct"},
)
# Lengths, limits and pages as in models: each is tried with one other value, since it takes some time.
_FAR_WITH: tuple[dict[str, Any], ...] = (
    {"shape": "audio", "kind": "encoder"},
    {"shape": "audio", "kind": "encoder_half"},
    {"shape": "audio", "kind": "cross"},
    {"shape": "longer-prompt", "dtype": "bfloat16"},
    {"shape": "longer-prompt", "dtype": "float16"},
    {"shape": "longer-prompt", "window": (1023, 0)},
    {"shape": "longer-prompt", "logits_soft_cap": 50.0},
    {"shape": "longer-prompt", "has_alibi": True},
    {"shape": "longer-prompt", "has_sinks": True, "needs_lse": True},
    {"shape": "longer-prompt", "mm_prefix": True},
    {"shape": "longer-prompt", "kind": "direct"},
    {"shape": "longer-prompt", "values": "smaller"},
    {"shape": "far-decode", "logits_soft_cap": 50.0},
    {"shape": "far-decode", "has_alibi": True},
    {"shape": "far-decode", "has_sinks": True, "needs_lse": True},
    {"shape": "far-decode", "kind": "direct"},
    {"shape": "far-decode", "kind": "cross"},
    {"shape": "far-extend", "kind": "non_causal"},
    {"shape": "far-decode", "sparse": SparseSpec("block", 64, 64)},
    {"shape": "far-extend", "sparse": SparseSpec("block", 64, 64)},
    {"shape": "far-decode", "block_size": 544},
    {"shape": "farther-decode", "window": (149, 0)},
)
# The oracle has all keys of a long context for each query head in float64.
_MOST_ELEMENTS = 2**13
"""Elements of a token's queries in layers of models that are cheap to try."""
_CROSSED_FAR = ("far-decode", "far-extend")
_FEW_HEADS: tuple[dict[str, Any], ...] = ({"heads": (2, 1)}, {"heads": (1, 1)}, {"heads": (2, 2)}, {})
_CROSSED_SHAPES = ("mixed", "decode", "speculative", "context")
_CROSSED_KINDS = ("non_causal", "direct", "encoder", "cross")
_CROSSED_LONG = ("long-decode", "long-extend", "long-prompt")
_LONG_LIMITS: dict[str, Any] = {
    "window": (149, 0),
    "chunk_size": 129,
    "sparse": SparseSpec("token_topk", 1024),
}
"""Values that leave many keys of a long context."""
# Axes that are left out of triples, because kernels seldom have a path of their own for a pair with one of them.
_NOT_CROSSED = {"shape", "kind", "numbers", "head_size", "block_size", "scale", "mla", "joint", "apart"}
# Shapes whose requests have more than 64 rows, even with one query head per KV head.
_MANY_ROWS = ("prefill", "many-extends")
# Head sizes that are no power of two, of many models: kernels may divide them into unlike tiles.
_ODD_SIZES = (80, 96, 160)
_SHAPES_OF_LATENTS = ("decode", "idle", "prefill", "mixed", *LATENT)
# FlashInfer compiles each key when a step is planned, for 20 to 95 s. A check of 22 keys reaches its time limit.
_MAX_COMPILE_KEYS = {Level.SMOKE: 6, Level.FULL: 24}


def designed_cases(target: Target) -> list[Case]:
    """The cases to run, equal in every process: each pair of values that the backend serves is in one.

    Each value is also tried with the plainest values of the other axes. The full level has three designs,
    which differ in the values that go with a pair. If the backend has compile keys, only the cases of those
    keys are kept that cover most pairs: 6 keys, at the full level 24. The cases of _latent_rows and _many_rows are always kept;
    at the smoke level their keys are among the 6.
    """
    search = CaseSearch(target)
    few = target.level is Level.SMOKE
    known = search.axes["shape"]
    plain = "halves" if "halves" in known else "mixed"
    shapes = [shape for shape in (plain, "decode", "speculative") if shape in known]
    # A mixed batch in no order leaves no work for the decoding half of a composite.
    plain_shapes = shapes[: 2 if issubclass(target.backend, CompositeBackend) else 1] if few else shapes
    alone: list[dict[str, Any]] = [
        {"shape": shape, axis: value}
        for shape in plain_shapes
        for axis, values in search.axes.items()
        if axis != "shape"
        for value in values
    ]
    # Decodes alone, since kernels of steps without prefills differ.
    for shape in shapes[:2]:
        alone += [{"shape": shape, axis: value} for axis, value in _further(target, search)]
        alone += _blocks_over_pages(target, search, shape)
    alone += [{"shape": shapes[0], **fields} for fields in _TOGETHER]
    alone += [
        {"shape": shape, "numbers": Numbers.RANGE, "kv_cache_dtype": name, "dtype": dtype}
        for shape, dtype in itertools.product(
            shapes[:2], dict.fromkeys((target.dtypes[0], target.dtypes[-1]))
        )
        for name in target.scaled_kv_dtypes
    ]
    alone += _long_rows(target, search, few)
    alone += _model_rows(search, shapes[:1]) if few else _model_rows(search, shapes[:2], None)
    latent = _keep_served(search, _latent_rows(target, search))
    rows = _keep_served(search, alone)
    # About 80 backends pass without these: each is right for single features, and wrong where two or three meet.
    rows += crossed_rows(search, _axes_to_cross(search, _CROSSED_SHAPES), 3)
    # Pairs alone leave out paths such as verification over long fp8 pages.
    rows += crossed_rows(search, _axes_to_cross(search, _CROSSED_LONG, _LONG_LIMITS), 2)
    rows += _far_rows(target, search, few)
    for kind in search.axes["kind"][1:]:
        if kind in _CROSSED_KINDS:
            both = {axis: values[:2] for axis, values in _axes_to_cross(search, ()).items()}
            rows += crossed_rows(search, both, 2, {"kind": kind, "shape": shapes[0]})
    served = served_pairs(search)
    if few:
        had = {pair for row in (*rows, *latent) for pair in itertools.combinations(row.items(), 2)}
        served = {pair: row for pair, row in served.items() if pair not in had}
    for seed in range(1 if few else 3):
        rows += packed_rows(search, served, seed=seed)
    needed = latent + _many_rows(target, search, few)
    kept = frozenset(search.case(row).id for row in needed)
    cases: dict[str, tuple[Case, Row]] = {}
    for row in (*rows, *needed):
        case = search.case(row)
        if _cache_bytes(case) <= _MOST_BYTES:
            cases.setdefault(case.id, (case, row))
    return _within_keys(target, list(cases.values()), kept)


def _keep_served(search: Search, every: Sequence[Mapping[str, Any]]) -> list[Row]:
    return [row for fixed in every if (row := search.complete(fixed)) and not search.reasons(row)]


def _latent_rows(target: Target, search: Search) -> list[dict[str, Any]]:
    """Layers with latents as models are served, in half precision and also over 8 bits; each compile key is kept."""
    if not target.is_latent:
        return []
    known = search.axes["shape"]
    shapes = [
        shape for shape in _SHAPES_OF_LATENTS if shape in known or (shape in LATENT and target.phase is None)
    ]
    both = next(shape for shape in ("halves", "context", "decode") if shape in shapes)
    known_heads = {*search.axes["heads"]}
    many = [{"heads": heads} for heads in of_models("heads", "mla") if heads not in known_heads]
    rows = [{"shape": shapes[0], "block_size": size} for size in target.block_sizes[:3]]
    rows += [{"shape": shape} for shape in shapes] + [{"shape": both, **heads} for heads in many]
    for stored in ("auto", *target.scaled_kv_dtypes[:1]):
        served = {"dtype": target.dtypes[-1], "kv_cache_dtype": stored}
        chunked = {"chunk_rows": search.axes["chunk_rows"][:2][-1], "needs_lse": True}
        rows += [{**served, **chunked, "shape": shape} for shape in shapes]
        others = [*({"mla": dims} for dims in search.axes["mla"]), *many]
        rows += [{**served, "shape": both, **fields} for fields in others]
    for sparse in search.axes.get("sparse", ())[1:2]:
        rows += [{"sparse": sparse, "shape": shape, "needs_lse": True} for shape in shapes]
        rows += [
            {"sparse": sparse, "apart": True, "kv_cache_dtype": stored}
            for stored in ("auto", *target.scaled_kv_dtypes[:1])
        ]
    return rows


def _many_rows(target: Target, search: Search, few: bool) -> list[Row]:
    """Served rows of _MANY_ROWS with each head size and stored type; at the smoke level with _ODD_SIZES, types in turns."""
    # Elements of 8 bits are in layers of 16 bits: products in float32 take other instructions.
    if target.phase is Phase.DECODE:
        return []
    stored = _stored_types(target)
    pairs = list(itertools.product(target.head_sizes, stored))
    if few:
        sizes = [size for size in _ODD_SIZES if size in target.head_sizes]
        pairs = list(zip(sizes, itertools.cycle(stored), strict=False))
    rows = []
    for (size, types_of_pair), shape in itertools.product(pairs, _MANY_ROWS):
        fixed = {"shape": shape, **target.sized(size), **types_of_pair}
        # A head for each KV head: a group has more rows, so requests could be shorter.
        rows += _keep_served(search, [{**fixed, **heads} for heads in ({"heads": (8, 8)}, {})])[:1]
    return rows


def _stored_types(target: Target) -> list[dict[str, Any]]:
    """The types that a cache stores, each with a dtype of layers, those of 8 bits first; aliases once."""
    short = [dtype for dtype in target.dtypes if dtype != "float32"] or target.dtypes
    found: dict[str, dict[str, Any]] = {}
    scaled = target.scaled_kv_dtypes
    names = sorted(target.kv_cache_dtypes, key=lambda name: name not in scaled)
    for name, dtype in itertools.product(names, target.dtypes):
        # Layers of each dtype have a stored type in turn.
        chosen = short[len(found) % len(short)] if name in scaled else dtype
        layer = LayerSpec(num_heads=1, num_kv_heads=1, head_size=64, dtype=chosen, kv_cache_dtype=name)
        found.setdefault(layer.resolved_kv_cache_dtype, {"dtype": chosen, "kv_cache_dtype": name})
    return list(found.values())


def _axes_to_cross(
    search: Search, shapes: Sequence[str], chosen: Mapping[str, Any] = types.MappingProxyType({})
) -> dict[str, list[Any]]:
    """Axes to cross: the known `shapes`, all dtypes, and of other axes the plainest value and the `chosen` or next one."""
    known = [shape for shape in shapes if shape in {*search.axes["shape"], *LONG}]
    crossed: dict[str, list[Any]] = {"shape": known} if known else {}
    for axis, values in search.axes.items():
        others = [value for value in values if value != search.base[axis]]
        if axis == "kv_cache_dtype":
            others = [name for name in others if kv_format(name).has_scaled_numbers]
        if others and axis not in _NOT_CROSSED:
            more = others if axis == "dtype" else [chosen.get(axis, others[0])]
            crossed[axis] = [search.base[axis], *more]
    return crossed


def _further(target: Target, search: Search) -> list[tuple[str, Any]]:
    """Numbers of heads, head sizes and values of features that no pair has at the smoke level: each is tried alone."""
    samples = {flag.ask.field: samples_of(target, flag) for flag in target.backend.features & COMPUTED}
    every = {"heads": (*HEADS, (1, 1)), "head_size": _HEADS_OF_FEW, **samples}
    return [
        (axis, value)
        for axis, tried in search.axes.items()
        for value in every.get(axis, ())
        if value not in tried
    ]


def _blocks_over_pages(target: Target, search: Search, shape: str) -> list[dict[str, Any]]:
    """Layers that choose blocks, over pages of each size."""
    # Pages as large as the blocks hide which one is counted.
    if Feature.SPARSE not in target.backend.features:
        return []
    chosen = [sample for sample in samples_of(target, Feature.SPARSE) if sample.block > 1]
    sizes = search.axes["block_size"][1:]
    return [{"shape": shape, "sparse": sample, "block_size": size} for sample in chosen for size in sizes]


def _long_rows(target: Target, search: Search, few: bool) -> list[dict[str, Any]]:
    """The values to try with LONG: none, those of _LONG_WITH, and at the full level each alone with two of them."""
    least = min((size for size in search.axes["block_size"] if size), default=None)
    far = {"shape": "far-blocks", "block_size": least}
    found: list[dict[str, Any]] = [{"shape": shape} for shape in LONG if shape not in {*FAR, "far-blocks"}]
    found.append(far)
    # A request of thousands of pages: kernels may copy a part of its table.
    found += [*_LONG_WITH, {"shape": "long-decode", "block_size": least}]
    found += [{"shape": "long-decode", "kv_cache_dtype": name} for name in target.scaled_families.values()]
    pages = of_models("block_size")
    found += [
        {"shape": shape, "block_size": size} for shape in ("long-decode", "long-extend") for size in pages
    ]
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


def _model_rows(
    search: Search, shapes: Sequence[str], most: int | None = _MOST_ELEMENTS
) -> list[dict[str, Any]]:
    """The layers of models whose queries have at most so many elements, if the backend has their axes."""
    # A backend of latents has no head sizes, and others have no latents.
    own = [fields for fields in MODELS.values() if fields.keys() <= search.axes.keys()]
    if most is not None:
        own = [fields for fields in own if fields["heads"][0] * _query_size(fields) <= most]
    return [{"shape": shape, **fields} for fields in own for shape in shapes]


def _query_size(fields: Mapping[str, Any]) -> int:
    dims: MLADims | None = fields.get("mla")
    return int(fields["head_size"] if dims is None else dims.query_size)


def _far_rows(target: Target, search: Search, few: bool) -> list[Row]:
    """Layers of few heads over the steps of FAR: each dtype, stored type and limit of models, and each two of them.

    At the full level also each other value, and the layers of models.
    """
    fewest = next(
        (heads for heads in _FEW_HEADS if _keep_served(search, [{"shape": "far-decode", **heads}])), {}
    )
    alone: list[dict[str, Any]] = [{"shape": shape} for shape in FAR if shape not in ("audio", "far-prompt")]
    alone += [*_FAR_WITH, *({"shape": "far-decode", **stored} for stored in _stored_types(target))]
    alone += [{"shape": shape, axis: value} for axis, value in FAR_LIMITS.items() for shape in _CROSSED_FAR]
    alone += [{"shape": "longer-prompt", "kv_cache_dtype": name} for name in target.scaled_families.values()]
    if not few:
        alone += [
            {"shape": shape, axis: value}
            for shape in ("far-decode", "far-extend", "farther-decode", "farther-extend", "longer-prompt")
            for axis, values in search.axes.items()
            if axis not in ("shape", "heads")
            for value in values[1:]
        ]
    # A backend that masks all scores of a head holds 324 MB of them.
    prompts: list[dict[str, Any]] = [{}]
    on_gpu = target.device.type in GPU_TYPES
    if not few or on_gpu:
        prompts += [{"dtype": name} for name in target.dtypes[1:]]
        prompts += [{axis: value} for axis, value in FAR_LIMITS.items() if axis != "sparse"]
    axes = _axes_to_cross(search, _CROSSED_FAR, FAR_LIMITS)
    del axes["heads"]
    rows = _keep_served(search, [{**fewest, **fields} for fields in alone])
    # A kernel may be compiled for its number of heads.
    for heads in (fewest,) if on_gpu else ({"heads": (1, 1)}, fewest):
        if found := _keep_served(search, [{"shape": "far-prompt", **heads, **fields} for fields in prompts]):
            rows += found
            break
    rows += crossed_rows(search, axes, 2, fewest)
    return rows + ([] if few else _keep_served(search, _model_rows(search, _CROSSED_FAR)))


def _cache_bytes(case: Case) -> int:
    """The bytes of the cache of a case with far blocks, else 0."""
    if case.shape != "far-blocks":
        return 0
    pages = kv_cache_spec_for(case.spec, case.block_size)
    return 0 if pages is None else far_blocks(case.block_size) * pages.page_size_bytes


def _within_keys(target: Target, designed: Sequence[tuple[Case, Row]], kept: frozenset[str]) -> list[Case]:
    """The cases of as many compile keys as the level allows: the plainest key, those that add most pairs, and the `kept`."""
    keys = [compile_key(target.backend, case.spec) for case, _ in designed]
    pairs: dict[Hashable, set[Any]] = {key: set() for key in keys if key is not None}
    for key, (_, row) in zip(keys, designed, strict=True):
        if key is not None:
            pairs[key].update(itertools.combinations(row.items(), 2))
    plainest = next(iter(pairs), None)
    first = {plainest, *(key for key, (case, _) in zip(keys, designed, strict=True) if case.id in kept)}
    covered = set().union(*(pairs.pop(key, set()) for key in first))
    had = len(first - {None}) if target.level is Level.SMOKE else 1
    most = max(_MAX_COMPILE_KEYS[target.level] - had, 0)
    chosen = {None, *first, *most_adding(pairs, covered, most)}
    return [case for key, (case, _) in zip(keys, designed, strict=True) if key in chosen]


class Designs:
    """The designed cases of the targets of one suite.

    Another process has other objects for the same target, so it is known by its names.

    Args:
        written: what `written` gave in another process; None if nothing was found before.
    """

    def __init__(self, written: bytes | None = None) -> None:
        # A backend of the other process may have damaged them: then they are searched for again.
        read, problem = guarded_call(lambda: dict(pickle.loads(written)) if written else {})  # noqa: S301
        self._taken: dict[tuple[str, ...], list[Case] | None] = {} if problem is not None else read
        self._found: dict[tuple[str, ...], list[Case] | None] = {}

    def of(self, target: Target) -> list[Case]:
        """The cases of a target, searched for unless another process has found them."""
        backend = target.backend
        key = (backend.__module__, backend.__qualname__, target.name, str(target.device), target.level)
        cases = self._taken.get(key)
        cases = designed_cases(target) if cases is None else cases
        # Two targets with equal names are not told apart, so neither is kept.
        self._found[key] = None if key in self._found else cases
        return cases

    def written(self) -> bytes:
        """The cases of all targets that were asked for."""
        return pickle.dumps(self._found)
