"""What a model has besides attention that keeps KV: mixers of other kinds, and towers of other media."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from attnplug.core.errors import ModelConfigError
from attnplug.integrations.reader.trace import Trace

__all__ = ["find_other_layers", "looks_like_attention", "mixer_kind"]

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
_ATTENTION = re.compile(r"atten|attn", re.IGNORECASE)
_TOWERS = (
    ("vision", "vision encoder"),
    ("visual", "vision encoder"),
    ("image", "vision encoder"),
    ("video", "vision encoder"),
    ("audio", "audio encoder"),
    ("speech", "audio encoder"),
)


def mixer_kind(module: torch.nn.Module, attribute: str = "") -> str | None:
    """The kind of a token mixer that is no softmax attention, or None for any other module.

    The class says it, or the name of the `attribute` that holds the module.
    """
    name = type(module).__name__
    if re.search(r"norm|rotary|cache|embed", name, re.IGNORECASE):
        return None
    if attribute in _ATTRIBUTES:
        return _ATTRIBUTES[attribute]
    return next((kind for pattern, kind in _KINDS if pattern.search(name)), None)


def looks_like_attention(module: torch.nn.Module) -> bool:
    """Whether the class calls itself attention and is no mixer of another kind."""
    return bool(_ATTENTION.search(type(module).__name__)) and mixer_kind(module) is None


def find_other_layers(trace: Trace, attention: frozenset[str]) -> dict[str, str]:
    """Names and kinds of mixers and towers in `trace`, in module order; `attention` are the layers read.

    ModelConfigError for attention that did not run, or ran without a call that was recorded.
    """
    others: dict[str, str] = {}
    modules = dict(trace.model.named_modules(remove_duplicate=False))
    holders = {parent for path in attention for parent in _parents(path)} | attention
    for path, module in modules.items():
        if not path or path in holders or any(parent in others for parent in _parents(path)):
            continue
        if any(parent in attention for parent in _parents(path)):
            if path in trace.executed and _convolves(module):
                others[path] = "conv"
            continue
        if path in trace.executed:
            kind = mixer_kind(module, path.rpartition(".")[2])
            if kind is not None and not _holds_mixer(module):
                others[path] = kind
            elif looks_like_attention(module) and not any(mixer_kind(m) for m in module.modules()):
                raise ModelConfigError(
                    f"{path}: {type(module).__name__} does not go through transformers' attention interface, "
                    "so what it computes cannot be checked"
                )
        elif _parents_ran(path, trace) and _has_attention(module):
            others[path] = _tower(path, module)
    others.update(_silent_blocks(trace, modules, attention, others))
    order = {path: place for place, path in enumerate(modules)}
    return dict(sorted(others.items(), key=lambda item: order[item[0]]))


def _parents(path: str) -> Iterator[str]:
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def _parents_ran(path: str, trace: Trace) -> bool:
    return all(p in trace.executed or _is_list(p, trace) for p in _parents(path))


def _is_list(path: str, trace: Trace) -> bool:
    return isinstance(trace.model.get_submodule(path), (torch.nn.ModuleList, torch.nn.ModuleDict))


def _holds_mixer(module: torch.nn.Module) -> bool:
    """Whether a more precise mixer lies inside: a block named after its family is not the mixer."""
    return any(
        mixer_kind(child) is not None and any(True for _ in child.parameters())
        for child in module.modules()
        if child is not module
    )


def _convolves(module: torch.nn.Module) -> bool:
    """Whether the module mixes neighbouring tokens, and so keeps a state of its own beside the KV cache."""
    return any(isinstance(child, torch.nn.Conv1d) and child.kernel_size[0] > 1 for child in module.children())


def _has_attention(module: torch.nn.Module) -> bool:
    return any(_ATTENTION.search(type(child).__name__) for child in module.modules())


def _tower(path: str, module: torch.nn.Module) -> str:
    parts = path.split(".")
    if any(part.isdigit() for part in parts):
        raise ModelConfigError(
            f"{path}: {type(module).__name__} holds attention that a run on text does not reach, "
            "so it cannot be read"
        )
    text = f"{parts[-1]} {type(module).__name__}".lower()
    return next((kind for word, kind in _TOWERS if word in text), type(module).__name__)


def _silent_blocks(
    trace: Trace,
    modules: dict[str, torch.nn.Module],
    attention: frozenset[str],
    others: dict[str, str],
) -> Iterator[tuple[str, str]]:
    """Blocks of a layer list that held neither attention nor a mixer, such as MLP-only layers."""
    config = trace.model.config.get_text_config()
    served = {parent for path in (*attention, *others) for parent in (path, *_parents(path))}
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    for path, module in modules.items():
        if not isinstance(module, torch.nn.ModuleList) or len(module) != config.num_hidden_layers:
            continue
        if path not in served and any(part.isdigit() for part in path.split(".")):
            continue
        if not any(f"{path}.{index}" in trace.executed for index in range(len(module))):
            continue
        for index, block in enumerate(module):
            name = f"{path}.{index}"
            if name in served:
                continue
            if len(kinds) != len(module):
                raise ModelConfigError(
                    f"{name}: {type(block).__name__} mixes tokens in a way the reader does not know"
                )
            yield name, str(kinds[index])
