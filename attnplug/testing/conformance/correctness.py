"""Accepted means correct: every designed case against the oracle, and a name for what came instead."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from attnplug.testing.comparison import assert_close, assert_lse_close, tolerance
from attnplug.testing.conformance.cases import Case, designed_cases, untried
from attnplug.testing.conformance.check import Check, ConformanceError
from attnplug.testing.conformance.mistake_recognition import recognise
from attnplug.testing.conformance.target import Target
from attnplug.testing.running import run_batch


def checks(target: Target) -> Iterator[Check]:
    """One check for each designed case, and one that fails for each declared feature without a numeric case."""
    for flag in untried(target):
        name = flag.names()[0]
        summary = f"a layer that asks for {name} is as the float64 oracle has it"
        yield Check(f"correct/untried-{name}", functools.partial(_check_untried, name), summary)
    for case in designed_cases(target):
        summary = f"a {case.shape} batch is as the float64 oracle has it"
        yield Check(f"correct/{case.id}", functools.partial(check_case, target, case), summary)


def _check_untried(name: str) -> None:
    raise ConformanceError(
        f"features declares {name.upper()}, and the kit has no numeric case for it: nothing proves that it is honoured"
    )


def check_case(target: Target, case: Case) -> None:
    """Run the case and compare; a wrong answer is compared with those of known mistakes."""
    batch = case.batch(target)
    output, lse = run_batch(target.backend, batch)
    expected, bound = batch.oracle(), tolerance(batch.spec)
    tokens = batch.common.num_actual_tokens
    try:
        assert_close(output[:tokens], expected.output, bound.output)
        if lse is not None:
            assert_lse_close(lse[:tokens], expected.lse, bound.lse)
    except AssertionError as problem:
        named = recognise(batch, output[:tokens], None if lse is None else lse[:tokens])
        likely = f"; these are the numbers of a known mistake: {named}" if named else ""
        raise ConformanceError(f"{problem}{likely}", named) from None
    if not output[tokens:].isnan().all():
        raise ConformanceError(f"output rows past num_actual_tokens={tokens} were written")
    if lse is not None and not lse[tokens:].isnan().all():
        raise ConformanceError(f"LSE rows past num_actual_tokens={tokens} were written")
