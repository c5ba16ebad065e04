"""Pages whose elements are more than 2**31 elements from the first one are written and read."""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Iterator

import torch

from attnplug.core.errors import LayoutError
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.cache_layouts import expect_stored_and_right
from attnplug.testing.conformance.check import Check, CheckSkipped, ConformanceError, SkipKind
from attnplug.testing.conformance.gpu import GPU_TYPES
from attnplug.testing.conformance.guarded_cache import cache_of
from attnplug.testing.conformance.steps import of_each_storage, paged_scenarios
from attnplug.testing.conformance.target import Target

_FAR = 2**31
"""The first offset that 32 bits with a sign do not hold."""
_SPARE = 4
"""Blocks of a batch that no request has; of one block more, a request has at least one."""


def checks(target: Target) -> Iterator[Check]:
    """The check of far pages, if the backend serves layers over pages."""
    if paged_scenarios(target):
        summary = "pages further than 2**31 elements from the first one are written and read"
        yield Check.of("cache/far-offsets", summary, _check_far, target)


def _check_far(target: Target) -> None:
    batch = _batch(target)
    cache = cache_of(batch)
    blocks, elements = cache.shape[0], cache[0].numel()
    if cache.stride(0) != max(cache.stride()):
        raise CheckSkipped("blocks are not the outermost dimension of the cache")
    # As where an engine keeps many layers in a block.
    step = -(-_FAR // ((blocks - _SPARE) * elements)) * elements
    memory = _memory(step * blocks * cache.itemsize, batch.query.device).view(cache.dtype)
    far = memory.as_strided(cache.shape, (step, *cache.stride()[1:])).copy_(cache)
    what = f"with a cache of {cache.dtype} whose blocks are {step} elements apart, the last ones beyond 2**31"
    try:
        expect_stored_and_right(target, dataclasses.replace(batch, kv_cache=far), what)
    except ConformanceError as problem:
        if isinstance(problem.__cause__, LayoutError):
            raise CheckSkipped(f"such strides are refused: {problem.__cause__}", SkipKind.ALLOWED) from None
        raise


def _batch(target: Target) -> Batch:
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
    """Bytes of which few are used: on a CPU the others take no memory."""
    try:
        if device.type == "cpu":
            return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        if device.type in GPU_TYPES and 2 * size > torch.cuda.mem_get_info(device)[0]:
            raise CheckSkipped(f"{device} has less than twice {size:,} bytes free")
        return torch.empty(size, dtype=torch.uint8, device=device)
    except (OSError, MemoryError, torch.OutOfMemoryError) as problem:
        raise CheckSkipped(f"{size:,} bytes cannot be allocated: {problem}") from problem
