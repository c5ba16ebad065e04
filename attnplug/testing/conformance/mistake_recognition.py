"""Find the known mistake that gives the numbers of a wrong answer."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeAlias

import torch

from attnplug.testing.batches import Batch
from attnplug.testing.comparison import Tolerance, tolerance
from attnplug.testing.conformance.known_mistakes import KNOWN_MISTAKES, LSE_MISTAKES
from attnplug.testing.conformance.mistake_oracle import attend, requests_of, rules_of
from attnplug.testing.oracle import OracleResult

NAN_FOR_EMPTY_ROWS = "NaN where nothing is seen"
"""The mistake of a softmax over no keys, which divides zero by zero."""

_SAME = 2.0
"""Numbers are those of a mistake within this multiple of the tolerance."""
_CLEAR = 4.0
"""A mistake must differ from the right answer by this multiple of the tolerance."""
_NOTHING = 1e-2
"""Two mistakes count as equal within this multiple of the tolerance."""

_Numbers: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]
"""Output `[n, H, Dv]` and LSE `[n, H]`, float64."""
_Mistake: TypeAlias = tuple[str, Callable[[int], _Numbers]]
"""A name, and the numbers that the mistake gives for a request; NaN for unknown values."""


def recognise(batch: Batch, output: torch.Tensor, lse: torch.Tensor | None) -> str | None:
    """The name of the known mistake that gives `output [T, H, Dv]` and `lse [T, H]`, or None.

    A backend may make a mistake in one code path only, so each row may be right or mistaken. The mistake
    must differ clearly from the right answer in some row. The nearest mistake is named; if several are
    equally near, the simplest.
    """
    truth = batch.oracle()
    bound = tolerance(batch.spec, truth.logit_size)
    found = (output.detach().cpu().double(), None if lse is None else lse.detach().cpu().double())
    right = (truth.output, None if lse is None else truth.lse)
    wrong = _error(right, found, bound) > 1
    if not bool(wrong.any()):
        return None
    empty = batch.oracle(use_sinks=False).lse.isneginf()
    if bool(found[0].isnan().any(-1)[wrong].all()) and bool(empty[wrong].all()):
        return NAN_FOR_EMPTY_ROWS
    spans = [(index, span) for index, span in enumerate(_spans(batch)) if bool(wrong[span].any())]
    # One request excludes most mistakes; short ones come first, since they are cheap.
    suspects = dict(sorted(spans, key=lambda item: batch.seq_lens[item[0]]))
    fits: dict[str, float] = {}
    for name, numbers in _mistakes(batch, truth, with_lse=lse is not None):
        error = _fit(numbers, suspects, wrong, right, found, bound)
        if error is not None:
            fits[name] = error
    nearest = min(fits.values(), default=0.0)
    return next((name for name, error in fits.items() if error <= 2 * nearest + _NOTHING), None)


def mistaken_answers(
    batch: Batch, names: Collection[str] | None = None
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    """The mistakes that apply to the batch, with the output and LSE of each; only those of `names` if given."""
    with_lse = batch.spec.needs_lse
    for name, numbers in _mistakes(batch, batch.oracle(), with_lse=with_lse):
        if names is None or name in names:
            outputs, lses = zip(*map(numbers, range(len(batch.seq_lens))), strict=True)
            yield name, torch.cat(outputs), torch.cat(lses) if with_lse else None


def _fit(
    numbers: Callable[[int], _Numbers],
    suspects: Mapping[int, slice],
    wrong: torch.Tensor,
    right: _Numbers,
    found: _Numbers,
    bound: Tolerance[torch.Tensor],
) -> float | None:
    """The largest error of a mistake in wrong rows; None unless it explains every request and is clear in one."""
    worst, is_clear = 0.0, False
    for index, span in suspects.items():
        given = numbers(index)
        bounds = Tolerance(bound.output[span], bound.lse[span], bound.whole[span])
        error = float(_error(given, _rows(found, span), bounds)[wrong[span]].max())
        if not error <= _SAME:
            return None
        worst = max(worst, error)
        is_clear |= bool((_error(given, _rows(right, span), bounds)[wrong[span]] > _CLEAR).any())
    return worst if is_clear else None


def _rows(numbers: _Numbers, span: slice) -> _Numbers:
    return numbers[0][span], None if numbers[1] is None else numbers[1][span]


def _mistakes(batch: Batch, truth: OracleResult, *, with_lse: bool) -> Iterator[_Mistake]:
    right, requests, spans = rules_of(batch), requests_of(batch), _spans(batch)
    for mistake in KNOWN_MISTAKES:
        if mistake.feature is None or mistake.feature in right.features:
            rules = dataclasses.replace(right, **mistake.changes(right))
            yield mistake.name, functools.partial(attend, rules, requests)
    for lse_mistake in LSE_MISTAKES if with_lse else ():
        lse = lse_mistake.lse_of(batch, truth)
        parts = [(truth.output[span], lse[span]) for span in spans]
        yield lse_mistake.name, parts.__getitem__


def _spans(batch: Batch) -> list[slice]:
    starts = batch.common.query_start_loc_cpu.tolist()
    return [slice(start, stop) for start, stop in itertools.pairwise(starts)]


def _error(expected: _Numbers, found: _Numbers, bound: Tolerance[torch.Tensor]) -> torch.Tensor:
    """The error of each row `[n, H]` in multiples of the bound: 0 for unknown values, inf for a found NaN."""
    output = _multiple((found[0] - expected[0]).abs().amax(-1), bound.output * expected[0].abs().amax(-1))
    output = output.masked_fill(expected[0].isnan().any(-1), 0.0)
    if expected[1] is None or found[1] is None:
        return output
    lse = _multiple((found[1] - expected[1]).abs(), bound.lse * expected[1].abs().clamp_min(1.0))
    lse = lse.masked_fill((found[1] == expected[1]) | expected[1].isnan(), 0.0)
    return torch.maximum(output, lse)


def _multiple(error: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    multiple = torch.where(error == 0, 0.0, error / bound)
    # An expected infinity gives an infinite bound, which must not accept finite values.
    return multiple.masked_fill(~error.isfinite(), math.inf)
