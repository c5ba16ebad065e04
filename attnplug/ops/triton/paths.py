"""Attention of rows over a few slots each, by one kernel."""

from __future__ import annotations

import functools
from typing import Any

import torch

from attnplug.ops.triton.kernels.paths import paths_kernel
from attnplug.ops.triton.launch import BoundKernel, on_device_of, power_of_two

_KERNEL: Any = paths_kernel
_TILE = 4096
"""Elements of queries, and of results, per program."""


def paths_into(
    query: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    starts: torch.Tensor,
    slots: torch.Tensor,
    output: torch.Tensor,
    output_lse: torch.Tensor,
    scale: float,
    cap: float | None,
    sinks: torch.Tensor | None,
    scales: tuple[torch.Tensor | float, torch.Tensor | float],
) -> None:
    """As `attnplug.ops.paths.paths_into`, in one launch."""
    k, v = pages
    # Without a copy of a column of a larger tensor, the kernel would read what is beside it.
    sinks = query if sinks is None else sinks.contiguous()
    # As everywhere, numbers of 16 bits and more have no scale.
    k_scale, v_scale = scales if k.dtype.itemsize == 1 else (1.0, 1.0)
    forms = (query.stride()[:2], query.dtype), (output.stride()[:2], output.dtype), output_lse.stride(0)
    stored = k.dtype, k.stride(), v.stride(), *k.shape[1:], v.shape[3]
    kind = None if sinks is query else sinks.dtype
    tiles, bound = _bound(forms, stored, query.shape[1], scale, k_scale, v_scale, cap, kind)
    given = query, k, v, starts, slots, sinks, output, output_lse
    with on_device_of(output):
        bound((starts.shape[0] - 1, tiles), *given)


@functools.lru_cache(maxsize=256)
def _bound(
    forms: Any,
    stored: Any,
    num_heads: int,
    scale: float,
    k_scale: torch.Tensor | float,
    v_scale: torch.Tensor | float,
    cap: float | None,
    sinks: torch.dtype | None,
) -> tuple[int, BoundKernel]:
    (q_strides, _), (out_strides, _), lse_stride = forms
    _, k_strides, v_strides, block_size, kv_heads, size, size_v = stored
    group = num_heads // kv_heads
    sides = power_of_two(group), power_of_two(size), power_of_two(size_v)
    most = max(_TILE // (sides[0] * max(sides[1:])), 1)
    heads = min(power_of_two(most + 1) // 2, power_of_two(kv_heads))
    values = {
        "stride_qt": q_strides[0],
        "stride_qh": q_strides[1],
        "stride_ot": out_strides[0],
        "stride_oh": out_strides[1],
        "stride_lse": lse_stride,
        "scale": scale if isinstance(k_scale, torch.Tensor) else scale * k_scale,
        "value_scale": v_scale,
        "key_scale": k_scale if isinstance(k_scale, torch.Tensor) else 1.0,
        "cap": 1.0 if cap is None else cap,
        "K_PAGES": k_strides,
        "V_PAGES": v_strides,
        "BLOCK_SIZE": block_size,
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "D": size,
        "DV": size_v,
        "HEADS": heads,
        "MEMBERS": sides[0],
        "BLOCK_D": sides[1],
        "BLOCK_DV": sides[2],
        "HAS_CAP": cap is not None,
        "HAS_SINKS": sinks is not None,
    }
    return -(-kv_heads // heads), BoundKernel(_KERNEL, 8, values)
