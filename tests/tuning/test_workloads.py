"""Workloads by name and by list, and the layers that meet them."""

from __future__ import annotations

import pytest

from attnplug import LayerSpec, Phase
from attnplug.errors import PolicyError
from attnplug.registry.measured.step_shapes import StepShape
from attnplug.tuning.workloads import NAMES, layers_of, shapes_for, workload_from_lists, workload_of

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64)


def words(found: object) -> list[str]:
    return [str(shape) for shape, _ in found]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", NAMES)
def test_a_named_workload_has_both_phases_and_ragged_lengths(name: str) -> None:
    found = workload_of(f" {name.upper()} ")
    assert {shape.phase for shape, _ in found} - {None} == set(Phase)
    assert any(shape.ragged for shape, _ in found)
    assert all(weight > 0 for _, weight in found)
    assert len(set(words(found))) == len(found)


def test_a_list_of_shapes_weighs_alike() -> None:
    found = workload_of("decode 64 x 8k,prefill 4x4k , decode 16 x 4 of 8k ragged")
    assert words(found) == ["decode 64 x 8k", "prefill 4 x 4k", "decode 16 x 4 of 8k ragged"]
    assert {weight for _, weight in found} == {1.0}


@pytest.mark.parametrize(
    ("lists", "shapes"),
    [
        (("1,8", "1k,8k", None), ["decode 1 x 1k", "decode 8 x 1k", "decode 1 x 8k", "decode 8 x 8k"]),
        (("4", None, None), ["decode 4 x 8k"]),
        ((None, "2k", None), ["decode 1 x 2k", "decode 8 x 2k", "decode 64 x 2k"]),
        ((None, None, "4x4k, 1x1k of 9k"), ["prefill 4 x 4k", "prefill 1 x 1k of 9k"]),
    ],
)
def test_lists_become_shapes(lists: tuple[str | None, ...], shapes: list[str]) -> None:
    assert words(workload_from_lists(*lists)) == shapes


@pytest.mark.parametrize(
    ("lists", "argument"),
    [
        (("1,x", None, None), "--batch"),
        ((",", None, None), "--batch"),
        (("0", None, None), "--batch"),
        ((None, "8m", None), "--context"),
        ((None, None, "4k"), "--prefill"),
        ((None, None, "4x9k of 1k"), "--prefill"),
        ((None, None, "0x4k"), "--prefill"),
        ((None, None, ""), "--prefill"),
        (("", None, None), "--batch"),
        (("99999999", None, None), "--batch"),
        ((None, "", None), "--context"),
        ((None, "1k,99999k", None), "--context"),
        (("1,1", "1k", None), "--batch, --context or --prefill"),
    ],
)
def test_a_list_of_something_else_is_refused(lists: tuple[str | None, ...], argument: str) -> None:
    with pytest.raises(PolicyError) as error:
        workload_from_lists(*lists)
    assert error.value.field == argument


@pytest.mark.parametrize(
    "text", ["talk", "", "decode 64", "decode 1 x 1k, decode 1 x 1k", "decode 1 x 0", "prefill 1 x 9k of 1k"]
)
def test_an_unknown_workload_is_refused(text: str) -> None:
    with pytest.raises(PolicyError) as error:
        workload_of(text)
    assert error.value.field == "--workload"
    assert error.value.value in text
    assert error.value.remedy


def test_a_number_out_of_range_is_named_with_its_limit() -> None:
    with pytest.raises(
        PolicyError, match=r"--prefill='prefill 4x9k of 1k' is no step: shape.query=9216 must be at most"
    ):
        workload_from_lists(None, None, "4x9k of 1k")
    with pytest.raises(PolicyError, match="--batch='99999999' must be numbers from 1 to 16777216"):
        workload_from_lists("99999999", None, None)


def test_an_encoder_meets_whole_prefills_only() -> None:
    every = workload_of("decode 1 x 1k, prefill 4 x 1k, prefill 4 x 1k of 2k")
    assert shapes_for(SPEC, every) == every
    encoder = SPEC.replace(attn_type="encoder_only", causal=False)
    assert (
        words(shapes_for(encoder, every))
        == words(shapes_for(SPEC.replace(direct_kv=True), every))
        == ["prefill 4 x 1k"]
    )


def test_layers_that_differ_in_their_scale_are_one_kind() -> None:
    sliding = SPEC.replace(sliding_window=64)
    specs = {"0": SPEC, "1": sliding, "2": SPEC.replace(scale=0.5), "3": sliding}
    assert list(layers_of(specs, None).values()) == [["0", "2"], ["1", "3"]]
    assert {spec.block_size for spec in layers_of(specs, 64)} == {64}


def test_a_mixed_step_has_its_decodes_first() -> None:
    shape = StepShape.parse("mixed 3 x 1k + 2 x 64 of 256 ragged")
    assert (shape.phase, shape.requests, shape.tokens) == (None, 5, 131)
    assert shape.query_lens == (1, 1, 1, 64, 64)
    assert (shape.lengths[:3], shape.lengths[3:]) == ((128, 1024, 1920), (64, 448))
    assert str(shape) == "mixed 3 x 1k + 2 x 64 of 256 ragged"
    assert StepShape.parse(str(shape)) == StepShape.from_dict(shape.to_dict()) == shape


@pytest.mark.parametrize(
    "text",
    [
        "mixed 4 x 4k",
        "decode 3 x 1k + 2 x 64",
        "mixed + 2 x 64",
        "mixed 0 x 1k + 2 x 64",
        "mixed 3 x 0 + 1 x 8",
    ],
)
def test_half_a_mixed_step_is_refused(text: str) -> None:
    with pytest.raises(PolicyError):
        StepShape.parse(text)


def test_a_step_of_one_phase_has_no_other_requests() -> None:
    with pytest.raises(PolicyError, match="must be 0 in a step that is not mixed"):
        StepShape(Phase.DECODE, 4, 1, 64, decodes=2, decode_context=64)
