"""Writing new keys and values into their pages by one kernel launch."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

from attnplug.core.errors import LayoutError
from attnplug.ops.checks import check_kv_write
from attnplug.ops.triton.kernels.kv_write import kv_write_kernel
from attnplug.ops.triton.launch import BoundKernel, can_overlap, on_device_of, power_of_two

_KERNEL: Any = kv_write_kernel

# Elements of K, and of V, per program: with one warp, four 16-byte loads per thread.
_TILE = 1024
_NUM_WARPS = 1

# PTX converts to these two types from capability 8.9 on.
_NATIVE = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
_SOFTWARE = {
    torch.float8_e4m3fn: (3, 7, False),
    torch.float8_e5m2: (2, 15, False),
    torch.float8_e4m3fnuz: (3, 8, True),
    torch.float8_e5m2fnuz: (2, 16, True),
}
"""Bits of the mantissa, bias of the exponent, and whether -0 is NaN."""


def write_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write each token's K and V where its slot says; slot -1 is not written.

    It has the arguments and errors of `attnplug.ops.write_kv_cache`, and is one launch: nothing waits and nothing is
    allocated. Arguments may have any strides. Slots past the last page are not checked.
    """
    check_kv_write(key, value, k_cache, v_cache, slot_mapping)
    BoundWrite(key, value, k_cache, v_cache, slot_mapping, (k_scale, v_scale))(
        key, value, k_cache, v_cache, slot_mapping
    )


class BoundWrite:
    """`write_kv_cache` without its checks, for tensors with the strides and dtypes of these.

    Args:
        key: `[T, Hkv, D]`.
        value: `[T, Hkv, Dv]`.
        k_cache: pages `[num_blocks, block_size, Hkv, D]`.
        v_cache: pages `[num_blocks, block_size, Hkv, Dv]`.
        slot_mapping: int64 `[T]`.
        scales: of stored keys and values: numbers, or float32 `[Hkv]` that live as long as what is written is read.
    """

    __slots__ = ("_heads", "_kernel", "_rows", "_stored")

    def __init__(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        scales: tuple[torch.Tensor | float, torch.Tensor | float],
    ) -> None:
        _, block_size, self._heads, head_size = k_cache.shape
        tile = _tile(head_size, v_cache.shape[3])
        self._rows = tile[0]
        form = _format(k_cache.dtype, k_cache.device)
        # Triton refuses pointers to 8-bit floats that the hardware does not have.
        self._stored = torch.uint8 if len(form) > 1 else None
        values = {
            "k_scale": scales[0],
            "v_scale": scales[1],
            **dict(zip(("stride_kt", "stride_kh", "stride_kd"), key.stride(), strict=True)),
            **dict(zip(("stride_vt", "stride_vh", "stride_vd"), value.stride(), strict=True)),
            "stride_slot": slot_mapping.stride(0),
            "K_PAGES": k_cache.stride(),
            "V_PAGES": v_cache.stride(),
            "BLOCK_SIZE": block_size,
            "HEADS": self._heads,
            "D": head_size,
            "DV": v_cache.shape[3],
            "TILE": tile,
            "FORMAT": form,
            "PDL": can_overlap(k_cache.device),
        }
        self._kernel = BoundKernel(_KERNEL, 6, values, num_warps=_NUM_WARPS)

    def __call__(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write each token to its slot."""
        num_rows = slot_mapping.shape[0] * self._heads
        if not num_rows:
            return
        if self._stored is not None:
            k_cache, v_cache = k_cache.view(self._stored), v_cache.view(self._stored)
        with on_device_of(key):
            grid = (-(-num_rows // self._rows),)
            self._kernel(grid, key, value, k_cache, v_cache, slot_mapping, num_rows)


def rounds_to(dtype: torch.dtype) -> bool:
    """Whether the kernel writes pages of this dtype."""
    return dtype.itemsize > 1 or dtype in _SOFTWARE


@functools.cache
def _tile(head_size: int, head_size_v: int) -> tuple[int, int, int]:
    """Rows per program, and both head sizes as powers of two."""
    block_d, block_dv = power_of_two(head_size), power_of_two(head_size_v)
    return max(_TILE // max(block_d, block_dv), 1), block_d, block_dv


@functools.cache
def _format(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """FORMAT of the kernel for pages of this dtype."""
    if dtype.itemsize > 1:
        return ()
    if dtype not in _SOFTWARE:
        names = ", ".join(str(each) for each in _SOFTWARE)
        raise LayoutError("k_cache.dtype", dtype, f"must be one of {names}, if it has 8 bits")
    limit = torch.finfo(dtype).max
    return (limit,) if _converts(dtype, device) else (limit, *_SOFTWARE[dtype])


def _converts(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the hardware has an instruction that rounds as torch does."""
    interpreted = not isinstance(kv_write_kernel, triton.JITFunction)
    if device.type != "cuda" or torch.version.hip or interpreted:
        return False
    return dtype in _NATIVE and torch.cuda.get_device_capability(device) >= (8, 9)
