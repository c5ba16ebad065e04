"""Reads from a module class's code whether its forward calls transformers' attention interface."""

from __future__ import annotations

import dis
import enum
import functools
import inspect
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from attnplug.integrations.reader.mixers import looks_like_attention, works_on_single_tokens

_KERNELS = frozenset(
    {"scaled_dot_product_attention", "multi_head_attention_forward", "flex_attention"}
    | {"flash_attn_func", "flash_attn_varlen_func", "memory_efficient_attention"}
)
_PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "einsum", "@"})
_NAMED_ATTENTION = re.compile(r"(attention|attn)(v?\d+)?$", re.IGNORECASE)
_LIBRARIES = ("torch.", "transformers.modeling_", "transformers.generation", "transformers.masking_utils")


class Kind(enum.Enum):
    """Whether a module computes attention through the interface, by itself, or not at all."""

    DISPATCHES = "dispatches"
    OWN = "own"
    NONE = "none"


def attention_kind(module: torch.nn.Module) -> Kind:
    """The kind of `module` itself; the modules inside it have kinds of their own.

    Code that has no attention call of a known form counts as attention of its own if the class is named so.
    """
    cls: Any = type(module)
    if cls.forward is torch.nn.Module.forward:
        return Kind.NONE
    names = _reached(cls)
    if names is None:
        return Kind.OWN if looks_like_attention(module) else Kind.NONE
    if _INTERFACE in names:
        return Kind.DISPATCHES
    if isinstance(module, PreTrainedModel):
        return Kind.NONE
    if names & _KERNELS:
        return Kind.OWN
    if looks_like_attention(module):
        if "softmax" in names:
            return Kind.OWN
        named = _NAMED_ATTENTION.search(cls.__name__)
        parts = (part for child in module.children() for part in child.modules())
        below = any(attention_kind(part) is not Kind.NONE for part in parts) if named else False
        return Kind.OWN if named and not below else Kind.NONE
    # A class of another name computes attention if it projects, multiplies, normalises and multiplies again.
    projects = sum(isinstance(child, torch.nn.Linear) for child in module.children()) > 1
    is_attention = projects and {"softmax", _REPEATED} <= names and not works_on_single_tokens(module)
    return Kind.OWN if is_attention else Kind.NONE


def class_table(cls: type[PreTrainedModel], name: str) -> str | None:
    """The global dictionary from which `cls` picks module classes by implementation, if `name` is not in it."""
    seen: set[type] = set()
    waiting: list[type] = [cls]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        for function in _methods(current, "__init__"):
            for key in _names(function.__code__):
                value: Any = function.__globals__.get(key)
                if _is_class_table(value) and name not in value:
                    return key
                if isinstance(value, type) and issubclass(value, torch.nn.Module):
                    waiting.append(value)
    return None


def _is_class_table(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and "eager" in value
        and all(isinstance(item, type) and issubclass(item, torch.nn.Module) for item in value.values())
    )


_INTERFACE = "<attention interface>"
_REPEATED = "<two products>"


@functools.cache
def _reached(cls: type[torch.nn.Module]) -> frozenset[str] | None:
    """Names in the code that `cls.forward` reaches: its own methods, and functions of modelling files.

    None if the code cannot be read.
    """
    functions = list(_methods(cls, "forward"))
    if not functions:
        return None
    found: set[str] = set()
    products = 0
    seen: set[types.CodeType] = set()
    while functions:
        function = functions.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        names = _names(function.__code__)
        found.update(names)
        products += sum(name in _PRODUCTS for name in names)
        for name in set(names):
            value = function.__globals__.get(name)
            if isinstance(value, AttentionInterface):
                found.add(_INTERFACE)
            elif isinstance(value, types.FunctionType):
                functions.extend(f for f in _unwrapped(value) if _is_model_code(f))
            if name != "forward":
                functions.extend(f for f in _methods(cls, name) if _is_model_code(f))
        functions.extend(_in_closure(function))
    if products > 1:
        found.add(_REPEATED)
    return frozenset(found)


def _methods(cls: type, name: str) -> Iterator[types.FunctionType]:
    """The method of `cls`, and those of its bases that it reaches through `super()`."""
    for base in cls.__mro__:
        if name not in vars(base) or base is torch.nn.Module:
            continue
        value = vars(base)[name]
        value = getattr(value, "__func__", getattr(value, "fget", value))
        functions = list(_unwrapped(value))
        yield from functions
        if not any("super" in function.__code__.co_names for function in functions):
            return


def _unwrapped(value: Any) -> Iterator[types.FunctionType]:
    value = inspect.unwrap(value) if callable(value) else value
    if isinstance(value, types.FunctionType):
        yield value


def _in_closure(function: types.FunctionType) -> Iterator[types.FunctionType]:
    for cell in function.__closure__ or ():
        try:
            yield from _unwrapped(cell.cell_contents)
        except ValueError:  # an empty cell
            continue


def _is_model_code(function: types.FunctionType) -> bool:
    return not f"{function.__module__}.".startswith(_LIBRARIES)


def _names(code: types.CodeType) -> list[str]:
    """The names that `code` and the functions inside it load, each as often as it does; "@" for a product."""
    found = []
    for step in dis.get_instructions(code):
        if step.opname.startswith(("LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD", "LOAD_NAME", "LOAD_DEREF")):
            found.append(str(step.argval))
        elif step.argrepr in ("@", "@="):
            found.append("@")
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found += _names(constant)
    return found
