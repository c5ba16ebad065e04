"""Every way of making a step's metadata gives what a plain build gives, and builders remember no other step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch

from attnplug.core.metadata import (
    PAD_SLOT_ID,
    AttentionCGSupport,
    CommonAttentionMetadata,
)
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.check import Check, ConformanceError
from attnplug.testing.conformance.driving import Driver
from attnplug.testing.conformance.phases import in_phase
from attnplug.testing.conformance.steps import decodes, kinds, layer_of_kind, mixed, step_of
from attnplug.testing.conformance.target import Target
from attnplug.testing.conformance.verdicts import Misread, check_slots, during, judge, with_lengths

__all__ = ["checks", "kept_of"]


def checks(target: Target) -> Iterator[Check]:
    """The checks of builders, for each kind of layer that the backend declares."""
    for kind in kinds(target):
        for name, (run, summary) in _CHECKS.items():
            yield Check(f"builder/{name}-{kind}", functools.partial(run, target, kind), summary)


def kept_of(other: CommonAttentionMetadata) -> dict[str, Misread]:
    """What a builder may keep of another step with as many requests and tokens."""
    lengths = other.seq_lens.cpu()
    table = other.block_table_tensor
    return {
        "another step's block table": lambda c: dataclasses.replace(c, block_table_tensor=table),
        "another step's lengths": lambda c: with_lengths(c, lengths),
    }


def _check_update(target: Target, kind: str) -> None:
    spec = layer_of_kind(target, kind)
    first, second = (step_of(target, spec, mixed(target.block_size(spec)), seed) for seed in (0, 1))
    one, other = first(), second()
    of_one, of_other = Driver.of(target, one), Driver.of(target, other)
    given = other.common.block_table_tensor, other.common.slot_mapping
    with during("a build before update_block_table"):
        metadata = of_one.builder.build(0, one.common)
    if not of_other.builder.supports_update_block_table:
        what = "update_block_table must raise TypeError where supports_update_block_table is False"
        with during(what):
            try:
                of_other.builder.update_block_table(metadata, *given)
            except TypeError:
                return
        raise ConformanceError(f"{what}, and raised nothing")
    with during("update_block_table and a forward"):
        updated = of_other.builder.update_block_table(metadata, *given)
        check_slots(updated, other.common, "after update_block_table")
        found = of_other.run(other, updated)
    judge(target, second, found, "after update_block_table", kept_of(one.common))
    what = "with the metadata that update_block_table was given, which must stay as it was"
    with during(what):
        check_slots(metadata, one.common, what)
        found = of_one.run(one, metadata)
    judge(target, first, found, what, kept_of(other.common))


def _check_drafting(target: Target, kind: str) -> None:
    spec = layer_of_kind(target, kind)
    size = target.block_size(spec)
    driver = Driver.of(target, step_of(target, spec, mixed(size))(), num_speculative_tokens=3)
    for index in range(3):
        make = step_of(target, spec, decodes(size, index) if index else mixed(size), index)
        batch, what = make(), f"build_for_drafting with draft_index={index}"
        with during(what):
            metadata = driver.builder.build_for_drafting(batch.common, index)
            check_slots(metadata, batch.common, what)
            found = driver.run(batch, metadata)
        judge(target, make, found, what, {"the last token dropped": _without_last})


def _without_last(common: CommonAttentionMetadata) -> CommonAttentionMetadata:
    return with_lengths(common, common.seq_lens.cpu() - 1)


def _check_steps(target: Target, kind: str, fast: bool) -> None:
    spec = layer_of_kind(target, kind)
    size = target.block_size(spec)
    lengths = mixed(size), mixed(size, 2), decodes(size), decodes(size, 2), mixed(size), ([1], [size + 1])
    driver = Driver.of(target, step_of(target, spec, lengths[0])())
    before: Batch | None = None
    for index, each in enumerate(lengths):
        make = step_of(target, spec, each, index)
        batch, what = make(), f"step {index + 1} of one builder" + (", fast_build=True" if fast else "")
        with during(what):
            metadata = driver.builder.build(0, batch.common, fast)
            check_slots(metadata, batch.common, what)
            found = driver.run(batch, metadata)
        judge(target, make, found, what, {} if before is None else kept_of(before.common))
        before = batch


def _check_capture(target: Target, kind: str) -> None:
    spec = layer_of_kind(target, kind)
    size = target.block_size(spec)
    settings = {"num_speculative_tokens": 2, "cudagraph_batch_sizes": (4,), "max_model_len": 4 * size}
    driver = Driver.of(target, step_of(target, spec, decodes(size))(), **settings)
    builder = driver.builder
    with during("get_cudagraph_support"):
        levels = [builder.get_cudagraph_support(builder.config, builder.kv_cache_spec) for _ in range(2)]
    if not all(isinstance(level, AttentionCGSupport) for level in levels):
        raise ConformanceError(f"get_cudagraph_support gave {levels[0]!r}, which is no AttentionCGSupport")
    if levels[0] is not levels[1]:
        raise ConformanceError(f"get_cudagraph_support gave {levels[0].name}, then {levels[1].name}")
    asked = (AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, 1), (AttentionCGSupport.UNIFORM_BATCH, 3)
    for level, new in asked:
        if levels[0] < level or (target.phase is not None and not in_phase(target.phase, [new])):
            continue
        common = step_of(target, spec, decodes(size, 2, new))().common
        # As a graph is captured: no length is known, only the longest.
        bounds = dataclasses.replace(
            with_lengths(common, torch.full((4,), 4 * size)),
            seq_lens=torch.ones_like(common.seq_lens),
            slot_mapping=torch.full_like(common.slot_mapping, PAD_SLOT_ID),
            seq_lens_host_exact=False,
        )
        what = f"build_for_cudagraph_capture of decodes of {new} tokens, with {levels[0].name} declared"
        with during(what):
            made = builder.build_for_cudagraph_capture(bounds)
        if not torch.equal(made.slot_mapping[: 4 * new], bounds.slot_mapping[: 4 * new]):
            raise ConformanceError(f"{what}: slot_mapping is not the step's")


_CHECKS: dict[str, tuple[Callable[[Target, str], None], str]] = {
    "update_block_table": (_check_update, "update_block_table gives what a build with another table gives"),
    "build_for_drafting": (_check_drafting, "build_for_drafting gives what a plain build gives"),
    "build": (functools.partial(_check_steps, fast=False), "a builder keeps nothing of the steps before"),
    "fast_build": (
        functools.partial(_check_steps, fast=True),
        "fast_build gives what a plain build gives, and keeps nothing of the steps before",
    ),
    "cudagraph-support": (
        _check_capture,
        "the level declared is one, and steps up to it are built for capture",
    ),
}
