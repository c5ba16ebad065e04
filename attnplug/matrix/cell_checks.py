"""The cells of the matrix as checks of the conformance kit: workers compare each with the float64 oracle."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from attnplug.core.backend import AttentionBackend
from attnplug.core.composite import CompositeBackend
from attnplug.core.interface.answers import serving_class
from attnplug.core.kv_format import kv_format
from attnplug.matrix.axes import spec_of
from attnplug.matrix.design import design
from attnplug.matrix.model import Cell
from attnplug.testing.conformance.cases.cases import Case
from attnplug.testing.conformance.check import Check, CheckSkipped, ConformanceError
from attnplug.testing.conformance.numbers.correctness import check_case
from attnplug.testing.conformance.states.state_checks import run_state_layer
from attnplug.testing.conformance.target import Target
from attnplug.testing.design.search import compile_key
from attnplug.testing.oracle import COMPUTED

# Backends may compute prefills with and without a context differently, so both are tried.
_SHAPES = {"prefill": ("prefill", "extend"), "decode": ("decode",), "mixed": ("mixed",)}
"""The batches tried for a phase."""
# Used for layers without pages too: the lengths of their requests are chosen around the ends of such pages.
_BLOCK_SIZE, _LAYOUT = 16, "NHD"


def cell_checks(target: Target) -> Iterator[Check]:
    """One check for each cell of the design, under its id; cells with one compile key are in one group."""
    cells = design(target.backend, target.device)
    keys = {cell: compile_key(target.backend, spec_of(cell)) for cell in cells}
    groups = {key: f"compiled-{number}" for number, key in enumerate(dict.fromkeys(keys.values()))}
    for cell in cells:
        key = keys[cell]
        yield Check(
            cell.id,
            functools.partial(_check, target, cell),
            f"{cell.feature} in {cell.phase} equals the float64 oracle",
            None if key is None else groups[key],
        )


def cases_of(cell: Cell, backend: type[AttentionBackend]) -> list[Case]:
    """The kit's cases for a cell of `backend`: one layer with each batch of the phase.

    Raises:
        CheckSkipped: the layer needs inputs or storage that the kit's batches lack.
    """
    spec = spec_of(cell)
    if untried := spec.required_features() & ~COMPUTED:
        raise CheckSkipped(f"the conformance kit has no batches of {', '.join(untried.names())} layers")
    if not kv_format(spec.resolved_kv_cache_dtype).has_numbers:
        raise CheckSkipped(f"the conformance kit stores no kv_cache_dtype={spec.kv_cache_dtype!r}")
    block_size, layout = cell.block_size or _BLOCK_SIZE, cell.layout or _LAYOUT
    shapes = _SHAPES[cell.phase]
    if spec.is_encoder:
        shapes = shapes[:1]  # encoders compute all their tokens at once
    elif cell.phase == "mixed" and issubclass(backend, CompositeBackend):
        shapes = ("mixed", "ordered")
    return [Case(spec, shape, block_size, layout) for shape in shapes]


def _check(target: Target, cell: Cell) -> None:
    spec = spec_of(cell)
    if spec.state is not None:
        run_state_layer(dataclasses.replace(target, backend=serving_class(target.backend, spec)), spec)
        return
    for case in cases_of(cell, target.backend):
        serving = dataclasses.replace(target, backend=serving_class(target.backend, case.spec))
        try:
            check_case(serving, case)
        except ConformanceError as problem:
            raise ConformanceError(f"{case.id}: {problem}", problem.named) from problem
