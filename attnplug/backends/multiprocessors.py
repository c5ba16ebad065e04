"""How many multiprocessors a device has."""

from __future__ import annotations

import functools

import torch

__all__ = ["num_multiprocessors"]


@functools.cache
def num_multiprocessors(device: torch.device, on_cpu: int = 1) -> int:
    """Of a GPU; `on_cpu` elsewhere, where tests compute what kernels would."""
    if device.type != "cuda":
        return on_cpu
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
