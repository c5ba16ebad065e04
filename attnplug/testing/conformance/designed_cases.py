"""The cases to run with a backend: every value alone, every pair of values, and long ones."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import Any

from attnplug.core.composite import CompositeBackend
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.core.sparse import SparseSpec
from attnplug.testing.conformance.case_axes import HEADS, samples_of
from attnplug.testing.conformance.cases import Case, CaseSearch
from attnplug.testing.conformance.check import Level
from attnplug.testing.conformance.shapes import LONG, far_blocks
from attnplug.testing.conformance.target import Target
from attnplug.testing.design.compiling import compile_key, most_adding
from attnplug.testing.design.packing import packed_rows, served_pairs
from attnplug.testing.design.search import Row, Search
from attnplug.testing.drawn_values import Numbers
from attnplug.testing.oracle import COMPUTED

_LARGEST_HEAD = 512
"""A head size of models that few kernels serve."""
_MOST_BYTES = 1 << 29
"""Of a cache: a larger one takes seconds to fill."""
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
_MAX_COMPILE_KEYS = {Level.SMOKE: 6, Level.FULL: 24}


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
    # Decodes alone, since kernels of steps without prefills differ.
    for shape in shapes[:2]:
        alone += [{"shape": shape, axis: value} for axis, value in _further(target, search)]
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
    every = {"heads": (*HEADS, (1, 1)), "head_size": (_LARGEST_HEAD,), **samples}
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
    # A request of thousands of pages: kernels may copy a part of its table.
    found += [*_LONG_WITH, {"shape": "long-decode", "block_size": least}]
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
    chosen = {None, plainest, *most_adding(pairs, covered, _MAX_COMPILE_KEYS[target.level] - 1)}
    return [case for key, (case, _) in zip(keys, designed, strict=True) if key in chosen]
