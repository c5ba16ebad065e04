"""Attention of rows that each name the slots of their few keys, such as the nodes of a draft tree."""

from __future__ import annotations

import torch

from attnplug.ops.gather import slots_into
from attnplug.ops.triton import triton_ops


def paths_into(
    query: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    starts: torch.Tensor,
    slots: torch.Tensor,
    output: torch.Tensor,
    output_lse: torch.Tensor,
    scale: float,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
    scales: tuple[torch.Tensor | float, torch.Tensor | float] = (1.0, 1.0),
) -> None:
    """Attend the slots of each row, at least one, without waiting for a device; the caller made all tensors itself.

    On a GPU one Triton kernel runs, which reads each key once for each row and multiplies in float32; without triton, a few
    torch operations.

    Args:
        query: `[at least T, H, D]`, with a last stride of 1; rows past T are not read.
        pages: K `[num_blocks, block_size, Hkv, D]` and V of head size Dv, of any strides, in their stored dtype.
        starts: int32 `[T + 1]`: row t attends `slots[starts[t] : starts[t + 1]]`.
        slots: int64 `[N]`.
        output: `[T, H, Dv]` to write to, with a last stride of 1.
        output_lse: float32 `[T, H]` to write to, natural log, with the sinks.
        scale: of the logits.
        cap: of the logits, by tanh; None without.
        sinks: `[H]`; None without.
        scales: of keys and values that are stored in 8 bits: numbers, or float32 `[Hkv]` that live as long as the layer.
    """
    rows, (heads, size_v) = starts.shape[0] - 1, output.shape[1:]
    if not rows:
        return
    kernels = triton_ops("paths") if query.is_cuda and _converts(pages[0]) else None
    if kernels is not None:
        kernels.paths_into(query, pages, starts, slots, output, output_lse, scale, cap, sinks, scales)
        return
    count, owners = slots.shape[0], torch.arange(rows, device=slots.device)
    owners = torch.repeat_interleave(owners, starts.diff(), output_size=count)
    key, value = (
        slots_into(
            each, slots, torch.empty(count, *each.shape[2:], device=slots.device), by
        ).repeat_interleave(heads // each.shape[2], 1)
        for each, by in zip(pages, scales, strict=True)
    )
    logits = (query[owners].float() * key).sum(-1) * scale
    if cap is not None:
        logits = cap * (logits / cap).tanh()
    places = owners[:, None].expand_as(logits)
    own = (
        torch.full((rows, heads), -torch.inf, device=slots.device)
        if sinks is None
        else sinks.float().expand(rows, -1)
    )
    top = own.clone().scatter_reduce_(0, places, logits, "amax")
    weights = torch.exp(logits - top[owners])
    total = torch.exp(own - top).index_add_(0, owners, weights)
    sums = torch.zeros(rows, heads, size_v, device=slots.device)
    output.copy_(sums.index_add_(0, owners, weights[..., None] * value) / total[..., None])
    output_lse.copy_(top + total.log())


def _converts(pages: torch.Tensor) -> bool:
    """Whether Triton converts the stored elements on this GPU: E4M3 only from compute capability 8.9 on."""
    if pages.dtype.itemsize > 1 or torch.version.hip is not None:
        return True
    return torch.cuda.get_device_capability(pages.device) >= (8, 9)
