"""Chosen positions as pages of one token, by one kernel."""

from __future__ import annotations

import functools
from typing import Any

import torch

from attnplug.core.selection import Selection
from attnplug.core.sparse import SparseSpec
from attnplug.ops.triton.kernels.selection import query_ends_kernel, token_table_kernel
from attnplug.ops.triton.launch import BoundKernel, on_device_of, power_of_two

_KERNEL: Any = token_table_kernel
_ENDS: Any = query_ends_kernel

_BLOCK = 2048
"""Most positions that a program reads at once."""


def table_of_tokens(
    selection: Selection,
    sparse: SparseSpec,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    steps: tuple[int, int],
    page_table: torch.Tensor,
    counts: torch.Tensor,
    ends: torch.Tensor,
) -> None:
    """As `attnplug.ops.selection.table_of_tokens`."""
    tokens, width = page_table.shape
    num_reqs = seq_lens.shape[0]
    if not tokens:
        return
    most = min(sparse.topk, selection.positions.shape[1])
    bound = _bound(
        (query_start_loc.dtype, seq_lens.dtype, block_table.dtype),
        (selection.positions.stride(0), block_table.stride(0), page_table.stride(0)),
        steps,
        (most, width),
        block_size,
        sparse.block,
        min(power_of_two(most * sparse.block), _BLOCK),
    )
    with on_device_of(page_table):
        bound(
            (tokens,),
            selection.positions,
            selection.counts,
            query_start_loc,
            seq_lens,
            block_table,
            page_table,
            counts,
            ends,
            num_reqs,
        )


def query_ends(query_start_loc: torch.Tensor, seq_lens: torch.Tensor, ends: torch.Tensor) -> None:
    """As `attnplug.ops.selection.query_ends`."""
    tokens = ends.shape[0]
    if tokens:
        with on_device_of(ends):
            bound = _bound_ends(query_start_loc.dtype, seq_lens.dtype)
            bound((tokens,), query_start_loc, seq_lens, ends, seq_lens.shape[0])


@functools.lru_cache(maxsize=64)
def _bound(
    dtypes: tuple[torch.dtype, ...],
    strides: tuple[int, int, int],
    steps: tuple[int, int],
    most: tuple[int, int],
    block_size: int,
    chosen: int,
    block: int,
) -> BoundKernel:
    # Cached, because engines keep their tensors from step to step. A new dtype needs another kernel.
    names = ("stride_positions", "stride_table", "stride_pages")
    values = {
        **dict(zip(names, strides, strict=True)),
        **dict(zip(("block_step", "token_step"), steps, strict=True)),
        **dict(zip(("most", "width"), most, strict=True)),
        "BLOCK_SIZE": block_size,
        "CHOSEN": chosen,
        "BLOCK": block,
    }
    # Many threads, because few queries leave most of a GPU idle.
    return BoundKernel(_KERNEL, 9, values, num_warps=8 if block >= _BLOCK else 4)


@functools.lru_cache(maxsize=4)
def _bound_ends(*dtypes: torch.dtype) -> BoundKernel:
    return BoundKernel(_ENDS, 4, {}, num_warps=1)
