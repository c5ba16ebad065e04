"""Keys and values of all requests out of their pages, by one kernel."""

from __future__ import annotations

import functools
from typing import Any

import torch

from attnplug.ops.triton.kernels.gather import gather_keys_kernel
from attnplug.ops.triton.launch import BoundKernel, on_device_of, power_of_two

_KERNEL: Any = gather_keys_kernel
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
    rows, bound = _bound(*block_table.stride(), dtypes, *pages)
    count = k_out.shape[0] * k_out.shape[1]
    given = k_cache, v_cache, block_table, cu_lens, k_out, v_out, block_table.shape[0], count
    with on_device_of(k_out):
        bound((-(-count // rows),), *given)


@functools.lru_cache(maxsize=64)
def _bound(
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
    """Rows of a program, and the kernel for such tables and pages; cached, because engines keep theirs."""
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
    return rows, BoundKernel(_KERNEL, 8, values)
