"""Compares results with the oracle, within a tolerance for each dtype and size of logits."""

from __future__ import annotations

import dataclasses
import math
from typing import Generic, TypeVar, overload

import numpy as np
import torch

from attnplug.core.spec import LayerSpec

_OUTPUT = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
# Kernels such as FlashInfer's fa2 sum weights that are rounded for the product with V: to 8 bits in bfloat16.
_LSE = {"float32": 1e-4, "float16": 1e-3, "bfloat16": 2.0**-9}
# Relative error of the hardware's tanh, with which kernel libraries cap logits.
_APPROXIMATE_TANH = 2.0**-11
# Error of a logit summed in float32 in any order, relative to its size: 8 roundings of 2**-24.
# A CPU without AVX512 sums in another order, and is 1.4e-5 off.
_SUMMED = 8 * 2.0**-24
# Error of a logit whose query was rounded once, in units of the dtype's eps and the size by the root of head_size.
_ROUNDED = 3 * 0.5
# An error of a logit moves at most a quarter of it in weight, between values that differ by at most twice the largest.
_IN_OUTPUT = 0.5
# In a whole result of many rows, few errors are as large as their bound. One row has all of it.
_IN_WHOLE = 1 / 16
# Queries and weights in e4m3, for backends that declare it: 3 bits behind the first. Errors of weights are of both
# signs, so a sum has less than the largest, 2**-4.
_QUANTIZED_EPS, _QUANTIZED_OUTPUT = 2.0**-3, 5e-2
# Latent attention multiplies by W_UK and W_UV, and rounds expanded keys and values, or absorbed queries, once more.
_PRODUCT = 2.0
# Hardware may replace smaller numbers by zero.
FLUSHED = torch.finfo(torch.float32).smallest_normal

_Bound = TypeVar("_Bound", float, torch.Tensor)


@dataclasses.dataclass(frozen=True, slots=True)
class Tolerance(Generic[_Bound]):
    """Bounds of the error against the oracle: floats, or float64 tensors `[T, H]` with a bound for each row.

    Args:
        output: of each element, relative to its row's magnitude.
        lse: of each log-sum-exp, absolute up to 1 and relative above.
        whole: of the norm of the whole output, relative to that of its rows.
    """

    output: _Bound
    lse: _Bound
    whole: _Bound


@overload
def tolerance(spec: LayerSpec, *, quantized_queries: bool = False) -> Tolerance[float]: ...
@overload
def tolerance(
    spec: LayerSpec, logit_size: torch.Tensor, *, quantized_queries: bool = False
) -> Tolerance[torch.Tensor]: ...
def tolerance(
    spec: LayerSpec, logit_size: torch.Tensor | None = None, *, quantized_queries: bool = False
) -> Tolerance[torch.Tensor] | Tolerance[float]:
    """The bounds for a layer: those of its dtype, and the error of the logits.

    `logit_size` is `OracleResult.logit_size`; the default is about the largest size in batches of `paged_batch`.
    An error of a logit is a relative error of its weight, and an error of the LSE. It has these parts:

    * a sum of `head_size` products in float32, in any order;
    * in half precision, one rounding of the query or the key, for kernels that multiply it with the scale;
    * in half precision, twice the bounds of latent attention, whose products with weights are rounded once more;
    * in half precision, a soft cap with an approximate tanh: 2**-11 of the largest logit, which is the cap.

    The oracle reads keys and values as they are stored, so no bound includes their quantisation. With
    `quantized_queries`, over pages of 8 bits, the rounding of queries and weights to e4m3 is in the bounds.
    """
    quantized = quantized_queries and spec.has_quantized_kv_cache
    output = _QUANTIZED_OUTPUT if quantized else _OUTPUT[spec.dtype]
    cap = spec.logits_soft_cap if spec.dtype != "float32" else None
    # Float32 gets no extra bound: only half precision is expected to use the hardware's tanh.
    more = 0.0 if cap is None else _APPROXIMATE_TANH * cap
    eps = _QUANTIZED_EPS if quantized else torch.finfo(getattr(torch, spec.dtype)).eps
    times = 1.0 if spec.mla is None or spec.dtype == "float32" else _PRODUCT
    output, lse = times * output + more, times * _LSE[spec.dtype] + more
    size = spec.query_size
    relative = _SUMMED + _ROUNDED * eps * size**-0.5
    if logit_size is None:
        # Queries are drawn with a factor of 2. Few of many random vectors are longer than the root of their size + 2.
        error = relative * 2 * spec.scale * (size**0.5 + 2) ** 2
        return Tolerance(output + _IN_OUTPUT * error, lse + error, output + _IN_OUTPUT * error)
    errors = relative * logit_size
    share = min(_IN_WHOLE + _IN_OUTPUT * max(logit_size.numel(), 1) ** -0.5, _IN_OUTPUT)
    return Tolerance(output + _IN_OUTPUT * errors, lse + errors, output + share * errors)


