"""Classifies modules by class name: attention, another token mixer, or neither."""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Hashable, Iterator
from typing import Any, cast

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
_ATTENDS = re.compile(
    r"softmax|scaled_dot_product|multi_?head_?attention|attention_forward|ALL_ATTENTION|(flash|flex|sdpa|self|cross)_att"
    r"|^(attention|attn|attend)$|transformer(en|de)coder"
)
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


def attention_inside(module: torch.nn.Module) -> tuple[str, torch.nn.Module] | None:
    """The path and module of the first part of `module`, or of itself, that may attend; None if none can.

    A part may attend if its class is named so, or if a method of its class names what attention needs.
    """
    first: dict[type, tuple[str, torch.nn.Module]] = {}
    for path, part in module.named_modules():
        first.setdefault(type(part), (path, part))
    named = (place for cls, place in first.items() if _ATTENTION.search(cls.__name__))
    return next(named, None) or next(
        (place for cls, place in first.items() if _names_attention(cast(Hashable, cls))), None
    )


@functools.cache
def _names_attention(cls: Any) -> bool:
    if cls.__module__.startswith("torch."):
        return bool(_ATTENDS.search(cls.__name__.lower()))
    owners = [owner for owner in cls.__mro__ if _is_of_model(owner)]
    methods = [each for owner in owners for each in vars(owner).values()]
    codes = [
        code for each in methods if (code := getattr(inspect.unwrap(each), "__code__", None)) is not None
    ]
    return any(_ATTENDS.search(name) for code in codes for name in _names_in(code))


def _is_of_model(cls: type) -> bool:
    """Whether a class is of a modelling file, and no base of torch's or transformers' own."""
    return not cls.__module__.startswith(("torch.", "transformers.modeling_")) and cls is not object


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):  # a function or a comprehension inside
            yield from _names_in(constant)


def works_on_single_tokens(module: torch.nn.Module) -> bool:
    """Whether the class name is that of an MLP or (part of) a mixture of experts, without attention inside."""
    return bool(_SINGLE.search(type(module).__name__)) and not contains_attention(module)
