"""Which known mistake gives the numbers that came back."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
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

_Numbers: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]
"""Output `[n, H, Dv]` and LSE `[n, H]`, float64."""
_Mistake: TypeAlias = tuple[str, Callable[[int], _Numbers]]
"""A name, and what it gives for a request; NaN stands for what nobody knows."""


def recognise(batch: Batch, output: torch.Tensor, lse: torch.Tensor | None) -> str | None:
    """The name of the mistake whose numbers `output [T, H, Dv]` and `lse [T, H]` are, or None.

    A backend may make a mistake on one of its paths only, so each row may be as the truth has it or
    as the mistake has it, which must differ clearly in some row. Of mistakes that give the same
    numbers the plainest is named.
    """
    truth, bound = batch.oracle(), tolerance(batch.spec)
    found = (output.detach().cpu().double(), None if lse is None else lse.detach().cpu().double())
    wrong = ~_same((truth.output, truth.lse), found, bound, 1.0)
    if not bool(wrong.any()):
        return None
    if bool((found[0].isnan().any(-1) & _sees_nothing(batch))[wrong].all()):
        return NAN_FOR_NOTHING
    parts = [_Part.of(span, wrong, truth, found) for span in _spans(batch)]
    # Most mistakes are out of the question after one request, and a short one tells it cheaply.
    suspects = sorted(
        (index for index, part in enumerate(parts) if bool(part.wrong.any())),
        key=lambda index: batch.seq_lens[index],
    )
    for name, numbers in _mistakes(batch, truth, with_lse=lse is not None):
        verdicts = (parts[index].judge(numbers(index), bound) for index in suspects)
        if _all_explained(verdicts):
            return name
    return None


def mistaken(batch: Batch) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    """Each mistake that the batch leaves room for, and the output and LSE that it gives; see `recognise`."""
    requests = len(batch.seq_lens)
    truth = batch.oracle()
    for name, numbers in _mistakes(batch, truth, with_lse=batch.spec.needs_lse):
        outputs, lses = zip(*(numbers(index) for index in range(requests)), strict=True)
        yield name, torch.cat(outputs), torch.cat(lses) if batch.spec.needs_lse else None


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

    def judge(self, mistake: _Numbers, bound: Tolerance) -> tuple[bool, bool]:
        """Whether `mistake` explains every wrong row, and whether it clearly differs from the truth in one."""
        explained = _same(mistake, self.found, bound, _SAME) | ~self.wrong
        clear = self.wrong & ~_same(mistake, self.truth, bound, _CLEAR)
        return bool(explained.all()), bool(clear.any())


def _all_explained(verdicts: Iterator[tuple[bool, bool]]) -> bool:
    is_clear = False
    for explained, clear in verdicts:
        if not explained:
            return False
        is_clear |= clear
    return is_clear


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


def _same(expected: _Numbers, found: _Numbers, bound: Tolerance, times: float) -> torch.Tensor:
    """Which rows `[n, H]` of `found` are `expected`, where that is known, within `times` the bound."""
    wide = times * bound.output * expected[0].abs().amax(-1)
    error = (found[0] - expected[0]).abs().amax(-1)
    same = (error <= wide) | expected[0].isnan().any(-1)
    if expected[1] is None or found[1] is None:
        return same
    near = (found[1] - expected[1]).abs() <= times * bound.lse * expected[1].abs().clamp_min(1.0)
    return same & ((near & expected[1].isfinite()) | (found[1] == expected[1]) | expected[1].isnan())
