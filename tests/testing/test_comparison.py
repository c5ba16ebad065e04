"""How near is near enough: by element, as a whole, and never NaN."""

from __future__ import annotations

import math

import pytest
import torch

from attnplug.core import LayerSpec, LayerTensors
from attnplug.testing import assert_close, assert_lse_close, paged_batch, request_oracle, tolerance


def spec(dtype: str, stored: str = "auto") -> LayerSpec:
    return LayerSpec(num_heads=1, num_kv_heads=1, head_size=8, dtype=dtype, kv_cache_dtype=stored)


@pytest.mark.parametrize(
    ("layer", "output", "lse"),
    [
        (spec("float32"), 1e-5, 1e-4),
        (spec("float16"), 2e-3, 1e-3),
        (spec("bfloat16"), 1e-2, 2.0**-9),
        (spec("bfloat16", "fp8"), 1e-2, 2.0**-9),
        (spec("float32", "fp8_e5m2"), 1e-5, 1e-4),
    ],
)
def test_bounds_of_small_logits_follow_the_dtype_whatever_is_stored(
    layer: LayerSpec, output: float, lse: float
) -> None:
    bounds = tolerance(layer, torch.zeros(2, dtype=torch.float64))
    assert bounds.output.tolist() == pytest.approx([output] * 2)
    assert bounds.lse.tolist() == pytest.approx([lse] * 2)


@pytest.mark.parametrize(
    ("dtype", "eps"), [("float32", 2.0**-23), ("float16", 2.0**-10), ("bfloat16", 2.0**-7)]
)
def test_bounds_grow_with_the_error_of_a_logit(dtype: str, eps: float) -> None:
    layer = spec(dtype).replace(head_size=64)
    small, large = (tolerance(layer, torch.tensor([[size]], dtype=torch.float64)) for size in (0.0, 100.0))
    error = 100 * (8 * 2.0**-24 + 1.5 * eps / 8)
    assert float(large.lse - small.lse) == pytest.approx(error)
    assert float(large.output - small.output) == pytest.approx(error / 2)
    assert large.whole == large.output
    many = tolerance(layer, torch.full((100, 100), 100.0, dtype=torch.float64))
    assert float((many.whole - small.whole).max()) == pytest.approx(error * (1 / 16 + 1 / 200))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("head_size", [8, 16, 64, 256, 576])
def test_the_default_is_about_the_largest_bound_of_a_drawn_batch(dtype: str, head_size: int) -> None:
    layer = LayerSpec(num_heads=4, num_kv_heads=2, head_size=head_size, dtype=dtype)
    batch = paged_batch(layer, [1, 40, 1], [300, 300, 7])
    largest = tolerance(layer, batch.oracle().logit_size).output.max()
    assert 0.75 * largest <= tolerance(layer).output <= 1.5 * largest


def test_a_soft_cap_widens_half_precision_by_the_error_of_an_approximate_tanh() -> None:
    for dtype in ("float16", "bfloat16"):
        bounds, plain = tolerance(spec(dtype).replace(logits_soft_cap=3.0)), tolerance(spec(dtype))
        assert bounds.output == pytest.approx(plain.output + 3 * 2.0**-11)
        assert bounds.lse == pytest.approx(plain.lse + 3 * 2.0**-11)
    assert tolerance(spec("float32").replace(logits_soft_cap=3.0)) == tolerance(spec("float32"))


def test_the_size_of_logits_is_that_of_the_keys_that_a_query_sees() -> None:
    layer = LayerSpec(num_heads=1, num_kv_heads=1, head_size=2, scale=0.5, window=(0, 0), has_sinks=True)
    query, key = (
        torch.tensor([[[3.0, 4.0]]] * 3),
        torch.tensor([[[0.0, 2.0]], [[math.nan] * 2], [[-6.0, 8.0]]]),
    )
    tensors = LayerTensors(sinks=torch.tensor([10.0]))
    found = request_oracle(layer, query, key, torch.ones(3, 1, 2), 3, tensors=tensors)
    # The sink exceeds the first logit, 4, by 6, and the last, 7, by 3.
    assert found.logit_size[[0, 2], 0].tolist() == [5 + 6, 25 + 3]


def test_each_row_has_its_own_bound() -> None:
    expected = torch.ones(2, 1, 4)
    found = expected + torch.tensor([0.0, 0.05]).reshape(2, 1, 1)
    assert_close(found, expected, torch.tensor([[1e-3], [0.1]]))
    with pytest.raises(AssertionError, match=r"output\[1, 0, 0\]: 1.05 is not 1 within 0.001 of"):
        assert_close(found, expected, torch.tensor([[0.1], [1e-3]]))
    assert_lse_close(found[..., 0], expected[..., 0], torch.tensor([[1e-3], [0.1]]))
    with pytest.raises(AssertionError, match=r"error 0\.05 is above 0\.001"):
        assert_lse_close(found[..., 0], expected[..., 0], torch.tensor([[0.1], [1e-3]]))


def test_numbers_that_hardware_may_flush_are_zero_or_not() -> None:
    expected = torch.full((1, 1, 4), 1e-40)
    assert_close(torch.zeros(1, 1, 4), expected, 1e-5)
    with pytest.raises(AssertionError, match="within 1e-05 of its row's magnitude"):
        assert_close(torch.full((1, 1, 4), 1e-37), expected, 1e-5)


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


def test_the_whole_may_have_a_bound_of_its_own() -> None:
    expected = torch.ones(2, 1, 4)
    assert_close(expected + 0.9e-2, expected, 1e-2, whole=0.95e-2)
    with pytest.raises(AssertionError, match=r"relative error 0\.009 is above 0\.008"):
        assert_close(expected + 0.9e-2, expected, 1e-2, whole=torch.full((2, 1), 0.8e-2))


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


@pytest.mark.parametrize(
    ("pair", "says"),
    [
        ((-math.inf, 0.0), "1 rows have -inf, though they see keys or a sink"),
        ((0.0, -math.inf), "1 rows that see nothing have 0, not -inf"),
        ((math.inf, -math.inf), "1 rows that see nothing have inf, not -inf"),
        ((math.nan, -math.inf), "1 rows that see nothing have nan, not -inf"),
        ((math.nan, 0.0), "error nan"),
    ],
)
def test_minus_infinity_equals_only_itself(pair: tuple[float, float], says: str) -> None:
    found, expected = (torch.tensor([[number]]) for number in pair)
    with pytest.raises(AssertionError, match=says):
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
