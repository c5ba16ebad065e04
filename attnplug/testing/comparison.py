"""Compares results with the oracle, within a tolerance for each dtype."""

from __future__ import annotations

import dataclasses
import math

import torch

from attnplug.core.spec import LayerSpec

_OUTPUT = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
# The oracle reads the values as stored, so this bound does not include their quantisation.
_FP8 = 5e-2
_LSE = {"float32": 1e-4, "float16": 1e-3, "bfloat16": 2.0**-9}
"""Kernels may sum weights that are rounded for the product with V: to 8 bits in bfloat16."""
_APPROXIMATE_TANH = 2.0**-11
"""Relative error of the hardware's tanh, with which kernel libraries cap logits."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tolerance:
    """Bounds of the error against the oracle.

    Args:
        output: of each element relative to its row's magnitude, and of `||out - ref|| / ||ref||`.
        lse: of each log-sum-exp, absolute up to 1 and relative above.
    """

    output: float
    lse: float


def tolerance(spec: LayerSpec) -> Tolerance:
    """The bounds for a layer: those of its dtype, or of fp8 if the cache stores fp8.

    In half precision a soft cap adds the error of an approximate tanh: 2**-11 of the largest logit, which is the
    cap. An error of a logit is a relative error of its weight, and an error of the LSE.
    """
    stored = spec.resolved_kv_cache_dtype
    output = _FP8 if stored.startswith("fp8") else _OUTPUT[spec.dtype]
    cap = spec.logits_soft_cap if spec.dtype != "float32" else None
    # Float32 gets no extra bound: only half precision is expected to use the hardware's tanh.
    more = 0.0 if cap is None else _APPROXIMATE_TANH * cap
    return Tolerance(output + more, _LSE[spec.dtype] + more)


def assert_close(found: torch.Tensor, expected: torch.Tensor, bound: float, name: str = "output") -> None:
    """AssertionError unless `found [n, H, D]` is within `bound` of `expected`, by element and as a whole.

    An element's error is relative to the largest magnitude in its row (the last dimension); a row
    of zeros must be zeros. NaN never passes. A row below the smallest normal number of the dtype of `found`, such as
    6e-5 in float16, has that magnitude: its numbers are stored with less precision.
    """
    least = torch.finfo(found.dtype).smallest_normal if found.is_floating_point() else 0.0
    found, expected = _as_float64(found, expected, name)
    if found.numel() == 0:
        return
    if not bool(found.isfinite().all()):
        raise AssertionError(f"{name}: {int((~found.isfinite()).sum())} elements are NaN or infinite")
    error = (found - expected).abs()
    magnitude = expected.abs().amax(-1, keepdim=True)
    worst = error - bound * torch.where(magnitude > 0, magnitude.clamp_min(least), 0.0)
    # The negated comparison also fails for NaN.
    if not bool((worst <= 0).all()):
        place = tuple(int(index) for index in torch.unravel_index(worst.argmax(), worst.shape))
        values = f"{found[place].item():.6g} is not {expected[place].item():.6g}"
        raise AssertionError(f"{name}{list(place)}: {values} within {bound} of its row's magnitude")
    relative = float(error.norm() / expected.norm()) if bool(expected.any()) else 0.0
    # The second bound holds for the result as a whole, where errors of single elements add up.
    if not relative <= bound:
        raise AssertionError(f"{name}: relative error {relative:.3g} is above {bound}")


def assert_lse_close(found: torch.Tensor, expected: torch.Tensor, bound: float, name: str = "lse") -> None:
    """AssertionError unless `found [n, H]` is within `bound` of `expected`; -inf equals only -inf."""
    found, expected = _as_float64(found, expected, name)
    empty = expected == -math.inf
    if not bool(((found == -math.inf) == empty).all()):
        raise AssertionError(f"{name}: -inf is not exactly in the {int(empty.sum())} empty rows")
    # Infinity minus infinity is NaN, so empty rows are compared above and left out here.
    found, expected = found.masked_fill(empty, 0.0), expected.masked_fill(empty, 0.0)
    # The clamp keeps the bound absolute for an LSE near 0, where a relative error has no meaning.
    error = (found - expected).abs() / expected.abs().clamp_min(1.0)
    if not bool((error <= bound).all()):
        raise AssertionError(f"{name}: error {float(error.max()):.3g} is above {bound}")


def _as_float64(found: torch.Tensor, expected: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    if found.shape != expected.shape:
        raise AssertionError(f"{name}: shape {tuple(found.shape)} is not {tuple(expected.shape)}")
    return found.detach().cpu().double(), expected.detach().cpu().double()
