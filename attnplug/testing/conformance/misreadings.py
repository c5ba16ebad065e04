"""Which known mistake gives the numbers that came back."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TypeAlias

import torch

from attnplug.testing.batches import Batch
from attnplug.testing.comparison import Tolerance, tolerance
from attnplug.testing.conformance.misreading_oracle import attend, read, requests_of
from attnplug.testing.conformance.misreading_table import MISREADINGS, MISWRITTEN_LSES
from attnplug.testing.oracle import OracleResult

__all__ = ["NAN_FOR_NOTHING", "mistaken", "recognise"]

NAN_FOR_NOTHING = "NaN where nothing is seen"
"""The name of a softmax over no keys, which divides zero by zero."""

_SAME = 2.0
"""Times the tolerance within which numbers are those of a mistake."""
_CLEAR = 4.0
"""Times the tolerance by which a mistake must differ from the truth to be told from it."""
_NOTHING = 1e-2
"""Times the tolerance by which two mistakes may differ that are the same here."""

_Numbers: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]
"""Output `[n, H, Dv]` and LSE `[n, H]`, float64."""
_Mistake: TypeAlias = tuple[str, Callable[[int], _Numbers]]
"""A name, and what it gives for a request; NaN stands for what nobody knows."""


def recognise(batch: Batch, output: torch.Tensor, lse: torch.Tensor | None) -> str | None:
    """The name of the mistake whose numbers `output [T, H, Dv]` and `lse [T, H]` are, or None.

    A backend may make a mistake on one of its paths only, so each row may be as the truth has it or
    as the mistake has it, which must differ clearly in some row. The nearest mistake is named, and of
    several as near the plainest.
    """
    truth, bound = batch.oracle(), tolerance(batch.spec)
    found = (output.detach().cpu().double(), None if lse is None else lse.detach().cpu().double())
    wrong = _error((truth.output, truth.lse), found, bound) > 1
    if not bool(wrong.any()):
        return None
    if bool(found[0].isnan().any(-1)[wrong].all()) and bool(_sees_nothing(batch)[wrong].all()):
        return NAN_FOR_NOTHING
    parts = [_Part.of(span, wrong, truth, found) for span in _spans(batch)]
    # Most mistakes are out of the question after one request, and a short one tells it cheaply.
    suspects = sorted(
        (index for index, part in enumerate(parts) if bool(part.wrong.any())),
        key=lambda index: batch.seq_lens[index],
    )
    fits: dict[str, float] = {}
    for name, numbers in _mistakes(batch, truth, with_lse=lse is not None):
        error = _worst(parts[index].judge(numbers(index), bound) for index in suspects)
        if error is not None:
            fits[name] = error
    nearest = min(fits.values(), default=0.0)
    return next((name for name, error in fits.items() if error <= 2 * nearest + _NOTHING), None)


def mistaken(
    batch: Batch, names: Collection[str] | None = None
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    """Mistakes that could be made with the batch, and the output and LSE that each gives.

    Args:
        batch: what is asked.
        names: of the mistakes wanted; default all.
    """
    with_lse = batch.spec.needs_lse
    for name, numbers in _mistakes(batch, batch.oracle(), with_lse=with_lse):
        if names is None or name in names:
            outputs, lses = zip(*map(numbers, range(len(batch.seq_lens))), strict=True)
            yield name, torch.cat(outputs), torch.cat(lses) if with_lse else None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The rows of one request: which are wrong `[n, H]`, what they ought to be and what they are."""

    wrong: torch.Tensor
    truth: _Numbers
    found: _Numbers

    @classmethod
    def of(cls, span: slice, wrong: torch.Tensor, truth: OracleResult, found: _Numbers) -> _Part:
        """The part of a batch that is in `span`."""
        expected = (truth.output[span], None if found[1] is None else truth.lse[span])
        return cls(wrong[span], expected, (found[0][span], None if found[1] is None else found[1][span]))

    def judge(self, mistake: _Numbers, bound: Tolerance) -> tuple[float, bool]:
        """The largest error of `mistake` in the wrong rows, and whether it clearly differs from the truth in one."""
        error = _error(mistake, self.found, bound)[self.wrong].max()
        return float(error), bool((_error(mistake, self.truth, bound)[self.wrong] > _CLEAR).any())


def _worst(verdicts: Iterable[tuple[float, bool]]) -> float | None:
    """The largest error of a mistake that explains every request, and is clear in one; else None."""
    worst, is_clear = 0.0, False
    for error, clear in verdicts:
        if not error <= _SAME:
            return None
        worst, is_clear = max(worst, error), is_clear or clear
    return worst if is_clear else None


def _mistakes(batch: Batch, truth: OracleResult, *, with_lse: bool) -> Iterator[_Mistake]:
    right, requests, spans = read(batch), requests_of(batch), _spans(batch)
    for misreading in MISREADINGS:
        if misreading.asked(right):
            reading = dataclasses.replace(right, **misreading.changes(right))
            yield misreading.name, functools.partial(attend, reading, requests)
    for miswritten in MISWRITTEN_LSES if with_lse else ():
        lse = miswritten.written(batch, truth)
        parts = [(truth.output[span], lse[span]) for span in spans]
        yield miswritten.name, parts.__getitem__


def _spans(batch: Batch) -> list[slice]:
    starts = batch.common.query_start_loc_cpu.tolist()
    return [slice(start, stop) for start, stop in itertools.pairwise(starts)]


def _sees_nothing(batch: Batch) -> torch.Tensor:
    return batch.oracle(use_sinks=False).lse.isneginf()


def _error(expected: _Numbers, found: _Numbers, bound: Tolerance) -> torch.Tensor:
    """The error of each row `[n, H]` in multiples of the bound: 0 where nobody knows, inf where found is NaN."""
    output = _multiple((found[0] - expected[0]).abs().amax(-1), bound.output * expected[0].abs().amax(-1))
    output = output.masked_fill(expected[0].isnan().any(-1), 0.0)
    if expected[1] is None or found[1] is None:
        return output
    lse = _multiple((found[1] - expected[1]).abs(), bound.lse * expected[1].abs().clamp_min(1.0))
    lse = lse.masked_fill((found[1] == expected[1]) | expected[1].isnan(), 0.0)
    return torch.maximum(output, lse)


def _multiple(error: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    multiple = torch.where(error == 0, 0.0, error / bound)
    # An infinity that is expected is no bound for what is not one.
    return multiple.masked_fill(~error.isfinite(), math.inf)
