"""Writing new keys and values into their pages: in plain torch, or by a Triton kernel on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from attnplug.core.arguments import positive
from attnplug.core.errors import BatchError
from attnplug.ops.checks import check_kv_write, check_slots
from attnplug.ops.storage import Rounding, quotient, round_to_float, rounding_to
from attnplug.ops.triton import triton_ops


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

    8-bit pages store value / scale, rounded as the table of stored types says: 8-bit floats are clamped to the type's
    finite maximum. On a GPU one Triton kernel writes floats without waiting; without triton, and for types that it does
    not know, the host waits to look for negative slots.

    Args:
        key: `[T, Hkv, D]`; rows past the slots are not read.
        value: `[T, Hkv, Dv]`.
        k_cache: pages `[num_blocks, block_size, Hkv, D]` of any strides, as `split_kv` gives them.
        v_cache: pages `[num_blocks, block_size, Hkv, Dv]`.
        slot_mapping: int64 `[T]`, block * block_size + offset.
        k_scale: stored key x k_scale = key.
        v_scale: the same for values.

    Raises:
        BatchError: fewer rows than slots, or rows of another shape than the pages'.
        LayoutError: pages of integers without a rounding in the table, or K and V pages that do not fit.
    """
    check_kv_write(key, value, k_cache, v_cache, slot_mapping)
    k_scale, v_scale = positive("k_scale", k_scale), positive("v_scale", v_scale)
    if key.device.type == "cpu":
        # On a GPU the host would wait for the slots.
        check_slots(slot_mapping, k_cache)
    write = bound_kv_write(key, value, k_cache, v_cache, slot_mapping, (k_scale, v_scale))
    write(key, value, k_cache, v_cache, slot_mapping)


def bound_kv_write(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: tuple[torch.Tensor | float, torch.Tensor | float],
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """`write_kv_cache` without its checks, for tensors with the strides and dtypes of these.

    Scales may be float32 `[Hkv]`, which must live as long as what is written is read.
    """
    kernels = triton_ops("kv_write") if key.is_cuda else None
    if kernels is None or not kernels.rounds_to(k_cache.dtype):
        return functools.partial(_write_both, scales, rounding_to(k_cache.dtype) or round_to_float)
    write: Callable[..., None] = kernels.BoundWrite(key, value, k_cache, v_cache, slot_mapping, scales)
    return write


@torch.no_grad()
def _write_both(
    scales: tuple[torch.Tensor | float, torch.Tensor | float],
    rounding: Rounding,
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    slots = slot_mapping.shape[0]
    key, value = key[:slots], value[:slots]
    kept = slot_mapping >= 0
    # This check makes the host wait for a GPU; the Triton kernel looks at each slot on the device.
    if not bool(kept.all()):
        slot_mapping, key, value = slot_mapping[kept], key[kept], value[kept]
    _write(k_cache, key, slot_mapping, scales[0], rounding)
    _write(v_cache, value, slot_mapping, scales[1], rounding)


def _write(
    pages: torch.Tensor,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    scale: torch.Tensor | float,
    rounding: Rounding,
) -> None:
    if pages.dtype.itemsize == 1:
        # The division runs in float32, so that only the conversion to 8 bits rounds. A copy, because rounding may write into it.
        wide = tokens.to(torch.float32, copy=True)
        stored = wide / scale[:, None] if isinstance(scale, torch.Tensor) else quotient(wide, scale)
        tokens = rounding(stored, pages.dtype).view(torch.uint8)
        pages = pages.view(torch.uint8)
    block_size = pages.shape[1]
    try:
        pages.index_put_((slots // block_size, slots % block_size), tokens.to(pages.dtype))
    # Callers of `bound_kv_write` did not check the slots, so the write itself finds one past the pages.
    except IndexError:
        past = f"is past the {pages.shape[0] * block_size} slots of the cache"
        raise BatchError("slot_mapping", int(slots.max()), past, "give slots of the pool's blocks") from None
