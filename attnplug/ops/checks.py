"""Checks of the operations' arguments, for their torch and Triton versions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnplug.core.errors import BatchError, LayoutError


def check_kv_write(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """The arguments of `write_kv_cache`.

    Raises:
        BatchError: fewer rows than slots, or rows of another shape than the pages'.
        LayoutError: pages of integers, or K and V pages that do not belong together.
    """
    slots = slot_mapping.shape
    if len(slots) != 1:
        raise BatchError("slot_mapping", tuple(slots), "must have one dimension")
    for name, pages in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not pages.is_floating_point():
            remedy = "view raw bytes as their 8-bit float"
            raise LayoutError(f"{name}.dtype", pages.dtype, "must be a float type", remedy)
    if k_cache.dtype != v_cache.dtype:
        raise LayoutError("v_cache.dtype", v_cache.dtype, f"must be that of k_cache, {k_cache.dtype}")
    k_pages, v_pages = k_cache.shape, v_cache.shape
    if len(k_pages) != 4 or k_pages[:3] != v_pages[:3] or len(v_pages) != 4:
        limit = "must be [num_blocks, block_size, num_kv_heads, head_size], alike but for the head size"
        raise LayoutError("k_cache, v_cache", (tuple(k_pages), tuple(v_pages)), limit)
    for name, rows, page in (("key", key.shape, k_pages), ("value", value.shape, v_pages)):
        if len(rows) != 3 or rows[1:] != page[2:]:
            raise BatchError(name, tuple(rows), f"must be of shape (tokens, {page[2]}, {page[3]})")
        if rows[0] < slots[0]:
            raise BatchError(name, tuple(rows), f"must have a row for each of {slots[0]} slots")


def check_merge(
    outputs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    output: torch.Tensor | None = None,
    output_lse: torch.Tensor | None = None,
) -> torch.Size:
    """The shape `[T, H, Dv]` of the arguments of `merge_attn_states`, the LSEs being `[T, H]`.

    Raises:
        BatchError: no partial, or shapes that do not fit each other.
    """
    if not len(outputs) or len(outputs) != len(lses):
        raise BatchError("outputs", len(outputs), f"must be as many as lses ({len(lses)}), at least one")
    shape = outputs[0].shape
    if len(shape) != 3:
        raise BatchError("outputs[0]", tuple(shape), "must be of shape (tokens, num_heads, head_size_v)")
    for index, (out, lse) in enumerate(zip(outputs, lses, strict=True)):
        if out.shape != shape or lse.shape != shape[:-1]:
            found = (tuple(out.shape), tuple(lse.shape))
            limit = f"must have the shapes {tuple(shape)} and {tuple(shape[:-1])}"
            raise BatchError(f"outputs[{index}], lses[{index}]", found, limit)
    for name, tensor, rows in (("output", output, shape), ("output_lse", output_lse, shape[:-1])):
        if tensor is not None and tensor.shape != rows:
            raise BatchError(name, tuple(tensor.shape), f"must have the shape {tuple(rows)}")
    return shape
