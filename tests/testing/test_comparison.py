"""How near is near enough: by element, as a whole, and never NaN."""

from __future__ import annotations

import math

import pytest
import torch

from attnplug.core import LayerSpec
from attnplug.testing import assert_close, assert_lse_close, tolerance


def spec(dtype: str, stored: str = "auto") -> LayerSpec:
    return LayerSpec(num_heads=1, num_kv_heads=1, head_size=8, dtype=dtype, kv_cache_dtype=stored)


@pytest.mark.parametrize(
    ("layer", "output", "lse"),
    [
        (spec("float32"), 1e-5, 1e-4),
        (spec("float16"), 2e-3, 1e-3),
        (spec("bfloat16"), 1e-2, 2.0**-9),
        (spec("bfloat16", "fp8"), 5e-2, 2.0**-9),
        (spec("float32", "fp8_e5m2"), 5e-2, 1e-4),
    ],
)
def test_bounds_follow_the_dtype_and_the_storage(layer: LayerSpec, output: float, lse: float) -> None:
    bounds = tolerance(layer)
    assert (bounds.output, bounds.lse) == (output, lse)


def test_a_soft_cap_widens_half_precision_by_the_error_of_an_approximate_tanh() -> None:
    for dtype, output, lse in (("float16", 2e-3, 1e-3), ("bfloat16", 1e-2, 2.0**-9)):
        bounds = tolerance(spec(dtype).replace(logits_soft_cap=3.0))
        assert bounds.output == output + 3 * 2.0**-11
        assert bounds.lse == lse + 3 * 2.0**-11
    assert tolerance(spec("float32").replace(logits_soft_cap=3.0)) == tolerance(spec("float32"))


def test_equal_tensors_pass_in_any_dtype() -> None:
    row = torch.tensor([[[1.0, -2.0, 0.5]]])
    assert_close(row.half(), row.double(), 1e-5)


def test_a_small_element_is_judged_by_its_row() -> None:
    expected = torch.tensor([[[100.0, 0.0]]])
    assert_close(torch.tensor([[[100.0, 0.09]]]), expected, 1e-3)
    with pytest.raises(AssertionError, match=r"output\[0, 0, 1\]"):
        assert_close(torch.tensor([[[100.0, 0.11]]]), expected, 1e-3)


def test_a_small_row_is_not_excused_by_a_large_one() -> None:
    expected = torch.tensor([[[1000.0, 1000.0]], [[1e-3, 1e-3]]])
    found = expected.clone()
    found[1] = 2e-3
    with pytest.raises(AssertionError, match=r"output\[1, 0, 0\]"):
        assert_close(found, expected, 1e-2)


def test_many_errors_that_each_pass_fail_together() -> None:
    expected = torch.zeros(1, 1, 100)
    expected[..., 0] = 1.0
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(expected + 0.9e-2, expected, 1e-2)


def test_a_row_of_zeros_must_be_zeros() -> None:
    zeros = torch.zeros(1, 1, 4)
    assert_close(zeros, zeros, 1e-2)
    with pytest.raises(AssertionError):
        assert_close(zeros + 1e-9, zeros, 1e-2)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_never_pass(value: float) -> None:
    expected = torch.ones(2, 1, 4)
    found = expected.clone()
    found[1, 0, 2] = value
    with pytest.raises(AssertionError, match="1 elements are NaN or infinite"):
        assert_close(found, expected, 1e9)
    with pytest.raises(AssertionError):
        assert_close(found, found, 1e9)


@pytest.mark.parametrize("shape", [(2, 1, 3), (1, 1, 4), (2, 4)])
def test_another_shape_never_passes(shape: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match="shape"):
        assert_close(torch.ones(shape), torch.ones(2, 1, 4), 1.0)
    with pytest.raises(AssertionError, match="shape"):
        assert_lse_close(torch.ones(shape), torch.ones(2, 3), 1.0)


def test_an_lse_is_judged_absolutely_and_relatively_where_it_is_large() -> None:
    assert_lse_close(torch.tensor([[0.0009, 100.09]]), torch.tensor([[0.0, 100.0]]), 1e-3)
    with pytest.raises(AssertionError, match=r"error 0\.002"):
        assert_lse_close(torch.tensor([[0.002]]), torch.tensor([[0.0]]), 1e-3)


@pytest.mark.parametrize("pair", [(-math.inf, 0.0), (0.0, -math.inf), (math.inf, -math.inf), (math.nan, 0.0)])
def test_minus_infinity_equals_only_itself(pair: tuple[float, float]) -> None:
    found, expected = (torch.tensor([[number]]) for number in pair)
    with pytest.raises(AssertionError):
        assert_lse_close(found, expected, 1e-3)
    assert_lse_close(torch.tensor([[-math.inf]]), torch.tensor([[-math.inf]]), 1e-3)


def test_numbers_below_the_smallest_normal_one_may_be_off_by_a_step() -> None:
    least = torch.finfo(torch.float16).smallest_normal
    step = least * torch.finfo(torch.float16).eps
    expected = torch.full((1, 1, 4), 0.5 * step, dtype=torch.float64)
    assert_close(torch.full((1, 1, 4), step, dtype=torch.float16), expected * 2.002, 2e-3)
    with pytest.raises(AssertionError, match=r"within 0\.002 of its row's magnitude"):
        assert_close(torch.full((1, 1, 4), 4 * step, dtype=torch.float16), expected, 2e-3)
    with pytest.raises(AssertionError, match="is not 0 within"):
        assert_close(torch.full((1, 1, 4), step, dtype=torch.float16), torch.zeros(1, 1, 4), 2e-3)
