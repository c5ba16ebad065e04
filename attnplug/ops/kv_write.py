"""Writing new keys and values into their pages, in plain torch."""

from __future__ import annotations

import torch

from attnplug.core.errors import BatchError, LayoutError

__all__ = ["write_kv_cache"]


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

    Storage in 8-bit floats holds value / scale, clamped to the type's finite maximum. Negative slots are
    looked for on the host: on a GPU this waits.

    Args:
        key: `[T, Hkv, D]`; rows past the slots are not read.
        value: `[T, Hkv, Dv]`.
        k_cache: pages `[num_blocks, block_size, Hkv, D]` of any strides, as `split_kv` gives them.
        v_cache: pages `[num_blocks, block_size, Hkv, Dv]`.
        slot_mapping: int64 `[T]`, block * block_size + offset.
        k_scale: stored key x k_scale = key.
        v_scale: the same for values.

    Raises:
        BatchError: fewer rows than slots.
        LayoutError: pages of integers: they would need more than a scale.
    """
    for name, pages in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not pages.is_floating_point():
            remedy = "view raw bytes as their 8-bit float"
            raise LayoutError(f"{name}.dtype", pages.dtype, "must be a float type", remedy)
    slots = slot_mapping.shape[0]
    for name, tensor in (("key", key), ("value", value)):
        if tensor.shape[0] < slots:
            raise BatchError(name, tuple(tensor.shape), f"must have a row for each of {slots} slots")
    key, value = key[:slots], value[:slots]
    kept = slot_mapping >= 0
    if not bool(kept.all()):
        slot_mapping, key, value = slot_mapping[kept], key[kept], value[kept]
    _write(k_cache, key, slot_mapping, k_scale)
    _write(v_cache, value, slot_mapping, v_scale)


def _write(pages: torch.Tensor, tokens: torch.Tensor, slots: torch.Tensor, scale: float) -> None:
    if pages.dtype.itemsize == 1:
        limit = torch.finfo(pages.dtype).max
        stored = tokens.float().div_(scale) if tokens.dtype != torch.float32 else tokens / scale
        tokens = stored.clamp_(-limit, limit).to(pages.dtype).view(torch.uint8)
        pages = pages.view(torch.uint8)
    block_size = pages.shape[1]
    pages.index_put_((slots // block_size, slots % block_size), tokens.to(pages.dtype))
