"""Hints in the values of wrong rows: not written, zero, a factor, other heads' or rows' numbers, low precision."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attnplug.testing.conformance.deviation import Deviation

_ROWS = 48
"""Rows that are compared with each other at most."""
_HALF, _WORST_HALF = 2.0**-7, 2.0**-4
"""The usual and the largest relative error that numbers rounded to bfloat16 explain in a float32 layer."""
_MANY = 0.1
"""The least part of all rows and heads that is wrong where sums are rounded."""
_NEAR = 8.0
"""Multiple of the bound that a product in half precision may reach in a layer of half precision."""
_TOLD_APART = 0.1
"""The largest bound within which rows of other tokens can be told apart."""
_LARGEST = 88.0
"""exp of more overflows in float32."""


def hints(wrong: Deviation) -> Iterator[str]:
    """What the values of the wrong rows say about the cause."""
    bad = wrong.output_errors > 1
    if not bool(bad.any()):
        return
    found, right = wrong.output[bad], wrong.expected.output[bad]
    if not bool(found.isfinite().all()):
        yield _of_nan(wrong)
    elif not bool(found.any()):
        yield "the wrong rows are 0"
    elif (factor := _factor(found, right, wrong.bound.output[bad])) is not None:
        yield f"the wrong rows are the right ones times {factor:.4g}"
    elif _is_factor_of_row(found, right, wrong.bound.output[bad]):
        what = "sum of weights, or a sink that is counted too often or not at all"
        yield f"each wrong row and head is the right one times a number of its own: a wrong {what}"
    elif (moved := _other_heads(wrong) or _other_rows(wrong) or _mixed(wrong)) is not None:
        yield moved
    elif (precision := _precision(wrong, bad)) is not None:
        yield precision


def _of_nan(wrong: Deviation) -> str:
    lost = ~wrong.output.isfinite()
    rows = lost.all(-1)
    large = wrong.expected.lse.nan_to_num(neginf=0.0).abs() > _LARGEST
    if bool(large.any()) and torch.equal(lost.any(-1), large):
        return "NaN or infinity exactly where logits are beyond 88: subtract their maximum before exp"
    if bool((rows == lost.any(-1)).all()):
        return "whole rows are NaN: they were not written, or rows of blocks without a token (NaN) were read"
    return "single elements are NaN or infinite"


def _factor(found: torch.Tensor, right: torch.Tensor, bound: torch.Tensor) -> float | None:
    """The number by which all of `right [k, Dv]` must be multiplied for `found`; None if there is none."""
    square = float((right * right).sum())
    factor = float((found * right).sum()) / square if square else 0.0
    rest = (found - factor * right).abs().amax(-1)
    is_near = bool((rest <= 2 * bound * abs(factor) * right.abs().amax(-1)).all())
    return factor if is_near and factor and abs(factor - 1) > 4 * float(bound.max()) else None


def _is_factor_of_row(found: torch.Tensor, right: torch.Tensor, bound: torch.Tensor) -> bool:
    """Whether each of `found [k, Dv]` is `right` times a positive number, and that number says more than rounding."""
    square = (right * right).sum(-1)
    factors = (found * right).sum(-1) / square.where(square > 0, 1.0)
    rest = (found - factors[:, None] * right).abs().amax(-1)
    is_near = (rest <= 2 * bound * factors.abs().clamp(min=1.0) * right.abs().amax(-1)) & (factors > 0)
    return found.shape[-1] >= 8 and bool(is_near.all()) and bool(((factors - 1).abs() > 8 * bound).any())


def _other_heads(wrong: Deviation) -> str | None:
    """Words for heads in another order."""
    rows = (wrong.output_errors > 1).any(1).nonzero().flatten()[:_ROWS]
    found, right = wrong.output[rows].transpose(0, 1), wrong.expected.output[rows].transpose(0, 1)
    places = _places(found, right, float(wrong.bound.output.max()))
    if places is None or places == list(range(len(places))):
        return None
    first = next(head for head, place in enumerate(places) if head != place)
    return f"heads are in another order: head {first} has the numbers of head {places[first]}"


def _other_rows(wrong: Deviation) -> str | None:
    """Words for rows of other tokens."""
    rows = (wrong.output_errors > 1).any(1).nonzero().flatten()[:_ROWS]
    places = _places(wrong.output[rows], wrong.expected.output, float(wrong.bound.output.max()))
    if places is None or places == rows.tolist():
        return None
    pairs = [(row, place) for row, place in zip(rows.tolist(), places, strict=True) if row != place]
    if not pairs:
        return None
    return f"rows are in another order: row {pairs[0][0]} has the numbers of row {pairs[0][1]}"


def _mixed(wrong: Deviation) -> str | None:
    """Words for rows and heads of a request that changed places with each other."""
    bound, first = float(wrong.bound.output.max()), None
    if bound > _TOLD_APART:
        return None
    for span in wrong.spans:
        bad = (wrong.output_errors[span] > 1).nonzero()[:_ROWS].tolist()
        right = wrong.expected.output[span]
        magnitude = right.abs().amax(-1)
        for row, head in bad:
            found = wrong.output[span][row, head]
            same = ((right - found).abs().amax(-1) <= 2 * bound * magnitude).nonzero().tolist()
            if not same:
                return None
            first = first or (span.start + row, head, span.start + same[0][0], same[0][1])
    if first is None:
        return None
    row, head, other_row, other_head = first
    return (
        f"rows and heads of a request are mixed up: row {row} head {head} has the numbers of row {other_row} head "
        f"{other_head}; are packed groups of heads unpacked in another order?"
    )


def _places(found: torch.Tensor, right: torch.Tensor, bound: float) -> list[int] | None:
    """For each of `found [k, a, b]` the index in `right [l, a, b]` with the same numbers; None without one."""
    # Within a wide bound, numbers of any row are near those of many others.
    if found.numel() * right.shape[0] > 2**24 or bound > _TOLD_APART:
        return None
    magnitude = right.abs().amax(-1, keepdim=True)
    places = []
    for each in found:
        same = ((each - right).abs() <= 2 * bound * magnitude).flatten(1).all(1)
        if not bool(same.any()):
            return None
        places.append(int(same.nonzero()[0]))
    return places


def _precision(wrong: Deviation, bad: torch.Tensor) -> str | None:
    """Words for errors as small as half precision gives."""
    errors, spec = wrong.output_errors, wrong.batch.spec
    relative = (errors * wrong.bound.output)[bad]
    if spec.dtype == "float32":
        usual = float(relative.median())
        if usual <= _HALF and float(relative.max()) <= _WORST_HALF and float(bad.double().mean()) > 0.5:
            return f"errors around {usual:.1g}, as half precision gives: is a product or sum in bfloat16 or float16?"
    elif (
        float(relative.max()) <= _TOLD_APART
        and float(errors[bad].max()) <= _NEAR
        and float(bad.double().mean()) > _MANY
    ):
        return f"errors of a few bounds only: are sums accumulated in {spec.dtype}?"
    return None
