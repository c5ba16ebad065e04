"""Find the known mistake that gives the numbers of a wrong answer, within a budget of time."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch

from attnplug.testing.batches import Batch
from attnplug.testing.conformance.check import naming_seconds
from attnplug.testing.conformance.mistakes.attention_rules import (
    AttentionRules,
    RequestContents,
    requests_of,
    rules_of,
)
from attnplug.testing.conformance.mistakes.deviation import (
    Deviation,
    lse_errors,
    output_errors,
    rows_of_requests,
)
from attnplug.testing.conformance.mistakes.known_mistakes import KNOWN_MISTAKES, LSE_MISTAKES
from attnplug.testing.conformance.mistakes.mistake_oracle import attend
from attnplug.testing.oracle import OracleResult

NAN_FOR_EMPTY_ROWS = "NaN where nothing is seen"
"""The mistake of a softmax over no keys, which divides zero by zero."""

_SAME = 2.0
"""Numbers are those of a mistake within this multiple of the tolerance."""
_CLEAR = 4.0
"""A mistake must differ from the right answer by this multiple of the tolerance."""
_NEARER = 1.5
"""A mistake must be nearer to the answer than the right answer by this factor."""
_NOTHING = 1e-2
"""Two mistakes count as equal within this multiple of the tolerance."""
# A sample of its rows and heads is enough to exclude a mistake.
_SCORES = 2**18
"""Scores of a request that are computed for a mistake."""
_LEAST_ROWS, _MOST_HEADS, _MOST_REQUESTS = 6, 8, 16

_Numbers: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]
"""Output `[n, H, Dv]` and LSE `[n, H]`, float64."""


class Recognition(NamedTuple):
    """The known mistake that gives the numbers of an answer, if there is one.

    Args:
        name: of the mistake.
        tried: mistakes that were tried before the time was over.
        of: mistakes that apply to the layer.
    """

    name: str | None
    tried: int = 0
    of: int = 0


class _Sample(NamedTuple):
    """Some wrong rows and heads of a request."""

    request: int
    span: slice
    rows: torch.Tensor
    heads: torch.Tensor

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sample of a tensor `[T, H, ...]`."""
        return tensor[self.span][self.rows][:, self.heads]


_Mistake: TypeAlias = tuple[str, Callable[[_Sample], _Numbers]]
"""A name, and the numbers that the mistake gives for a sample; NaN for unknown values."""


def recognise(wrong: Deviation, seconds: float | None = None, only: str | None = None) -> Recognition:
    """The known mistake that gives the numbers of a wrong answer.

    Args:
        wrong: the answer.
        seconds: the time that the search may take; by default a share of what is left to the check.
        only: the one mistake to try.
    """
    # A backend may make a mistake in one code path only, so each row may be right or mistaken. The
    # mistake must differ clearly from the right answer in some row. The nearest mistake is named; if
    # several are equally near, the simplest. Long requests are compared in a sample of their wrong rows.
    end = time.monotonic() + (naming_seconds() if seconds is None else seconds)
    bad = wrong.wrong
    if wrong.output.shape != wrong.expected.output.shape or not bool(bad.any()):
        return Recognition(None)
    requests = requests_of(wrong.batch)
    if bool(wrong.output.isnan().any(-1)[bad].all()) and _see_nothing(wrong, requests):
        return Recognition(NAN_FOR_EMPTY_ROWS)
    if rounded := _rounded_lse(wrong):
        return Recognition(rounded)
    # An LSE that is right everywhere may come from elsewhere.
    errors = wrong.lse_errors
    parts = frozenset({"output"} if errors is None or bool((errors <= 1).all()) else {"output", "lse"})
    samples = _samples(wrong, requests)
    known = _mistakes(wrong.batch, wrong.expected, with_lse=wrong.lse is not None)
    mistakes = [each for each in known if only in (None, each[0])]
    fits: dict[str, float] = {}
    tried = 0
    for name, numbers in mistakes:
        if time.monotonic() > end:
            break
        tried += 1
        # Naming is a help: a mistake whose numbers cannot be computed for a batch explains nothing.
        with contextlib.suppress(RuntimeError, IndexError):
            error = _fit(numbers, samples, wrong, parts)
            if error is not None:
                fits.setdefault(name, error)
    nearest = min(fits.values(), default=0.0)
    named = next((name for name, error in fits.items() if error <= 2 * nearest + _NOTHING), None)
    return Recognition(named, tried, len(mistakes))


