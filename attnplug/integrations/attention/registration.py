"""Making attnplug known to transformers, setting it on a model, and asking what it chose."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from attnplug.core.errors import ModelConfigError
from attnplug.integrations.attention.functions import attention, attention_mask
from attnplug.integrations.attention.layers import served
from attnplug.integrations.reader.mixers import looks_like_attention
from attnplug.registry.decision import Decision

__all__ = ["NAME", "attention_decisions", "register", "set_attention"]

NAME = "attnplug"
"""What `attn_implementation` is set to."""


def register() -> None:
    """Make `attn_implementation="attnplug"` known to transformers; may be called again.

    Models that dispatch through transformers' attention interface then run on the backends that
    `attnplug.select` chooses for each layer. Classes that do not (Bloom, Falcon, MPT) accept the name
    and never use it: `set_attention` refuses those.
    """
    AttentionInterface.register(NAME, attention)
    # A mask made while tracing would say nothing of the step; made for real, it refuses to be traced.
    untraced: Any = torch.compiler.disable
    AttentionMaskInterface.register(NAME, untraced(attention_mask))


def set_attention(model: PreTrainedModel) -> None:
    """Register attnplug and set it on every part of a model that is built.

    Raises:
        ModelConfigError: a part whose class computes attention itself and would ignore it; or one that
            transformers would not set it on. The model is then left as it was.
    """
    register()
    parts = {name: part for name, part in model.named_modules() if isinstance(part, PreTrainedModel)}
    for name, module in model.named_modules():
        if not _dispatches(module):
            inside = f" ({name})" if name else ""
            raise ModelConfigError(
                f"{type(model).__name__}: its {type(module).__name__}{inside} computes attention of its own "
                "instead of dispatching through transformers' attention interface, so attnplug would never "
                "be called; leave its attn_implementation as it is"
            )
    before = {id(part.config): (part.config, part.config._attn_implementation) for part in parts.values()}
    model.set_attn_implementation(NAME)
    for part in parts.values():
        if part.config._attn_implementation != NAME:
            found = part.config._attn_implementation
            _restore(before)
            raise ModelConfigError(
                f"{type(part).__name__}: transformers keeps attn_implementation={found!r} here"
            )


def attention_decisions(model: torch.nn.Module) -> dict[str, Decision]:
    """What was chosen for each attention layer that has run, by the layer's name in `model`.

    Empty before the first forward pass; still empty after one where nothing calls attnplug.
    """
    layers = {name: served(module) for name, module in model.named_modules()}
    return {name: layer.decision for name, layer in layers.items() if layer and layer.decision}


def _dispatches(module: torch.nn.Module) -> bool:
    """Whether a module is no attention, or its file asks transformers for the function to call."""
    if isinstance(module, PreTrainedModel):
        return bool(module._can_set_attn_implementation())
    if not looks_like_attention(module):
        return True
    return _asks_for_interface(next(cls for cls in type(module).__mro__ if "forward" in vars(cls)).__module__)


@functools.cache
def _asks_for_interface(module_name: str) -> bool:
    try:
        return "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(sys.modules[module_name])
    except (KeyError, OSError, TypeError):
        return False  # no source to read: nothing says that it dispatches


def _restore(before: Mapping[int, tuple[Any, str | None]]) -> None:
    for config, implementation in before.values():
        config._attn_implementation_internal = implementation
