"""Writes to the KV cache: the right values at the slots of the batch, and nothing else.

The scales of quantised pages that count: those of the engine's layer, else those given to `from_spec`, in numbers or tensors.

Scales of the engine's layer that do not belong to a call change no number of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from attnplug.core.features import Feature
from attnplug.core.impl import LayerTensors, host_scale
from attnplug.core.kv_format import kv_format
from attnplug.core.spec import LayerSpec
from attnplug.ops.kv_codec import codec_of
from attnplug.ops.storage import storage_dtype
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.cases.steps import (
    decode_lengths,
    mixed_lengths,
    of_each_storage,
    paged_scenarios,
    scenario_factory,
    scenarios,
)
from attnplug.testing.conformance.check import (
    Check,
    CheckSkipped,
    CheckTable,
    ConformanceError,
    checks_from,
    error_context,
)
from attnplug.testing.conformance.harness import Harness, HarnessLayer, Output, make_impl, run_batch
from attnplug.testing.conformance.layer_names import layer_names
from attnplug.testing.conformance.mistakes.attention_rules import scales_of
from attnplug.testing.conformance.mistakes.expectations import difference, expect_correct, wrong_answer
from attnplug.testing.conformance.numbers.cache_reads import GuardedCache, pages_of, slots_of
from attnplug.testing.conformance.target import Target
from attnplug.testing.drawn_values import FP8_SCALES, stored_scale
from attnplug.testing.oracle import stored_values
from attnplug.testing.pages import encoding_fault, rows_at

_SHARERS: dict[str, tuple[Feature, dict[str, Any]]] = {
    "window": (Feature.SLIDING_WINDOW, {"window": (5, 0)}),
    "chunk": (Feature.CHUNKED_LOCAL, {"chunk_size": 16}),
    "cap": (Feature.SOFT_CAP, {"logits_soft_cap": 3.0}),
    "scale": (Feature(0), {"scale": 0.15}),
}
"""The fields that only the sharing layer has, and the feature that it needs."""
# Float16 does not hold it, so a cache of wider numbers that goes through float16 loses it.
_LARGE = 2.0**20


def checks(target: Target) -> Iterator[Check]:
    """The checks of writes, in each scenario over pages, and of each declared storage type."""
    for scenario in paged_scenarios(target):
        yield from checks_from(_CHECKS, "cache", target, scenario)
    if Feature.CROSS | Feature.NON_CAUSAL in target.backend.features:
        summary = "a cross layer writes the slots of the encoder's tokens and nothing else"
        yield Check.of("cache/only-slots-written-cross", summary, _check_cross, target)
    yield from checks_from(_ONCE, "cache", target)
    for name, (needed, fields) in _SHARERS.items():
        if needed in target.backend.features:
            summary = f"a layer with a {name} of its own reads the cache of one without"
            yield Check.of(f"cache/sharing-{name}", summary, _check_sharing, target, **fields)
    for family, stored in target.scaled_families.items():
        summary = f"a layer that shares an {family} cache reads it with its scales"
        yield Check.of(f"cache/sharing-{family}", summary, _check_sharing, target, kv_cache_dtype=stored)
    for name in target.kv_cache_dtypes:
        summary = f"a cache of {name} stores keys and values rounded, or divided by their scales"
        yield Check.of(f"cache/stored-{name}", summary, _check_stored, target, name)
        if Feature.HEAD_SCALES in target.backend.features and kv_format(name).feature == "fp8_kv":
            summary = f"a cache of {name} stores keys and values divided by the scales of their heads"
            yield Check.of(
                f"cache/stored-heads-{name}", summary, _check_stored, target, name, head_scales=True
            )
        if name in target.scaled_kv_dtypes:
            summary = f"a value too large for {name} is stored as the largest finite value"
            yield Check.of(f"cache/clamped-{name}", summary, _check_clamped, target, name)


def _check_only_slots(target: Target, scenario: str) -> None:
    guarded = GuardedCache.of(target.backend, scenario_factory(target, scenario)())
    Harness.of(target, guarded.batch).forward(guarded.batch)
    guarded.expect_only_written(slots_of(guarded.batch), "forward")


def _check_cross(target: Target) -> None:
    spec = target.spec(attn_type="encoder_decoder")
    size = target.block_size(spec)
    batch = target.batch(spec, [1, 5, 0], [size + 3, 9, 2], padding=3)
    guarded = GuardedCache.of(target.backend, batch)
    Harness.of(target, guarded.batch).forward(guarded.batch)
    guarded.expect_only_written(batch.common.slot_mapping, "forward")


def _check_attend_reads(target: Target, scenario: str) -> None:
    batch = scenario_factory(target, scenario)()
    Harness.of(target, batch).write(batch)
    guarded = GuardedCache.of(target.backend, batch)
    Harness.of(target, guarded.batch).attend(guarded.batch)
    guarded.expect_only_written(slots_of(batch)[:0], "attend")


def _check_negative(target: Target) -> None:
    for fields in of_each_storage(target):
        with contextlib.suppress(CheckSkipped) if fields else contextlib.nullcontext():
            _expect_negative(target, **fields)


def _expect_negative(target: Target, **fields: Any) -> None:
    guarded = GuardedCache.of(target.backend, scenario_factory(target, "mixed", **fields)())
    batch = guarded.batch
    slots = batch.common.slot_mapping
    slots[0] = slots[3:6] = slots[batch.common.num_actual_tokens - 1] = -1
    Harness.of(target, batch).write(batch)
    guarded.expect_only_written(slots_of(batch), "update_kv_cache, with tokens of slot -1,")
    _expect_stored(target, batch)


def _check_sharing(target: Target, kv_cache_dtype: str = "auto", **own: Any) -> None:
    """A layer writes, and another with `own` fields reads its pages."""
    if kv_cache_dtype == "auto":
        batch = scenario_factory(target, "mixed")()
    else:
        batch = _batch(target, kv_cache_dtype, **FP8_SCALES)
    spec = target.changed(batch.spec, **own)
    if own and spec == batch.spec:
        raise CheckSkipped(f"{target.name} serves no two such layers that differ in {', '.join(own)}")
    Harness.of(target, batch).write(batch)
    sevens: dict[str, Any] = {name: torch.full_like(getattr(batch, name), 7.0) for name in ("key", "value")}
    guarded = GuardedCache.of(target.backend, dataclasses.replace(batch, spec=spec, **sevens))
    harness = Harness.of(target, guarded.batch)
    # The harness has a layer of this name too, and an impl may know its target by the name.
    written, reader = layer_names(2, spec)
    shared = make_impl(target.backend, batch.spec, batch.tensors, written, options=target.own_options)
    with error_context("from_spec with kv_sharing_target_layer_name"):
        harness.layers[0].impl = make_impl(
            target.backend,
            spec,
            batch.tensors,
            reader,
            kv_sharing_target_layer_name=shared.layer_name,
            options=target.own_options,
        )
    found = harness.forward(guarded.batch)
    what = "forward of a layer with kv_sharing_target_layer_name"
    guarded.expect_only_written(slots_of(batch)[:0], what)
    expect_correct(
        dataclasses.replace(batch, spec=spec),
        found,
        f"{what}, which reads the other layer's keys and not those of its call",
    )


def _check_stored(target: Target, name: str, **fields: Any) -> None:
    batch = _batch(target, name, fields, **FP8_SCALES)
    if not batch.spec.has_quantized_kv_cache and torch.finfo(storage_dtype(batch.spec)).max > _LARGE:
        for tensor in (batch.key, batch.value):
            tensor[0] = _LARGE * tensor[0].sign()
    Harness.of(target, batch).write(batch)
    _expect_stored(target, batch)


def _check_clamped(target: Target, name: str) -> None:
    batch = _batch(target, name, k_scale=0.125, v_scale=0.125)
    limit = float(stored_values(torch.tensor(1e30), batch.spec))
    for tensor in (batch.key, batch.value):
        tensor[::2] = 0.5 * limit * tensor[::2].sign()
    Harness.of(target, batch).write(batch)
    slots = slots_of(batch)
    for part, tokens, pages in zip(
        "KV", (batch.key, batch.value), pages_of(target.backend, batch), strict=True
    ):
        found = rows_at(pages, slots, batch.spec, 0.125)[::2].cpu() / 0.125
        wanted = stored_values(tokens[: len(slots)][::2].cpu(), batch.spec, 0.125) / 0.125
        if not torch.equal(found, wanted):
            wrong = found[found != wanted][0].item()
            given = f"{0.5 * limit:g} at scale 0.125"
            raise ConformanceError(
                f"{part}: {given} was stored as {wrong:g}, not as the largest finite value, {limit:g}"
            )


def _batch(target: Target, name: str, fields: Mapping[str, Any] | None = None, **scales: float) -> Batch:
    spec = target.paged_spec(kv_cache_dtype=name, **fields or {})
    size = target.block_size(spec)
    options: dict[str, Any] = dict(scales) if spec.has_kv_scales else {}
    return target.batch(spec, [1, 5, size + 3], [size, size + 9, size + 3], padding=3, **options)


def _expect_stored(target: Target, batch: Batch) -> None:
    """Raise ConformanceError unless the cache has the batch's keys and values at their slots."""
    spec, slots = batch.spec, slots_of(batch)
    kept = slots >= 0
    scales: tuple[Any, Any] = scales_of(batch.tensors.k_scale, spec), scales_of(batch.tensors.v_scale, spec)
    for part, tokens, pages, scale, other in zip(
        "KV", (batch.key, batch.value), pages_of(target.backend, batch), scales, scales[::-1], strict=True
    ):
        rows = tokens[: len(slots)][kept].cpu()
        found = rows_at(pages, slots[kept], spec, scale).cpu()
        wanted = stored_values(rows, spec, scale)
        if codec_of(spec) is not None:
            if why := encoding_fault(found, wanted, rows):
                raise ConformanceError(f"{part} of a cache of {spec.kv_cache_dtype!r}: {why}")
            continue
        quantised = spec.has_quantized_kv_cache
        if _is_rounded(found / scale, rows, scale, spec) if quantised else torch.equal(found, wanted):
            continue
        mistake = _mistake(found / scale, rows, scale, other, spec) if quantised else None
        place = int((found - wanted).abs().nan_to_num(torch.inf).argmax())
        gives = f"gives back {found.flatten()[place].item():g} for {wanted.flatten()[place].item():g}"
        raise wrong_answer(f"{part} of a cache of {spec.kv_cache_dtype!r} {gives}", mistake)


