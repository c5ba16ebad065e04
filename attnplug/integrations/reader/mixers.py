"""Parts of a model by their class names: attention, other token mixers, and encoders of other media."""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Hashable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch

from attnplug.core.errors import ModelConfigError
from attnplug.integrations.model_spec import NOT_READ

if TYPE_CHECKING:
    from attnplug.integrations.reader.trace import Trace

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
_NO_MODEL = ("torch.", "transformers.modeling_", "builtins")
_NO_MIXER = re.compile(r"norm|rotary|cache|embed", re.IGNORECASE)
_ATTENTION = re.compile(r"atten|attn", re.IGNORECASE)
_ATTENDS = re.compile(
    r"softmax|scaled_dot_product|multi_?head_?attention|attention_forward|ALL_ATTENTION|(flash|flex|sdpa|self|cross)_att"
    r"|^(attention|attn|attend)$|transformer(en|de)coder"
)
_SINGLE = re.compile(
    r"(mlp|moe(block|layer)?|experts?(gemm)?|router|gat(e|ing)|feedforward|ffn)$", re.IGNORECASE
)
_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict)
_TOWERS = (
    (re.compile(r"vision|visual|image|video"), "vision encoder"),
    (re.compile(r"audio|speech|acoustic"), "audio encoder"),
)
_SOFTMAX_KIND = re.compile(r"^((full|global|local|sliding|chunked|self|cross|hybrid)_)?(window_)?attention$")
"""Kinds of layers, in configurations, that have a softmax."""
_CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
_BLOCK_CLASS = re.compile(r"(layer|block)$", re.IGNORECASE)
_TOWER_CLASS = re.compile(r"(encoder|tower|tokenizer|model|backbone)$", re.IGNORECASE)


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
    # The bases of torch's or transformers' own name attention too.
    owners = (owner for owner in cls.__mro__ if not owner.__module__.startswith(_NO_MODEL))
    methods = (inspect.unwrap(each) for owner in owners for each in vars(owner).values())
    codes = [each.__code__ for each in methods if hasattr(each, "__code__")]
    return any(_ATTENDS.search(name) for code in codes for name in _names_in(code))


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):  # a function or a comprehension inside
            yield from _names_in(constant)


def works_on_single_tokens(module: torch.nn.Module) -> bool:
    """Whether the class name is that of an MLP or (part of) a mixture of experts, without attention inside."""
    return bool(_SINGLE.search(type(module).__name__)) and not contains_attention(module)


class UnreachedError(ModelConfigError):
    """A layer with attention did not run with the inputs of this run; others may reach it."""


