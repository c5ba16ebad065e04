"""Each layout, stride and block size that a backend declares gives the right answer.

Pages whose elements are more than 2**31 elements from the first one are written and read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
from collections.abc import Iterator
from typing import Any

import torch

from attnplug.core.errors import LayoutError
from attnplug.ops.kv_codec import codec_of
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.cases.steps import (
    decode_lengths,
    mixed_lengths,
    of_each_storage,
    paged_scenarios,
)
from attnplug.testing.conformance.check import (
    Check,
    CheckSkipped,
    CheckTable,
    ConformanceError,
    Level,
    SkipKind,
    checks_from,
)
from attnplug.testing.conformance.harness import Harness, raw_bytes
from attnplug.testing.conformance.mistakes.expectations import expect_correct
from attnplug.testing.conformance.numbers.cache_reads import cache_of, pages_of, slots_of
from attnplug.testing.conformance.target import GPU_TYPES, Target
from attnplug.testing.oracle import stored_values
from attnplug.testing.pages import encoding_fault, rows_at

_LAYERS = 3


def checks(target: Target) -> Iterator[Check]:
    """The checks of layouts and of block sizes; at level smoke the first three sizes."""
    for layout in target.backend.supported_kv_cache_layouts():
        for scenario in paged_scenarios(target):
            yield from checks_from(_CHECKS, "cache", target, layout, scenario)
    sizes = target.block_sizes
    for size in sizes[:3] if target.level is Level.SMOKE else sizes:
        summary = f"blocks of {size} tokens are written and read"
        yield Check.of(f"cache/block-size-{size}", summary, _check_block_size, target, size)


def _batch(target: Target, scenario: str, layout: str, **fields: Any) -> Batch:
    spec = target.paged_spec(**fields)
    lengths = (decode_lengths if scenario == "decode" else mixed_lengths)(target.block_size(spec))
    return target.batch(spec, *lengths, padding=3, layout=layout)


def _check_layout(target: Target, layout: str, scenario: str) -> None:
    batch = _batch(target, scenario, layout)
    try:
        expect_stored_and_right(target, batch, f"with the layout {layout}")
    except ConformanceError as problem:
        raise ConformanceError(f"{problem}{_where_right(target, layout, scenario)}") from None


def _where_right(target: Target, layout: str, scenario: str) -> str:
    """A hint that names the layouts with the right answer; empty if no layout has it."""
    right = []
    for other in target.backend.supported_kv_cache_layouts():
        if other != layout:
            try:
                expect_stored_and_right(target, _batch(target, scenario, other), "")
            except ConformanceError:
                continue
            right.append(other)
    hint = f"; with the layout {' or '.join(right)} it is right: strides of the cache are misread"
    return hint if right else ""


def _check_strided(target: Target, layout: str, scenario: str) -> None:
    _expect_strided(target, _batch(target, scenario, layout), layout)
    for fields in of_each_storage(target)[1:]:
        with contextlib.suppress(CheckSkipped):
            _expect_strided(target, _batch(target, scenario, layout, **fields), layout)


def _expect_strided(target: Target, batch: Batch, layout: str) -> None:
    layers = _among_layers(target, batch, layout)
    among = dataclasses.replace(batch, kv_cache=layers[1])
    stored = layers[1].dtype
    what = f"with a cache of {stored} and strides {layers[1].stride()}, one of {_LAYERS} layers whose pages of a block lie together"
    _expect_right_or_refused(target, among, what)
    for other in (0, 2):
        if not bool(layers[other].float().isnan().all()):
            raise ConformanceError(f"{what} another layer's pages were written")


def _expect_right_or_refused(target: Target, batch: Batch, what: str) -> None:
    try:
        expect_stored_and_right(target, batch, what)
    except ConformanceError as problem:
        if isinstance(problem.__cause__, LayoutError):
            raise CheckSkipped(f"such strides are refused: {problem.__cause__}", SkipKind.ALLOWED) from None
        raise


def _among_layers(target: Target, batch: Batch, layout: str) -> torch.Tensor:
    """A tensor `[3, *cache.shape]` in the backend's order with layers: the batch's cache between two of NaN."""
    cache = cache_of(batch)
    order = target.backend.get_kv_cache_stride_order(True, layout=layout, spec=batch.spec)
    shape = (_LAYERS, *cache.shape)
    physical = torch.full([shape[dim] for dim in order], torch.nan, device=cache.device).to(cache.dtype)
    layers = physical.permute([order.index(dim) for dim in range(len(order))])
    layers[1].copy_(cache)
    return layers


def expect_stored_and_right(target: Target, batch: Batch, what: str) -> None:
    """Raise ConformanceError unless the answer is right and the cache has the new keys and values."""
    found = Harness.of(target, batch).forward(batch, what=what)
    expect_correct(batch, found, what)
    slots = slots_of(batch)
    for name, pages, tokens in zip(
        "KV", pages_of(target.backend, batch), (batch.key, batch.value), strict=True
    ):
        wanted = tokens[: len(slots)]
        if codec_of(batch.spec) is not None:
            rows = rows_at(pages, slots, batch.spec).cpu()
            if why := encoding_fault(rows, stored_values(wanted.cpu(), batch.spec), wanted.cpu()):
                raise ConformanceError(f"{what} {name} of the new tokens: {why}")
            continue
        size = pages.shape[1]
        rows = pages[slots // size, slots % size]
        wanted = stored_values(tokens[: len(slots)].cpu(), batch.spec).to(rows.dtype)
        if not torch.equal(raw_bytes(rows), raw_bytes(wanted)):
            raise ConformanceError(f"{what} {name} of the new tokens is not where their slots are")


def _check_block_size(target: Target, size: int) -> None:
    spec = target.paged_spec(block_size=size)
    for lengths in (decode_lengths(size), mixed_lengths(size)):
        expect_stored_and_right(
            target, target.batch(spec, *lengths, padding=3), f"with pages of {size} tokens"
        )


_CHECKS: CheckTable = {
    "layout": (_check_layout, "pages in this layout are written and read"),
    "strided": (_check_strided, "pages that are one layer of a larger tensor are written and read"),
}


# The first offset that 32 bits with a sign do not hold.
_FAR = 2**31
_SPARE = 4
"""Blocks of a batch that no request has; of one block more, a request has at least one."""


def far_offset_checks(target: Target) -> Iterator[Check]:
    """The check of far pages, if the backend serves layers over pages."""
    if paged_scenarios(target):
        summary = "pages further than 2**31 elements from the first one are written and read"
        yield Check.of("cache/far-offsets", summary, _check_far, target)


def _check_far(target: Target) -> None:
    batch = _far_batch(target)
    cache = cache_of(batch)
    blocks, elements = cache.shape[0], cache[0].numel()
    if cache.stride(0) != max(cache.stride()):
        raise CheckSkipped("blocks are not the outermost dimension of the cache")
    # As where an engine keeps many layers in a block.
    step = -(-_FAR // ((blocks - _SPARE) * elements)) * elements
    memory = _memory(step * blocks * cache.itemsize, batch.query.device).view(cache.dtype)
    far = memory.as_strided(cache.shape, (step, *cache.stride()[1:])).copy_(cache)
    what = f"with a cache of {cache.dtype} whose blocks are {step} elements apart, the last ones beyond 2**31"
    _expect_right_or_refused(target, dataclasses.replace(batch, kv_cache=far), what)


def _far_batch(target: Target) -> Batch:
    """A step over some dozens of pages, of the smallest storage type that the backend serves."""
    refused: CheckSkipped | None = None
    for fields in reversed(of_each_storage(target)):
        try:
            spec = target.paged_spec(**fields)
        except CheckSkipped as problem:
            refused = problem
            continue
        size = target.block_size(spec)
        return target.batch(spec, [1, 5, size + 3], [20 * size, 9 * size + 5, 12 * size + 3])
    assert refused is not None  # noqa: S101 - the first storage has no fields
    raise refused


def _memory(size: int, device: torch.device) -> torch.Tensor:
    """Bytes that are mostly unused."""
    # On a CPU unused ones take no memory.
    try:
        if device.type == "cpu":
            return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        if device.type in GPU_TYPES and 2 * size > torch.cuda.mem_get_info(device)[0]:
            raise CheckSkipped(f"{device} has less than twice {size:,} bytes free")
        return torch.empty(size, dtype=torch.uint8, device=device)
    except (OSError, MemoryError, torch.OutOfMemoryError) as problem:
        raise CheckSkipped(f"{size:,} bytes cannot be allocated: {problem}") from problem
