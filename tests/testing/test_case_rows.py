"""Steps as long as those of models: which rows the oracle computes, and what a failing check says about them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from capturable import CapturableImpl, lying
from catching import torch_cases, variant

from attnplug.backends.torch_native import TorchBackend
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core import Device, LayerSpec
from attnplug.testing.batches import paged_batch
from attnplug.testing.conformance import CheckSkipped
from attnplug.testing.conformance.cases.cases import sampled_rows
from attnplug.testing.conformance.cases.model_sizes import FAR, FAR_LIMITS
from attnplug.testing.conformance.check import ConformanceError
from attnplug.testing.conformance.numbers import correctness
from attnplug.testing.conformance.serving import gpu
from attnplug.testing.conformance.target import Target

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32")
TARGET = Target(TorchBackend, Device("cpu"))


@pytest.mark.parametrize(
    "fields",
    [{}, {"window": (6, 0), "has_sinks": True}, {"has_alibi": True, "mm_prefix": True}, {"sparse": "topk"}],
    ids=["plain", "window", "spans", "sparse"],
)
def test_some_rows_of_the_oracle_are_those_of_all(fields: dict[str, Any]) -> None:
    sparse = FAR_LIMITS["sparse"].__class__("token_topk", 5)
    spec = SPEC.replace(**{name: sparse if value == "topk" else value for name, value in fields.items()})
    batch = paged_batch(spec, [1, 20, 7], [9, 33, 7])
    whole, rows = batch.oracle(), torch.tensor([0, 3, 20, 27])
    batch.sampled = rows
    some = batch.oracle()
    for field in dataclasses.fields(whole):
        one, other = getattr(whole, field.name), getattr(some, field.name)
        torch.testing.assert_close(other[rows], one[rows])
        rest = other.clone()
        rest[rows] = 0
        assert not bool(rest.any())
    assert torch.equal(batch.is_compared.nonzero().flatten(), rows)


def test_each_tile_and_the_ends_of_limits_have_a_row_to_compare() -> None:
    rows = sampled_rows(SPEC.replace(window=(4095, 0), chunk_size=None), [1, 9000], [50, 9000])
    assert rows is not None
    found = set(rows.tolist())
    assert {0, 1, 2, 4096, 4097, 4098, 8192, 8193, 8194, 9000} <= found
    assert all(found & set(range(first, first + 64)) for first in range(1, 9000 - 64, 64))
    assert len(found) < 300


def test_small_steps_are_compared_whole() -> None:
    assert sampled_rows(SPEC, [1, 700], [9001, 700]) is None
    assert all(case.batch(TARGET).sampled is None for case in torch_cases() if case.shape == "mixed")


def test_each_limit_of_models_has_a_case_that_passes_it() -> None:
    cases = [case for case in torch_cases() if case.shape in FAR]
    assert {case.shape for case in cases} == {*FAR}
    for name, value in FAR_LIMITS.items():
        alone = {case.shape for case in cases if getattr(case.spec, name) == value}
        assert {"far-decode", "far-extend"} <= alone
    stored = {case.spec.resolved_kv_cache_dtype for case in torch_cases()}
    assert {case.spec.resolved_kv_cache_dtype for case in cases} == stored


def test_a_prompt_that_would_take_minutes_is_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(correctness, "_MOST_SECONDS", 0.0)
    case = next(case for case in torch_cases() if case.shape == "far-prompt")
    with pytest.raises(CheckSkipped, match=r"a prompt of 700 tokens takes .* 165 times as long") as why:
        correctness.check_case(TARGET, case)
    assert why.value.text.startswith("too slow here")


def test_rows_that_are_not_compared_are_not_counted_as_right() -> None:
    class Zeros(TorchImpl):
        def _attend_long(self, request: int, query: Any, source: Any, metadata: Any, *rest: Any) -> None:
            super()._attend_long(request, query, source, metadata, *rest)
            rest[2][2048:2500] = 0

    case = next(case for case in torch_cases() if case.shape == "longer-prompt")
    with pytest.raises(ConformanceError) as problem:
        correctness.check_case(Target(variant("ZEROS", impl=Zeros), Device("cpu")), case)
    said = str(problem.value)
    assert " compared rows, all 2 heads" in said
    assert "row 2048 and " in said
    assert "pattern: only rows from position 2048 on" in said


def test_a_graph_over_more_keys_than_its_capture_had_is_tried() -> None:
    class Cuts(CapturableImpl):
        def attend(self, *given: Any, **asked: Any) -> Any:
            query, key, value, cache, made, *rest = given[1:]
            if made.common.max_query_len <= 3:
                common = dataclasses.replace(made.common, seq_lens=made.common.seq_lens.clamp(max=512))
                made = dataclasses.replace(made, common=common)
            return super().attend(given[0], query, key, value, cache, made, *rest, **asked)

    (check,) = gpu.capture_checks(Target(lying("CUTS", impl=Cuts), Device("cpu")))
    with pytest.raises(ConformanceError, match=r"new tokens {'c': 3, 'e': 3}"):
        check()
