"""Moves the keys of an accepted path of drafts behind the computed tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.arguments import instance, integer
from attnplug.core.errors import BatchError
from attnplug.ops.checks import pages_of
from attnplug.runtime.batch.engine_values import Ints
from attnplug.runtime.batch.step_batch import StepBatch, check_current
from attnplug.runtime.steps.attention_groups import AttentionGroup
from attnplug.runtime.steps.forest_parts import to_device
from attnplug.runtime.steps.runtime_layer import RuntimeLayer


def keep_paths(
    batch: StepBatch,
    accepted: Mapping[str, int],
    groups: Iterable[AttentionGroup],
    layers: Mapping[str, RuntimeLayer],
    device: torch.device,
) -> None:
    """Copy the K and V of each accepted path, in all layers with pages of their own; see `AttentionRuntime.keep_path`.

    Raises:
        BatchError: the batch is out of date or has no such tree; a node is not in its tree.
    """
    instance("batch", batch, StepBatch, remedy="give the batch of step(trees=...)")
    check_current("batch", batch.stamps)
    instance("accepted", accepted, Mapping)  # type: ignore[type-abstract]
    moves = list[tuple[int, Ints, Ints]]()
    for name, node in accepted.items():
        tree = batch.trees.get(name)
        if tree is None:
            limit = f"has no tree in this step, which has {len(batch.trees)}"
            raise BatchError("accepted", name, limit, "give the nodes of trees only")
        if not -1 <= integer(f"accepted[{name!r}]", node) < tree.size:
            limit = f"must be in -1 .. {tree.size - 1}, the nodes of its tree"
            raise BatchError(f"accepted[{name!r}]", node, limit)
        if tree.kept is not None and tree.kept != node:
            limit = f"is not {tree.kept}, whose path was moved already"
            raise BatchError(f"accepted[{name!r}]", node, limit, "call keep_path once for each tree")
        path = np.array(tree.path(node), dtype=np.int64)
        moved = path != np.arange(path.size)
        if tree.kept is None and moved.any():
            moves.append((batch.req_ids.index(name), path[moved], np.flatnonzero(moved)))
    if moves:
        _move(batch, moves, groups, layers, device)
    for name, node in accepted.items():
        batch.trees[name].kept = node


def _move(
    batch: StepBatch,
    moves: Sequence[tuple[int, Ints, Ints]],
    groups: Iterable[AttentionGroup],
    layers: Mapping[str, RuntimeLayer],
    device: torch.device,
) -> None:
    host, places = batch.host, dict[int, list[torch.Tensor]]()
    for group in groups:
        at = group.kv_cache_group_id
        if host is None or at in batch.cross_groups:
            continue
        if at not in places:
            size, found = batch.block_sizes[at], list[tuple[Ints, ...]]()
            for row, sources, targets in moves:
                both = (host.computed[row] + each for each in (sources, targets))
                found.append(
                    tuple(part for each in both for part in _blocks_of(host.tables[at, row], each, size))
                )
            places[at] = to_device([np.concatenate(part) for part in zip(*found, strict=True)], device)
        from_block, from_place, to_block, to_place = places[at]
        for name in group.layer_names:
            layer = layers[name]
            if layer.target is not None or layer.kv_cache is None:
                continue
            for pages in pages_of(layer.impl.backend, layer.kv_cache, layer.spec):
                # Indexing copies bytes; torch has no indexing of every 8-bit float.
                stored = pages.view(torch.uint8) if pages.dtype.itemsize == 1 else pages
                # All are read before any is written, because a path may write where it reads.
                stored[to_block, to_place] = stored[from_block, from_place]


def _blocks_of(row: npt.NDArray[np.int32], positions: Ints, size: int) -> tuple[Ints, Ints]:
    """The block and the place in it of each position of a request."""
    return row[positions // size].astype(np.int64), positions % size
