"""Caches of the caller as pages: one view of keys and values, without a copy where they share memory."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.errors import BatchError
from attnplug.registry.plugins.switches import DEBUG, is_on

_BLOCK_SIZES = (256, 128, 64, 32, 16, 8, 4, 2, 1)


def must_check(device: torch.device) -> bool:
    """Whether to read numbers on a device: a GPU is waited for in debug mode only, and never inside a capture."""
    return device.type == "cpu" or (
        is_on(DEBUG) and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
    )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """Pages of keys `[N, block_size, Hkv, D]` and of values, and the block table int32 `[R, max_blocks]`.

    `are_rows` says that each page is a whole row of the caller's caches, of any strides and size.
    """

    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    are_rows: bool = False

    @property
    def block_size(self) -> int:
        """Tokens in a page."""
        return self.keys.shape[1]

    @property
    def capacity(self) -> int:
        """Tokens that each request's row of the table holds."""
        return self.table.shape[1] * self.block_size

    def as_one(self) -> torch.Tensor | None:
        """The logical cache `(N, 2, block_size, Hkv, D)` over both; None where their memory has no such strides.

        Keys and values of one allocation, such as `torch.empty(2, layers, N, block_size, Hkv, D)`, have.
        """
        keys, values = self.keys, self.values
        distance = values.storage_offset() - keys.storage_offset()
        shared = keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
        if not shared or distance <= 0 or keys.shape != values.shape or keys.stride() != values.stride():
            return None
        block, *rest = keys.stride()
        if rest[-1] != 1 and keys.shape[-1] > 1:
            return None  # kernels read the elements of a head one after another
        shape = (keys.shape[0], 2, *keys.shape[1:])
        return keys.as_strided(shape, (block, distance, *rest), keys.storage_offset())

    def slots(self, first: torch.Tensor, count: int) -> torch.Tensor:
        """The slots of `count` tokens of each request from position `first` int `[R]` on, int64 `[R * count]`.

        Tokens past the table have slot -1.
        """
        places = first.long()[:, None] + torch.arange(count, device=first.device)
        # A position past the table would read another row's page.
        columns = (places // self.block_size).clamp_(max=self.table.shape[1] - 1)
        slots = self.table.long().gather(1, columns) * self.block_size + places % self.block_size
        return torch.where(places < self.capacity, slots, -1).flatten()

    def slots_of(self, lengths: npt.NDArray[np.int64]) -> torch.Tensor:
        """The slots of all tokens of requests of these lengths, one request after another, int64."""
        device = self.table.device
        rows = torch.from_numpy(np.repeat(np.arange(lengths.size), lengths)).to(device)
        starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
        places = torch.from_numpy(np.arange(lengths.sum()) - starts).to(device)
        return self.table.long()[rows, places // self.block_size] * self.block_size + places % self.block_size


def block_sizes(*caches: torch.Tensor) -> tuple[int, ...]:
    """The sizes of pages into which each row of caches `[B_cache, S, Hkv, D]` can be divided, larger first.

    It is S alone where rows do not follow each other in memory: slices of longer caches, or heads before tokens.
    """
    size = caches[0].shape[1]
    if size and not all(map(_is_divisible, caches)):
        return (size,)
    return tuple(each for each in _BLOCK_SIZES if size % each == 0)


def paged(keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, batch: int) -> Pages:
    """Caches `[N, block_size, Hkv, D]` and a block table.

    BatchError: a table that is not int32 `[batch, max_blocks]` on the caches' device.
    """
    if (table.dtype, table.device, table.shape[0]) != (torch.int32, keys.device, batch):
        found = f"{table.dtype} {tuple(table.shape)} on {table.device}"
        limit = f"must be torch.int32 ({batch}, max_blocks) on {keys.device}"
        raise BatchError("block_table", found, limit)
    return Pages(keys, values, table)


def cut_into_pages(
    keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor | None, batch: int, block_size: int
) -> Pages:
    """Caches `[B_cache, S, Hkv, D]` as pages of one of their `block_sizes`; `rows` int32 `[batch]`.

    BatchError: fewer cache rows than requests, or other `rows`.
    """
    size = keys.shape[1]
    count = size // block_size
    if rows is None:
        if keys.shape[0] < batch:
            limit = f"must have a row for each of {batch} requests"
            raise BatchError("k_cache", tuple(keys.shape), limit, "or pass cache_batch_idx")
        rows = torch.arange(batch, dtype=torch.int32, device=keys.device)
    elif rows.shape != (batch,) or (rows.dtype, rows.device) != (torch.int32, keys.device):
        found = f"{rows.dtype} {tuple(rows.shape)} on {rows.device}"
        raise BatchError("cache_batch_idx", found, f"must be torch.int32 ({batch},) on {keys.device}")
    table = rows[:, None] * count + torch.arange(count, dtype=torch.int32, device=keys.device)
    if size and not (_is_divisible(keys) and _is_divisible(values)):
        return Pages(keys, values, table, are_rows=True)
    return Pages(_divided(keys, block_size), _divided(values, block_size), table)


def _is_divisible(cache: torch.Tensor) -> bool:
    """Whether one step leads from each token to the next, also from a row's last one to the next row's first."""
    return cache.shape[0] <= 1 or cache.stride(0) == cache.shape[1] * cache.stride(1)


def _divided(cache: torch.Tensor, block_size: int) -> torch.Tensor:
    """`[B, S, Hkv, D]` as `[B * S / block_size, block_size, Hkv, D]`, never a copy."""
    batch, size, heads, width = cache.shape
    _, token, *rest = cache.stride()
    shape = (batch * (size // block_size), block_size, heads, width)
    return cache.as_strided(shape, (block_size * token, token, *rest), cache.storage_offset())
