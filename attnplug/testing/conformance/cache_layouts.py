"""Every layout, stride and page size that a backend declares gives the same answer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import torch

from attnplug.core.errors import LayoutError
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.check import Check, CheckSkipped, ConformanceError, Level
from attnplug.testing.conformance.guarded import pages_of, slots_of
from attnplug.testing.conformance.single_layer import SingleLayer, matches_oracle, raw_bytes
from attnplug.testing.conformance.situations import PAGED
from attnplug.testing.conformance.steps import decodes, mixed
from attnplug.testing.conformance.target import Target

__all__ = ["checks"]

_LAYERS = 3


def checks(target: Target) -> Iterator[Check]:
    """The checks of layouts, and of page sizes: at level smoke the first three."""
    for layout in target.backend.supported_kv_cache_layouts():
        for situation in PAGED:
            for name, run, summary in (
                ("layout", _check_layout, f"pages in the order {layout} are written and read as such"),
                (
                    "strided",
                    _check_strided,
                    f"so they are where they are one layer of a larger {layout} tensor",
                ),
            ):
                yield Check(
                    f"cache/{name}-{layout}-{situation}",
                    functools.partial(run, target, layout, situation),
                    summary,
                )
    sizes = target.block_sizes
    for size in sizes[:3] if target.level is Level.SMOKE else sizes:
        run_size = functools.partial(_check_block_size, target, size)
        yield Check(f"cache/block-size-{size}", run_size, f"pages of {size} tokens are written and read")


def _batch(target: Target, situation: str, layout: str) -> Batch:
    spec = target.spec()
    lengths = (decodes if situation == "decode" else mixed)(target.block_size(spec))
    return target.batch(spec, *lengths, padding=3, layout=layout)


def _check_layout(target: Target, layout: str, situation: str) -> None:
    batch = _batch(target, situation, layout)
    try:
        _run(target, batch, f"with the layout {layout}")
    except ConformanceError as problem:
        raise ConformanceError(f"{problem}{_where_right(target, layout, situation)}") from None


def _where_right(target: Target, layout: str, situation: str) -> str:
    """Says which layouts give the right answer, where some do: the strides of the others are misread."""
    right = []
    for other in target.backend.supported_kv_cache_layouts():
        if other != layout:
            try:
                _run(target, _batch(target, situation, other), "")
            except ConformanceError:
                continue
            right.append(other)
    return (
        f"; with the layout {' or '.join(right)} it is right: strides of the cache are misread"
        if right
        else ""
    )


def _check_strided(target: Target, layout: str, situation: str) -> None:
    batch = _batch(target, situation, layout)
    layers = _among_layers(target, batch, layout)
    held = dataclasses.replace(batch, kv_cache=layers[1])
    what = f"with a cache of strides {layers[1].stride()}, one of {_LAYERS} layers whose pages of a block lie together"
    try:
        _run(target, held, what)
    except ConformanceError as problem:
        if isinstance(problem.__cause__, LayoutError):
            raise CheckSkipped(f"such strides are refused: {problem.__cause__}") from None
        raise
    for other in (0, 2):
        if not bool(layers[other].isnan().all()):
            raise ConformanceError(f"{what} another layer's pages were written")


def _among_layers(target: Target, batch: Batch, layout: str) -> torch.Tensor:
    """`[3, *cache.shape]` in the backend's order with layers, the batch's cache in the middle of NaN."""
    cache = batch.kv_cache
    assert cache is not None  # noqa: S101 - asked only of batches over pages
    order = target.backend.get_kv_cache_stride_order(True, layout=layout, spec=batch.spec)
    shape = (_LAYERS, *cache.shape)
    physical = torch.full([shape[dim] for dim in order], torch.nan, dtype=cache.dtype, device=cache.device)
    layers = physical.permute([order.index(dim) for dim in range(len(order))])
    layers[1].copy_(cache)
    return layers


def _run(target: Target, batch: Batch, what: str) -> None:
    """ConformanceError unless the answer is right and the cache holds the new keys and values."""
    found = SingleLayer.of(target, batch).forward(batch, what=what)
    matches_oracle(batch, found, what)
    slots = slots_of(batch)
    for name, pages, tokens in zip(
        "KV", pages_of(target.backend, batch), (batch.key, batch.value), strict=True
    ):
        size = pages.shape[1]
        rows = pages[slots // size, slots % size]
        if not torch.equal(raw_bytes(rows), raw_bytes(tokens[: len(slots)])):
            raise ConformanceError(f"{what} {name} of the new tokens is not where their slots are")


def _check_block_size(target: Target, size: int) -> None:
    spec = target.spec(block_size=size)
    for lengths in (decodes(size), mixed(size)):
        _run(target, target.batch(spec, *lengths, padding=3), f"with pages of {size} tokens")
