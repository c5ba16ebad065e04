"""The prefixes that requests of a step share, at any depth: found from the block tables on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attnplug.runtime.batch.engine_values import Ints

_Table = npt.NDArray[np.int32]
_Pays = Callable[[int, int, int], float]
"""The seconds saved by requests, their new tokens, and the tokens that they share; not above 0 if nothing is."""
_NULL_BLOCK = 0
# Columns that are compared at once, at first. Requests often share a short prefix, or a long one.
_FEW_COLUMNS = 16
_MOST_LEVELS = 4
"""Nodes of one request, so that the rows of all pieces have a limit."""


class Node(NamedTuple):
    """Blocks that several requests read, and that all their new tokens see whole.

    Args:
        readers: int64 `[n]`, the requests.
        first: the first column of their tables.
        last: one past the last column.
    """

    readers: Ints
    first: int
    last: int


class Forest(NamedTuple):
    """The nodes of a step in one KV group, and what is left of its requests.

    Args:
        nodes: that pay.
        kept: int64 `[R]`, the leading blocks of each request that its rest has no more.
        saved: seconds of a layer, by the model.
    """

    nodes: list[Node]
    kept: Ints
    saved: float


class Reach(NamedTuple):
    """The blocks of each request that other requests may read with it.

    Args:
        first: int64 `[R]`, the block with the first key that all its new tokens see.
        end: int64 `[R]`, one past its last whole computed block; not above `first` where nothing can be shared.
    """

    first: Ints
    end: Ints


def reach_of(
    computed: Ints,
    scheduled: Ints,
    size: int,
    left: int = -1,
    chunk: int | None = None,
    is_tree: npt.NDArray[np.bool_] | None = None,
) -> Reach:
    """The blocks of requests in layers with a window of `left` keys before the query, or with chunks.

    A window or chunk must begin at the border of a block, and with the same key for all new tokens of a request. A tree
    of drafts may share from the first block that all its nodes see whole: its nodes get the keys before it one by one.

    Args:
        computed: int64 `[R]`, computed tokens.
        scheduled: int64 `[R]`, new tokens; of a tree, those of its longest path.
        size: tokens of a block.
        left: keys that a new token sees before its own; -1 for all.
        chunk: tokens of a chunk; None without.
        is_tree: bool `[R]`, the requests whose new tokens are a tree; None without any.
    """
    # numpy divides as slowly by powers of two as by other numbers, so these are shifted.
    blocks = computed // size if size & (size - 1) else computed >> (size.bit_length() - 1)
    end = blocks * (scheduled > 0)
    if left < 0 and chunk is None:
        return Reach(np.zeros_like(end), end)
    low, high = first_seen(computed, left, chunk), first_seen(computed + scheduled - 1, left, chunk)
    fits = (low == high) & (low % size == 0)
    first = low // size
    if is_tree is not None:
        first, fits = np.where(is_tree, -(-high // size), first), fits | is_tree
    # Without its first blocks a request keeps its chunks only if these begin where it does.
    return Reach(np.where(fits, first, 0), np.where(fits, end, 0))


def first_seen(positions: Ints, left: int, chunk: int | None) -> Ints:
    """The position of the first key that the token at each position sees."""
    low = np.zeros_like(positions) if left < 0 else np.maximum(positions - left, 0)
    return low if chunk is None else np.maximum(low, positions // chunk * chunk)


def may_share(table: _Table) -> bool:
    """Whether two requests without a window may share blocks: most steps have none, and one sort of a column says so."""
    ordered = np.sort(table[:, 0])
    return bool((ordered[1:] == ordered[:-1]).any())


def find_forest(table: _Table, size: int, scheduled: Ints, reach: Reach, saves: _Pays) -> Forest | None:
    """The nodes that pay, by one pass over the blocks that requests share.

    A node that does not pay gives its keys to those after it.

    Args:
        table: int32 `[R, max_blocks]`, the block table of the KV group.
        size: tokens of a block.
        scheduled: int64 `[R]`, new tokens.
        reach: the blocks that may be shared.
        saves: the price model.

    Returns:
        The forest, or None if no node pays.
    """
    kept = reach.first.copy()
    nodes, total = list[Node](), 0.0
    first, end = reach
    stack = [(readers, at, at, 0) for readers, at in _roots(table, first, end)]
    # Most steps with shared prefixes are decodes, whose rows need no sum.
    one_row = bool((scheduled == 1).all())
    while stack:
        readers, begin, at, level = stack.pop()
        rows, limits = readers.size if one_row else int(scheduled[readers].sum()), end[readers]
        # No prefix of these requests is longer, so most of them are given up before their blocks are read.
        if saves(readers.size, rows, int(limits.max() - begin) * size) <= 0:
            continue
        at = _equal_until(table, readers, at, int(limits.min()))
        gain = saves(readers.size, rows, (at - begin) * size)
        if gain > 0:
            nodes.append(Node(readers, begin, at))
            kept[readers] = at
            total, begin, level = total + gain, at, level + 1
        if level < _MOST_LEVELS:
            longer = readers[limits > at]
            stack += [(group, begin, at, level) for group in _alike(table[longer, at], longer)]
    return Forest(nodes, kept, total) if nodes else None


def _roots(table: _Table, first: Ints, end: Ints) -> Iterator[tuple[Ints, int]]:
    """The requests with an equal first block at an equal place, and that place."""
    if not first.any():
        readers = np.flatnonzero(end > 0)
        yield from ((group, 0) for group in _alike(table[readers, 0], readers))
        return
    able = np.flatnonzero(end > first)
    for at in np.unique(first[able]).tolist():
        readers = able[first[able] == at]
        yield from ((group, at) for group in _alike(table[readers, at], readers))


def _alike(blocks: _Table, readers: Ints) -> list[Ints]:
    """The requests of each block that several have; the null block is nobody's."""
    if readers.size < 2:
        return []
    first = blocks[0]
    if (blocks == first).all():
        return [] if first == _NULL_BLOCK else [readers]
    alike = np.sort(blocks)
    # The readers of a prompt mostly differ behind it.
    if not (alike[1:] == alike[:-1]).any():
        return []
    order = np.argsort(blocks, kind="stable")
    ordered = blocks[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1], [True])))
    return [
        readers[order[start:stop]]
        for start, stop in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
        if stop - start > 1 and ordered[start] != _NULL_BLOCK
    ]


def _equal_until(table: _Table, readers: Ints, at: int, limit: int) -> int:
    """The first column from `at` on, at most `limit`, where the readers' blocks differ or are null."""
    # Neighbours in the batch are read in place; others would be copied first.
    is_run = int(readers[-1] - readers[0]) == readers.size - 1 and bool((readers[1:] > readers[:-1]).all())
    rows = table[int(readers[0]) : int(readers[-1]) + 1] if is_run else None
    width = _FEW_COLUMNS
    while at < limit:
        stop = min(at + width, limit)
        part = table[readers, at:stop] if rows is None else rows[:, at:stop]
        # Two passes without a table of truths, which for 256 requests has as many bytes as a core's cache.
        least = np.minimum.reduce(part)
        same = (np.maximum.reduce(part) == least) & (least != _NULL_BLOCK)
        if not same.all():
            return at + int(same.argmin())
        at, width = stop, width * 16
    return at
