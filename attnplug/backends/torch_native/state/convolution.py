"""A short convolution of each channel over its last inputs, which are its state."""

from __future__ import annotations

import torch
from torch.nn.functional import silu


def convolve(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    activation: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs `[R, T, C]` of T tokens of each of R requests, and their next states.

    Args:
        inputs: `[R, T, C]`.
        weight: `[C, W]`; the last column is for the token itself.
        bias: `[C]`, or None.
        state: `[R, C, W - 1]`, the inputs before these tokens.
        activation: "silu" or None.
    """
    width, tokens = weight.shape[1], inputs.shape[1]
    every = torch.cat([state, inputs.mT], dim=2)
    # A sum of W products for each token, and no convolution of torch, so that float64 and small batches cost little.
    outputs = every[:, :, :tokens] * weight[:, :1]
    for place in range(1, width):
        outputs = outputs + every[:, :, place : place + tokens] * weight[:, place : place + 1]
    if bias is not None:
        outputs = outputs + bias[:, None]
    if activation == "silu":
        outputs = silu(outputs)
    return outputs.mT, every[:, :, tokens:]
