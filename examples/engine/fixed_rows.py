"""Layers of a model whose products always have equally many rows, so that a token's bits do not depend on the others.

Libraries pick another kernel for a product with another number of rows, and it adds in another order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from attnplug.errors import ModelConfigError

ROWS = 64
_SEPARATE = (torch.nn.Embedding,)
"""Layers that compute each number of the output by itself."""


def fix_rows(model: torch.nn.Module) -> None:
    """Have projections and norms of `model` compute ROWS tokens at a time, the last of them padded.

    Attention layers, which are paged by now, ask their backends. ModelConfigError: a layer with weights of its own that is neither, such as experts.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) or type(module).__name__.endswith("Norm"):
            module.forward = functools.partial(_in_blocks, module.forward)
        elif (
            next(module.parameters(recurse=False), None) is not None
            and not isinstance(module, _SEPARATE)
            and not hasattr(module, "paged_forward")
        ):
            raise ModelConfigError(
                f"{name} ({type(module).__name__}): its sums may depend on the number of tokens in a step; "
                "leave out --invariance, or choose a model of projections and norms"
            )


def _in_blocks(forward: Callable[..., torch.Tensor], inputs: torch.Tensor, *given: Any) -> torch.Tensor:
    """`forward` of `inputs [..., size]`, with ROWS rows in each call."""
    rows = inputs.reshape(-1, inputs.shape[-1])
    missing = -rows.shape[0] % ROWS
    padded = torch.cat((rows, rows.new_zeros(missing, rows.shape[1])))
    made = torch.cat([forward(block, *given) for block in padded.split(ROWS)])
    return made[: rows.shape[0]].reshape(*inputs.shape[:-1], made.shape[-1])
