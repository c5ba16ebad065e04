"""Chosen positions as pages of one token, by one kernel."""

from __future__ import annotations

from typing import Any

import torch

from attnplug.core.selection import Selection
from attnplug.core.sparse import SparseSpec
from attnplug.ops.triton.kernels.selection import token_table_kernel
from attnplug.ops.triton.launch import on_device_of, power_of_two

_KERNEL: Any = token_table_kernel

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
) -> None:
    """As `attnplug.ops.selection.table_of_tokens`."""
    tokens, width = page_table.shape
    num_reqs = seq_lens.shape[0]
    if not tokens:
        return
    most = min(sparse.topk, selection.positions.shape[1])
    with on_device_of(page_table):
        _KERNEL[(tokens,)](
            selection.positions,
            selection.counts,
            query_start_loc,
            seq_lens,
            block_table,
            page_table,
            counts,
            num_reqs,
            most,
            width,
            selection.positions.stride(0),
            block_table.stride(0),
            page_table.stride(0),
            *steps,
            block_size,
            sparse.block,
            min(power_of_two(most * sparse.block), _BLOCK),
        )
