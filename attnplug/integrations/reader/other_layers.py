"""Parts of a model without attention KV: token mixers of other kinds, and encoders of other media."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import torch

from attnplug.core.errors import ModelConfigError
from attnplug.integrations.model_spec import NOT_READ
from attnplug.integrations.reader.mixers import attention_inside, looks_like_attention, mixer_kind
from attnplug.integrations.reader.trace import Trace

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
        around = next((parent for parent in _parents(path) if parent in others), None)
        idle = path not in open_parts and all(parent in open_parts for parent in _parents(path))
        if around is not None:
            # A mixer of another kind may have attention beside it that did not run.
            may_attend = idle and around in trace.executed and attention_inside(module) is not None
            kind = _idle_kind(path, module, unread.get(path)) if may_attend else None
        elif any(parent in attention for parent in _parents(path)):
            kind = "conv" if path in trace.executed and _convolves(module) else None
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


def _parents(path: str) -> Iterator[str]:
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def _with_parents(paths: Iterable[str]) -> frozenset[str]:
    return frozenset(each for path in paths for each in (path, *_parents(path)))


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


def _convolves(module: torch.nn.Module) -> bool:
    """Whether the module mixes neighbouring tokens, and so has a state in addition to the KV cache."""
    return any(isinstance(child, _CONVOLUTIONS) and max(child.kernel_size) > 1 for child in module.children())


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
    served = {parent for path in (*attention, *others) for parent in (path, *_parents(path))}
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