def find_other_layers(
    trace: Trace, attention: frozenset[str], unread: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """Names and kinds of mixers and towers in `trace`, in module order; `attention` has the layers read.

    `unread` gives the reason why the attention of a tower was not read. UnreachedError for other attention
    that did not run; ModelConfigError for attention that ran without a recorded call.
    """
    others: dict[str, str] = {}
    modules = dict(trace.model.named_modules(remove_duplicate=False))
    holders = _with_parents(attention)
    # A part whose own forward did not run may still have blocks that did, one by one.
    open_parts = _with_parents(trace.executed) | holders | _with_parents(unread) - set(unread)
    open_parts |= {path for path, module in modules.items() if isinstance(module, _CONTAINERS)}
    for path, module in modules.items():
        if not path or path in holders:
            continue
        around = next((parent for parent in parents(path) if parent in others), None)
        idle = path not in open_parts and all(parent in open_parts for parent in parents(path))
        if around is not None:
            # A mixer of another kind may have attention beside it that did not run.
            may_attend = idle and around in trace.executed and attention_inside(module) is not None
            kind = _idle_kind(path, module, unread.get(path)) if may_attend else None
        elif any(parent in attention for parent in parents(path)):
            # A module that mixes neighbouring tokens has a state in addition to the KV cache.
            children = (child for child in module.children() if isinstance(child, _CONVOLUTIONS))
            convolves = path in trace.executed and any(max(child.kernel_size) > 1 for child in children)
            kind = "conv" if convolves else None
        elif path in trace.executed:
            kind = _executed_kind(path, module)
        else:
            kind = _idle_kind(path, module, unread.get(path)) if idle else None
        if kind is not None:
            others[path] = kind
    others.update(_other_blocks(trace, modules, attention, others))
    order = {path: place for place, path in enumerate(modules)}
    return dict(sorted(others.items(), key=lambda item: order[item[0]]))


def own_attention_refused(path: str, module: torch.nn.Module, why: str = "") -> ModelConfigError:
    """The error for a module that computes attention without calling transformers' attention function."""
    return ModelConfigError(
        f"{path}: {type(module).__name__} computes attention of its own and does not go through transformers' "
        f"attention interface, so it cannot be checked against a LayerSpec{f': it {why}' if why else ''}"
    )


def parents(path: str) -> Iterator[str]:
    """The paths around `path`, the innermost first, without that of the whole model."""
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def _with_parents(paths: Iterable[str]) -> frozenset[str]:
    return frozenset(each for path in paths for each in (path, *parents(path)))


def _executed_kind(path: str, module: torch.nn.Module) -> str | None:
    kind = mixer_kind(module, path.rpartition(".")[2])
    if kind is not None:
        # Some blocks are named after the mixer that they contain.
        inside = (
            child for child in module.modules() if child is not module and mixer_kind(child) is not None
        )
        return None if any(any(True for _ in child.parameters()) for child in inside) else kind
    if looks_like_attention(module) and not any(mixer_kind(child) for child in module.modules()):
        raise own_attention_refused(path, module)
    return None


def _idle_kind(path: str, module: torch.nn.Module, reason: str | None) -> str | None:
    """The kind of a part that did not run, with the reason if it may have attention; None for other parts."""
    parts = path.split(".")
    cls = type(module).__name__
    kind = next((kind for words, kind in _TOWERS if words.search(f"{parts[-1]} {cls}".lower())), None)
    inside = attention_inside(module)
    if inside is None:
        return kind if _TOWER_CLASS.search(cls) else None
    place, found = inside
    named = f"{path}.{place}: {type(found).__name__}" if place else f"{path}: {cls}"
    if any(part.isdigit() for part in parts):
        raise UnreachedError(f"{named} has attention that a run on text does not reach, so it cannot be read")
    if reason is None:
        reason = (
            f"{named} may attend, a run on text does not reach it, and {cls} is no model that runs by itself"
        )
    return f"{kind or cls}{NOT_READ}{reason}"


def _other_blocks(
    trace: Trace, modules: Mapping[str, torch.nn.Module], attention: frozenset[str], others: dict[str, str]
) -> Iterator[tuple[str, str]]:
    """Blocks in a list of layers without attention or mixer, such as MLP-only layers."""
    config = trace.model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    served = {parent for path in (*attention, *others) for parent in (path, *parents(path))}
    for path, module in modules.items():
        if not isinstance(module, torch.nn.ModuleList) or any(p.isdigit() for p in path.split(".")):
            continue
        names = [f"{path}.{index}" for index in range(len(module))]
        if not any(name in trace.executed for name in names):
            continue
        are_layers = any(_BLOCK_CLASS.search(type(block).__name__) for block in module)
        if not are_layers and not any(name in served for name in names):
            continue
        for name, block, index in zip(names, module, range(len(names)), strict=True):
            if name in served:
                continue
            if len(kinds) != len(module) and any(isinstance(m, _CONVOLUTIONS) for m in block.modules()):
                yield name, "conv"
                continue
            if len(kinds) != len(module):
                raise ModelConfigError(
                    f"{name}: {type(block).__name__} mixes tokens in a way that the reader does not know"
                )
            kind = str(kinds[index])
            if _SOFTMAX_KIND.search(kind):
                raise ModelConfigError(
                    f"{name}: {type(block).__name__} is a layer of {kind} by its configuration, and no attention of it was seen"
                )
            yield name, kind