def assert_close(
    found: torch.Tensor,
    expected: torch.Tensor,
    bound: float | torch.Tensor,
    name: str = "output",
    *,
    whole: float | torch.Tensor | None = None,
) -> None:
    """AssertionError unless `found [n, H, D]` is within `bound` of `expected`, by element and as a whole.

    `bound` is a number, or a tensor `[n, H]` with one for each row. An element's error is relative to the largest
    magnitude in its row (the last dimension); a row of zeros must be zeros. As a whole, `norm(found - expected)` is
    at most the norm of all rows times `whole`, by default `bound`. NaN never passes. A row below the smallest normal
    number of the dtype of `found`, such as 6e-5 in float16, has that magnitude: its numbers are stored with less
    precision.
    """
    least = torch.finfo(found.dtype).smallest_normal if found.is_floating_point() else 0.0
    found, expected = _as_float64(found, expected, name)
    if found.numel() == 0:
        return
    if not bool(found.isfinite().all()):
        raise AssertionError(f"{name}: {int((~found.isfinite()).sum())} elements are NaN or infinite")
    error = (found - expected).abs()
    magnitude = expected.abs().amax(-1, keepdim=True)
    bounds = _of_rows(bound, found)
    allowed = (bounds * magnitude.clamp_min(least)).clamp_min(FLUSHED).masked_fill(magnitude == 0, 0.0)
    worst = error - allowed
    # The negated comparison also fails for NaN.
    if not bool((worst <= 0).all()):
        # torch's own unravel_index imports sympy, which takes a second.
        place = tuple(int(index) for index in np.unravel_index(int(worst.argmax()), worst.shape))
        values = f"{found[place].item():.6g} is not {expected[place].item():.6g}"
        within = f"within {float(bounds[place[:-1]]):.3g} of its row's magnitude"
        row = float(magnitude[place[:-1]])
        by = f", it is off by {float(error[place]) / row:.2g}" if row else ""
        raise AssertionError(f"{name}{list(place)}: {values} {within}{by}")
    # The second bound holds for the result as a whole, where errors of single elements add up.
    shares = bounds if whole is None else _of_rows(whole, found)
    limit = float((shares * expected).norm()) + FLUSHED * expected.numel() ** 0.5
    if not float(error.norm()) <= limit:
        relative, most = (float(number / expected.norm()) for number in (error.norm(), limit))
        raise AssertionError(f"{name}: relative error {relative:.3g} is above {most:.3g}")


def assert_lse_close(
    found: torch.Tensor, expected: torch.Tensor, bound: float | torch.Tensor, name: str = "lse"
) -> None:
    """AssertionError unless `found [n, H]` is within `bound`, a number or `[n, H]`; -inf equals only -inf."""
    found, expected = _as_float64(found, expected, name)
    empty = expected == -math.inf
    wrong = found[empty & (found != -math.inf)]
    if wrong.numel():
        raise AssertionError(
            f"{name}: {wrong.numel()} rows that see nothing have {wrong[0].item():g}, not -inf"
        )
    lost = int(((found == -math.inf) & ~empty).sum())
    if lost:
        raise AssertionError(f"{name}: {lost} rows have -inf, though they see keys or a sink")
    # Infinity minus infinity is NaN, so empty rows are compared above and left out here.
    found, expected = found.masked_fill(empty, 0.0), expected.masked_fill(empty, 0.0)
    # The clamp keeps the bound absolute for an LSE near 0, where a relative error has no meaning.
    error = (found - expected).abs() / expected.abs().clamp_min(1.0)
    bounds = torch.as_tensor(bound, dtype=torch.float64).expand(error.shape)
    if not bool((error <= bounds).all()):
        worst = int((error - bounds).argmax())
        above = f"{float(error.flatten()[worst]):.3g} is above {float(bounds.flatten()[worst]):.3g}"
        raise AssertionError(f"{name}: error {above}")


def _of_rows(bound: float | torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The bound of each of the rows, `[..., 1]` in float64."""
    return torch.as_tensor(bound, dtype=torch.float64).expand(rows.shape[:-1])[..., None]


def _as_float64(found: torch.Tensor, expected: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    if found.shape != expected.shape:
        raise AssertionError(f"{name}: shape {tuple(found.shape)} is not {tuple(expected.shape)}")
    return found.detach().cpu().double(), expected.detach().cpu().double()
