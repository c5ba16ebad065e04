"""The slots of new tokens' K and V by one kernel, from block tables on the device."""

from __future__ import annotations

from typing import Any

import torch

from attnplug.core.batch.host import check_count
from attnplug.core.errors import BatchError
from attnplug.core.metadata import PAD_SLOT_ID
from attnplug.ops.triton.kernels.slots import slot_mapping_kernel
from attnplug.ops.triton.launch import on_device_of

_KERNEL: Any = slot_mapping_kernel

_BLOCK = 256
"""Tokens per program."""


def compute_slot_mapping(
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_size: int,
    *,
    out: torch.Tensor,
    start_idx: torch.Tensor | None = None,
) -> torch.Tensor:
    """The slot of every new token, request after request: `table[p // block] * block + p % block`.

    It gives the result of `attnplug.core.batch.compute_slot_mapping` from device tensors in one launch: nothing waits,
    nothing is allocated, and lengths are not checked.

    Args:
        block_table: `[R, max_blocks]`, of any integer type, as all inputs.
        query_start_loc: `[R + 1]`; tokens past its last value get -1.
        positions: `[T]`, of each token in its request; padding tokens' are not read.
        block_size: tokens per KV page.
        out: int64 `[N]`, N >= T, all written: -1 past the tokens, and for positions outside of the table.
        start_idx: `[R]`: positions before it get -1; see `compute_slot_mapping_start_idx`.

    Returns:
        `out`.

    Raises:
        BatchError: shapes that do not fit each other, or an `out` that is not int64 or too short.
    """
    check_count("block_size", block_size, 1)
    if block_table.dim() != 2:
        raise BatchError("block_table", tuple(block_table.shape), "must be of shape (requests, max_blocks)")
    num_reqs, width = block_table.shape
    for field, tensor, rows in (
        ("query_start_loc", query_start_loc, num_reqs + 1),
        ("start_idx", start_idx, num_reqs),
    ):
        if tensor is not None and tensor.shape != (rows,):
            limit = f"must be of shape ({rows},): block_table has {num_reqs} requests"
            raise BatchError(field, tuple(tensor.shape), limit)
    if positions.dim() != 1:
        raise BatchError("positions", tuple(positions.shape), "must have one dimension")
    if out.dtype != torch.int64 or out.dim() != 1 or out.shape[0] < positions.shape[0]:
        limit = f"must be int64 with at least {positions.shape[0]} elements"
        raise BatchError("out", f"{out.dtype} {tuple(out.shape)}", limit)
    num_slots = out.shape[0]
    if not num_slots:
        return out
    if not num_reqs or not width:
        return out.fill_(PAD_SLOT_ID)
    starts = query_start_loc if start_idx is None else start_idx
    with on_device_of(out):
        _KERNEL[(-(-num_slots // _BLOCK),)](
            block_table,
            query_start_loc,
            positions,
            starts,
            out,
            num_reqs,
            positions.shape[0],
            num_slots,
            width,
            num_reqs.bit_length(),
            *block_table.stride(),
            query_start_loc.stride(0),
            positions.stride(0),
            starts.stride(0),
            out.stride(0),
            block_size,
            start_idx is not None,
            _BLOCK,
        )
    return out
