"""Gathering the tokens of pages into one tensor, such as the latents of a chunk of computed tokens.

The concatenated pages of all requests, for kernels with compressed page tables.
"""

from __future__ import annotations

import torch

from attnplug.core.arguments import at_least, checked, positive
from attnplug.core.errors import BatchError
from attnplug.ops.checks import check_apart, check_lengths, check_numbers, check_slots, check_written
from attnplug.ops.triton import triton_ops


@checked(
    k_cache="B S H D: floats",
    v_cache="B S H Dv: floats",
    block_table="R M: int32",
    cu_lens="R+1: int32",
    k_out="T H D: floats",
    v_out="T H Dv: floats",
)
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

    Raises:
        BatchError: tensors of other shapes, dtypes or devices, or outputs that share memory with what is read. On a CPU also
            a page that is not in the cache, and rows that are not as many as the tokens.
    """
    for name, tensor in (("v_cache", v_cache), ("k_out", k_out), ("v_out", v_out)):
        if tensor.dtype != k_cache.dtype:
            raise BatchError(f"{name}.dtype", tensor.dtype, f"must be that of k_cache, {k_cache.dtype}")
    given = {"k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "cu_lens": cu_lens}
    check_written("k_out", k_out)
    check_written("v_out", v_out)
    check_apart("k_out", k_out, **given, v_out=v_out)
    check_apart("v_out", v_out, **given)
    keys_into(k_cache, v_cache, block_table, cu_lens, k_out, v_out)


def keys_into(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_lens: torch.Tensor,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
) -> None:
    """`gather_keys` without its checks of types, for tensors that the caller made itself."""
    kernels = triton_ops("pages") if k_out.is_cuda else None
    if kernels is not None:
        kernels.gather_keys(k_cache, v_cache, block_table, cu_lens, k_out, v_out)
        return
    starts = torch.zeros_like(cu_lens[1:])
    pages_into(k_cache, block_table, cu_lens, starts, k_out, "k_cache", "k_out")
    pages_into(v_cache, block_table, cu_lens, starts, v_out, "v_cache", "v_out")


@checked(
    kv_cache="B S *: stored",
    block_table="R M: int32",
    cu_lens="R+1: integers",
    starts="R: integers",
    out="T *: floats",
    scale=positive,
)
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

    Raises:
        BatchError: as `gather_keys`.
    """
    check_written("out", out)
    check_apart("out", out, kv_cache=kv_cache, block_table=block_table, cu_lens=cu_lens, starts=starts)
    return pages_into(kv_cache, block_table, cu_lens, starts, out, "kv_cache", "out", scale)


def pages_into(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_lens: torch.Tensor,
    starts: torch.Tensor,
    out: torch.Tensor,
    pages: str = "kv_cache",
    rows: str = "out",
    scale: float = 1.0,
) -> torch.Tensor:
    """`gather_pages` without its checks of types; `pages` and `rows` are the names of two arguments in errors."""
    if out.shape[1:] != kv_cache.shape[2:]:
        expected = ", ".join(map(str, ("cu_lens[R]", *kv_cache.shape[2:])))
        raise BatchError(
            rows, tuple(out.shape), f"must have the shape ({expected}), that of tokens of {pages}"
        )
    if not kv_cache.shape[1] and out.shape[0]:
        raise BatchError(pages, tuple(kv_cache.shape), "must have pages of at least one token")
    on_host = out.device.type == "cpu"
    if on_host:
        # On a device the host would wait for these numbers.
        check_lengths("cu_lens", cu_lens, rows, out.shape[0])
    places = torch.arange(out.shape[0], device=out.device)
    ends = cu_lens[1:].long()
    owners = torch.searchsorted(ends, places, right=True)
    positions = places - cu_lens.long()[owners] + starts.long()[owners]
    size = kv_cache.shape[1]
    columns = positions // size
    if on_host:
        check_numbers("starts", starts, 0, None)
        check_numbers(
            "block_table",
            columns,
            0,
            block_table.shape[1],
            "is the number of a page past the table's columns",
        )
    blocks = block_table[owners, columns].long()
    if on_host:
        check_numbers(
            "block_table",
            blocks,
            0,
            kv_cache.shape[0],
            f"must be in 0 .. {kv_cache.shape[0] - 1}, the pages of {pages}",
        )
    return _dequantised(kv_cache, blocks, positions % size, out, scale)


