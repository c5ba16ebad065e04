"""Compare a backend's answer with the oracle's, and name the known mistake that gives the same numbers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch

from attnplug.core.errors import BatchError
from attnplug.core.metadata import AttentionMetadata, CommonAttentionMetadata
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.cases.steps import with_lengths
from attnplug.testing.conformance.check import ConformanceError
from attnplug.testing.conformance.harness import Harness, Output
from attnplug.testing.conformance.mistakes.deviation import Deviation, deviation
from attnplug.testing.conformance.mistakes.mistake_recognition import recognise
from attnplug.testing.conformance.mistakes.wrong_answers import description
from attnplug.testing.conformance.target import Target

StepMistake: TypeAlias = Callable[[CommonAttentionMetadata], CommonAttentionMetadata]
"""Gives the step as a backend with a known mistake reads it."""


def difference(batch: Batch, found: Output, *, use_sinks: bool = True) -> str | None:
    """The first difference of the batch's own rows of `found` from the oracle's answer; None if they agree."""
    wrong = deviation(batch, found, use_sinks=use_sinks)
    return None if wrong is None else wrong.problem


def wrong_answer(problem: str, mistake: str | None, wrong: Deviation | None = None) -> ConformanceError:
    """The error for a wrong answer, which names the known mistake that gives the same numbers.

    Without a `mistake` the known ones are tried on `wrong`, which is described in some lines.
    """
    lines, hint = [] if wrong is None else description(wrong), ""
    if mistake is None and wrong is not None:
        found = recognise(wrong)
        mistake = found.name
        if mistake is None and found.tried < found.of:
            lines.append(f"time was over after {found.tried} of {found.of} known mistakes: none of them fits")
    if mistake is not None:
        hint = f"; these are the numbers of a known mistake: {mistake}"
    step = None if wrong is None else wrong.batch.made_of
    pattern = next((line for line in lines if line.startswith("pattern: ")), "")
    return ConformanceError("\n".join([f"{problem}{hint}", *lines]), mistake, step, pattern)


def expect_correct(
    batch: Batch,
    found: Output,
    what: str,
    mistake: Callable[[], str | None] = lambda: None,
    *,
    use_sinks: bool = True,
) -> None:
    """Raise ConformanceError, which begins with `what`, unless `found` is the oracle's answer but for padding.

    `mistake` is called for a wrong answer; it returns the name of the mistake of this check that explains it.
    """
    if wrong := deviation(batch, found, use_sinks=use_sinks):
        raise wrong_answer(f"{what}: {wrong.problem}", mistake(), wrong)


def expect_correct_step(
    target: Target,
    make: Callable[[], Batch],
    found: Output,
    what: str,
    mistakes: Mapping[str, StepMistake] | None = None,
) -> None:
    """Raise ConformanceError unless `found` is the oracle's answer to the batch that `make` returns.

    A wrong answer is compared with that of a plain build for each of `mistakes`; the error names the
    mistake that gives the same numbers.
    """

    def mistake() -> str | None:
        given = mistakes or {}
        return next((name for name in given if _gives(target, make(), given[name], found)), None)

    expect_correct(make(), found, what, mistake)


def expect_batch_refused(target: Target, batch: Batch, what: str, harness: Harness | None = None) -> None:
    """Raise ConformanceError, which begins with `what`, unless the backend refuses the step with a BatchError.

    The step is run by `harness`, by default a new one.
    """
    try:
        (harness or Harness.of(target, batch)).forward(batch)
    except ConformanceError as problem:
        # Any other error may come from the kernel, which is a crash and no refusal.
        if isinstance(problem.__cause__, BatchError):
            return
        raise ConformanceError(f"{what} must raise a BatchError: {problem}") from problem
    raise ConformanceError(f"{what} was accepted; it must raise a BatchError")


def expect_own_slots(metadata: AttentionMetadata, common: CommonAttentionMetadata, what: str) -> None:
    """Raise ConformanceError unless the metadata has the step's slots, where `forward` writes new keys."""
    tokens = common.num_actual_tokens
    if not torch.equal(metadata.slot_mapping[:tokens].long(), common.slot_mapping[:tokens]):
        raise ConformanceError(f"{what}: metadata.slot_mapping is not the step's own, so new keys go astray")


def _gives(target: Target, batch: Batch, mistake: StepMistake, found: Output) -> bool:
    # A mistake may raise: then it does not explain the answer.
    with contextlib.suppress(Exception):
        harness = Harness.of(target, batch)
        given = harness.run(batch, harness.builder.build(0, mistake(batch.common))).output
        bounds = {"rtol": batch.bound, "atol": batch.bound}
        return torch.allclose(given.double(), found.output.double(), **bounds, equal_nan=True)
    return False


def stale_mistakes(other: CommonAttentionMetadata) -> dict[str, StepMistake]:
    """Mistakes of a builder that keeps state of `other`, a step with as many requests and tokens."""
    lengths, table = other.seq_lens.cpu(), other.block_table_tensor
    spans = {"mm_prefix_spans": other.mm_prefix_spans, "mm_prefix_spans_cpu": other.mm_prefix_spans_cpu}
    return {
        "another step's spans": lambda c: dataclasses.replace(c, **spans),
        "another step's block table": lambda c: dataclasses.replace(c, block_table_tensor=table),
        "another step's lengths": lambda c: with_lengths(c, lengths),
        "another step's block table and lengths": lambda c: dataclasses.replace(
            with_lengths(c, lengths), block_table_tensor=table
        ),
    }
