"""Writing new keys and values into pages with planes by one kernel launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from attnplug.core.kv_format import KVFormat, kv_format
from attnplug.core.spec import LayerSpec
from attnplug.ops.kv_codec import bound_codec_write as torch_codec_write
from attnplug.ops.kv_codec import make_codec, page_planes
from attnplug.ops.triton.kernels.kv_format_write import format_write_kernel
from attnplug.ops.triton.launch import BoundKernel, can_overlap, on_device_of, power_of_two
from attnplug.ops.triton.rotation import Rotation, exact_parts

_KERNEL: Any = format_write_kernel
_TILES = {"int8_token_head": 8, "nvfp4": 8, "rotated4": 16}
"""Rows of a program, for the formats that the kernel writes; matrix products have no fewer than 16."""


def bound_codec_write(
    spec: LayerSpec,
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    scales: tuple[float, float],
) -> Callable[..., None]:
    """The function that writes keys and values `[T, heads, head_size]` into pages, for tensors of these forms.

    It is one launch for the formats of attnplug, and `attnplug.ops.kv_codec.write_pages` for others.
    """
    row = kv_format(spec.resolved_kv_cache_dtype)
    if row.name not in _TILES:
        return torch_codec_write(spec, key, value, k_cache, v_cache, slots, scales)
    return BoundFormatWrite(row, spec.head_size, key, value, k_cache, v_cache, slots, scales)


class PlanePlaces(NamedTuple):
    """Where a page has the rows of its second plane, in bytes."""

    start: int
    token: int
    head: int
    is_aligned: bool
    """Whether the addresses of its items are multiples of their size."""


def scale_places(row: KVFormat, head_size: int, k: torch.Tensor, v: torch.Tensor) -> PlanePlaces:
    """The places of the scales in pages of K and of V, which have the same ones.

    Raises:
        LayoutError: the bytes of a block's heads are not neighbours in the order NHD or HND.
    """
    data, scales = page_planes(k, row, head_size)
    start = int(scales.storage_offset() - data.storage_offset())
    size = getattr(torch, row.planes[1].dtype).itemsize
    places = k.data_ptr() + start, v.data_ptr() + start, k.stride(0), v.stride(0), *scales.stride()[1:3]
    return PlanePlaces(start, scales.stride(1), scales.stride(2), not any(each % size for each in places))


class BoundFormatWrite:
    """Writes keys and values of one format, for tensors with the strides and dtypes of these.

    Args:
        row: the format.
        head_size: elements of a row.
        key: `[T, Hkv, D]`.
        value: `[T, Hkv, D]`.
        k_cache: pages `[num_blocks, block_size, Hkv, width]` of bytes.
        v_cache: the same of values.
        slot_mapping: int64 `[T]`.
        scales: of stored keys and values.
    """

    __slots__ = ("_heads", "_kernel", "_matrix", "_tile")

    def __init__(
        self,
        row: KVFormat,
        head_size: int,
        key: torch.Tensor,
        value: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        scales: tuple[float, float],
    ) -> None:
        _, block_size, self._heads, _ = k_cache.shape
        self._tile = _TILES[row.name]
        data = page_planes(k_cache, row, head_size)[0].stride()
        # The kernel has the strides of keys for both.
        places = scale_places(row, head_size, k_cache, v_cache)
        codec: Any = make_codec(row, head_size)
        turn = Rotation.of(codec, key.device) if hasattr(codec, "rotate") else None
        self._matrix = None if turn is None else turn.matrix
        # Layers of float32 have bounds that a scale with another last bit would pass.
        exact = torch.float32 in (key.dtype, value.dtype)
        values = {
            "k_scale": float(scales[0]),
            "v_scale": float(scales[1]),
            "factor": 1.0 if turn is None else turn.factor,
            **dict(zip(("stride_kt", "stride_kh", "stride_kd"), key.stride(), strict=True)),
            **dict(zip(("stride_vt", "stride_vh", "stride_vd"), value.stride(), strict=True)),
            "stride_slot": slot_mapping.stride(0),
            "stride_kb": k_cache.stride(0),
            "stride_vb": v_cache.stride(0),
            "DATA": data[1:3],
            "SCALES": tuple(places),
            "BLOCK_SIZE": block_size,
            "HEADS": self._heads,
            "D": head_size,
            "BLOCK_D": max(power_of_two(head_size), 16),
            "TILE": self._tile,
            "PARTS": max(exact_parts(key), exact_parts(value)),
            "BLOCK": 1 if turn is None else codec.block,
            "IN_ORDER": exact and turn is not None,
            "FORMAT": row.name,
            "PDL": can_overlap(k_cache.device),
        }
        # Sums in the order of the codec are its sums only if no product is fused with them.
        options = {"enable_fp_fusion": False} if values["IN_ORDER"] else {}
        self._kernel = BoundKernel(_KERNEL, 7, values, num_warps=4, **options)

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
        matrix = slot_mapping if self._matrix is None else self._matrix
        with on_device_of(key):
            grid = (-(-num_rows // self._tile), 2)
            self._kernel(grid, key, value, k_cache, v_cache, slot_mapping, matrix, num_rows)