@checked(kv_cache="B S *: stored", slot_mapping="T: int64", out="T *: floats", scale=positive)
def gather_slots(
    kv_cache: torch.Tensor, slot_mapping: torch.Tensor, out: torch.Tensor, scale: float = 1.0
) -> torch.Tensor:
    """Write the token of each slot, int64 `[T]`, to `out [T, D]`; rows of slot -1 are undefined.

    Raises:
        BatchError: tensors of other shapes, dtypes or devices, or, on a CPU, a slot that is not in the cache.
    """
    if out.shape[1:] != kv_cache.shape[2:]:
        limit = f"must have the shape ({', '.join(map(str, (slot_mapping.shape[0], *kv_cache.shape[2:])))})"
        raise BatchError("out", tuple(out.shape), limit)
    check_written("out", out)
    check_apart("out", out, kv_cache=kv_cache, slot_mapping=slot_mapping)
    if out.device.type == "cpu":
        check_slots(slot_mapping, kv_cache)
    return slots_into(kv_cache, slot_mapping, out, scale)


def slots_into(
    kv_cache: torch.Tensor, slot_mapping: torch.Tensor, out: torch.Tensor, scale: torch.Tensor | float = 1.0
) -> torch.Tensor:
    """`gather_slots` without its checks, for tensors that the caller made itself; a scale may be `[heads]`."""
    size = kv_cache.shape[1]
    if not kv_cache.shape[0] * size:
        return out.zero_()  # only slots of -1 are in no page
    slots = slot_mapping.clamp(min=0)
    return _dequantised(kv_cache, slots // size, slots % size, out, scale)


def _dequantised(
    kv_cache: torch.Tensor,
    blocks: torch.Tensor,
    offsets: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor | float,
) -> torch.Tensor:
    if kv_cache.dtype.itemsize > 1:
        return out.copy_(kv_cache[blocks, offsets])
    # Indexing copies bytes; torch has no indexing of every 8-bit float.
    rows = kv_cache.view(torch.uint8)[blocks, offsets].view(kv_cache.dtype)
    factor = scale[:, None] if isinstance(scale, torch.Tensor) else scale
    return out.copy_(rows.float().mul_(factor))


@checked(
    block_table="R M: integers",
    seq_lens="S: integers",
    page_size=at_least(1),
    rows="?n: int32",
    out="T: int32",
    count=at_least(0),
)
def gather_page_indices(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    rows: torch.Tensor | None,
    out: torch.Tensor,
    count: int,
) -> torch.Tensor:
    """Write each request's pages after those of the requests before it, without waiting for a device.

    On a GPU one Triton kernel runs; without triton, a few torch operations.

    Args:
        block_table: int32 or int64 `[R, max_blocks]`; entries past a request's pages are not written.
        seq_lens: int32 or int64 `[R]`, tokens of each request.
        page_size: tokens of a page.
        rows: int32 `[n]`, the requests to write, in this order; None for all.
        out: int32, at least `count` long; the rest stays.
        count: their number of pages on the host; no more are written, and if the device has fewer, the places
            after them are undefined.

    Returns:
        `out`.

    Raises:
        BatchError: tensors of other shapes or dtypes, or fewer places than `count`; on a CPU also rows or lengths that the
            table does not have.
    """
    if not count:
        return out
    if rows is not None and not rows.shape[0]:
        raise BatchError("rows", (0,), f"must name the requests of {count} pages")
    if count > out.shape[0]:
        raise BatchError("count", count, f"must be at most {out.shape[0]}, the size of out")
    kernels = triton_ops("pages") if out.is_cuda else None
    if kernels is not None:
        kernels.gather_page_indices(block_table, seq_lens, page_size, rows, out, count)
        return out
    places = torch.arange(count, device=out.device)
    taken = None if rows is None else rows.long()
    if out.device.type == "cpu":
        reqs, most = block_table.shape
        if taken is not None:
            reqs = min(reqs, seq_lens.shape[0])
            check_numbers(
                "rows", taken, 0, reqs, f"must be in 0 .. {reqs - 1}, the rows of block_table and seq_lens"
            )
        limit = f"must be in 0 .. {most * page_size}, the tokens of a row of block_table"
        check_numbers("seq_lens", seq_lens, 0, most * page_size + 1, limit)
    if not seq_lens.shape[0]:
        raise BatchError("seq_lens", (0,), f"must have the lengths of {count} pages")
    lengths = seq_lens if taken is None else seq_lens[taken]
    ends = ((lengths.long() + (page_size - 1)) // page_size).cumsum(0)
    # `count` comes from the host, so no size is read back from the device.
    # If the device has fewer pages than `count`, the places after them still need an index in range.
    owners = torch.searchsorted(ends, places, right=True).clamp_(max=len(ends) - 1)
    before = torch.nn.functional.pad(ends, (1, 0))
    columns = (places - before[owners]).clamp_(max=block_table.shape[1] - 1)
    out[:count] = block_table[owners if taken is None else taken[owners], columns]
    return out
