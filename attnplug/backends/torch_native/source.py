"""The keys of a batch: in pages, or packed in the tensors of the call."""

from __future__ import annotations

import dataclasses
import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.errors import BatchError

_Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class HeadRows:
    """`[num_blocks, block_size, Hkv, D]` of any strides, as rows of D elements that one index picks.

    Row `block * steps[0] + offset * steps[1] + head * steps[2]` is one head of one token. One flat index gathers a
    tile head by head, so that batched matrix products need no further copy.
    """

    rows: torch.Tensor
    steps: tuple[int, int, int]
    dtype: torch.dtype

    @classmethod
    def of(cls, pages: torch.Tensor) -> HeadRows:
        """The rows of `pages`; shares its storage."""
        blocks, block_size, heads, size = pages.shape
        dtype = pages.dtype
        if dtype.itemsize == 1:
            pages = pages.view(torch.uint8)
        # The stride of a dimension of one element has no meaning.
        outer = [pages.stride(dim) if pages.shape[dim] > 1 else 0 for dim in range(3)]
        unit = math.gcd(*outer) or 1
        block_step, offset_step, head_step = (stride // unit for stride in outer)
        last = (blocks - 1) * block_step + (block_size - 1) * offset_step + (heads - 1) * head_step
        count = last + 1 if blocks * block_size else 0
        rows = pages.as_strided((count, size), (unit, pages.stride(3)), pages.storage_offset())
        return cls(rows, (block_step, offset_step, head_step), dtype)

    def index(self, tokens: torch.Tensor, heads: int) -> torch.Tensor:
        """Rows `[B, heads, L]` of every head of `tokens [B, L]` (rows of their first heads)."""
        offsets = torch.arange(heads, device=tokens.device) * self.steps[2]
        return tokens[:, None] + offsets[:, None]

    def gather(self, index: torch.Tensor, buffer: torch.Tensor | None = None) -> torch.Tensor:
        """`[*index.shape, D]` in the storage dtype, in `buffer` (flat, of `rows.dtype`) if given."""
        size = self.rows.shape[1]
        flat = index.reshape(-1)
        picked = None if buffer is None else buffer[: flat.numel() * size].view(-1, size)
        try:
            picked = torch.index_select(self.rows, 0, flat, out=picked)
        except IndexError:
            limit = "has a page that is no block of the cache"
            raise BatchError(
                "block_table_tensor", int(flat.max()), limit, "give blocks of the pool"
            ) from None
        return picked.view(self.dtype).view(*index.shape, size)


@dataclasses.dataclass(slots=True, eq=False)
class PagedKeys:
    """Keys in pages.

    Args:
        k: pages `[num_blocks, block_size, Hkv, D]`.
        v: pages `[num_blocks, block_size, Hkv, Dv]`.
        block_table: `[R, max_blocks]`; entries past a request's pages are not followed.
        end: lengths of the requests, host int64 `[R]`.
        start: the first position of every request.

    Raises:
        BatchError: a length that needs more pages than the table has columns.
    """

    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor
    end: _Ints
    start: int = 0
    first: _Ints = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.first = np.full_like(self.end, self.start)
        held = self.block_table.shape[1] * self.k.shape[1]
        if self.end.size and int(self.end.max()) > held:
            limit = f"is past the {held} tokens of {self.block_table.shape[1]} pages per request"
            raise BatchError("seq_lens", int(self.end.max()), limit, "widen block_table_tensor")

    def locate(self, requests: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Block and offset, int64 `[B, L]`, of `positions [B, L]` in `requests [B]`."""
        block_size = self.k.shape[1]
        page = positions // block_size
        return self.block_table[requests[:, None], page].long(), positions - page * block_size

    def of_request(self, request: int, low: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V `[Hkv, high - low, D]` of positions `low .. high - 1`, gathered from the pages of one request."""
        device = self.block_table.device
        positions = torch.arange(low, high, device=device)[None]
        block, offset = self.locate(torch.tensor([request], device=device), positions)
        tensors = []
        for pages in (self.k, self.v):
            rows = HeadRows.of(pages)
            index = rows.index(block * rows.steps[0] + offset * rows.steps[1], pages.shape[2])
            tensors.append(rows.gather(index)[0])
        return tensors[0], tensors[1]


@dataclasses.dataclass(slots=True, eq=False)
class PackedKeys:
    """Keys given with the call, request after request.

    Args:
        key: `[Tk, Hkv, D]`.
        value: `[Tk, Hkv, Dv]`.
        starts: host int64 `[R + 1]`, where each request's keys start.
        end: lengths of the requests, host int64 `[R]`; the keys are the last ones.
    """

    key: torch.Tensor
    value: torch.Tensor
    starts: _Ints
    end: _Ints
    first: _Ints = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.first = self.end - np.diff(self.starts)

    @property
    def k(self) -> torch.Tensor:
        """Keys as one block."""
        return self.key[None]

    @property
    def v(self) -> torch.Tensor:
        """Values as one block."""
        return self.value[None]

    def locate(self, requests: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Block 0, and the row of each position."""
        shift = torch.from_numpy(self.starts[:-1] - self.first).to(positions.device)
        return torch.zeros_like(positions), positions + shift[requests][:, None]

    def of_request(self, request: int, low: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the keys and values of one request."""
        shift = int(self.starts[request] - self.first[request])
        rows = slice(low + shift, high + shift)
        return self.key[rows].transpose(0, 1), self.value[rows].transpose(0, 1)


KeySource: TypeAlias = PagedKeys | PackedKeys
"""K `[blocks, block_size, Hkv, D]` and V of R requests; request i has the positions `first[i] .. end[i] - 1`."""
