"""Whether caches of layers that must not share memory overlap, and whether an output is in a cache."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from attnplug.core.errors import LayoutError
from attnplug.core.kv_cache_spec import KVCacheConfig
from attnplug.ops.shared_memory import byte_span, share_memory


class Blocks(NamedTuple):
    """The bytes of a cache: `pieces` of `size` bytes, `step` bytes apart.

    `by_block` says that each piece is one block; otherwise one piece has all blocks.
    """

    start: int
    step: int
    size: int
    pieces: int
    by_block: bool = True


class CacheMemory:
    """The memory of caches, which no output of a layer may share.

    Args:
        caches: the cache of each layer.
    """

    __slots__ = ("_caches", "_ends", "_starts")

    def __init__(self, caches: Mapping[str, torch.Tensor]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._caches: list[list[tuple[str, torch.Tensor]]] = []
        spans = ((byte_span(cache), name, cache) for name, cache in caches.items() if cache.numel())
        # Layers may share an allocation, so spans that overlap are one.
        for (start, end), name, cache in sorted(spans, key=lambda each: each[0]):
            if self._ends and start < self._ends[-1]:
                self._ends[-1] = max(end, self._ends[-1])
            else:
                self._starts.append(start)
                self._ends.append(end)
                self._caches.append([])
            self._caches[-1].append((name, cache))

    def owner_of(self, tensor: torch.Tensor, start: int, end: int) -> str | None:
        """The first layer in whose cache a tensor with this `byte_span` has bytes; None if it has none there."""
        first = bisect.bisect_right(self._ends, start)
        for at in range(first, len(self._starts)):
            if self._starts[at] >= end:
                break
            for name, cache in self._caches[at]:
                if share_memory(tensor, cache):
                    return name
        return None


NO_CACHES = CacheMemory({})


def check_overlaps(
    config: KVCacheConfig, blocks: Mapping[str, Blocks], kv_sharing: Mapping[str, str]
) -> None:
    """Refuse caches that share bytes, unless the configuration lets them.

    A layer that reads the pages of another has the same memory. Layers of different groups in one
    `KVCacheTensor` may have the same memory, block by block, because one group at a time uses a block. All other
    caches must be apart.

    Raises:
        LayoutError: two layers break this; the error names them.
    """
    for name, target in kv_sharing.items():
        if blocks[name] != blocks[target]:
            limit = f"is not the memory of layer {target}, whose pages it reads"
            raise LayoutError(f"kv_caches[{name!r}]", hex(blocks[name].start), limit, "pass the same tensor")
    group = {name: g for g, each in enumerate(config.kv_cache_groups) for name in each.layer_names}
    tensor = {name: t for t, each in enumerate(config.kv_cache_tensors) for name in each.shared_by}
    owners: dict[Blocks, list[str]] = {}
    for name, memory in blocks.items():
        if name in kv_sharing:
            continue
        for other in owners.get(memory, ()):
            if not memory.by_block or tensor[name] != tensor[other] or group[name] == group[other]:
                raise _overlap(name, other)
        owners.setdefault(memory, []).append(name)
    _check_apart(list(owners), [names[0] for names in owners.values()])


def _check_apart(memories: list[Blocks], names: list[str]) -> None:
    if len(memories) < 2:
        return
    starts, sizes, owner = [], [], []
    for index, memory in enumerate(memories):
        # Blocks without gaps are one piece, so only pools of interleaved layers have many.
        pieces = 1 if memory.step == memory.size else memory.pieces
        size = memory.size * memory.pieces // pieces
        starts.append(memory.start + memory.step * np.arange(pieces, dtype=np.int64))
        sizes.append(np.full(pieces, size, dtype=np.int64))
        owner.append(np.full(pieces, index, dtype=np.int64))
    begin = np.concatenate(starts)
    order = np.argsort(begin, kind="stable")
    end = (begin + np.concatenate(sizes))[order]
    # In the order of starts, if any two pieces overlap, then two neighbours do.
    overlapping = np.flatnonzero(end[:-1] > begin[order][1:])
    if overlapping.size:
        place = int(overlapping[0])
        first, second = sorted(int(np.concatenate(owner)[order[i]]) for i in (place, place + 1))
        raise _overlap(names[second], names[first])


def _overlap(name: str, other: str) -> LayoutError:
    remedy = "give each its own memory"
    return LayoutError(f"kv_caches[{name!r}]", "overlapping", f"shares bytes with layer {other}", remedy)
