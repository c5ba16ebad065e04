"""The distance of an answer from the oracle's, row by row, in multiples of the bounds."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import torch

from attnplug.testing.batches import Batch
from attnplug.testing.comparison import FLUSHED, Tolerance, assert_close, assert_lse_close
from attnplug.testing.conformance.harness import Output
from attnplug.testing.oracle import OracleResult


@dataclasses.dataclass(frozen=True, eq=False)
class Deviation:
    """A wrong answer beside the right one.

    Args:
        batch: the step.
        output: what the backend gave, float64 `[T, H, Dv]`.
        lse: likewise `[T, H]`; None if the layer needs none.
        expected: the oracle's answer.
        bound: the bounds of the errors of each row.
        problem: the first difference, in one line.
    """

    batch: Batch
    output: torch.Tensor
    lse: torch.Tensor | None
    expected: OracleResult
    bound: Tolerance[torch.Tensor]
    problem: str

    @functools.cached_property
    def output_errors(self) -> torch.Tensor:
        """The error of each row in multiples of the bound, `[T, H]`; infinite for NaN."""
        return output_errors(self.output, self.expected.output, self.bound.output, self.batch.spec.dtype)

    @functools.cached_property
    def lse_errors(self) -> torch.Tensor | None:
        """Likewise of the LSE; None if the layer needs none."""
        return None if self.lse is None else lse_errors(self.lse, self.expected.lse, self.bound.lse)

    @functools.cached_property
    def wrong(self) -> torch.Tensor:
        """Whether the output or LSE of each row and head is outside its bound, bool `[T, H]`."""
        errors = self.lse_errors
        return (self.output_errors > 1) | (False if errors is None else errors > 1)

    @functools.cached_property
    def compared(self) -> torch.Tensor:
        """Whether each row was compared at all, bool `[T]`."""
        return self.batch.is_compared

    @property
    def spans(self) -> list[slice]:
        """The rows of each request."""
        return rows_of_requests(self.batch)


def deviation(batch: Batch, found: Output, *, use_sinks: bool = True) -> Deviation | None:
    """The difference of the batch's own rows of `found` from the oracle's answer; None if they agree."""
    expected = batch.oracle(use_sinks=use_sinks)
    bound = batch.row_bounds(expected)
    tokens = batch.common.num_actual_tokens
    output = batch.compared(found.output[:tokens])
    lse = None if found.lse is None else batch.compared(found.lse[:tokens])
    try:
        assert_close(output, expected.output, bound.output, whole=bound.whole)
        if lse is not None:
            assert_lse_close(lse, expected.lse, bound.lse)
    except AssertionError as problem:
        return deviation_of(batch, output, lse, expected, str(problem))
    return None


def deviation_of(
    batch: Batch,
    output: torch.Tensor,
    lse: torch.Tensor | None,
    expected: OracleResult,
    problem: str = "",
) -> Deviation:
    """The deviation of an answer to the batch's tokens; `problem` describes it."""
    return Deviation(
        batch,
        output.detach().cpu().double(),
        None if lse is None else lse.detach().cpu().double(),
        expected,
        batch.row_bounds(expected),
        problem,
    )


def rows_of_requests(batch: Batch) -> list[slice]:
    """The rows of each request of a batch."""
    starts = batch.common.query_start_loc_cpu.tolist()
    return [slice(start, stop) for start, stop in itertools.pairwise(starts)]


def output_errors(
    found: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor, dtype: str
) -> torch.Tensor:
    """The errors `[n, H]` of `found [n, H, Dv]` in multiples of the bound, relative to their row's magnitude.

    Rows below the smallest normal number of `dtype` have that magnitude. The errors are 0 where NaN is expected, which means unknown, and infinite where only `found` is NaN.
    """
    if not found.shape[-1]:
        return torch.zeros(found.shape[:2], dtype=torch.float64)
    magnitude = expected.abs().amax(-1)
    least = torch.finfo(getattr(torch, dtype)).smallest_normal
    allowed = (bound * magnitude.clamp_min(least)).clamp_min(FLUSHED).masked_fill(magnitude == 0, 0.0)
    errors = _multiple((found - expected).abs().amax(-1), allowed)
    return errors.masked_fill(expected.isnan().any(-1), 0.0)


def lse_errors(found: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """The errors of an LSE `[n, H]` in multiples of the bound, with NaN as in `output_errors`."""
    errors = _multiple((found - expected).abs(), bound * expected.abs().clamp_min(1.0))
    return errors.masked_fill((found == expected) | expected.isnan(), 0.0)


def _multiple(error: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    multiple = torch.where(error == 0, 0.0, error / bound)
    # An expected infinity gives an infinite bound, which must not accept finite values.
    return multiple.masked_fill(~error.isfinite(), math.inf)
