"""Records the calls of the functions by which transformers computes recurrences and short convolutions."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from attnplug.integrations.reader.trace import Trace

_LIGHTNING = {"MiniMaxLightningAttention": "transformers.models.minimax.modeling_minimax"}
"""Classes that compute a recurrence by code of their own, and their modules."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateCall:
    """One call of such a function, for all ranks.

    Args:
        path: the module that called.
        visit: the run of its forward.
        after: the calls of attention before it.
        rule: "linear", "delta" or "conv".
        heads: value heads, or channels.
        key_heads: key heads; 0 if the call has copies of them, one for each value head.
        size: elements of a key.
        size_v: elements of a value.
        decay: "head" or "row"; None for a convolution.
        width: of a convolution.
        activation: of a convolution.
        dtype: of the values.
    """

    path: str
    visit: int
    after: int
    rule: str
    heads: int
    key_heads: int = 1
    size: int = 1
    size_v: int = 1
    decay: str | None = None
    width: int | None = None
    activation: str | None = None
    dtype: torch.dtype


def _delta(query: Any, key: Any, value: Any, g: Any, **_: Any) -> dict[str, Any]:
    sizes = {"heads": value.shape[2], "key_heads": 0, "size": key.shape[3], "size_v": value.shape[3]}
    return {**sizes, "rule": "delta", "decay": "row" if g.ndim == 4 else "head", "dtype": value.dtype}


def _mamba2(hidden_states: Any, dt: Any, A: Any, B: Any, C: Any, *_: Any, **__: Any) -> dict[str, Any]:  # noqa: N803
    # The values of Mamba2 are its inputs: [B, T, H, P], with B and C [B, T, G, N] for keys and queries.
    sizes = {"heads": hidden_states.shape[2], "key_heads": B.shape[2], "size": B.shape[3]}
    sizes["size_v"] = hidden_states.shape[3]
    return {**sizes, "rule": "linear", "decay": "head", "dtype": hidden_states.dtype}


def _mamba(hidden_states: Any, dt: Any, A: Any, *_: Any, **__: Any) -> dict[str, Any]:  # noqa: N803
    # Each channel is a head with values of one element: [B, D, T], with a decay [D, N].
    sizes = {"heads": hidden_states.shape[1], "key_heads": 1, "size": A.shape[1], "size_v": 1}
    return {**sizes, "rule": "linear", "decay": "row", "dtype": hidden_states.dtype}


def _conv(hidden_states: Any, weight: Any, *rest: Any, **given: Any) -> dict[str, Any]:
    activation = given.get("activation", rest[1] if len(rest) > 1 else None)
    return {
        "rule": "conv",
        "heads": weight.shape[0],
        "key_heads": weight.shape[0],
        "width": weight.shape[1],
        "activation": {"swish": "silu"}.get(str(activation), activation),
        "dtype": hidden_states.dtype,
    }


_FUNCTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "torch_chunk_gated_delta_rule": _delta,
    "chunk_kimi_delta_attention": _delta,
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba,
    "causal_conv1d_fn": _conv,
}
"""The functions of transformers' modelling files, and what each says of a layer."""


@contextlib.contextmanager
def states_recorded(trace: Trace, current: Callable[[], object]) -> Iterator[None]:
    """Note each call in `trace.states`, inside the block and where `current()` is the trace.

    The modelling files of other threads call the functions as they are. Layers of equal sizes get the results of the first
    one: their numbers say nothing of attention, and transformers computes them in many small steps.
    """
    results: dict[str, Any] = {}
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    files = {type(module).__module__ for module in trace.model.modules()}
    for file in sorted(files):
        names = vars(sys.modules[file])
        replaced += [(names, name, names[name]) for name in _FUNCTIONS if callable(names.get(name))]
    try:
        for names, name, function in replaced:
            names[name] = _recorded(trace, current, function, _FUNCTIONS[name], results)
        yield
    finally:
        for names, name, function in replaced:
            names[name] = function


def _recorded(
    trace: Trace,
    current: Callable[[], object],
    function: Any,
    facts: Callable[..., dict[str, Any]],
    results: dict[str, Any],
) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if current() is trace and trace.stack:
            path, visit, _ = trace.stack[-1]
            found = facts(*args, **kwargs)
            trace.states.append(StateCall(path=path, visit=visit, after=len(trace.calls), **found))
            form = str((function, tree_map(_form, (args, sorted(kwargs.items())))))
            if form not in results:
                results[form] = function(*args, **kwargs)
            return tree_map(
                lambda each: each.clone() if isinstance(each, torch.Tensor) else each, results[form]
            )
        return function(*args, **kwargs)

    return call


def _form(each: Any) -> Any:
    """What the sizes of a result depend on: of a tensor its sizes, dtype and device."""
    return (each.shape, each.dtype, each.device) if isinstance(each, torch.Tensor) else each


def lightning_call(trace: Trace, module: torch.nn.Module) -> StateCall | None:
    """The call of a module that has begun, if its class computes lightning attention; None for other classes."""
    cls: type = type(module)
    if _LIGHTNING.get(cls.__name__) != cls.__module__:
        return None
    path, visit, _ = trace.stack[-1]
    own: Any = module
    heads, size = own.num_attention_heads, own.head_dim
    sizes = {"heads": heads, "key_heads": heads, "size": size, "size_v": size}
    kind: dict[str, Any] = {"rule": "linear", "decay": "head", "dtype": own.qkv_proj.weight.dtype}
    return StateCall(path=path, visit=visit, after=len(trace.calls), **sizes, **kind)
