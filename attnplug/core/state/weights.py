"""The weights of a short convolution."""

from __future__ import annotations

import torch

from attnplug.core.errors import SpecError
from attnplug.core.spec import LayerSpec


def check_convolution(spec: LayerSpec, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    """SpecError unless these are the tensors of a convolution, or all None for other layers."""
    dims = spec.state
    given = {"conv_weight": weight, "conv_bias": bias}
    if dims is None or dims.width is None:
        name = next((name for name, value in given.items() if value is not None), None)
        if name is not None:
            raise SpecError(name, "given", "is for layers with rule conv")
        return
    if weight is None:
        shape = spec.num_heads, dims.width
        raise SpecError("conv_weight", None, f"is required with rule conv: of shape {shape}")
    _check_shape("conv_weight", weight, (spec.num_heads, dims.width))
    if bias is not None:
        _check_shape("conv_bias", bias, (spec.num_heads,))


def _check_shape(field: str, tensor: object, shape: tuple[int, ...]) -> None:
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        raise SpecError(field, tensor, "must be a tensor of floats")
    if tuple(tensor.shape) != shape:
        raise SpecError(field, tuple(tensor.shape), f"must be of shape {shape}")
