"""Backends for calls: one binding for each spec and device, and metadata that a step's layers may share."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar, cast

import torch

from attnplug._system.scopes import Scopes
from attnplug.core.metadata import CommonAttentionMetadata
from attnplug.core.spec import LayerSpec, Phase
from attnplug.integrations.binding import Binding, version_of
from attnplug.registry.default import select
from attnplug.registry.selection.decision import Decision
from attnplug.registry.selection.policy import phase_rule_for, rule_sets

_Function = TypeVar("_Function", bound=Callable[..., Any])

NAME = "flash_attn"
"""The layer name of all calls, for rules by name."""
_MOST_BINDINGS = 256


def untraced(function: _Function) -> _Function:
    """`function`, which torch.compile runs outside of its graphs: it would trace the selection too.

    `torch.compiler.disable` as a decorator would import the compiler, 1.5 s, for callers that never compile.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            disable: Any = torch.compiler.disable
            return disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return cast("_Function", call)


class _Thread(threading.local):
    """The bindings of one thread, because builders keep buffers."""

    def __init__(self) -> None:
        self.bindings: OrderedDict[Hashable, Binding] = OrderedDict()


_thread = _Thread()
_STEPS: Scopes[dict[Hashable, tuple[Any, ...]]] = Scopes("attnplug_one_step")
"""The metadata of the open `one_step` blocks."""


def bind(spec: LayerSpec, device: torch.device, slopes: torch.Tensor | None, *, is_decode: bool) -> Binding:
    """The impl and builder for `spec` under the current selection rules; made on first use.

    Raises:
        NoBackendError, BackendUnavailableError, PolicyError: see `attnplug.select`.
    """
    phase = None
    if phase_rule_for(rule_sets(), spec, NAME):
        phase = Phase.DECODE if is_decode else Phase.PREFILL
    decision = select(spec, device, phase, layer_name=NAME)
    key = (decision.get_backend_cls(), spec, device, decision.options, version_of(slopes))
    found = _thread.bindings.get(key)
    learned = {"alibi_slopes": slopes}
    if found is None:
        found = _thread.bindings[key] = Binding(decision, NAME, device, learned)
        if len(_thread.bindings) > _MOST_BINDINGS:
            _thread.bindings.popitem(last=False)
    elif slopes is not None:
        found.read(learned)
    _thread.bindings.move_to_end(key)
    return found


def decisions() -> tuple[Decision, ...]:
    """The decisions that this thread's calls use, the latest last, with the reasons for and against each backend."""
    return tuple(binding.decision for binding in _thread.bindings.values())


@contextlib.contextmanager
def one_step() -> Iterator[None]:
    """Calls inside share metadata where they give the same tensors of lengths and tables.

    The caller promises that nothing writes to these tensors meanwhile. A model's forward is such a step: its layers
    differ in queries, keys and values alone. Without it each call reads the lengths again, and calls of
    `flash_attn_varlen_func` wait for the device to copy `cu_seqlens_q` to the host.
    """
    with _STEPS.block({}):
        yield


def shared(what: Hashable, tensors: tuple[torch.Tensor | None, ...], make: Callable[[], Any]) -> Any:
    """`make()`, or inside of `one_step` what it returned for the same `what` and the same tensors."""
    steps = _STEPS.get()
    if not steps:
        return make()
    step = steps[0]
    key = (what, *(id(tensor) for tensor in tensors))
    if key not in step:
        # The tensors are kept, so that no other tensor can get the id of one of them within the step.
        step[key] = (tensors, make())
    return step[key][1]


def built(
    binding: Binding,
    what: Hashable,
    tensors: tuple[torch.Tensor | None, ...],
    make: Callable[[], CommonAttentionMetadata],
) -> Any:
    """The binding's metadata for `make()`; inside of `one_step` that of its last call, if `what` and the tensors are equal.

    Only the last one is kept, because metadata is valid until its builder builds again.
    """
    steps = _STEPS.get()
    if not steps:
        return binding.build(make())
    step = steps[0]
    key = (what, *(id(tensor) for tensor in tensors))
    found = step.pop(binding, None)
    if found is None or found[0] != key:
        found = (key, binding.build(make()), tensors)
    step[binding] = found
    return found[1]
