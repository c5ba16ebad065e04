"""Hooks that refuse, at a model's forward, requests and layers that attnplug would not serve.

The running forward of a watched model: its root, its positions, and the attention calls it has made.
"""

from __future__ import annotations

import functools
import inspect
import re
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from types import FrameType
from typing import Any, TypeVar

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from attnplug.core.errors import BatchError, ModelConfigError
from attnplug.integrations.attention.class_code import Kind, attention_kind
from attnplug.integrations.attention.layers import LayerState, layer_state, name_in_model, set_state


class ForwardPass(threading.local):
    """The outermost watched model that runs in this thread; a model that runs inside it changes nothing.

    `calls` counts attention calls served in this thread. `position_ids` are those of the caller. `masks` caches
    what was read from the caller's mask tensors.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._root: weakref.ref[PreTrainedModel] | None = None
        self._clear()

    def _clear(self) -> None:
        self._root = None
        self.position_ids: torch.Tensor | None = None
        self.masks: dict[Hashable, Any] = {}

    @property
    def root(self) -> PreTrainedModel | None:
        """The outermost model; None outside of a watched model's forward."""
        return None if self._root is None else self._root()

    def enter(self, model: PreTrainedModel) -> None:
        """Note that the forward of `model` begins."""
        root = self.root
        # A compiled model runs no hook after an error, so a root may be left from an earlier forward.
        if root is None or root is model or all(part is not model for part in root.modules()):
            self._clear()
            self._root = weakref.ref(model)

    def leave(self, model: PreTrainedModel) -> None:
        """Note that the forward of `model` ends."""
        if self.root is model:
            self._clear()


forward_pass = ForwardPass()
"""The state of each thread."""


NAME = "attnplug"
"""The value of `attn_implementation`."""

_Hook = TypeVar("_Hook", bound=Callable[..., Any])
_WATCHED = "_attnplug_watched"
_POOLING = re.compile(r"pool(er|ing)?(head|layer)?$", re.IGNORECASE)
_OTHER_SEQUENCE = re.compile(
    r"^(k|v|x_kv)$|key|value|encoder|context|memory|inputs|cross|image|vision|text|features", re.IGNORECASE
)
_WEIGHTS = "attention weights are never computed as a whole"


class _Watched:
    """Marks a model whose attention modules have hooks; a copy's modules have no states yet."""

    def __init__(self, ready: bool = False) -> None:
        self.ready = ready

    def __deepcopy__(self, memo: dict[int, Any]) -> _Watched:
        return _Watched()

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return _Watched, ()


def watch(model: PreTrainedModel) -> None:
    """Check every later forward of `model` while its configuration names attnplug; may be called again.

    The decisions of its layers begin anew.

    Raises:
        ModelConfigError: the configuration asks for attention weights.
    """
    if getattr(model.config, "output_attentions", False):
        raise ModelConfigError(
            f"{type(model).__name__}: config.output_attentions=True: {_WEIGHTS}; set it to False, or use "
            "attn_implementation='eager'"
        )
    if _enter not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_enter, with_kwargs=True)
        model.register_forward_hook(_leave, always_call=True)
    setattr(model, _WATCHED, _Watched())
    for module in model.modules():
        if (state := layer_state(module)) is not None:
            state.decision = None


def watch_running_model(frame: FrameType | None) -> PreTrainedModel | None:
    """Watch the outermost model that runs at `frame`, whose configuration named attnplug after it was built."""
    models: list[PreTrainedModel] = []
    while frame is not None:
        # Reading f_locals builds a dictionary, so frames other than methods are skipped.
        if frame.f_code.co_varnames[:1] == ("self",):
            owner = frame.f_locals.get("self")
            if isinstance(owner, PreTrainedModel):
                models.append(owner)
        frame = frame.f_back
    for model in models:
        if uses_attnplug(model, model) and not hasattr(model, _WATCHED):
            watch(model)
    return models[-1] if models else None


def uses_attnplug(module: torch.nn.Module, owner: PreTrainedModel | None) -> bool:
    """Whether the configuration of `module`, or else of its `owner`, names attnplug now."""
    config = getattr(module, "config", None)
    if not isinstance(config, PreTrainedConfig):
        config = None if owner is None else owner.config
    return getattr(config, "_attn_implementation", None) == NAME


