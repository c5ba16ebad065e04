"""The design: every value and every two values that mean something, few cells, the same in every process."""

from __future__ import annotations

import collections
import itertools
import os
import subprocess
import sys
from typing import Any

import pytest
from design_backends import backend_of

from attnplug.core.backend import AttentionBackend
from attnplug.core.blocks import MultipleOf
from attnplug.core.composite import composite_backend
from attnplug.core.device import Device
from attnplug.core.features import Feature
from attnplug.matrix.axes import LATENT, axes_of, phase_of, spec_of
from attnplug.matrix.design import MOST_CELLS, answers, design
from attnplug.matrix.model import Cell
from attnplug.registry.default import get_registry
from attnplug.testing.design.search import HEAD_SIZES

CPU = Device("cpu")
BACKENDS = ("TORCH", "TRITON", "FLASH_ATTN_2", "FLASH_ATTN_3", "FLASH_ATTN_4", "FLASHINFER")
DEVICES = [
    pytest.param("sm80", marks=pytest.mark.slow),
    "sm90",
    pytest.param("sm100", marks=pytest.mark.slow),
    "cpu",
]

_CODE = """
from attnplug.core.device import Device
from attnplug.matrix.design import design
from attnplug.registry.default import get_registry
for name, backend in sorted(get_registry().backends().items()):
    for device in ("sm90", "cpu"):
        print(name, device, *(cell.id for cell in design(backend, Device.parse(device))))
"""


def builtin(name: str) -> type[AttentionBackend]:
    members = [get_registry().backends()[each] for each in name.split("+")]
    return members[0] if len(members) == 1 else composite_backend(*members)


def pairs_in(cells: list[Cell]) -> set[frozenset[tuple[str, Any]]]:
    names = Cell.__dataclass_fields__
    return {
        frozenset([(one, getattr(cell, one)), (other, getattr(cell, other))])
        for cell in cells
        for one, other in itertools.combinations(names, 2)
    }


def means_nothing(feature: str, axis: str, value: Any) -> bool:
    """What no layer asks: spelled out once more, as a reader of the matrix would."""
    is_fp8 = axis == "kv_cache_dtype" and "fp8" in value
    is_stored = axis in ("block_size", "layout") or (axis == "kv_cache_dtype" and value != "auto")
    if axis == "head_size" and value == LATENT:
        return feature not in ("mla", "sparse")
    return {
        "plain": is_fp8,
        **dict.fromkeys(("fp8_kv", "head_scales"), axis == "kv_cache_dtype" and not is_fp8),
        "mla": axis == "head_size",
        "direct_kv": is_stored,
        **dict.fromkeys(("state", "state_drafts", "state_checkpoints"), is_stored),
        "encoder": is_stored or value in ("decode", "mixed"),
    }.get(feature, False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*BACKENDS, "FLASH_ATTN_4+FLASHINFER", "TRITON+TORCH"])
def test_every_two_values_that_mean_something_are_in_a_cell(name: str, device: str) -> None:
    backend = builtin(name)
    cells = design(backend, Device.parse(device))
    held = pairs_in(cells)
    for (one, firsts), (other, seconds) in itertools.combinations(axes_of(backend).items(), 2):
        for first, second in itertools.product(firsts, seconds):
            if one == "feature" and means_nothing(first, other, second):
                continue
            assert frozenset([(one, first), (other, second)]) in held
    assert len(cells) <= MOST_CELLS
    assert len({cell.id for cell in cells}) == len(cells)


@pytest.mark.parametrize("name", BACKENDS)
def test_no_cell_asks_what_means_nothing(name: str) -> None:
    for cell in design(builtin(name), Device.parse("sm90")):
        values = {axis: getattr(cell, axis) for axis in Cell.__dataclass_fields__ if axis != "feature"}
        if cell.block_size is None:
            assert cell.layout is None
            del values["block_size"], values["layout"]
        assert not any(means_nothing(cell.feature, *item) for item in values.items())
        asked = spec_of(cell).required_features()
        assert cell.feature == "plain" or Feature[cell.feature.upper()] in asked


@pytest.mark.parametrize("device", DEVICES[:3])
@pytest.mark.parametrize("name", ["TORCH", "FLASH_ATTN_4", "FLASHINFER", "FLASH_ATTN_4+FLASHINFER"])
def test_two_values_that_are_served_are_shown_served(name: str, device: str) -> None:
    backend, where = builtin(name), Device.parse(device)
    shown = pairs_in([cell for cell, reasons in answers(backend, where).items() if not reasons])
    axes = {axis: values[:12] for axis, values in axes_of(backend).items()}
    for head_size, feature, kv, block in itertools.product(
        axes["head_size"], axes["feature"], axes["kv_cache_dtype"], (16, 64, 128, 256)
    ):
        has_pages = feature not in ("direct_kv", "encoder")
        phase = "prefill" if feature == "encoder" else "mixed"
        pages = (block, "NHD") if has_pages else (None, None)
        cell = Cell(feature, phase, head_size, "bfloat16", kv, *pages)
        if any(means_nothing(feature, *item) for item in (("head_size", head_size), ("kv_cache_dtype", kv))):
            continue
        if not backend.validate_configuration(spec_of(cell), where, phase_of(cell)):
            assert pairs_in([cell]) <= shown