def _mistake(
    stored: torch.Tensor, tokens: torch.Tensor, scale: Any, other: Any, spec: LayerSpec
) -> str | None:
    used: dict[str, Any] = {
        "the scale left out": 1.0,
        "the other's scale": other,
        "multiplied by the scale": 1 / scale,
    }
    if spec.head_scales:
        used |= {"the scale of the first KV head used for all": scale[:1]}
        used |= {"the largest scale of the KV heads used for all": scale.max()}
    for name, each in used.items():
        if _is_rounded(stored, tokens, each, spec):
            return name
    near = _is_rounded(stored, tokens, scale, spec, steps=1.0)
    return "not rounded to the nearest value" if near else None


def _is_rounded(
    stored: torch.Tensor, tokens: torch.Tensor, scale: Any, spec: LayerSpec, steps: float = 9 / 16
) -> bool:
    """Whether `stored` are the values of the stored type nearest to `tokens / scale`, at most so many steps of the type away."""
    # A sixteenth more than half a step allows a quotient that is rounded to bfloat16 before.
    numbers = _numbers_of(spec)
    exact = (tokens.double() / scale).clamp(numbers[0], numbers[-1])
    above = torch.searchsorted(numbers, exact, right=True).clamp(1, len(numbers) - 1)
    step = numbers[above] - numbers[above - 1]
    return bool(((stored - exact).abs() <= steps * step).all())