def attention_modules(model: PreTrainedModel) -> Iterator[tuple[torch.nn.Module, PreTrainedModel, Kind]]:
    """Each attention module of `model`, the innermost PreTrainedModel that contains it, and its kind.

    Pooling heads with attention of their own are left out: their queries are no tokens of a sequence.
    """
    waiting: list[tuple[torch.nn.Module, PreTrainedModel, bool]] = [(model, model, False)]
    seen: set[int] = set()
    while waiting:
        module, owner, pools = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        owner = module if isinstance(module, PreTrainedModel) else owner
        pools = pools or bool(_POOLING.search(type(module).__name__))
        kind = attention_kind(module)
        if kind is Kind.DISPATCHES or (kind is Kind.OWN and not pools):
            yield module, owner, kind
        waiting.extend((child, owner, pools) for child in reversed(list(module.children())))


def _untraced(function: _Hook) -> _Hook:
    """`function`, which torch.compile runs outside of its graphs."""
    disable: Any = torch.compiler.disable
    untraced: _Hook = disable(function)
    return untraced


@_untraced
def _enter(model: PreTrainedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Before a model's forward: refuses requests that concern the whole model."""
    forward_pass.enter(model)
    if not uses_attnplug(model, model):
        return
    asked = _argument(model, "output_attentions", args, kwargs)
    if asked is None:
        asked = getattr(model.config, "output_attentions", False)
    if asked:
        limit = f"{_WEIGHTS} (asked of {type(model).__name__})"
        raise BatchError("output_attentions", asked, limit, "use attn_implementation='eager'")
    if forward_pass.position_ids is None:
        forward_pass.position_ids = _argument(model, "position_ids", args, kwargs)
    if not vars(model)[_WATCHED].ready:
        _prepare(model)
        vars(model)[_WATCHED].ready = True


@_untraced
def _leave(model: PreTrainedModel, args: tuple[Any, ...], output: Any) -> None:
    forward_pass.leave(model)


def _prepare(model: PreTrainedModel) -> None:
    """Give each attention module its hooks.

    Raises:
        ModelConfigError: no module calls the interface, and some compute attention.
    """
    found: dict[Kind, torch.nn.Module] = {}
    for module, owner, kind in attention_modules(model):
        found.setdefault(kind, module)
        state = layer_state(module) or set_state(module, LayerState())
        state.owner, state.is_own = weakref.ref(owner), kind is Kind.OWN
        if _before not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_before, with_kwargs=True)
            module.register_forward_hook(_after)
    if Kind.OWN in found and Kind.DISPATCHES not in found:
        raise _unserved(found[Kind.OWN])


@_untraced
def _before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Before an attention module's forward: refuses self-attention that the module computes by itself."""
    state = layer_state(module)
    if state is None or not uses_attnplug(module, state.get_owner()):
        return
    state.one_sequence = _has_one_sequence(args, kwargs)
    state.calls_before = forward_pass.calls
    if state.is_own and not _has_other_sequence(module, args, kwargs):
        raise _unserved(module)


@_untraced
def _after(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """After an attention module's forward: it must have called attnplug."""
    state = layer_state(module)
    if state is None or state.is_own or not uses_attnplug(module, state.get_owner()):
        return
    if forward_pass.calls == state.calls_before:
        raise _unserved(module)


def _unserved(module: torch.nn.Module) -> ModelConfigError:
    name = name_in_model(module, forward_pass.root)
    return ModelConfigError(
        f"{name} ({type(module).__name__}) computes attention of its own and was not served by attnplug; "
        "use attn_implementation='eager' for its model, or attnplug.integrations.transformers.set_attention "
        "on a part without it"
    )


def _has_one_sequence(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the arguments contain at most one tensor of hidden states `[B, L, C]`.

    If so, padding applies to both keys and queries. Unclear cases count as two sequences, which is correct
    for both.
    """
    hidden = {id(value) for value in (*args, *kwargs.values()) if _is_float(value) and value.ndim == 3}
    return len(hidden) <= 1


def _has_other_sequence(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether this is cross attention: by its name, or an argument named for keys or another sequence."""
    if "cross" in type(module).__name__.lower():
        return True
    cls: Any = type(module)
    names = _parameters(cls)
    named = [*zip(names, args, strict=False), *kwargs.items()]
    tensors = [(name, value) for name, value in named if _is_float(value)]
    return any(value is not tensors[0][1] and _OTHER_SEQUENCE.search(name) for name, value in tensors[1:])


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _argument(model: PreTrainedModel, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if name in kwargs or not args:
        return kwargs.get(name)
    cls: Any = type(model)
    names = _parameters(cls)
    return args[names.index(name)] if name in names[: len(args)] else None


@functools.cache
def _parameters(cls: type[torch.nn.Module]) -> tuple[str, ...]:
    """The parameters of `cls.forward` without self."""
    return tuple(inspect.signature(cls.forward).parameters)[1:]
