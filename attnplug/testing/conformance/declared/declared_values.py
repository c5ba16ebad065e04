"""Every declared value is run: a layer that asks for it is served, and is as the oracle has it.

A declaration that this machine cannot try is reported, not passed over.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from attnplug.core.device import Device
from attnplug.core.features import Feature
from attnplug.core.interface.signatures import overrides
from attnplug.core.metadata import AttentionCGSupport
from attnplug.registry.plugins.installed import missing_requirements
from attnplug.registry.plugins.waiting import guarded_call
from attnplug.testing.conformance.cases.cases import Case, CaseSearch
from attnplug.testing.conformance.cases.steps import decode_lengths, layer_kinds, layer_of_kind, step_factory
from attnplug.testing.conformance.check import (
    Check,
    CheckSkipped,
    CheckUntested,
    ConformanceError,
    SkipKind,
    reworded,
)
from attnplug.testing.conformance.declared.claims import DeclaredValue, block_sizes, claims_of, head_sizes
from attnplug.testing.conformance.harness import Harness
from attnplug.testing.conformance.numbers.correctness import check_case
from attnplug.testing.conformance.target import GPU_TYPES, Target
from attnplug.testing.design.search import Row

_CAPABILITIES = {
    "cuda": ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)),
    "rocm": ((9, 0), (9, 4), (9, 5), (12, 0)),
}
_REASONS = 4


def checks(target: Target) -> Iterator[Check]:
    """One check that any layer is served, and one for each declared value."""
    summary = "the backend serves some layer, and its numbers are right"
    yield Check.of("declared/any-layer", summary, _check_claim, target, DeclaredValue("layers", [{}]))
    for claim in claims_of(target):
        summary = f"a layer with the declared {claim.words} is served, and its numbers are right"
        check_id = f"declared/{re.sub(r'[^A-Za-z0-9._-]', '_', claim.name)}"
        yield Check.of(check_id, summary, _check_claim, target, claim)


def _check_claim(target: Target, claim: DeclaredValue) -> None:
    if claim.problem is not None:
        raise ConformanceError(f"declares {claim.words}, and {claim.problem}")
    if not _serves_any(target):
        raise ConformanceError(f"declares {claim.words}, and serves no layer at all: {_words(target, [{}])}")
    for case in _cases(target, claim):
        try:
            check_case(target, case)
        except CheckSkipped as why:
            if claim.rows == [{}] and why.kind is SkipKind.OPTIONS:
                raise ConformanceError(f"the plainest layer is refused: {why}") from why
            raise
        except Exception as problem:
            text = f"declares {claim.words}, and the case {case.id} is wrong: {problem}"
            raise reworded(problem, text) from problem


def _cases(target: Target, claim: DeclaredValue) -> list[Case]:
    """The cases of the plainest served layer with the declared value.

    Raises:
        ConformanceError: no layer with it is served.
        CheckUntested: only devices that are not here serve it.
        CheckSkipped: it is a default of AttentionBackend, which the author did not declare.
    """
    search = _search(target)
    row = _served_row(search, claim)
    if row is not None:
        known = search.axes["shape"]
        shapes = [shape for shape in claim.shapes if shape in known] or known[:1]
        if any("shape" in fixed for fixed in claim.rows):
            shapes = [row["shape"]]
        return [search.case({**row, "shape": shape}) for shape in shapes]
    why = _words(target, claim.rows)
    there = (dataclasses.replace(target, device=device) for device in _others(target))
    served = (each.device for each in there if _served_row(_search(each, deep=False), claim) is not None)
    elsewhere = next(served, None)
    if elsewhere is not None:
        raise CheckUntested(f"{claim.words}: served on {elsewhere}, and not on {target.device}: {why}")
    if not claim.is_own:
        raise CheckSkipped(f"{target.name} does not declare {claim.words} itself, and refuses it: {why}")
    raise ConformanceError(
        f"declares {claim.words}, and no case ran with it: every candidate layer was refused: {why}"
    )


def _served_row(search: CaseSearch, claim: DeclaredValue) -> Row | None:
    for fixed in claim.rows:
        row = search.complete(fixed)
        if row is not None and not search.reasons(row) and claim.asks(search.case(row).spec):
            return row
    # A row that needs other changes too is searched for last, because that asks hundreds of layers.
    for fixed in claim.rows:
        row = search.plainest(fixed)
        if row is not None and claim.asks(search.case(row).spec):
            return row
    return None


def _search(target: Target, *, deep: bool = True) -> CaseSearch:
    search = CaseSearch(target)
    # Some values go only with two other ones, such as a head size and a dtype.
    search.joined = search.order if deep else ()
    return search


@functools.lru_cache(maxsize=8)
def _serves_any(target: Target) -> bool:
    return _search(target).plainest({}) is not None


def _others(target: Target) -> list[Device]:
    """Devices of the declared types that need not be here."""
    found: list[Device] = []
    for kind in target.backend.device_types:
        if kind != target.device.type or kind in _CAPABILITIES:
            found += [Device(kind, each) for each in _CAPABILITIES.get(kind, (None,))]
    return [device for device in found if not device.matches(target.device)]


def _words(target: Target, rows: Sequence[Any]) -> str:
    """The reasons against the plainest layers of the rows."""
    search = CaseSearch(target)
    made = [row for fixed in rows if (row := search.complete(fixed)) is not None]
    found = list(dict.fromkeys(str(reason) for row in made for reason in search.reasons(row)))
    more = f"; and {len(found) - _REASONS} more reasons" if len(found) > _REASONS else ""
    return ("; ".join(found[:_REASONS]) or "no layer of the kit asks for it") + more


def untested_checks(target: Target) -> Iterator[Check]:
    """One check for each declaration that needs another machine, or more time; each raises CheckUntested."""
    backend, here = target.backend, target.device
    if others := [kind for kind in dict.fromkeys(backend.device_types) if kind != here.type]:
        what = f"{'device types' if len(others) > 1 else 'device type'} {', '.join(others)}"
        yield _untested("device-types", what, f"this run is on {here}")
    # Requirements that are not installed, because an alternative to them is.
    groups = [entry for entry in target.backend.requires if isinstance(entry, tuple)]
    for name in (name for group in groups for name in group if missing_requirements((name,))):
        yield _untested(f"requires-{name}", f"alternative requirement {name}", "it is not installed")
    for field, listed, tried in (
        ("head_size", target.head_sizes, head_sizes(target)),
        ("block_size", target.block_sizes, block_sizes(target)),
    ):
        if more := len(listed) - len(tried):
            why = f"level {target.level} tries {len(tried)} of the {len(listed)} that are listed"
            yield _untested(f"{field}-others", f"{more} values of {field}", why)
    impl, _ = guarded_call(backend.get_impl_cls)
    if Feature.LSE not in backend.features and getattr(impl, "can_return_lse_for_decode", False):
        yield _untested("can_return_lse_for_decode", "can_return_lse_for_decode", "features has no LSE")
    if here.type in GPU_TYPES:
        return
    if backend.step_safe:
        yield _untested("step_safe", "step_safe", f"it is about GPUs, and this run is on {here}")
    builder, _ = guarded_call(backend.get_builder_cls)
    level = getattr(builder, "cudagraph_support", None)
    declares = isinstance(level, AttentionCGSupport) and level > 0
    if builder is not None and (declares or overrides(builder, "get_cudagraph_support")):
        summary = "the declared support of CUDA graphs is tried on a GPU"
        yield Check.of("declared/cudagraph_support", summary, _check_graphs, target)


def _untested(name: str, what: str, why: str) -> Check:
    return Check.of(
        f"declared/{name}", f"another run tries the declared {what}", _raise_untested, f"{what}: {why}"
    )


def _raise_untested(text: str) -> None:
    raise CheckUntested(text)


def _check_graphs(target: Target) -> None:
    levels = []
    for kind in layer_kinds(target):
        try:
            spec, size = layer_of_kind(target, kind)
        except CheckSkipped:
            continue
        builder = Harness.of(target, step_factory(target, spec, decode_lengths(size))()).builder
        levels.append(builder.get_cudagraph_support(builder.config, builder.kv_cache_spec))
    most = max(levels, default=AttentionCGSupport.NEVER)
    if most > AttentionCGSupport.NEVER:
        raise CheckUntested(f"CUDA graphs ({most.name}): they need a GPU, and this run is on {target.device}")
