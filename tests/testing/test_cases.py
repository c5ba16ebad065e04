"""The designed space is the same everywhere, names each case once, and leaves out no pair of features."""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from catching import torch_cases, variant

from attnplug.backends.torch_native import TorchBackend
from attnplug.core import AttentionBackend, Device, Feature, LayerSpec
from attnplug.testing.conformance import Level
from attnplug.testing.conformance.cases.case_axes import KINDS, SHAPES, axes, lengths
from attnplug.testing.conformance.cases.cases import Case
from attnplug.testing.conformance.cases.designed_cases import designed_cases
from attnplug.testing.conformance.target import Target
from attnplug.testing.drawn_values import Numbers

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype="float32")
LISTING = """
from attnplug.backends.torch_native import TorchBackend
from attnplug.core import Device
from attnplug.testing.conformance.cases.designed_cases import designed_cases
from attnplug.testing.conformance.target import Target
print("\\n".join(case.id for case in designed_cases(Target(TorchBackend, Device("cpu")))))
"""
FEATURES: dict[str, dict[str, Any]] = {
    "window": {"window": (6, 0)},
    "chunk": {"chunk_size": 24},
    "cap": {"logits_soft_cap": 3.0},
    "scale": {"scale": 0.15},
    "sinks": {"has_sinks": True},
    "alibi": {"has_alibi": True},
    "lse": {"needs_lse": True},
    "fp8": {"kv_cache_dtype": "fp8_e4m3"},
    "non_causal": {"causal": False},
    "direct": {"direct_kv": True},
}


def target(level: Level = Level.SMOKE, backend: type[AttentionBackend] = TorchBackend) -> Target:
    return Target(backend, Device("cpu"), level)


cases = torch_cases


def has(case: Case, fields: dict[str, Any]) -> bool:
    return all(getattr(case.spec, name) == value for name, value in fields.items())


@pytest.mark.parametrize(
    ("level", "most"), [(Level.SMOKE, 480), pytest.param(Level.FULL, 2200, marks=pytest.mark.slow)]
)
def test_a_level_has_a_bounded_number_of_cases(level: Level, most: int) -> None:
    assert most / 2 < len(cases(level)) < most


@pytest.mark.parametrize("level", [Level.SMOKE, pytest.param(Level.FULL, marks=pytest.mark.slow)])
def test_ids_are_unique_and_plain(level: Level) -> None:
    ids = [case.id for case in cases(level)]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in ids)


@pytest.mark.slow
def test_cases_are_the_same_in_every_process() -> None:
    here = [case.id for case in cases(Level.SMOKE)]
    for seed in "12":
        environment = {"PYTHONHASHSEED": seed}
        found = subprocess.run(
            [sys.executable, "-c", LISTING], env=environment, capture_output=True, text=True, check=True
        )
        assert found.stdout.split() == here


def test_every_value_stands_alone() -> None:
    plain = next(iter(cases(Level.SMOKE))).spec
    for name, fields in FEATURES.items():
        alone = plain.replace(**fields, **({"block_size": None} if name == "direct" else {}))
        assert any(case.spec == alone for case in cases(Level.SMOKE)), name


@pytest.mark.parametrize("level", [Level.SMOKE, pytest.param(Level.FULL, marks=pytest.mark.slow)])
def test_every_pair_of_features_that_can_stand_together_does(level: Level) -> None:
    for one, other in itertools.combinations(FEATURES, 2):
        fields = {**FEATURES[one], **FEATURES[other]}
        impossible = {one, other} in ({"window", "chunk"}, {"chunk", "non_causal"}, {"fp8", "direct"})
        assert any(has(case, fields) for case in cases(level)) == (not impossible), (one, other)


@pytest.mark.parametrize("level", [Level.SMOKE, pytest.param(Level.FULL, marks=pytest.mark.slow)])
def test_every_shape_goes_with_every_kind_and_feature(level: Level) -> None:
    for shape in SHAPES:
        here = [case for case in cases(level) if case.shape == shape]
        # The last one is for backends that serve neither of its halves alone.
        assert {case.kind for case in here} == set(KINDS) - {"direct_non_causal"}
        for name, fields in FEATURES.items():
            assert any(has(case, fields) for case in here), (shape, name)


