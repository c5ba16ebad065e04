"""The design of backends that declare anything: nothing is left out, lost, or renamed by what has nothing to do with it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from design_backends import backend_of, combined
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnplug.core.backend import AttentionBackend
from attnplug.core.blocks import MultipleOf
from attnplug.core.device import Device
from attnplug.matrix.axes import axes_of, goes_with, own_latents, phase_of, spec_of
from attnplug.matrix.design import MOST_CELLS, answers
from attnplug.matrix.model import Cell

CPU = Device("cpu")
SEARCHED = ("feature", "phase", "head_size", "dtype", "kv_cache_dtype", "block_size")
COMMON = [
    "sliding_window",
    "chunked_local",
    "sinks",
    "alibi",
    "lse",
    "non_causal",
    "direct_kv",
    "fp8_kv",
    "cross",
]

_sizes = st.integers(1, 40).map(lambda count: count * 8)
_lists = st.lists(_sizes | _sizes.map(MultipleOf), max_size=5)
declarations = st.fixed_dictionaries(
    {
        "head_sizes": _lists,
        "block_sizes": st.none() | st.lists(_sizes | _sizes.map(MultipleOf), min_size=1, max_size=5),
        "layouts": st.sampled_from([("NHD", "HND"), ("HND",), ("HND", "NHD")]),
        "features": st.lists(st.sampled_from(COMMON), unique=True).map(combined),
        "supported_dtypes": st.lists(st.sampled_from(["float16", "bfloat16", "float32"]), min_size=1, unique=True),
        "supported_kv_cache_dtypes": st.lists(
            st.sampled_from(["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"]), min_size=1, unique=True
        ),
        "supported_phases": st.sampled_from([("prefill", "decode"), ("prefill",), ("decode",)]),
    }
)  # fmt: skip
some = settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def combinations(draw: st.DrawFn) -> Any:
    """Two values of two attributes that do not go together."""
    choices: dict[str, list[Any]] = {
        "head_size": [64, 128, 192],
        "dtype": ["float16", "bfloat16"],
        "kv_cache_dtype": ["auto", "fp8_e4m3"],
        "block_size": [16, 32, 64],
        "has_sinks": [True, False],
        "needs_lse": [True, False],
    }
    one, other = draw(st.lists(st.sampled_from(sorted(choices)), min_size=2, max_size=2, unique=True))
    first, second = draw(st.sampled_from(choices[one])), draw(st.sampled_from(choices[other]))

    def refuses(spec: Any, device: Any) -> str | None:
        if getattr(spec, one) == first and getattr(spec, other) == second:
            return f"{one}={first} with {other}={second}"
        return None

    return refuses


def served_pairs(backend: type[AttentionBackend]) -> dict[Any, Cell]:
    """Every two values that some layer has which the backend serves, found by asking all layers."""
    axes, latents = axes_of(backend), own_latents(backend)
    layouts = [layout for layout in axes["layout"] if layout in backend.supported_kv_cache_layouts()]
    found: dict[Any, Cell] = {}
    axes["head_size"] = tuple(size for size in axes["head_size"] if backend.supports_head_size(size))
    names = [backend.supported_dtypes, backend.supported_phases]
    axes["dtype"], axes["phase"] = names[0], (*names[1], *(["mixed"] if len(names[1]) > 1 else []))
    blocks = backend.get_supported_kernel_block_sizes()
    axes["block_size"] = tuple(size for size in axes["block_size"] if MultipleOf.allows(blocks, size))
    for feature in ("plain", *backend.features.names()):
        fitting = [
            [value for value in (*axes[axis], None) if goes_with(feature, axis, value, latents)]
            for axis in SEARCHED[1:]
        ]
        for values in itertools.product(*fitting):
            layout = None if values[-1] is None else layouts[0]
            cell = Cell(feature, **dict(zip(SEARCHED[1:], values, strict=True)), layout=layout)
            pairs = pairs_of(cell)
            if not pairs <= found.keys() and not refusals(backend, cell):
                found |= dict.fromkeys(pairs, cell)
    return found


def pairs_of(cell: Cell) -> set[Any]:
    return set(itertools.combinations(((axis, getattr(cell, axis)) for axis in SEARCHED), 2))


def asked_of(cell: Cell) -> tuple[str, ...]:
    return spec_of(cell).required_features().names()


def refusals(backend: type[AttentionBackend], cell: Cell) -> list[Any]:
    return backend.validate_configuration(spec_of(cell), CPU, phase_of(cell))


@some
@given(declarations)
def test_every_value_is_asked_and_every_answer_is_the_class_s_own(declared: dict[str, Any]) -> None:
    backend = backend_of(**declared)
    found = answers(backend, CPU)
    assert len(found) <= MOST_CELLS
    for axis, values in axes_of(backend).items():
        assert set(values) <= {getattr(cell, axis) for cell in found}
    for cell, reasons in found.items():
        unread = cell.layout is not None and cell.layout not in declared["layouts"]
        assert [str(reason) for reason in reasons[: -1 if unread else None]] == refusals(backend, cell)


@settings(some, max_examples=20)
@given(declarations)
def test_two_values_that_any_layer_with_them_is_served_for_are_in_a_served_cell(
    declared: dict[str, Any],
) -> None:
    backend = backend_of(**{**declared, "head_sizes": declared["head_sizes"][:2]})
    shown: set[Any] = set().union(*(pairs_of(cell) for cell, why in answers(backend, CPU).items() if not why))
    lost = {pair: cell for pair, cell in served_pairs(backend).items() if pair not in shown}
    assert not lost


@settings(some, max_examples=20)
@given(st.lists(combinations(), max_size=2))
def test_two_values_are_shown_served_though_others_do_not_go_together(rules: list[Any]) -> None:
    backend = backend_of(
        head_sizes=(64, 128, 192),
        block_sizes=(16, 32, 64),
        features=combined(["sinks", "lse", "fp8_kv"]),
        supported_kv_cache_dtypes=("auto", "fp8_e4m3"),
        refuses=lambda spec, device: next((why for rule in rules if (why := rule(spec, device))), None),
    )
    shown: set[Any] = set().union(*(pairs_of(cell) for cell, why in answers(backend, CPU).items() if not why))
    lost = {pair: cell for pair, cell in served_pairs(backend).items() if pair not in shown}
    assert not lost


@pytest.mark.slow
@some
@given(declarations, st.sampled_from(COMMON))
def test_one_more_feature_changes_its_own_cells_only(declared: dict[str, Any], name: str) -> None:
    declared["supported_kv_cache_dtypes"] = ["auto", *declared["supported_kv_cache_dtypes"]]
    without, having = (
        answers(backend_of(**{**declared, "features": features}), CPU)
        for features in (declared["features"] & ~combined([name]), declared["features"] | combined([name]))
    )
    assert all(name in asked_of(cell) for cell in without.keys() ^ having.keys())
    for cell in without.keys() & having.keys():
        assert bool(without[cell]) == bool(having[cell]) or name in asked_of(cell)


@pytest.mark.slow
@some
@given(declarations, _sizes)
def test_one_more_head_size_changes_its_own_cells_only(declared: dict[str, Any], size: int) -> None:
    # With 128, of which the plainest layer is.
    listed = [128, *(each for each in declared["head_sizes"] if isinstance(each, int) and each != size)]
    before, after = (
        answers(backend_of(**{**declared, "head_sizes": sizes}), CPU) for sizes in (listed, [*listed, size])
    )
    for cell in before.keys() ^ after.keys():
        assert size in (cell.head_size, spec_of(cell).head_size_v)
