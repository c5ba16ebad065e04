"""What a module of a model is, as far as its class says it: attention, another token mixer, or neither."""

from __future__ import annotations

import re

import torch

__all__ = ["holds_attention", "looks_like_attention", "mixer_kind", "works_on_single_tokens"]

_KINDS = (
    (re.compile(r"[Mm]amba|SSM"), "mamba"),
    (
        re.compile(r"delta(net|attention)|linearattention|lightningattention", re.IGNORECASE),
        "linear_attention",
    ),
    (re.compile(r"shortconv", re.IGNORECASE), "conv"),
    (re.compile(r"recurrentblock|rglru", re.IGNORECASE), "recurrent"),
    (re.compile(r"rwkv\w*attention", re.IGNORECASE), "rwkv"),
    (re.compile(r"[ms]lstm|xlstm", re.IGNORECASE), "xlstm"),
)
_ATTRIBUTES = {"mamba": "mamba", "ssm": "mamba", "linear_attn": "linear_attention"}
_NO_MIXER = re.compile(r"norm|rotary|cache|embed", re.IGNORECASE)
_ATTENTION = re.compile(r"atten|attn", re.IGNORECASE)
_SINGLE = re.compile(
    r"(mlp|moe(block|layer)?|experts?(gemm)?|router|gat(e|ing)|feedforward|ffn)$", re.IGNORECASE
)


def mixer_kind(module: torch.nn.Module, attribute: str = "") -> str | None:
    """The kind of a token mixer that is no softmax attention, or None for any other module.

    The class says it, or the name of the `attribute` that holds the module.
    """
    name = type(module).__name__
    if _NO_MIXER.search(name):
        return None
    if attribute in _ATTRIBUTES:
        return _ATTRIBUTES[attribute]
    return next((kind for pattern, kind in _KINDS if pattern.search(name)), None)


def looks_like_attention(module: torch.nn.Module) -> bool:
    """Whether the class calls itself attention and is no mixer of another kind."""
    return bool(_ATTENTION.search(type(module).__name__)) and mixer_kind(module) is None


def holds_attention(module: torch.nn.Module) -> bool:
    """Whether the module or anything inside it calls itself attention, of whichever kind."""
    return any(_ATTENTION.search(type(child).__name__) for child in module.modules())


def works_on_single_tokens(module: torch.nn.Module) -> bool:
    """Whether the class says that it is an MLP, a mixture of experts or a part of one, and holds no attention."""
    return bool(_SINGLE.search(type(module).__name__)) and not holds_attention(module)
