"""Steps after something unusual are right: after a refusal, after drafts, and after a cross layer's first step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from attnplug.core.features import Feature
from attnplug.ops.storage import FP8_OUTPUTS, STORAGE_DTYPES
from attnplug.registry.plugins.waiting import guarded_call
from attnplug.testing.conformance.cases.steps import (
    decode_lengths,
    mixed_lengths,
    plain_scenario,
    scenario_factory,
    step_factory,
)
from attnplug.testing.conformance.check import Check, CheckSkipped, ConformanceError, SkipKind, error_context
from attnplug.testing.conformance.harness import Harness, blank_output, raw_bytes
from attnplug.testing.conformance.mistakes.expectations import expect_correct, expect_correct_step
from attnplug.testing.conformance.target import Target


def checks(target: Target) -> Iterator[Check]:
    """The checks of steps that follow others, and of tensors that only some calls have."""
    features = target.backend.features
    yield Check.of("batch/after-refusal", "a step after a refused one is right", _check_after_refusal, target)
    yield Check.of("builder/after-drafts", "a step after draft steps is right", _check_after_drafts, target)
    if Feature.CROSS | Feature.NON_CAUSAL in features:
        summary = "a cross layer serves later steps, of other requests too, without keys"
        yield Check.of("cache/cross-later-steps", summary, _check_cross, target)
    if Feature.LSE in features:
        summary = "rows of output_lse past num_actual_tokens are not written"
        yield Check.of("tensors/lse-padding", summary, _check_lse_padding, target)
    yield Check.of("tensors/output-scale-kept", "output_scale is not modified", _check_scale, target)


def _check_after_refusal(target: Target) -> None:
    make = scenario_factory(target, plain_scenario(target))
    batch = make()
    harness = Harness.of(target, batch)
    if not batch.spec.causal:
        raise CheckSkipped(f"{target.name} serves no causal layer", SkipKind.LAYER)
    wide = dataclasses.replace(batch, common=dataclasses.replace(batch.common, causal=False))
    _, error = guarded_call(harness.forward, wide)
    if error is None:
        raise CheckSkipped(f"{target.name} does not refuse causal=False, which batch/widened reports")
    fresh, what = make(), "a step of the same impl and builder, after one with causal=False was refused"
    expect_correct(fresh, harness.forward(fresh, what=what), what)


def _check_after_drafts(target: Target) -> None:
    spec = target.spec()
    size = target.block_size(spec)
    harness = Harness.of(target, step_factory(target, spec, mixed_lengths(size))(), num_speculative_tokens=3)
    for index in range(2):
        drafted = step_factory(target, spec, decode_lengths(size, index), index)()
        with error_context("build_for_drafting"):
            harness.run(drafted, harness.builder.build_for_drafting(drafted.common, index))
    make = step_factory(target, spec, decode_lengths(size, 2), 5)
    batch, what = make(), "a plain build after draft steps"
    with error_context(what):
        found = harness.run(batch, harness.builder.build(0, batch.common))
    expect_correct_step(target, make, found, what)


def _check_cross(target: Target) -> None:
    spec = target.spec(attn_type="encoder_decoder")
    size = target.block_size(spec)
    first = target.batch(spec, [1, 3], [size + 3, 7])
    harness = Harness.of(target, first)
    expect_correct(first, harness.forward(first), "the first step of a cross layer")
    # The encoder's keys of these requests were written in a step of their own.
    for lengths in ([2 * size, 5], [9, size + 1]):
        later = target.batch(spec, [1, 1], lengths, seed=lengths[1])
        Harness.of(target, later).write(later)
        what = f"a later step of a cross layer without keys, over {lengths} encoder tokens"
        expect_correct(later, harness.attend(later, with_keys=False), what)


def _check_lse_padding(target: Target) -> None:
    for scenario in ("decode", "mixed"):
        batch = scenario_factory(target, scenario, needs_lse=True)()
        tokens = batch.common.num_actual_tokens
        found = Harness.of(target, batch).forward(batch, blank_output(batch, 7.0))
        expect_correct(batch, found, "with an LSE that held 7")
        if found.lse is not None and bool((found.lse[tokens:] != 7.0).any()):
            raise ConformanceError(f"rows of output_lse past num_actual_tokens={tokens} were written")


def _check_scale(target: Target) -> None:
    tried = False
    for key in FP8_OUTPUTS:
        batch = scenario_factory(target, plain_scenario(target))()
        harness = Harness.of(target, batch)
        with error_context(f"fused_output_quant_supported({key!r})"):
            if not harness.impl.fused_output_quant_supported(key):
                continue
        tried = True
        output = blank_output(batch).output.to(STORAGE_DTYPES[key])
        scale = torch.tensor([0.037], dtype=torch.float32, device=batch.query.device)
        before = raw_bytes(scale)
        given = (batch.query, batch.key, batch.value, batch.kv_cache, harness.build(batch), output)
        with error_context(f"output_scale for an output of {key}"):
            harness.impl.forward(harness.layers[0], *given, output_scale=scale)
        if not torch.equal(raw_bytes(scale), before):
            raise ConformanceError(f"forward modified output_scale: 0.037 became {scale.item():g}")
    if not tried:
        raise CheckSkipped(f"{target.name} writes no quantised outputs")
