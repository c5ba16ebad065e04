"""What every launch needs: the device that is current, and sizes that are powers of two."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

__all__ = ["on_device_of", "power_of_two"]


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Triton launches on the current device: here it is that of `tensor`; nothing for a host tensor."""
    guard: AbstractContextManager[None] = torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]
    return guard


def power_of_two(size: int) -> int:
    """The least power of two that is at least `size`, which is positive."""
    return 1 << (size - 1).bit_length()
