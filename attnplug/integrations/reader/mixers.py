"""Classifies modules by class name: attention, another token mixer, or neither."""

from __future__ import annotations

import re

import torch

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
    """The kind of a token mixer other than softmax attention; None for other modules.

    It follows from the class, or from the name of the `attribute` that contains the module.
    """
    name = type(module).__name__
    if _NO_MIXER.search(name):
        return None
    if attribute in _ATTRIBUTES:
        return _ATTRIBUTES[attribute]
    return next((kind for pattern, kind in _KINDS if pattern.search(name)), None)


def looks_like_attention(module: torch.nn.Module) -> bool:
    """Whether the class name contains attention and does not name another kind of mixer."""
    return bool(_ATTENTION.search(type(module).__name__)) and mixer_kind(module) is None


def contains_attention(module: torch.nn.Module) -> bool:
    """Whether the class name of the module, or of a module inside, contains attention of any kind."""
    return any(_ATTENTION.search(type(child).__name__) for child in module.modules())


def works_on_single_tokens(module: torch.nn.Module) -> bool:
    """Whether the class name is that of an MLP or (part of) a mixture of experts, without attention inside."""
    return bool(_SINGLE.search(type(module).__name__)) and not contains_attention(module)
