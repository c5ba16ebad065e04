"""The name of a module in the model that is running, for rules by layer name and for messages."""

from __future__ import annotations

from types import FrameType

import torch
from transformers import PreTrainedModel

__all__ = ["running_name"]


def running_name(module: torch.nn.Module, frame: FrameType | None) -> str:
    """Its path in the outermost model whose forward is running, as "model.layers.0.self_attn".

    `frame` is where the call comes from: attention functions are told the module only. A module that
    runs alone is named by its class and `layer_idx`.
    """
    models: list[PreTrainedModel] = []
    while frame is not None:
        # Only methods have a first argument that can be a model; f_locals of other frames is not built.
        if frame.f_code.co_varnames[:1] == ("self",):
            owner = frame.f_locals.get("self")
            if isinstance(owner, PreTrainedModel):
                models.append(owner)
        frame = frame.f_back
    for model in reversed(models):
        paths = [name for name, part in model.named_modules() if part is module]
        if paths:
            return str(paths[0])
    index = getattr(module, "layer_idx", None)
    name = type(module).__name__
    return name if index is None else f"{name}.{index}"