def test_the_design_is_the_same_in_every_process() -> None:
    seen = {
        subprocess.run(
            [sys.executable, "-c", _CODE],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1
    assert "TORCH cpu plain/mixed/d16/" in seen.pop()


def test_a_refusal_is_for_the_two_values_alone() -> None:
    found = answers(builtin("FLASH_ATTN_2"), Device.parse("sm90"))
    cell = Cell("sinks", "mixed", 64, "bfloat16", "auto", 256, "NHD")
    assert [str(reason) for reason in found[cell]] == ["sinks not supported"]


def test_sizes_without_bound_are_named_by_canonical_ones() -> None:
    axes = axes_of(backend_of(head_sizes=(MultipleOf(8),), block_sizes=(MultipleOf(16),)))
    assert axes["head_size"] == (128, 64, 16, 32, 72, 20, 80, 96, 112, 192, 256, 320, LATENT)
    assert axes["block_size"] == (16, 32, 64, 128, 256, 8, 1, 24, 48)


def test_multiples_without_a_canonical_size_are_named_by_the_least() -> None:
    axes = axes_of(backend_of(head_sizes=(MultipleOf(72),), block_sizes=(MultipleOf(384),)))
    assert 72 in axes["head_size"]
    assert 384 in axes["block_size"]


def test_what_a_backend_lists_is_asked_too() -> None:
    backend = backend_of(
        head_sizes=(40, 64),
        block_sizes=(24,),
        layouts=("TILED",),
        supported_kv_cache_dtypes=("auto", "nvfp4"),
    )
    cells = design(backend, CPU)
    assert {40, 64} <= {cell.head_size for cell in cells}
    assert "nvfp4" in {cell.kv_cache_dtype for cell in cells}
    assert {24, None} <= {cell.block_size for cell in cells}
    served = [cell for cell, reasons in answers(backend, CPU).items() if not reasons]
    assert {cell.layout for cell in served} == {"TILED"}
    assert {cell.block_size for cell in served} == {24}


@pytest.mark.parametrize("count", [60, 100, pytest.param(1000, marks=pytest.mark.slow)])
def test_of_long_lists_so_many_values_are_asked_as_can_be_paired(count: int) -> None:
    backend = backend_of(head_sizes=tuple(range(300, 300 + count)), features=Feature.SINKS)
    cells = design(backend, CPU)
    common = {*HEAD_SIZES, LATENT}
    sizes = collections.Counter(cell.head_size for cell in cells if cell.head_size not in common)
    assert {300, 299 + count} <= sizes.keys()
    assert len(sizes) >= 28
    # One more size would need more cells than there may be.
    assert MOST_CELLS - max(sizes.values()) < len(cells) <= MOST_CELLS


def test_what_cannot_be_paired_at_all_is_named_by_its_first_value() -> None:
    axes = axes_of(backend_of(block_sizes=tuple(range(300, 400))), most_own=1)
    assert axes["block_size"] == (16, 32, 64, 128, 256, 8, 1, 24, 48, 300)


def test_a_backend_of_latents_is_asked_for_its_own_latents() -> None:
    backend = backend_of(head_sizes=(320, LATENT), features=Feature.MLA)
    served = [cell for cell, reasons in answers(backend, CPU).items() if not reasons]
    assert {cell.feature for cell in served} == {"mla"}
    assert {cell.head_size for cell in served} == {320, LATENT}
    assert {cell.phase for cell in served} == {"mixed", "prefill", "decode"}


def test_sparse_latents_are_served_by_who_serves_only_those() -> None:
    backend = backend_of(head_sizes=(LATENT,), features=Feature.MLA | Feature.SPARSE)
    served = [cell for cell, reasons in answers(backend, CPU).items() if not reasons]
    assert {cell.feature for cell in served} == {"sparse"}


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_backend_of_one_phase_is_asked_in_that_phase(phase: str) -> None:
    backend = backend_of(features=Feature.SINKS, supported_phases=(phase,))
    found = answers(backend, CPU)
    assert {cell.phase for cell, reasons in found.items() if not reasons} == {phase}
    assert not found[Cell("sinks", phase, 64, "bfloat16", "auto", 16, "NHD")]


def test_what_is_served_only_with_another_value_moved_is_found() -> None:
    def refuses(spec: Any, device: Any) -> str | None:
        if spec.has_sinks and (spec.head_size, spec.dtype) != (64, "float16"):
            return "sinks go with head_size=64 in float16"
        return None

    backend = backend_of(features=Feature.SINKS, refuses=refuses)
    found = answers(backend, CPU)
    assert not found[Cell("sinks", "mixed", 64, "float16", "auto", 16, "NHD")]