def mistaken_answers(
    batch: Batch, names: Collection[str] | None = None
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    """The mistakes that apply to the batch, with the output and LSE of each; only those of `names` if given."""
    with_lse = batch.spec.needs_lse
    heads = torch.arange(batch.spec.num_heads)
    whole = [
        _Sample(index, span, torch.arange(span.stop - span.start), heads)
        for index, span in enumerate(rows_of_requests(batch))
    ]
    for name, numbers in _mistakes(batch, batch.oracle(), with_lse=with_lse):
        if names is None or name in names:
            outputs, lses = zip(*map(numbers, whole), strict=True)
            yield name, torch.cat(outputs), torch.cat(lses) if with_lse else None


def _rounded_lse(wrong: Deviation) -> str | None:
    """The name of an LSE that was stored in half precision: its numbers are, and are near the right ones."""
    found, errors = wrong.lse, wrong.lse_errors
    if found is None or errors is None or bool((wrong.output_errors > 1).any()):
        return None
    for dtype in (torch.float16, torch.bfloat16):
        # Numbers of a bit less are a rounding of sums that differ a bit.
        near = errors * wrong.bound.lse <= 2 * torch.finfo(dtype).eps
        if bool((found == found.to(dtype).double()).all()) and bool(near.all()):
            return f"LSE rounded to {str(dtype).removeprefix('torch.')}"
    return None


def _see_nothing(wrong: Deviation, requests: Sequence[RequestContents]) -> bool:
    """Whether all wrong rows belong to queries that see no key."""
    plain = dataclasses.replace(rules_of(wrong.batch), sinks=None)
    for index, span in enumerate(wrong.spans):
        rows = wrong.wrong[span].any(1).nonzero().flatten()
        one = torch.zeros(1, dtype=torch.int64)
        if len(rows) and not bool(attend(plain, requests, index, rows, one)[1].isneginf().all()):
            return False
    return True


def _samples(wrong: Deviation, requests: Sequence[RequestContents]) -> list[_Sample]:
    """Samples of the wrong requests, the short ones first."""
    # One excludes most mistakes, and short ones are cheap.
    samples = []
    for index, span in enumerate(wrong.spans):
        rows = wrong.wrong[span].any(1).nonzero().flatten()
        if len(rows):
            heads = _spread(wrong.wrong[span].any(0).nonzero().flatten(), _MOST_HEADS)
            keys = max(requests[index].key.shape[0], 1)
            most = max(_SCORES // (keys * len(heads)), _LEAST_ROWS)
            samples.append(_Sample(index, span, _spread(rows, most), heads))
    samples.sort(key=lambda sample: wrong.batch.seq_lens[sample.request])
    return [samples[place] for place in _spread(torch.arange(len(samples)), _MOST_REQUESTS).tolist()]


def _spread(numbers: torch.Tensor, most: int) -> torch.Tensor:
    """At most `most` of the numbers, with the first and the last."""
    if len(numbers) <= most:
        return numbers
    return numbers[torch.linspace(0, len(numbers) - 1, most).round().long()]


def _fit(
    numbers: Callable[[_Sample], _Numbers],
    samples: Sequence[_Sample],
    wrong: Deviation,
    parts: Collection[str],
) -> float | None:
    """The largest error of a mistake in wrong rows; None unless it explains every request and is clear in one.

    A mistake that is hardly nearer than the right answer explains nothing.
    """
    worst, of_right, is_clear = 0.0, 0.0, False
    right, answer = (wrong.expected.output, wrong.expected.lse), (wrong.output, wrong.lse)
    for sample in samples:
        given, bad = numbers(sample), sample.of(wrong.wrong)
        if not bad.any():
            continue
        error = float(_errors(given, answer, wrong, sample, parts)[bad].amax())
        if not error <= _SAME:
            return None
        worst = max(worst, error)
        of_right = max(of_right, float(_excess(wrong, sample, parts)[bad].amax()))
        is_clear |= bool((_errors(given, right, wrong, sample, parts)[bad] > _CLEAR).any())
    return worst if is_clear and worst <= of_right / _NEARER else None


def _excess(wrong: Deviation, sample: _Sample, parts: Collection[str]) -> torch.Tensor:
    """The errors `[n, H]` of the sample from the right answer, in multiples of the bounds."""
    errors = torch.zeros(len(sample.rows), len(sample.heads), dtype=torch.float64)
    if "output" in parts:
        errors = sample.of(wrong.output_errors)
    if "lse" in parts and wrong.lse_errors is not None:
        errors = torch.maximum(errors, sample.of(wrong.lse_errors))
    return errors


def _errors(
    given: _Numbers, whole: _Numbers, wrong: Deviation, sample: _Sample, parts: Collection[str]
) -> torch.Tensor:
    """The errors `[n, H]` of the sample of a whole answer from `given`, in multiples of the bounds."""
    errors = torch.zeros(len(sample.rows), len(sample.heads), dtype=torch.float64)
    if "output" in parts:
        errors = output_errors(
            sample.of(whole[0]), given[0], sample.of(wrong.bound.output), wrong.batch.spec.dtype
        )
    if "lse" in parts and given[1] is not None and whole[1] is not None:
        errors = torch.maximum(errors, lse_errors(sample.of(whole[1]), given[1], sample.of(wrong.bound.lse)))
    return errors


def _mistakes(batch: Batch, truth: OracleResult, *, with_lse: bool) -> Iterator[_Mistake]:
    right, requests = rules_of(batch), requests_of(batch)
    features = right.features | ({"pages"} if batch.kv_cache is not None else frozenset())
    for mistake in KNOWN_MISTAKES:
        applies = mistake.feature is None or mistake.feature in features
        if not applies or (mistake.only == "lse" and not with_lse):
            continue
        rules = dataclasses.replace(right, **mistake.changes(right))
        yield mistake.name, functools.partial(_answer, rules, requests, truth, mistake.only)
    for lse_mistake in LSE_MISTAKES if with_lse else ():
        yield lse_mistake.name, functools.partial(_with_lse, truth.output, lse_mistake.lse_of(batch, truth))


def _answer(
    rules: AttentionRules,
    requests: Sequence[RequestContents],
    truth: OracleResult,
    only: str | None,
    sample: _Sample,
) -> _Numbers:
    output, lse = attend(rules, requests, sample.request, sample.rows, sample.heads)
    return (sample.of(truth.output) if only else output), lse


def _with_lse(output: torch.Tensor, lse: torch.Tensor, sample: _Sample) -> _Numbers:
    return sample.of(output), sample.of(lse)
