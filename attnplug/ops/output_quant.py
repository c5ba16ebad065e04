"""Outputs of 8 bits with one scale, quantised in plain torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch

from attnplug.core.errors import BatchError
from attnplug.core.kv_format import kv_formats
from attnplug.ops.storage import STORAGE_DTYPES, round_to_float

FP8_OUTPUTS: Mapping[str, torch.dtype] = MappingProxyType(
    {row.name: STORAGE_DTYPES[row.name] for row in kv_formats() if row.family == "fp8" and row.dtype}
)
"""The fp8 dtypes of outputs, by their `quant_key`."""


def check_output_scale(output: torch.Tensor, output_scale: torch.Tensor) -> None:
    """BatchError unless `output` is of 8-bit floats, and `output_scale` is one float32, finite and above 0.

    The value is read only on a CPU, where that waits for no device.
    """
    if output.dtype not in FP8_OUTPUTS.values():
        limit = f"needs an output of {', '.join(map(str, FP8_OUTPUTS.values()))}, and it is {output.dtype}"
        raise BatchError("output_scale", tuple(output_scale.shape), limit)
    if output_scale.numel() != 1 or output_scale.dtype != torch.float32:
        found = f"{output_scale.dtype} {tuple(output_scale.shape)}"
        raise BatchError("output_scale", found, "must be one torch.float32")
    if output_scale.device.type == "cpu":
        value = float(output_scale)
        if not 0 < value < math.inf:
            raise BatchError("output_scale", value, "must be finite and above 0: outputs are divided by it")


def quantise_output(wide: torch.Tensor, output_scale: torch.Tensor, output: torch.Tensor) -> None:
    """Write float32 `wide` / `output_scale`, clamped to the finite range of fp8, to `output` of the same shape."""
    output.copy_(round_to_float(wide / output_scale.reshape(()), output.dtype))
