"""Keys and values of all requests out of their pages, by one kernel.

The concatenated pages of all requests, by one kernel.

The slots of new tokens' K and V by one kernel, from block tables on the device.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from attnplug.core.batch.host import check_count
from attnplug.core.errors import BatchError
from attnplug.core.metadata import PAD_SLOT_ID
from attnplug.ops.triton.kernels.pages import gather_keys_kernel, page_indices_kernel, slot_mapping_kernel
from attnplug.ops.triton.launch import BoundKernel, on_device_of, power_of_two

_GATHER: Any = gather_keys_kernel
_TILE = 4096
"""Elements of K, and of V, per program."""
_REQS = 64
"""Requests that a program compares with its rows at once."""


def gather_keys(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_lens: torch.Tensor,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
) -> None:
    """As `attnplug.ops.gather.gather_keys`, in one launch."""
    pages = k_cache.stride(), v_cache.stride(), *k_cache.shape[1:], v_cache.shape[3]
    dtypes = k_cache.dtype, v_cache.dtype, block_table.dtype, cu_lens.dtype
    rows, bound = _bound_gather(*block_table.stride(), dtypes, *pages)
    count = k_out.shape[0] * k_out.shape[1]
    given = k_cache, v_cache, block_table, cu_lens, k_out, v_out, block_table.shape[0], count
    with on_device_of(k_out):
        bound((-(-count // rows),), *given)


@functools.lru_cache(maxsize=64)
def _bound_gather(
    stride_row: int,
    stride_page: int,
    dtypes: tuple[torch.dtype, ...],
    k_strides: tuple[int, ...],
    v_strides: tuple[int, ...],
    block_size: int,
    heads: int,
    size: int,
    size_v: int,
) -> tuple[int, BoundKernel]:
    # Cached, because engines keep their tables and pages from step to step.
    block_d, block_dv = power_of_two(size), power_of_two(size_v)
    rows = max(_TILE // max(block_d, block_dv), 1)
    values = {
        "stride_row": stride_row,
        "stride_page": stride_page,
        "K_PAGES": k_strides,
        "V_PAGES": v_strides,
        "BLOCK_SIZE": block_size,
        "HEADS": heads,
        "D": size,
        "DV": size_v,
        "TILE": (rows, block_d, block_dv),
        "REQS": _REQS,
    }
    return rows, BoundKernel(_GATHER, 8, values)


_PAGE_INDICES: Any = page_indices_kernel
_PAGES_A_PROGRAM = 512
"""Pages that a program copies at a time, and earlier requests that it counts at a time."""


def gather_page_indices(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    rows: torch.Tensor | None,
    out: torch.Tensor,
    count: int,
) -> torch.Tensor:
    """As `attnplug.ops.gather.gather_page_indices`, in one launch."""
    dtypes = block_table.dtype, seq_lens.dtype
    bound = _bound_page_indices(*block_table.stride(), *dtypes, page_size, rows is not None)
    # The kernel gets no stride of the lengths.
    seq_lens = seq_lens.contiguous()
    requests = (seq_lens if rows is None else rows).shape[0]
    with on_device_of(out):
        bound((requests,), block_table, seq_lens, seq_lens if rows is None else rows, out, count)
    return out


@functools.lru_cache(maxsize=64)
def _bound_page_indices(
    stride_row: int,
    stride_page: int,
    table_dtype: torch.dtype,
    lens_dtype: torch.dtype,
    page_size: int,
    has_rows: bool,
) -> BoundKernel:
    # Cached, because engines keep their tables from step to step.
    values = {
        "stride_row": stride_row,
        "stride_page": stride_page,
        "PAGE_SIZE": page_size,
        "HAS_ROWS": has_rows,
        "BLOCK": _PAGES_A_PROGRAM,
    }
    return BoundKernel(_PAGE_INDICES, 5, values)


_SLOTS: Any = slot_mapping_kernel

_TOKENS_A_PROGRAM = 256
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
        _SLOTS[(-(-num_slots // _TOKENS_A_PROGRAM),)](
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
            _TOKENS_A_PROGRAM,
        )
    return out
