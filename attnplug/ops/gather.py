"""Gathering the tokens of pages into one tensor, such as the latents of a chunk of computed tokens."""

from __future__ import annotations

import torch

from attnplug.ops.triton import triton_ops


def gather_keys(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_lens: torch.Tensor,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
) -> None:
    """Write the first keys and values of each request after those of the requests before it, without waiting for a device.

    On a GPU one Triton kernel runs; without triton, a few torch operations.

    Args:
        k_cache: pages `[num_blocks, block_size, Hkv, D]` of any strides, of 16 bits or more.
        v_cache: pages `[num_blocks, block_size, Hkv, Dv]` of that dtype.
        block_table: int32 `[R, max_blocks]`; only the pages of the gathered tokens are followed.
        cu_lens: int32 `[R + 1]`: request i gets the rows `cu_lens[i] : cu_lens[i + 1]`.
        k_out: contiguous `[cu_lens[R], Hkv, D]`.
        v_out: contiguous `[cu_lens[R], Hkv, Dv]`.
    """
    kernels = triton_ops("gather") if k_out.is_cuda else None
    if kernels is not None:
        kernels.gather_keys(k_cache, v_cache, block_table, cu_lens, k_out, v_out)
        return
    starts = torch.zeros_like(cu_lens[1:])
    gather_pages(k_cache, block_table, cu_lens, starts, k_out)
    gather_pages(v_cache, block_table, cu_lens, starts, v_out)


def gather_pages(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_lens: torch.Tensor,
    starts: torch.Tensor,
    out: torch.Tensor,
    scale: float = 1.0,
) -> torch.Tensor:
    """Write the tokens of each request's pages after those of the requests before it, without waiting for a device.

    Args:
        kv_cache: pages `[num_blocks, block_size, ...]` of any strides, in their stored dtype.
        block_table: int32 `[R, max_blocks]`; only the pages of the gathered positions are followed.
        cu_lens: int32 or int64 `[R + 1]`: request i gets the rows `cu_lens[i] : cu_lens[i + 1]`.
        starts: int32 or int64 `[R]`: the first position of each request.
        out: `[cu_lens[R], ...]`.
        scale: stored value x scale = value.

    Returns:
        `out`.
    """
    places = torch.arange(out.shape[0], device=out.device)
    ends = cu_lens[1:].long()
    owners = torch.searchsorted(ends, places, right=True)
    positions = places - cu_lens.long()[owners] + starts.long()[owners]
    size = kv_cache.shape[1]
    blocks = block_table[owners, positions // size].long()
    return _dequantised(kv_cache, blocks, positions % size, out, scale)


def gather_slots(
    kv_cache: torch.Tensor, slot_mapping: torch.Tensor, out: torch.Tensor, scale: float = 1.0
) -> torch.Tensor:
    """Write the token of each slot, int64 `[T]`, to `out [T, D]`; rows of slot -1 are undefined."""
    slots = slot_mapping.clamp(min=0)
    size = kv_cache.shape[1]
    return _dequantised(kv_cache, slots // size, slots % size, out, scale)


def _dequantised(
    kv_cache: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor, scale: float
) -> torch.Tensor:
    if kv_cache.dtype.itemsize > 1:
        return out.copy_(kv_cache[blocks, offsets])
    # Indexing copies bytes; torch has no indexing of every 8-bit float.
    rows = kv_cache.view(torch.uint8)[blocks, offsets].view(kv_cache.dtype)
    return out.copy_(rows.float().mul_(scale))
