"""Tensors as parts of larger ones, as engines give them: rows of a buffer, a rank's shard, a column of a table."""

from __future__ import annotations

import dataclasses

import torch

from attnplug.core.impl import LayerTensors

# A multiple of 16 bytes, so that kernels are compiled for no other alignment than that of whole tensors.
_FRONT = 4
"""Foreign elements or rows in front of a part, and behind it."""


def between(tensor: torch.Tensor, margin: int | None = None) -> torch.Tensor:
    """A copy of the same strides between `margin` traps on each side; by default whole rows."""
    shape, strides = tensor.shape, tensor.stride()
    if margin is None:
        margin = _FRONT * max(strides[0], 1)
    # Rows may be apart, with others' memory between them.
    span = 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    length = 2 * margin + (span if tensor.numel() else 0)
    # Filled on its device: a copy from the host would make the host wait.
    memory = tensor.new_full((length,), _worst(tensor.dtype))
    return memory.as_strided(shape, strides, margin).copy_(tensor)


def trap(dtype: torch.dtype) -> torch.Tensor:
    """The number of memory that nobody may read: NaN, of integers the largest."""
    return torch.tensor(_worst(dtype)).to(dtype)


def _worst(dtype: torch.dtype) -> float:
    return torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max


def shard(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a rank's heads `[H, ...]`, in the middle of those of three ranks, which are far from them."""
    return torch.cat([5 - 2 * tensor, tensor, 3 + 2 * tensor])[tensor.shape[0] : 2 * tensor.shape[0]]


def column(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers `[H]` of a layer, as a column between those of two others, which are far from them."""
    return torch.stack([5 - 2 * tensor, tensor, 3 + 2 * tensor], dim=1)[:, 1]


def scales_in_a_table(*scales: float, device: str | torch.device = "cpu") -> list[torch.Tensor]:
    """Scales as elements of a model's table, float32 without dimensions, with other layers' between and around them."""
    numbers = [number for scale in scales for number in (2.3 * scale + 1, scale)]
    # The default dtype belongs to the process, and checks change it.
    table = torch.tensor([*numbers, 7.7], dtype=torch.float32, device=device)
    return [table[2 * place + 1] for place in range(len(scales))]


def with_own_memory(tensors: LayerTensors) -> LayerTensors:
    """The numbers of a layer in tensors of their own."""
    learned = {"sinks": tensors.sinks, "alibi_slopes": tensors.alibi_slopes}
    copies = {name: each.clone() for name, each in learned.items() if each is not None}
    return dataclasses.replace(tensors, **copies)
