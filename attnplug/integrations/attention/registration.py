"""Registering attnplug with transformers, setting it on a model, and reading its decisions."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from attnplug.core.errors import ModelConfigError
from attnplug.integrations.attention.functions import attention, attention_mask
from attnplug.integrations.attention.layers import layer_state
from attnplug.integrations.reader.mixers import looks_like_attention
from attnplug.registry.decision import Decision

NAME = "attnplug"
"""The value of `attn_implementation`."""


def register() -> None:
    """Make `attn_implementation="attnplug"` known to transformers; may be called again.

    Models that dispatch through transformers' attention interface then use the backend that `attnplug.select`
    chooses for each layer. Other classes (Bloom, Falcon, MPT) accept the name but ignore it: `set_attention`
    refuses them.
    """
    AttentionInterface.register(NAME, attention)
    # Under torch.compile a traced mask would contain nothing of the step; an eager one refuses to be traced.
    untraced: Any = torch.compiler.disable
    AttentionMaskInterface.register(NAME, untraced(attention_mask))


def set_attention(model: PreTrainedModel) -> None:
    """Register attnplug and set it on every part of a model that is built.

    Raises:
        ModelConfigError: a part computes attention itself and would ignore attnplug, or transformers does not
            set it on that part. The model is then unchanged.
    """
    register()
    parts = {name: part for name, part in model.named_modules() if isinstance(part, PreTrainedModel)}
    for name, module in model.named_modules():
        if not _dispatches(module):
            inside = f" ({name})" if name else ""
            raise ModelConfigError(
                f"{type(model).__name__}: its {type(module).__name__}{inside} computes attention of its own "
                "and would never call attnplug; leave its attn_implementation unchanged"
            )
    # A refusal must leave the model unchanged, and transformers may have set other parts by then.
    before = {id(part.config): (part.config, part.config._attn_implementation) for part in parts.values()}
    model.set_attn_implementation(NAME)
    for part in parts.values():
        if part.config._attn_implementation != NAME:
            found = part.config._attn_implementation
            for config, implementation in before.values():
                # The public setter would also change the configurations inside this one.
                config._attn_implementation_internal = implementation
            raise ModelConfigError(
                f"{type(part).__name__}: transformers keeps attn_implementation={found!r} here"
            )


def attention_decisions(model: torch.nn.Module) -> dict[str, Decision]:
    """The decision for each attention layer that has run, by the layer's name in `model`.

    Empty before the first forward pass, or if no layer calls attnplug.
    """
    layers = {name: layer_state(module) for name, module in model.named_modules()}
    return {name: layer.decision for name, layer in layers.items() if layer and layer.decision}


def _dispatches(module: torch.nn.Module) -> bool:
    """Whether a module has no attention, or its source file uses transformers' attention interface."""
    if isinstance(module, PreTrainedModel):
        # A private method, seen in transformers 5.17.
        return bool(module._can_set_attn_implementation())
    if not looks_like_attention(module):
        return True
    return _asks_for_interface(next(cls for cls in type(module).__mro__ if "forward" in vars(cls)).__module__)


@functools.cache
def _asks_for_interface(module_name: str) -> bool:
    try:
        return "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(sys.modules[module_name])
    except (KeyError, OSError, TypeError):
        return False  # without source, nothing shows that it dispatches
