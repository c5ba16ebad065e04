"""Hooks that refuse, at a model's forward, requests and layers that attnplug would not serve.

Each attention module has the state of its layer, and each thread that of the running forward of a watched model.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from types import FrameType
from typing import Any, TypeVar

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from attnplug.core.errors import BatchError, ModelConfigError
from attnplug.core.spec import LayerSpec, Phase
from attnplug.integrations.attention.class_code import Kind, attention_kind
from attnplug.integrations.attention.packing import Packing
from attnplug.integrations.attention.step_mask import StepMask
from attnplug.integrations.binding import Binding, version_of
from attnplug.integrations.reader.state_specs import states_of_transformers
from attnplug.registry.default import select
from attnplug.registry.selection.decision import Decision
from attnplug.registry.selection.policy import phase_rule_for, rule_sets

_log = logging.getLogger("attnplug")
_ATTRIBUTE = "_attnplug"


class LayerState:
    """The decision and bindings of one module; copies and pickles of it keep what it asks for, and its name.

    `invariance` has the words of equal bits that set_attention was given. `is_own` says that the module computes
    attention by itself. `one_sequence` says that its running forward was given one sequence of hidden states, and
    `calls_before` how many calls attnplug had served before it.
    """

    def __init__(self, name: str = "", invariance: tuple[str, ...] = ()) -> None:
        self.name = name
        self.invariance = invariance
        self.decision: Decision | None = None
        self.owner: weakref.ref[PreTrainedModel] | None = None
        self.is_own = False
        self.one_sequence = False
        self.calls_before = 0
        self._bindings: dict[Hashable, _Binding] = {}

    def get_owner(self) -> PreTrainedModel | None:
        """The innermost model that contains the module; None if it runs alone."""
        return None if self.owner is None else self.owner()

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerState:
        return LayerState(self.name, self.invariance)

    def __reduce__(self) -> tuple[object, tuple[str, tuple[str, ...]]]:
        return LayerState, (self.name, self.invariance)

    def binding(
        self, spec: LayerSpec, device: torch.device, sinks: torch.Tensor | None, query_len: int
    ) -> _Binding:
        """The impl and builder for `spec` under the current selection rules; made on first use.

        Raises:
            NoBackendError, BackendUnavailableError, PolicyError: see `attnplug.select`.
            SpecError: sinks that are not one number per head.
        """
        spec = spec.replace(invariance=self.invariance) if self.invariance else spec
        # All requests of a call have `query_len` new tokens, so a call is of one phase, as rules for a phase need.
        phase = None
        if phase_rule_for(rule_sets(), spec, self.name):
            phase = Phase.DECODE if query_len == 1 and not spec.is_encoder else Phase.PREFILL
        decision = select(spec, device, phase, layer_name=self.name)
        backend = decision.get_backend_cls()
        # Rules such as attnplug.use may choose another backend for the next call of the same module.
        key = (backend, spec, device, decision.options)
        found = self._bindings.get(key)
        version = version_of(sinks)
        if found is None or found.sinks_version != version:
            found = _Binding(decision, self.name, device, sinks)
            self._bindings[key] = found
        elif sinks is not None:
            found.read({"sinks": sinks})
        if decision is not self.decision:
            if self.decision is None or self.decision.backend != decision.backend:
                _log.info("%s is served by %s", self.name, decision.backend)
            self.decision = decision
        return found


def layer_state(module: torch.nn.Module) -> LayerState | None:
    """The state of `module`; None if it has never called attnplug, and set_attention has not seen it."""
    found = module.__dict__.get(_ATTRIBUTE)
    return found if isinstance(found, LayerState) else None


def set_state(module: torch.nn.Module, state: LayerState) -> LayerState:
    """Store `state` on `module` and return it."""
    object.__setattr__(module, _ATTRIBUTE, state)
    return state


def name_in_model(module: torch.nn.Module, model: PreTrainedModel | None) -> str:
    """The path of `module` in `model`, such as "model.layers.0.self_attn".

    A module that runs outside of a watched model is named by its class and `layer_idx`.
    """
    if model is not None:
        for name, part in model.named_modules():
            if part is module:
                return str(name)
    index = getattr(module, "layer_idx", None)
    name = type(module).__name__
    return name if index is None else f"{name}.{index}"


class _Binding(Binding):
    """The impl and builder that serve one spec of a module on one device; its layer has no pages."""

    def __init__(
        self, decision: Decision, name: str, device: torch.device, sinks: torch.Tensor | None
    ) -> None:
        super().__init__(decision, name, device, {"sinks": sinks})
        self.sinks_version = version_of(sinks)
        self._unmasked: tuple[Hashable, Any] | None = None

    def metadata(self, step: StepMask, packing: Packing, is_shared: bool) -> Any:
        """The backend's metadata for the step.

        Layers that share a mask, backend and spec share it (`is_shared`). A layer without a mask builds
        one for each shape.
        """
        if not is_shared:
            shape = (step.batch, step.q_length, step.kv_length)
            if self._unmasked is None or self._unmasked[0] != shape:
                # The former step's tensors are freed before new ones are made.
                self._unmasked = None
                self._unmasked = (shape, self.build(packing.common))
            return self._unmasked[1]
        key = (self.decision.backend_cls, self.decision.spec, self.decision.options, self.device)
        if key not in step.metadata:
            self._unmasked = None
            step.metadata[key] = self.build(packing.common)
        return step.metadata[key]


class ForwardPass(threading.local):
    """The outermost watched model that runs in this thread; a model that runs inside it changes nothing.

    `calls` counts attention calls served in this thread. `position_ids` and `cache` are those of the caller. `masks`
    caches what was read from the caller's mask tensors.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._root: weakref.ref[PreTrainedModel] | None = None
        self._clear()

    def _clear(self) -> None:
        self._root = None
        self.position_ids: torch.Tensor | None = None
        self.cache: Any = None
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

    Its layers decide again.

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
    """Each attention module of `model`, the innermost PreTrainedModel that contains it, and its kind."""
    # Pooling heads with attention of their own are left out: their queries are no tokens of a sequence.
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
    # The keyword of continuous batching, which a model may not pass on to its layers.
    if forward_pass.cache is None:
        forward_pass.cache = kwargs.get("cache")
    if not vars(model)[_WATCHED].ready:
        _prepare(model)
        vars(model)[_WATCHED].ready = True


@_untraced
def _leave(model: PreTrainedModel, args: tuple[Any, ...], output: Any) -> None:
    forward_pass.leave(model)


def _prepare(model: PreTrainedModel) -> None:
    """Give each attention module its hooks.

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
    if forward_pass.root is model and (sentence := states_of_transformers(model)):
        _log.warning("%s", sentence)


@_untraced
def _before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Before an attention module's forward: refuses self-attention that the module computes by itself."""
    state = layer_state(module)
    if state is None or not uses_attnplug(module, state.get_owner()):
        return
    # With one tensor of hidden states [B, L, C], padding applies to both keys and queries. Unclear cases count as two
    # sequences, which is correct for both.
    hidden = {id(value) for value in (*args, *kwargs.values()) if _is_float(value) and value.ndim == 3}
    state.one_sequence = len(hidden) <= 1
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


def _has_other_sequence(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether this is cross attention: by its name, or an argument named for keys or another sequence."""
    if "cross" in type(module).__name__.lower():
        return True
    cls: Any = type(module)
    named = [*zip(_parameters(cls), args, strict=False), *kwargs.items()]
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