def _numbers_of(spec: LayerSpec) -> torch.Tensor:
    """All numbers of a stored type of 8 bits that its rounding can give, in order, in float64."""
    numbers = torch.arange(256).to(torch.uint8).view(storage_dtype(spec)).float()
    rounded = stored_values(numbers[numbers.isfinite()], spec)
    return torch.tensor(sorted(set(rounded.tolist())), dtype=torch.float64)


_CHECKS: CheckTable = {
    "only-slots-written": (_check_only_slots, "forward writes the slots of the batch and nothing else"),
    "attend-only-reads": (_check_attend_reads, "attend writes nothing to the cache"),
}
_ONCE: CheckTable = {
    "negative-slots": (_check_negative, "tokens of slot -1 are not written"),
    "sharing-writes-none": (_check_sharing, "a layer that shares another's cache reads it and writes none"),
}


_SOURCES = {
    "numbers": "scales given to from_spec as numbers, and no layer",
    "tensors": "scales given to from_spec as tensors of one element, and no layer",
    "layer": "scales of the engine's layer, which differ from those given to from_spec",
}
_OTHERS: dict[str, Any] = {"k_scale": 1.3, "v_scale": 0.6}
"""Scales given to `from_spec` that do not count, because the layer has its own."""


def scale_checks(target: Target) -> Iterator[Check]:
    """One check for each source of scales and each declared storage type with scales."""
    for name, (source, summary) in itertools.product(target.scaled_kv_dtypes, _SOURCES.items()):
        yield Check.of(f"cache/scales-of-{source}-{name}", summary, _check_scales, target, name, source)
        if Feature.HEAD_SCALES in target.backend.features and kv_format(name).feature == "fp8_kv":
            words = f"{summary}; one for each KV head"
            given = target, name, source, True
            yield Check.of(f"cache/scales-of-heads-{source}-{name}", words, _check_scales, *given)


