"""The fp8 scales that count: those of the engine's layer, else those given to `from_spec`, in numbers or tensors."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from attnplug.core.impl import LayerTensors
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.check import Check, error_context
from attnplug.testing.conformance.expectations import difference, expect_correct
from attnplug.testing.conformance.harness import Answer, HarnessLayer, run_batch
from attnplug.testing.conformance.steps import decodes, mixed
from attnplug.testing.conformance.target import Target
from attnplug.testing.drawn_values import FP8_SCALES
from attnplug.testing.oracle import stored_values

_SOURCES = {
    "numbers": "scales given to from_spec as numbers, and no layer",
    "tensors": "scales given to from_spec as tensors of one element, and no layer",
    "layer": "scales of the engine's layer, which differ from those given to from_spec",
}
_OTHERS: dict[str, Any] = {"k_scale": 1.3, "v_scale": 0.6}
"""Scales given to `from_spec` that do not count, because the layer has its own."""


def checks(target: Target) -> Iterator[Check]:
    """One check for each source of scales and each declared storage type of fp8."""
    for name in target.kv_cache_dtypes:
        if name.startswith("fp8"):
            for source, summary in _SOURCES.items():
                yield Check.of(
                    f"cache/scales-of-{source}-{name}", summary, _check_scales, target, name, source
                )


def _check_scales(target: Target, name: str, source: str) -> None:
    spec = target.paged_spec(kv_cache_dtype=name)
    size = target.block_size(spec)
    # Decodes read mostly what earlier steps have stored, and a prefill what its own step writes.
    for lengths in (decodes(size), mixed(size)):
        batch = target.batch(spec, *lengths, padding=3, **FP8_SCALES)
        layer: Any = HarnessLayer(target, "layer", batch) if source == "layer" else None
        given = dataclasses.replace(batch, tensors=_tensors(batch, source))
        what = f"with {_SOURCES[source]}"
        with error_context(what):
            output, lse = run_batch(target.backend, given, layer=layer, options=target.own_options)
        tokens = batch.common.num_actual_tokens
        found = Answer(output[:tokens], None if lse is None else lse[:tokens])
        expect_correct(batch, found, f"{what} ({FP8_SCALES})", functools.partial(_mistake, batch, found))


def _tensors(batch: Batch, source: str) -> LayerTensors:
    if source == "numbers":
        return batch.tensors
    if source == "layer":
        return dataclasses.replace(batch.tensors, **_OTHERS)
    device = batch.query.device
    # Both shapes have one element, and checkpoints have both.
    k_scale = torch.tensor(FP8_SCALES["k_scale"], device=device)
    v_scale = torch.tensor([FP8_SCALES["v_scale"]], device=device)
    return dataclasses.replace(batch.tensors, k_scale=k_scale, v_scale=v_scale)


def _mistake(batch: Batch, found: Answer) -> str | None:
    """The wrong scales that give the answer: earlier steps have stored keys and values with the right ones."""
    others = {
        "scales taken as 1": {"k_scale": 1.0, "v_scale": 1.0},
        "scales given to from_spec used": _OTHERS,
    }
    for name, used in others.items():
        keys = _read_with(batch, batch.keys, batch.key, FP8_SCALES["k_scale"], used["k_scale"])
        values = _read_with(batch, batch.values, batch.value, FP8_SCALES["v_scale"], used["v_scale"])
        if difference(dataclasses.replace(batch, keys=keys, values=values), found) is None:
            return name
    return None


def _read_with(
    batch: Batch, stored: Sequence[torch.Tensor], given: torch.Tensor, right: float, used: float
) -> list[torch.Tensor]:
    """The keys or values of each request as a backend reads them that writes and reads with another scale."""
    found, starts = list[torch.Tensor](), batch.common.query_start_loc_cpu.tolist()
    for tokens, (start, stop) in zip(stored, itertools.pairwise(starts), strict=True):
        new = stored_values(given[start:stop].cpu(), batch.spec, used)
        found.append(torch.cat([tokens[: tokens.shape[0] - (stop - start)] / right * used, new]))
    return found
