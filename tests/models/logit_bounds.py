"""Whether a model's logits are as near to the exact ones as its dtype allows.

What the dtype allows is measured: it is the error that TORCH makes in it, on the same weights and tokens.
"""

from __future__ import annotations

import dataclasses
import math

import torch

__all__ = ["ROW_FACTOR", "TEXT_FACTOR", "Found", "Reference", "check_logits", "excesses"]

TEXT_FACTOR = 2.0
"""Most error over many tokens, in TORCH's own; transformers' eager attention makes up to 1.5 of it."""
ROW_FACTOR = 3.0
"""Most error of the worst token, in that of TORCH's worst; transformers' eager attention makes up to 1.8 of it."""
_LAST_ROUNDING = 2.0**-9
"""Relative: that of the logits themselves to bfloat16."""


@dataclasses.dataclass(frozen=True, eq=False)
class Reference:
    """One text's logits, float32 `[L, V]`.

    Args:
        exact: computed in float32.
        rounded: computed by TORCH in the dtype under test.
        prompt: how many of the tokens are the prompt.
    """

    exact: torch.Tensor
    rounded: torch.Tensor
    prompt: int


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """One text's logits under test, `[L, V]`; its rows before `first` were not computed."""

    logits: torch.Tensor
    first: int = 0


def excesses(found: Found, reference: Reference) -> dict[str, float]:
    """Error over its bound, at most 1 where all is well; infinite where a logit is not finite.

    "text" and "decodes" are over all tokens and over those after the prompt, "row" is the worst token's.
    """
    exact = reference.exact.double()
    floor = _LAST_ROUNDING * float(_rms(exact))
    error = _rms(found.logits.double() - exact, -1)
    allowed = _rms(reference.rounded.double() - exact, -1)
    text, decodes = slice(found.first, None), slice(max(found.first, reference.prompt), None)
    # Which token fares worst is chance, so worst is set against worst.
    found_and_allowed = {
        "text": (_rms(error[text]), TEXT_FACTOR * _rms(allowed[text])),
        "decodes": (_rms(error[decodes]), TEXT_FACTOR * _rms(allowed[decodes])),
        "row": (error[text].max(), ROW_FACTOR * allowed[text].max()),
    }
    ratios = {name: float(one) / (float(other) + floor) for name, (one, other) in found_and_allowed.items()}
    return {name: ratio if math.isfinite(ratio) else math.inf for name, ratio in ratios.items()}


def check_logits(found: list[Found], references: list[Reference]) -> None:
    """AssertionError, naming the text, unless all errors are within their bounds."""
    for index, (text, reference) in enumerate(zip(found, references, strict=True)):
        assert text.logits.shape == reference.exact.shape
        ratios = excesses(text, reference)
        assert max(ratios.values()) <= 1, f"text {index}: error over its bound is {ratios}"


def _rms(values: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    return values.square().mean(dim).sqrt()
