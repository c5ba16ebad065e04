"""Random weights that make attention matter, for models that are compared in float32, where no tokens tie.

vLLM's own dummy weights are so small that a token depends on the one before it alone. Here each part of a layer adds
as much as the others, and a query attends a few keys strongly. So a wrong backend draws other tokens.
"""

from __future__ import annotations

from typing import Any

import torch

LOAD_FORMAT = "attnplug_random"
SHARPNESS = 4.0
"""The standard deviation of attention's logits."""


@torch.no_grad()
def fill(model: torch.nn.Module, _: Any) -> None:
    """Fill the parameters in place: what goes into each part has a standard deviation of 1."""
    gemma = any(type(module).__name__ == "GemmaRMSNorm" for module in model.modules())
    done: set[int] = set()
    draw: dict[torch.device, torch.Generator] = {}
    for module in model.modules():
        norm = "Norm" in type(module).__name__
        # Gemma multiplies embeddings by the root of their size.
        whole = "Embedding" in type(module).__name__ and not gemma
        for name, weight in module.named_parameters(recurse=False):
            if weight.data_ptr() in done or not weight.is_floating_point():
                continue
            done.add(weight.data_ptr())
            device = weight.device
            generator = draw.setdefault(device, torch.Generator(device).manual_seed(0))
            if norm:
                # Gemma's norms add 1 to their weight.
                weight.fill_(0.0 if "Gemma" in type(module).__name__ else 1.0)
            elif weight.ndim > 1:
                weight.normal_(0.0, 1.0 if whole else weight.shape[-1] ** -0.5, generator=generator)
            elif name == "sinks":
                weight.normal_(0.0, 1.0, generator=generator)
            else:
                weight.zero_()
    for module in model.modules():
        if not hasattr(module, "qkv_proj"):
            continue
        if hasattr(module, "q_norm"):
            own = module.q_norm.weight
            own.fill_(SHARPNESS - 1.0 if "Gemma" in type(module.q_norm).__name__ else SHARPNESS)
        else:
            module.qkv_proj.weight[: module.q_size].mul_(SHARPNESS)
