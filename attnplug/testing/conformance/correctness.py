"""Accepted means correct: every designed case against the oracle, and a name for what came instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from attnplug.testing.batches import Batch
from attnplug.testing.conformance.cases import Case
from attnplug.testing.conformance.check import Check, ConformanceError, error_context
from attnplug.testing.conformance.designed_cases import designed_cases
from attnplug.testing.conformance.deviation import deviation
from attnplug.testing.conformance.dropped_chunks import dropped_chunk
from attnplug.testing.conformance.expectations import wrong_answer
from attnplug.testing.conformance.guarded_cache import GuardedCache
from attnplug.testing.conformance.harness import Answer, run_batch
from attnplug.testing.conformance.inputs import inputs_kept
from attnplug.testing.conformance.latent_cases import LatentCase, latent_cases
from attnplug.testing.conformance.target import Target
from attnplug.testing.oracle import COMPUTED

_ROWS = 2**14
"""Rows of a workspace that has room for all computed tokens of a case."""


def checks(target: Target) -> Iterator[Check]:
    """One check for each designed case, and one that fails for each declared feature without a numeric case."""
    for flag in target.backend.features & ~COMPUTED:
        name = flag.names()[0]
        summary = f"a layer that asks for {name} is as the float64 oracle has it"
        yield Check.of(f"correct/untried-{name}", summary, _check_untried, name)
    if target.is_latent:
        for latent in latent_cases(target):
            summary = f"latent attention of a {latent.shape} batch is as the expanded float64 oracle has it"
            yield Check.of(f"correct/{latent.id}", summary, check_latent_case, target, latent)
    for case in designed_cases(target) if target.designs is None else target.designs.of(target):
        summary = f"a {case.shape} batch is as the float64 oracle has it"
        yield Check.of(f"correct/{case.id}", summary, check_case, target, case)


def _check_untried(name: str) -> None:
    raise ConformanceError(
        f"features declares {name.upper()}, and the kit has no numeric case for it: nothing proves that it is honoured"
    )


def check_case(target: Target, case: Case) -> None:
    """Run the case and compare; a wrong answer is compared with those of known mistakes."""
    batch = case.batch(target)
    # A cache with far blocks is large, and the others show what is written.
    is_guarded = batch.kv_cache is not None and case.shape != "far-blocks"
    guarded = GuardedCache.of(target.backend, batch) if is_guarded else None
    batch = batch if guarded is None else guarded.batch
    with inputs_kept(batch), error_context(f"a {case.shape} batch"):
        found = run_batch(target.backend, batch, options=target.own_options)
    if guarded is not None:
        guarded.expect_only_written(batch.common.slot_mapping, "forward")
    _check_answer(batch, *found)


def check_latent_case(target: Target, case: LatentCase) -> None:
    """As `check_case`, with computed tokens expanded in chunks of the case's rows."""
    batch, rows = case.batch(target), case.chunk_rows
    config: dict[str, Any] = {} if rows is None else {"context_chunk_rows": rows}
    with error_context(f"a {case.shape} batch"):
        found = Answer(*run_batch(target.backend, batch, options=target.own_options, **config))
    threshold = getattr(target.backend, "decode_threshold", 1)
    _check_answer(batch, *found, lambda: dropped_chunk(batch, found, rows or _ROWS, threshold))


def _check_answer(
    batch: Batch,
    output: torch.Tensor,
    lse: torch.Tensor | None,
    mistake: Callable[[], str | None] = lambda: None,
) -> None:
    tokens = batch.common.num_actual_tokens
    if wrong := deviation(batch, Answer(output, lse)):
        raise wrong_answer(wrong.problem, mistake(), wrong)
    for name, found in (("output", output), ("LSE", lse)):
        if found is not None and not found[tokens:].isnan().all():
            raise ConformanceError(f"{name} rows past num_actual_tokens={tokens} were written")
