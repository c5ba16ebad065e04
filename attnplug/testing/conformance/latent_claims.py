"""The cases of latent attention that try a declared value."""

from __future__ import annotations

from typing import Any

from attnplug.testing.conformance.case_axes import KINDS
from attnplug.testing.conformance.claims import Claim
from attnplug.testing.conformance.latent_cases import LatentCase, latent_cases
from attnplug.testing.conformance.target import Target

_PREFILLS = ("prefill", "context", "ordered")
_MOST = 2


def cases_of(target: Target, claim: Claim) -> list[LatentCase]:
    """The first cases of latent attention with the declared value; none if there are none."""
    every = (case for case in latent_cases(target) if claim.asks(case.spec))
    return [case for case in every if any(_has(case, fixed) for fixed in claim.rows)][:_MOST]


def _has(case: LatentCase, fixed: Any) -> bool:
    return all(_has_value(case, axis, value) for axis, value in fixed.items())


def _has_value(case: LatentCase, axis: str, value: Any) -> bool:
    if axis == "shape":
        return case.shape == value or (value == "prefill" and case.shape in _PREFILLS)
    if axis == "kind":
        return all(getattr(case.spec, name) == each for name, each in KINDS[value].items())
    if axis == "block_size":
        return bool(case.block_size == value)
    # A latent cache has no dimension of heads, so both layouts have the same order.
    if axis == "layout":
        return True
    found = getattr(case.spec, axis, None)
    return bool(found) if value is True else bool(found == value)
