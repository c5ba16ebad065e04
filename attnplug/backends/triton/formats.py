"""Layers whose pages have planes: where the kernels find scales, and the turned queries of rotated formats."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from attnplug.backends.triton.layout import tile_side
from attnplug.core.kv_format import KVFormat, kv_format
from attnplug.core.spec import LayerSpec
from attnplug.ops.kv_codec import codec_of, page_planes
from attnplug.ops.triton.kv_format_write import PlanePlaces, scale_places
from attnplug.ops.triton.rotation import Rotation


class Form(NamedTuple):
    """What the kernels know of a format: FORMAT of kernels/formats.py is these, one after the other."""

    name: str
    scales: PlanePlaces
    row_scales: bool
    step: int
    shift: int


def row_of(spec: LayerSpec) -> KVFormat | None:
    """The format of a layer's pages if they have planes, else None."""
    row = kv_format(spec.resolved_kv_cache_dtype)
    return row if row.planes else None


def rotation_of(spec: LayerSpec, device: torch.device) -> Rotation | None:
    """The rotation of a layer's queries and outputs; None if its rows are not turned."""
    codec = codec_of(spec)
    return None if codec is None or not hasattr(codec, "rotate") else Rotation.of(codec, device)


def scale_step(spec: LayerSpec) -> int:
    """Elements of a value that one program has: those of a scale, or 16 bytes of 16 bits."""
    return 16 if spec.resolved_kv_cache_dtype == "nvfp4" else 8


def stride_arguments(k: tuple[int, ...], v: tuple[int, ...]) -> dict[str, int]:
    """Strides of pages `[blocks, block_size, Hkv, D]`, or of keys and values `[T, Hkv, D]` as one page."""
    (kb, kt, kh, _), (vb, vt, vh, _) = (each if len(each) == 4 else (0, *each) for each in (k, v))
    return {
        "stride_kb": kb,
        "stride_kt": kt,
        "stride_kh": kh,
        "stride_vb": vb,
        "stride_vt": vt,
        "stride_vh": vh,
        # K and V of equal strides share one set of row offsets, which saves instructions.
        "ALIKE": (kb, kt) == (vb, vt),
    }


def format_values(
    spec: LayerSpec, k: torch.Tensor, v: torch.Tensor, columns: int | None = None
) -> dict[str, Any]:
    """Arguments of the kernels that differ for pages `[num_blocks, block_size, Hkv, width]` with planes; else none.

    Args:
        spec: the layer.
        k: its pages.
        v: as `k`.
        columns: elements of a value that a program has; None for all.

    Raises:
        LayoutError: the bytes of a block's heads are not neighbours in the order NHD or HND.
    """
    row = row_of(spec)
    if row is None or k.dim() < 4:
        return {}
    data, v_data = (page_planes(pages, row, spec.head_size)[0].stride() for pages in (k, v))
    packed = row.planes[0].per_element != 1
    form = Form(
        name=row.name,
        scales=scale_places(row, spec.head_size, k, v),
        row_scales=bool(row.planes[1].per_row),
        step=2 if row.name == "nvfp4" else 1,
        shift=0 if not packed else 1 if row.name == "nvfp4" else spec.head_size // 2,
    )
    width, width_v = (
        tile_side(size // 2 if packed else size) for size in (spec.head_size, columns or spec.head_size)
    )
    return {
        "FORMAT": (form.name, *form.scales, *form[2:]),
        **dict(zip(("stride_kb", "stride_kt", "stride_kh"), data, strict=False)),
        **dict(zip(("stride_vb", "stride_vt", "stride_vh"), v_data, strict=False)),
        "ALIKE": False,
        "PAIRS": False,
        "PTX": False,
        "BLOCK_D": width,
        "BLOCK_DV": width_v,
        "TAIL": width if packed else 0,
        "TAIL_V": width_v if packed else 0,
    }


def opened_scale(spec: LayerSpec, scales: tuple[Any, Any]) -> tuple[Any, Any]:
    """What opened keys and values are still multiplied with, from the scales of the layer."""
    row = row_of(spec)
    if row is None:
        return scales
    if not row.layer_scales:
        return 1.0, 1.0
    # The kernels open NVFP4 as 2**-9 of its numbers.
    return scales[0] * 512.0, scales[1] * 512.0
