"""Checks of the rows and pages that a call names, and of the memory that it writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.errors import BatchError
from attnplug.integrations.flash_attn.pages import Pages, must_check
from attnplug.integrations.flash_attn.running import shared
from attnplug.integrations.flash_attn.steps import Ints, Lengths
from attnplug.ops.shared_memory import allocation, overlaps_itself, share_memory

_Places: TypeAlias = npt.NDArray[np.int64]
_MOST_SHOWN = 20


def check_rows(rows: torch.Tensor, count: int, *, written: bool) -> None:
    """Refuse `cache_batch_idx` outside of a cache of `count` rows, and a row twice if new keys are written.

    BatchError: it names the request.
    """
    if rows.dtype != torch.int32 or not must_check(rows.device):
        return  # another dtype is refused where the pages are cut
    host = _on_host(rows)
    outside = np.flatnonzero((host < 0) | (host >= count))
    if outside.size:
        limit = (
            f"must be in 0 .. {count - 1}, the rows of k_cache; request {outside[0]} has {host[outside[0]]}"
        )
        raise BatchError("cache_batch_idx", _shown(host), limit)
    if written and np.unique(host).size < host.size:
        limit = "must name each row once where k is given: two requests would write their keys to one row"
        raise BatchError("cache_batch_idx", _shown(host), limit, "give each request a row of its own")


def check_pages(pages: Pages, lengths: Lengths, given: tuple[torch.Tensor | None, ...]) -> None:
    """Refuse pages of `block_table` that do not exist, and pages of two requests into which one of them writes.

    Only the pages of the first `lengths` tokens are read. The others may have any number. Inside of `one_step` layers
    that give the same tensors `given` are checked once.

    Raises:
        BatchError: it names the request and its page.
    """
    if not must_check(pages.table.device):
        return
    host = None if lengths.host is None else lengths.host.tobytes()
    what = ("pages", len(pages.keys), pages.block_size, lengths.added, host)
    shared(what, given, lambda: _check_pages(pages, lengths))


def _check_pages(pages: Pages, lengths: Lengths) -> None:
    table, lens, size = _on_host(pages.table), lengths.on_host(), pages.block_size
    if not lens.size:
        return
    used = np.arange(table.shape[1])[None] * size < lens[:, None]
    count = len(pages.keys)
    outside = np.argwhere(used & ((table < 0) | (table >= count)))
    if outside.size:
        request, column = outside[0]
        limit = f"must be in 0 .. {count - 1}, the pages of the cache; request {request} has {table[request, column]}"
        remedy = f"its {lens[request]} tokens need {-(-int(lens[request]) // size)} pages of {size}"
        raise BatchError("block_table", _shown(table), f"{limit} in column {column}", remedy)
    if lengths.added:
        _check_writes(table, used, lens, lengths.added, size)


def _check_writes(table: _Places, used: npt.NDArray[np.bool_], lens: Ints, added: int, size: int) -> None:
    """Refuse a slot that is written, and is another token's too."""
    columns = np.arange(table.shape[1])[None] * size
    written = used & (columns + size > lens[:, None] - added)
    often = np.bincount(table[used]) > 1
    # Only pages that are named more than once need a look at their slots.
    if not often[table[written]].any():
        return
    rows = np.repeat(np.arange(lens.size), lens)
    places = np.arange(lens.sum()) - np.repeat(np.cumsum(lens) - lens, lens)
    slots = table[rows, places // size] * size + places % size
    new = places >= np.repeat(lens - added, lens)
    twice = np.flatnonzero(new & (np.bincount(slots)[slots] > 1))
    if twice.size:
        other = next(row for row in np.flatnonzero(slots == slots[twice[0]]) if row != twice[0])
        one, page = rows[twice[0]], slots[twice[0]] // size
        of = f"request {rows[other]}" if rows[other] != one else "another of its tokens"
        limit = f"gives page {page} to request {one}, whose new keys are written there, and to {of}"
        raise BatchError(
            "block_table", _shown(table), limit, "give each request that writes a page of its own"
        )


def check_writable(tensors: Mapping[str, torch.Tensor], written: Sequence[str]) -> None:
    """Refuse tensors if one that is `written` shares memory with itself or with another one.

    BatchError: it names both.
    """
    # Most tensors have an allocation of their own, which costs less to see than which bytes they have.
    ranges = {name: allocation(tensor) for name, tensor in tensors.items()}
    for place, name in enumerate(written):
        tensor, (first, end) = tensors[name], ranges[name]
        if overlaps_itself(tensor):
            limit = "has elements that share memory, such as those of an expanded dimension, so no key can be written"
            raise BatchError(name, f"strides {tuple(tensor.stride())}", limit, "pass a contiguous cache")
        for other, (its_first, its_end) in ranges.items():
            if other == name or other in written[:place] or max(first, its_first) >= min(end, its_end):
                continue
            if share_memory(tensor, tensors[other]):
                limit = f"shares memory with {other}, which the new keys and values would overwrite"
                raise BatchError(name, tuple(tensor.shape), limit, f"pass a copy as {other}")


def _on_host(tensor: torch.Tensor) -> _Places:
    return tensor.detach().cpu().numpy().astype(np.int64)


def _shown(numbers: _Places) -> object:
    return numbers.tolist() if numbers.size < _MOST_SHOWN else f"{numbers.size} numbers"