def _check_scales(target: Target, name: str, source: str, head_scales: bool = False) -> None:
    spec = target.paged_spec(kv_cache_dtype=name, head_scales=head_scales)
    size = target.block_size(spec)
    # Decodes read mostly what earlier steps have stored, and a prefill what its own step writes.
    for lengths in (decode_lengths(size), mixed_lengths(size)):
        batch = target.batch(spec, *lengths, padding=3, **FP8_SCALES)
        layer: Any = HarnessLayer(target, "layer", batch) if source == "layer" else None
        given = dataclasses.replace(batch, tensors=_tensors(batch, source))
        what = f"with {_SOURCES[source]}"
        with error_context(what):
            output, lse = run_batch(target.backend, given, layer=layer, options=target.own_options)
        tokens = batch.common.num_actual_tokens
        found = Output(output[:tokens], None if lse is None else lse[:tokens])
        expect_correct(
            batch, found, f"{what} ({FP8_SCALES})", functools.partial(_scale_mistake, batch, found)
        )


def _tensors(batch: Batch, source: str) -> LayerTensors:
    if batch.spec.head_scales and source != "layer":
        given = {"k_scale": batch.tensors.k_scale, "v_scale": batch.tensors.v_scale}
        if source == "numbers":
            given = {name: host_scale(each, batch.spec) for name, each in given.items()}
        return dataclasses.replace(batch.tensors, **given)
    if source == "numbers":
        return batch.tensors
    if source == "layer":
        return dataclasses.replace(batch.tensors, **_OTHERS)
    device = batch.query.device
    # Both shapes have one element, and checkpoints have both.
    k_scale = torch.tensor(FP8_SCALES["k_scale"], device=device)
    v_scale = torch.tensor([FP8_SCALES["v_scale"]], device=device)
    return dataclasses.replace(batch.tensors, k_scale=k_scale, v_scale=v_scale)


def _scale_mistake(batch: Batch, found: Output) -> str | None:
    """The wrong scales that give the answer."""
    # Earlier steps have stored keys and values with the right scales.
    others: dict[str, dict[str, Any]] = {
        "scales taken as 1": {"k_scale": 1.0, "v_scale": 1.0},
        "scales given to from_spec used": _OTHERS,
    }
    right = {name: stored_scale(batch.spec, scale) for name, scale in FP8_SCALES.items()}
    if batch.spec.head_scales:
        others |= {
            "scales of the first KV head used for all": {name: each[:1] for name, each in right.items()},
            "largest scales of the KV heads used for all": {name: each.max() for name, each in right.items()},
        }
    for name, used in others.items():
        keys = _read_with(batch, batch.keys, batch.key, right["k_scale"], used["k_scale"])
        values = _read_with(batch, batch.values, batch.value, right["v_scale"], used["v_scale"])
        if difference(dataclasses.replace(batch, keys=keys, values=values), found) is None:
            return name
    return None


def _read_with(
    batch: Batch, stored: Sequence[torch.Tensor], given: torch.Tensor, right: Any, used: Any
) -> list[torch.Tensor]:
    """The keys or values of each request as a backend reads them that writes and reads with another scale."""
    found, starts = list[torch.Tensor](), batch.common.query_start_loc_cpu.tolist()
    for tokens, (start, stop) in zip(stored, itertools.pairwise(starts), strict=True):
        new = stored_values(given[start:stop].cpu(), batch.spec, used)
        found.append(torch.cat([tokens[: tokens.shape[0] - (stop - start)] / right * used, new]))
    return found


_SCALES = {
    "_q_scale": "is for queries that come quantised",
    "_k_scale": "is for a cache that stores keys quantised",
    "_v_scale": "is for a cache that stores values quantised",
    "_prob_scale": "is for weights that a kernel quantises",
}
"""By attribute of AttentionLayer, why a layer in full precision does not use it."""
_OF_STORED = ("_k_scale", "_v_scale")


def engine_scale_checks(target: Target) -> Iterator[Check]:
    """One check in each scenario."""
    for scenario in scenarios(target):
        summary = "the engine's scales do not change the numbers of a layer that quantises nothing"
        yield Check.of(f"tensors/unused-scales-{scenario}", summary, _check_unused, target, scenario)


def _check_unused(target: Target, scenario: str) -> None:
    for name, why in _SCALES.items():
        batch = scenario_factory(target, scenario)()
        if batch.spec.has_kv_scales and name in _OF_STORED:
            continue
        harness, scale = Harness.of(target, batch), 0.37
        setattr(harness.layers[0], name, torch.tensor(scale, device=batch.query.device))
        setattr(harness.layers[0], f"{name}_float", scale)
        found = harness.forward(batch)
        expect_correct(batch, found, f"with {name}={scale} in the engine's layer, which {why}")