PATHS: dict[str, Callable[[int, int], bool]] = {
    "decode": lambda new, tokens: new == 1,
    "verification": lambda new, tokens: 1 < new <= 4 < tokens,
    "extend": lambda new, tokens: 16 < new < tokens,
    "prompt": lambda new, tokens: 16 < new == tokens,
}


@pytest.mark.parametrize("path", PATHS)
def test_a_plain_decoder_has_each_two_features_on_each_path(path: str) -> None:
    features = {name: fields for name, fields in FEATURES.items() if name not in ("non_causal", "direct")}
    features |= {"fp8": {"kv_cache_dtype": "fp8"}, "half": {"dtype": "bfloat16"}}
    here = [
        case
        for case in cases(Level.SMOKE)
        if case.kind == "decoder"
        and any(
            PATHS[path](new, tokens)
            for new, tokens in zip(*lengths(case.shape, case.spec, case.block_size), strict=True)
        )
    ]
    for one, other in itertools.combinations(features, 2):
        fields = {**features[one], **features[other]}
        if {one, other} != {"window", "chunk"} and "scale" not in (one, other):
            assert any(has(case, fields) for case in here), (one, other)


def rows_of_sizes(found: list[Case]) -> set[tuple[int, str]]:
    """Head sizes with stored types of layers whose requests have more than 64 rows, in 16 bits where 8 are stored."""
    return {
        (case.spec.head_size, case.spec.resolved_kv_cache_dtype)
        for case in found
        if case.shape in ("prefill", "many-extends")
        and max(lengths(case.shape, case.spec, case.block_size)[0]) > 64
        and not (case.spec.has_quantized_kv_cache and case.spec.dtype == "float32")
    }


