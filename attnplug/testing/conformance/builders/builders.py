"""Each build method gives the metadata of a plain build, and builders keep nothing of other steps.

Builders share no state, and one metadata serves several layers of a group.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from attnplug.core.metadata import PAD_SLOT_ID, AttentionCGSupport, AttentionMetadata
from attnplug.core.selection import Selection
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.cases.steps import (
    BatchFactory,
    decode_lengths,
    layer_kinds,
    layer_of_kind,
    long_decodes,
    mixed_lengths,
    paged_kinds,
    step_factory,
    with_lengths,
)
from attnplug.testing.conformance.check import (
    Check,
    CheckSkipped,
    CheckTable,
    ConformanceError,
    checks_from,
    error_context,
)
from attnplug.testing.conformance.harness import Harness, Output
from attnplug.testing.conformance.mistakes.expectations import (
    difference,
    expect_correct,
    expect_correct_step,
    expect_own_slots,
    stale_mistakes,
)
from attnplug.testing.conformance.target import Target, in_phase
from attnplug.testing.drawn_values import layer_tensors


def checks(target: Target) -> Iterator[Check]:
    """The checks of builders, for each kind of layer that the backend declares."""
    for kind in layer_kinds(target):
        yield from checks_from(_CHECKS, "builder", target, kind)


def _check_update(target: Target, kind: str) -> None:
    spec, size = layer_of_kind(target, kind)
    first, drawn = (step_factory(target, spec, mixed_lengths(size), seed) for seed in (0, 1))
    one = first()
    # The other KV group is of the same step, so it has the same selection.
    second = functools.partial(_selecting, drawn, one.common.selection)
    other = second()
    first_harness, second_harness = Harness.of(target, one), Harness.of(target, other)
    given = other.common.block_table_tensor, other.common.slot_mapping
    with error_context("a build before update_block_table"):
        metadata = first_harness.builder.build(0, one.common)
    if not second_harness.builder.supports_update_block_table:
        what = "update_block_table must raise TypeError where supports_update_block_table is False"
        with error_context(what):
            try:
                second_harness.builder.update_block_table(metadata, *given)
            except TypeError:
                return
        raise ConformanceError(f"{what}, and raised nothing")
    with error_context("update_block_table and a forward"):
        updated = second_harness.builder.update_block_table(metadata, *given)
        expect_own_slots(updated, other.common, "after update_block_table")
        found = second_harness.run(other, updated)
    expect_correct_step(target, second, found, "after update_block_table", stale_mistakes(one.common))
    what = "with the metadata that update_block_table was given, which must stay as it was"
    _expect_step(target, first, metadata, what, other)
    own = one.common.block_table_tensor, one.common.slot_mapping
    with error_context("update_block_table of metadata that it returned"):
        back = first_harness.builder.update_block_table(updated, *own)
        again = second_harness.builder.update_block_table(back, *given)
    _expect_step(target, first, back, "after update_block_table twice, back to the first table", other)
    _expect_step(target, second, again, "after update_block_table three times", one)
    _expect_step(target, first, back, "with the metadata of the second update_block_table", other)


def _expect_step(
    target: Target, make: BatchFactory, metadata: AttentionMetadata, what: str, stale: Batch
) -> None:
    batch = make()
    with error_context(what):
        expect_own_slots(metadata, batch.common, what)
        found = Harness.of(target, batch).run(batch, metadata)
    expect_correct_step(target, make, found, what, stale_mistakes(stale.common))


def _selecting(make: BatchFactory, selection: Selection | None) -> Batch:
    batch = make()
    return dataclasses.replace(batch, common=dataclasses.replace(batch.common, selection=selection))


def _check_drafting(target: Target, kind: str) -> None:
    spec, size = layer_of_kind(target, kind)
    harness = Harness.of(target, step_factory(target, spec, mixed_lengths(size))(), num_speculative_tokens=3)
    dropped = {"the last token dropped": lambda c: with_lengths(c, c.seq_lens.cpu() - 1)}
    for index in range(3):
        make = step_factory(
            target, spec, decode_lengths(size, index) if index else mixed_lengths(size), index
        )
        batch, what = make(), f"build_for_drafting with draft_index={index}"
        with error_context(what):
            metadata = harness.builder.build_for_drafting(batch.common, index)
            expect_own_slots(metadata, batch.common, what)
            found = harness.run(batch, metadata)
        expect_correct_step(target, make, found, what, dropped)


def _check_steps(target: Target, kind: str, fast: bool) -> None:
    spec, size = layer_of_kind(target, kind)
    new, tokens = decode_lengths(size)
    # The last steps have more requests and tokens than the first, for which buffers may have been made.
    larger = ([*new * 5], [*tokens * 5]), ([4 * size + 1], [4 * size + 1])
    lengths = (
        mixed_lengths(size),
        mixed_lengths(size, 2),
        decode_lengths(size),
        decode_lengths(size, 2),
        mixed_lengths(size),
        ([1], [size + 1]),
    )
    harness = Harness.of(target, step_factory(target, spec, lengths[0])())
    before: Batch | None = None
    for index, each in enumerate((*lengths, *larger)):
        make = step_factory(target, spec, each, index)
        batch, what = make(), f"step {index + 1} of one builder" + (", fast_build=True" if fast else "")
        with error_context(what):
            metadata = harness.builder.build(0, batch.common, fast)
            expect_own_slots(metadata, batch.common, what)
            found = harness.run(batch, metadata)
        expect_correct_step(
            target, make, found, what, {} if before is None else stale_mistakes(before.common)
        )
        before = batch


def _check_capture(target: Target, kind: str) -> None:
    spec, size = layer_of_kind(target, kind)
    settings: dict[str, Any] = {
        "num_speculative_tokens": 2,
        "cudagraph_batch_sizes": (4,),
        "max_model_len": 4 * size,
    }
    harness = Harness.of(target, step_factory(target, spec, decode_lengths(size))(), **settings)
    builder = harness.builder
    with error_context("get_cudagraph_support"):
        levels = [builder.get_cudagraph_support(builder.config, builder.kv_cache_spec) for _ in range(2)]
    if not all(isinstance(level, AttentionCGSupport) for level in levels):
        raise ConformanceError(
            f"get_cudagraph_support gave {levels[0]!r}, which is not an AttentionCGSupport"
        )
    if levels[0] is not levels[1]:
        raise ConformanceError(f"get_cudagraph_support gave {levels[0].name}, then {levels[1].name}")
    cases = (AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, 1), (AttentionCGSupport.UNIFORM_BATCH, 3)
    for level, new in cases:
        if levels[0] < level or (target.phase is not None and not in_phase(target.phase, [new])):
            continue
        common = step_factory(target, spec, decode_lengths(size, 2, new))().common
        # At graph capture only the longest length is known.
        bounds = dataclasses.replace(
            with_lengths(common, torch.full((4,), 4 * size)),
            seq_lens=torch.ones_like(common.seq_lens),
            slot_mapping=torch.full_like(common.slot_mapping, PAD_SLOT_ID),
            seq_lens_host_exact=False,
        )
        what = f"build_for_cudagraph_capture of decodes of {new} tokens, with {levels[0].name} declared"
        with error_context(what):
            made = builder.build_for_cudagraph_capture(bounds)
        if not torch.equal(made.slot_mapping[: 4 * new], bounds.slot_mapping[: 4 * new]):
            raise ConformanceError(f"{what}: slot_mapping is not the step's")


_CHECKS: CheckTable = {
    "update_block_table": (
        _check_update,
        "update_block_table gives the metadata of a build with the other table",
    ),
    "build_for_drafting": (_check_drafting, "build_for_drafting gives the metadata of a plain build"),
    "build": (functools.partial(_check_steps, fast=False), "a builder keeps nothing of earlier steps"),
    "fast_build": (
        functools.partial(_check_steps, fast=True),
        "fast_build gives the metadata of a plain build, and keeps nothing of earlier steps",
    ),
    "cudagraph-support": (_check_capture, "steps up to the declared level are built for capture"),
}


def isolation_checks(target: Target) -> Iterator[Check]:
    """The isolation_checks of several builders and of several layers, for each kind of layer that the backend declares."""
    for kind in paged_kinds(target):
        yield Check.of(
            f"builder/two-builders-{kind}", "builders share no state", _check_two_builders, target, kind
        )
        summary = "one metadata serves layers with scales, caps, sinks and slopes of their own"
        yield Check.of(f"builder/several-layers-{kind}", summary, _check_layers, target, kind)


def _check_two_builders(target: Target, kind: str) -> None:
    spec, size = layer_of_kind(target, kind, paged=True)
    makes = (
        step_factory(target, spec, mixed_lengths(size)),
        step_factory(target, spec, mixed_lengths(size, 2), 1),
    )
    batches = [make() for make in makes]
    harnesses = [Harness.of(target, batch) for batch in batches]
    what = "two builders that build before the layer of either runs"
    with error_context(what):
        built = [
            harness.builder.build(0, batch.common) for harness, batch in zip(harnesses, batches, strict=True)
        ]
        for batch, metadata in zip(batches, built, strict=True):
            expect_own_slots(metadata, batch.common, what)
        found = [harnesses[index].run(batches[index], built[index]) for index in range(2)]
    for make, answer, other in zip(makes, found, reversed(batches), strict=True):
        expect_correct_step(target, make, answer, what, stale_mistakes(other.common))


def _check_layers(target: Target, kind: str) -> None:
    spec, size = layer_of_kind(target, kind, paged=True)
    for lengths in (mixed_lengths(size), long_decodes(size)):
        _check_one_metadata(target, _layers_over(target, step_factory(target, spec, lengths)()))


def _check_one_metadata(target: Target, layers: Mapping[str, Batch]) -> None:
    names, batches = list(layers), list(layers.values())
    harness, what = Harness.of(target, *batches), "one metadata for several layers of a KV group"
    with error_context(what):
        metadata = harness.builder.build(0, batches[0].common)
        # In both orders, since a layer may disturb only the layers after it.
        places = [*range(len(batches)), *reversed(range(len(batches)))]
        found = [harness.run(batches[place], metadata, layer=place) for place in places]
    for place, answer in zip(places, found, strict=True):
        mistake = functools.partial(_first_layer_mistake, batches[0], batches[place], answer)
        layer = f"{what} ({', '.join(names)}), the layer with {names[place]}"
        expect_correct(batches[place], answer, layer, mistake)


def _first_layer_mistake(first: Batch, batch: Batch, answer: Output) -> str | None:
    as_first = dataclasses.replace(batch, spec=first.spec, tensors=first.tensors)
    if batch is first or difference(as_first, Output(answer.output, None)):
        return None
    return "the first layer's scale, cap, sinks or slopes"


def _layers_over(target: Target, batch: Batch) -> dict[str, Batch]:
    """Layers over one step with caches and tensors of their own, by the feature that each adds to the first."""
    layers = {"nothing more": batch}
    features: dict[str, dict[str, Any]] = {
        "other keys": {},
        "another scale": {"scale": batch.spec.scale / 2},
        "a soft cap": {"logits_soft_cap": 3.0},
        "sinks": {"has_sinks": True},
        "other sinks": {"has_sinks": True},
        "ALiBi": {"has_alibi": True},
        **({"no spans": {"mm_prefix": False}} if batch.spec.mm_prefix and batch.spec.sparse is None else {}),
    }
    assert batch.kv_cache is not None  # noqa: S101 - the step is over pages
    for seed, (name, fields) in enumerate(features.items(), 1):
        try:
            spec = target.changed(batch.spec, **fields)
        except CheckSkipped:
            continue
        # Also layers with equal specs have other keys than the one before.
        sign = -1 if len(layers) % 2 else 1
        layers[name] = dataclasses.replace(
            batch,
            spec=spec,
            tensors=layer_tensors(spec, seed=seed, device=target.torch_device),
            key=sign * batch.key,
            value=sign * batch.value,
            # torch negates no fp8 values.
            kv_cache=(sign * batch.kv_cache.float()).to(batch.kv_cache.dtype),
            keys=[sign * keys for keys in batch.keys],
            values=[sign * values for values in batch.values],
        )
    return layers
