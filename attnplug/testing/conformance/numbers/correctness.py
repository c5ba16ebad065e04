"""Accepted means correct: every designed case against the oracle, and a name for what came instead.

The mistakes of a prefill of latents that leaves out a chunk of the computed tokens, or attends it twice.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Iterator

import torch

from attnplug.mla.chunks import ContextChunk, plan_context_chunks
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.calls.inputs import inputs_kept
from attnplug.testing.conformance.cases.case_axes import lengths
from attnplug.testing.conformance.cases.cases import Case
from attnplug.testing.conformance.cases.designed_cases import designed_cases
from attnplug.testing.conformance.check import Check, CheckSkipped, ConformanceError, SkipKind, error_context
from attnplug.testing.conformance.harness import EngineLayer, Output, blank_output, run_batch
from attnplug.testing.conformance.mistakes.deviation import deviation
from attnplug.testing.conformance.mistakes.expectations import difference, wrong_answer
from attnplug.testing.conformance.mistakes.misread_views import Call, misread_view
from attnplug.testing.conformance.numbers.cache_reads import GuardedCache
from attnplug.testing.conformance.target import Target
from attnplug.testing.oracle import COMPUTED


def dropped_chunk(batch: Batch, found: Output, rows: int, threshold: int) -> str | None:
    """The chunk without which, or with twice which, the step has these numbers; None if no chunk explains them.

    Args:
        batch: the step.
        found: the wrong answer.
        rows: rows of the workspace in which computed tokens are expanded.
        threshold: the longest query that is decoded, not prefilled.
    """
    new = batch.common.query_start_loc_cpu.diff().tolist()
    first = next((row for row, count in enumerate(new) if count > threshold), len(new))
    context = [tokens - count for tokens, count in zip(batch.seq_lens, new, strict=True)][first:]
    size = batch.common.block_table_tensor.shape[1] if batch.kv_cache is None else batch.kv_cache.shape[1]
    chunks = plan_context_chunks(context, rows, size) if rows >= size else []
    for number, chunk in enumerate(chunks, 1):
        for times, what in ((0, "left out of a prefill"), (2, "attended twice in a prefill")):
            if difference(_repeat(batch, chunk, first, times), found) is None:
                return f"chunk {number} of {len(chunks)} of the computed tokens {what}"
    return None


def _repeat(batch: Batch, chunk: ContextChunk, first: int, times: int) -> Batch:
    """The batch with the chunk's tokens so many times."""
    keys, values, lengths = [*batch.keys], [*batch.values], [*batch.seq_lens]
    for place, (start, count) in enumerate(zip(chunk.starts, chunk.lengths, strict=True)):
        row = first + chunk.first + place
        for tensors in (keys, values):
            own = tensors[row]
            tensors[row] = torch.cat(
                [own[:start], *[own[start : start + count]] * times, own[start + count :]]
            )
        lengths[row] += (times - 1) * count
    return dataclasses.replace(batch, keys=keys, values=values, seq_lens=lengths)


# Rows of a workspace that has room for all computed tokens of a case.
_ROWS = 2**14
_MOST_SECONDS = 60.0
"""The longest step: interpreted kernels and masks in float64 take more for a prompt of thousands of tokens."""


def checks(target: Target) -> Iterator[Check]:
    """One check for each designed case, and one that fails for each declared feature without a numeric case."""
    for flag in target.backend.features & ~COMPUTED:
        name = flag.names()[0]
        summary = f"a layer that asks for {name} is as the float64 oracle has it"
        yield Check.of(f"correct/untried-{name}", summary, _check_untried, name)
    for case in designed_cases(target) if target.designs is None else target.designs.of(target):
        summary = f"a {case.shape} batch is as the float64 oracle has it"
        yield Check.of(f"correct/{case.id}", summary, check_case, target, case)


def _check_untried(name: str) -> None:
    raise ConformanceError(
        f"features declares {name.upper()}, and the kit has no numeric case for it: nothing proves that it is honoured"
    )


def _expect_fast(target: Target, case: Case) -> None:
    """CheckSkipped if a prompt of 700 tokens takes so long that one of thousands does not fit into a run."""
    short = dataclasses.replace(case, shape="long-prompt")
    batch, seconds = short.batch(target), math.inf
    for _ in range(2):
        # The less of two runs, because the first one may compile.
        start = time.perf_counter()
        with error_context(f"a {short.shape} batch"):
            run_batch(target.backend, batch, options=target.own_options, **case.config)
        seconds = min(seconds, time.perf_counter() - start)
    times = (lengths(case.shape, case.spec, 1)[0][0] / lengths(short.shape, case.spec, 1)[0][0]) ** 2
    if seconds * times > _MOST_SECONDS:
        raise CheckSkipped(
            f"a prompt of 700 tokens takes {seconds:.2g} s, and one of {case.shape} {times:.0f} times as long",
            SkipKind.SLOW,
        )


def check_case(target: Target, case: Case) -> None:
    """Run the case and compare; a wrong answer is compared with those of known mistakes."""
    if case.shape == "far-prompt":
        _expect_fast(target, case)
    batch = case.batch(target)
    # A cache with far blocks is large, and the others show what is written.
    is_guarded = batch.kv_cache is not None and case.shape != "far-blocks"
    guarded = GuardedCache.of(target.backend, batch) if is_guarded else None
    batch = batch if guarded is None else guarded.batch
    view = functools.partial(
        misread_view, lambda: _call(case.batch(target)), functools.partial(_run, target, case)
    )
    with inputs_kept(batch):
        try:
            with error_context(f"a {case.shape} batch"):
                found = _run(target, case, _call(batch))
        except ConformanceError as problem:
            if mistake := view():
                raise ConformanceError(f"{problem}\n{mistake}", mistake) from problem
            raise
    if guarded is not None:
        guarded.expect_only_written(batch.common.slot_mapping, "forward")
    tokens = batch.common.num_actual_tokens
    if wrong := deviation(batch, found):
        threshold = getattr(target.backend, "decode_threshold", 1)
        rows = case.chunk_rows or _ROWS
        mistake = view()
        if mistake is None and case.spec.mla:
            mistake = dropped_chunk(batch, found, rows, threshold)
        raise wrong_answer(wrong.problem, mistake, wrong)
    for name, rows_of in zip(("output", "LSE"), found, strict=True):
        if rows_of is not None and not rows_of[tokens:].isnan().all():
            raise ConformanceError(f"{name} rows past num_actual_tokens={tokens} were written")


def _call(batch: Batch) -> Call:
    """The call of a case: some layers have their scales from the engine's layer, others from their tensors."""
    scale = batch.tensors.k_scale
    is_engines = batch.spec.has_kv_scales and isinstance(scale, float)
    if batch.spec.head_scales and isinstance(scale, torch.Tensor):
        is_engines = not scale.is_contiguous()
    return Call(batch, blank_output(batch), EngineLayer(batch) if is_engines else None)


def _run(target: Target, case: Case, call: Call) -> Output:
    given = {"layer": call.layer, "into": call.into, "options": target.own_options}
    return Output(*run_batch(target.backend, call.batch, **given, **case.config))