def test_odd_head_sizes_over_8_bits_have_requests_of_many_rows() -> None:
    assert {(80, "fp8_e4m3"), (96, "fp8_e5m2")} <= rows_of_sizes(cases(Level.SMOKE))
    assert {(80, "fp8_e4m3"), (96, "fp8_e5m2")} <= rows_of_sizes(compiled(Level.SMOKE, "all")[0])


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [None, tuple(range(16, 257, 8))], ids=["of models", "31"])
def test_every_head_size_has_requests_of_many_rows_over_every_stored_type(
    sizes: tuple[int, ...] | None,
) -> None:
    fields = {} if sizes is None else {"get_supported_head_sizes": lambda cls: sizes}
    chosen = target(Level.FULL, variant("SIZES", **fields))
    stored = ("float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
    expected = set(itertools.product(chosen.head_sizes, stored))
    assert len(chosen.head_sizes) == (12 if sizes is None else 31)
    assert expected <= rows_of_sizes(designed_cases(chosen))


def test_a_backend_of_decodes_alone_has_no_such_requests() -> None:
    decodes = variant("DECODES", supported_phases=("decode",))
    assert not {case.shape for case in designed_cases(target(backend=decodes))} & {"prefill"}


@functools.cache
def compiled(level: Level, key: str) -> tuple[list[Case], set[Hashable]]:
    def of_spec(cls: type[AttentionBackend], spec: LayerSpec) -> Hashable:
        return (spec.head_size, spec.dtype, spec.required_features()) if key == "all" else spec.head_size > 64

    backend = variant("COMPILED", compile_key=of_spec)
    found = designed_cases(target(level, backend))
    return found, {backend.compile_key(case.spec) for case in found}


@pytest.mark.parametrize("level", [Level.SMOKE, pytest.param(Level.FULL, marks=pytest.mark.slow)])
def test_compiled_kernels_are_held_to_a_few_keys(level: Level) -> None:
    found, keys = compiled(level, "all")
    if level is Level.SMOKE:
        assert len(keys) == 6
    else:
        # Head sizes over each stored type are beside them.
        assert len(keys) <= 24 + len(rows_of_sizes(found))
    assert found[0] == cases(level)[0]
    assert [case for case in cases(level) if case in set(found)] == found


@pytest.mark.slow
def test_keys_are_chosen_for_the_pairs_that_they_add() -> None:
    found, _ = compiled(Level.FULL, "all")
    features = Feature(0)
    for case in found:
        features |= case.spec.required_features()
    assert features == TorchBackend.features
    assert {case.spec.dtype for case in found} == {"float32", "float16", "bfloat16"}


def test_fewer_keys_than_allowed_leave_out_nothing() -> None:
    assert compiled(Level.SMOKE, "few")[0] == cases(Level.SMOKE)


def test_what_a_backend_refuses_is_not_tried() -> None:
    few = variant("FEW", features=Feature.SOFT_CAP, supported_dtypes=("bfloat16",))
    found = designed_cases(target(backend=few))
    assert {case.spec.dtype for case in found} == {"bfloat16"}
    assert {case.kind for case in found} == {"decoder"}
    assert {case.spec.required_features() for case in found} == {Feature(0), Feature.SOFT_CAP}


def test_many_sizes_are_thinned() -> None:
    many = variant("MANY", get_supported_head_sizes=lambda cls: tuple(range(8, 260, 4)))
    sizes = axes(target(Level.FULL, many))["head_size"]
    assert len(sizes) == 12
    assert {64, 128, 8, 256, 80} <= set(sizes)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_lengths_are_those_of_requests(shape: str, kind: str, block_size: int) -> None:
    spec = SPEC.replace(**KINDS[kind])
    new, tokens = lengths(shape, spec, block_size)
    assert len(new) == len(tokens) > 0
    assert max(new) > 0
    assert min(*new, *tokens, 0) == 0
    if spec.is_encoder:
        assert new == tokens
    elif kind != "cross":
        # A query whose request is empty stands for one with nothing to see.
        assert all(
            count <= every or (count, every) == (1, 0) for count, every in zip(new, tokens, strict=True)
        )
    assert ((1, 0) in zip(new, tokens, strict=True)) == (shape == "idle" and not spec.is_encoder)


def test_lengths_lie_around_the_ends_of_pages_windows_and_chunks() -> None:
    for fields, end in (({}, 16), ({"window": (6, 0)}, 7), ({"chunk_size": 24}, 24), ({}, 128)):
        _, tokens = lengths("decode", SPEC.replace(**fields), 16)
        assert {end - 1, end, end + 1} <= set(tokens)


def made(shape: str, spec: LayerSpec, **fields: Any) -> Any:
    return Case(spec, shape, 16, "NHD", **fields).batch(target())


def test_an_engines_own_cache_holds_what_a_window_has_not_passed() -> None:
    spec = SPEC.replace(direct_kv=True)
    assert [len(keys) for keys in made("decode", spec).keys] == made("decode", spec).seq_lens
    windowed = made("decode", spec.replace(window=(6, 0)))
    assert [len(keys) for keys in windowed.keys] == [min(length, 7) for length in windowed.seq_lens]
    assert made("prefill", spec).common.key_start_loc is None


def test_a_narrowed_case_is_causal_in_its_batch_alone() -> None:
    spec = SPEC.replace(causal=False)
    assert made("mixed", spec, narrowed=True).common.causal
    assert not made("mixed", spec).common.causal
    assert Case(spec, "mixed", 16, "NHD", narrowed=True).kind == "narrowed"


def test_wide_numbers_overflow_float16_and_leave_the_logits_as_they_are() -> None:
    plain, wide = made("mixed", SPEC), made("mixed", SPEC, numbers=Numbers.WIDE)
    for name in ("queries", "values"):
        assert all(part.abs().max() > 65504 for part in getattr(wide, name))
    assert torch.equal(plain.oracle().output * 2.0**20, wide.oracle().output)


def test_wide_numbers_are_for_dtypes_that_hold_them() -> None:
    wide = [case.spec for case in cases(Level.SMOKE) if case.numbers is Numbers.WIDE]
    assert {spec.dtype for spec in wide} == {"float32", "bfloat16"}
    assert {spec.resolved_kv_cache_dtype for spec in wide} == {"float32", "bfloat16"}


def test_scales_of_fp8_differ_from_one_and_from_each_other() -> None:
    tensors = made("mixed", SPEC.replace(kv_cache_dtype="fp8")).tensors
    assert len({1.0, float(tensors.k_scale), float(tensors.v_scale)}) == 3
