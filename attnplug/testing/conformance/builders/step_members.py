"""Each step of a composite with routes reaches the member that the first route with such a step names."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from attnplug.core.composite import CompositeBackend
from attnplug.core.composite.steps import StepKind, StepRange, StepSizes
from attnplug.core.interface.answers import answer
from attnplug.testing.conformance.check import Check, CheckSkipped, ConformanceError, SkipKind, error_context
from attnplug.testing.conformance.harness import Harness
from attnplug.testing.conformance.mistakes.expectations import expect_correct
from attnplug.testing.conformance.target import Target

# Longer steps would take an interpreter minutes.
_MOST_ROWS = 600
_DRAFTS = 3
Served: TypeAlias = list[tuple[str, int]]
"""The members that attend a step, by name, each with its rows."""


def checks(target: Target) -> Iterator[Check]:
    """A check for each route of a composite, and one for the steps without a route."""
    backend = target.backend
    if not (issubclass(backend, CompositeBackend) and backend.routes):
        return
    for number, (steps, member) in enumerate(backend.routes):
        summary = f"{steps.words} run on {answer(member, 'get_name')}, and steps past the limits do not"
        name = f"composite/route-{number + 1}-{steps.kind}"
        yield Check.of(name, summary, _check_steps, target, _steps_around(steps))
    summary = "steps of each kind run on the members of their routes, or of their phases"
    yield Check.of("composite/other-steps", summary, _check_steps, target, _ORDINARY)


_ORDINARY: tuple[tuple[int, ...], ...] = (
    (1,),
    (1, 1, 1),
    (2, 3),
    (1, 4, 1),
    (9,),
    (5, 40),
    (1, 9),
    (1, 1, 3, 7),
    (1, 1, 80),
)


def _steps_around(steps: StepRange) -> tuple[tuple[int, ...], ...]:
    """The query lengths of steps at the limits of a range, and one past each upper limit."""
    floor = {StepKind.DECODE: 1, StepKind.DRAFT: 2}.get(steps.kind, _DRAFTS + 2)
    least = max(steps.query[0], floor)
    queries, requests = _around(least, steps.query[1]), _around(steps.requests[0], steps.requests[1])
    if steps.kind is StepKind.DECODE:
        queries = [1]
    if steps.kind is StepKind.DRAFT:
        queries = [each for each in queries if each <= _DRAFTS + 1]
    found = [(*_others(steps.kind, many), query) for query in queries for many in requests]
    rows = steps.rows[1]
    if rows is not None and steps.kind in (StepKind.PREFILL, StepKind.MIXED):
        found += [(*_others(steps.kind, 2), rows + more) for more in (-_DRAFTS - 1, 0)]
    return tuple(
        lens for lens in dict.fromkeys(found) if sum(lens) <= _MOST_ROWS and max(lens) >= (lens[-1] or 1)
    )


def _around(least: int, most: int | None) -> list[int]:
    return [least, least + 3] if most is None else list(dict.fromkeys((least, most, most + 1)))


def _others(kind: StepKind, requests: int) -> tuple[int, ...]:
    """The other requests of a step; prefills have longer queries than decodes."""
    own = _DRAFTS + 2 if kind is StepKind.PREFILL else 1
    return (own,) * (requests - 1)


def expected_members(
    backend: type[CompositeBackend], threshold: int, lens: Sequence[int], keys: int
) -> Served:
    """The members that attend a step by a plain reading of the routes."""
    decodes = next((at for at, length in enumerate(lens) if length > threshold), len(lens))
    first, rest = lens[:decodes], lens[decodes:]
    member = functools.partial(_member, backend, keys)
    whole = member(StepKind.MIXED, lens, None) if first and rest else None
    if whole is not None:
        return [(whole, sum(lens))]
    kind = StepKind.DECODE if max(first, default=1) == 1 else StepKind.DRAFT
    parts = (kind, first, backend.decode), (StepKind.PREFILL, rest, backend.prefill)
    served = [(member(kind, part, default), sum(part)) for kind, part, default in parts if part]
    names = {name for name, _ in served}
    # A step whose parts have one member is not cut.
    return [(str(served[0][0]), sum(lens))] if len(names) == 1 else [(str(name), n) for name, n in served]


def _member(
    backend: type[CompositeBackend], keys: int, kind: StepKind, lens: Sequence[int], default: Any
) -> str | None:
    sizes = StepSizes(kind, max(lens), len(lens), sum(lens), keys)
    found = next((member for steps, member in backend.routes if steps.has(sizes)), default)
    return None if found is None else str(answer(found, "get_name"))


def _check_steps(target: Target, steps: Sequence[Sequence[int]]) -> None:
    backend, spec = target.backend, target.spec()
    if not issubclass(backend, CompositeBackend):
        raise ConformanceError(f"{target.name} is no composite")
    tried = False
    for lens in steps:
        batch = target.batch(spec, lens, [length + 7 for length in lens], exact=True)
        common = batch.common
        lens_of = common.query_start_loc_cpu.diff().tolist()
        with error_context(f"a step of {lens_of} tokens"):
            harness = Harness.of(target, batch, num_speculative_tokens=_DRAFTS)
            heard = _listen(harness)
            found = harness.forward(batch)
        threshold = harness.builder.reorder_batch_threshold or 1
        if sorted(lens_of, key=lambda length: length > threshold) != lens_of:
            continue
        tried = True
        expected = expected_members(backend, threshold, lens_of, common.max_seq_len)
        if heard != expected:
            raise ConformanceError(
                f"a step of {lens_of} tokens ran on {_words(heard)}, and the routes of {backend.full_name()} "
                f"name {_words(expected)}"
            )
        expect_correct(batch, found, f"a step of {lens_of} tokens")
    if not tried:
        raise CheckSkipped("no step of this range is small enough to run here", SkipKind.LAYER)


def _words(served: Served) -> str:
    return " and ".join(f"{name} ({rows} rows)" for name, rows in served) or "no member"


def _listen(harness: Harness) -> Served:
    """A list that collects the members of the layer that attend, each with its rows."""
    heard: Served = []
    composite: Any = harness.impl
    for place, impl in composite.members.items():
        name = str(answer(composite.backend.members()[place], "get_name"))
        impl.attend = functools.partial(_heard, heard, name, impl.attend)
    return heard


def _heard(heard: Served, name: str, attend: Any, layer: Any, query: Any, *given: Any, **options: Any) -> Any:
    heard.append((name, query.shape[0]))
    return attend(layer, query, *given, **options)
