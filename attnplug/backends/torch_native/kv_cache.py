"""Views pages of any layout as rows of one head of one token."""

from __future__ import annotations

import dataclasses
import math

import torch

__all__ = ["HeadRows"]


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
        rows = pages.as_strided((max(last, 0) + 1, size), (unit, pages.stride(3)), pages.storage_offset())
        return cls(rows, (block_step, offset_step, head_step), dtype)

    def index(self, tokens: torch.Tensor, heads: int) -> torch.Tensor:
        """Rows `[B, heads, L]` of every head of `tokens [B, L]` (rows of their first heads)."""
        offsets = torch.arange(heads, device=tokens.device) * self.steps[2]
        return tokens[:, None] + offsets[:, None]

    def gather(self, index: torch.Tensor, buffer: torch.Tensor | None = None) -> torch.Tensor:
        """`[*index.shape, D]` in the storage dtype, in `buffer` (flat, of `rows.dtype`) if given."""
        size = self.rows.shape[1]
        flat = index.reshape(-1)
        if buffer is None:
            picked = self.rows.index_select(0, flat)
        else:
            picked = buffer[: flat.numel() * size].view(-1, size)
            torch.index_select(self.rows, 0, flat, out=picked)
        return picked.view(self.dtype).view(*index.shape, size)
