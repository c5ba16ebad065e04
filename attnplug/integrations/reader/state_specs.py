"""The specs of state layers, per rank, from the recorded calls of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from attnplug.core.errors import ModelConfigError, SpecError
from attnplug.core.spec import LayerSpec
from attnplug.core.state.dims import StateDims
from attnplug.integrations.model_spec import make_spec
from attnplug.integrations.reader.state_calls import StateCall


def state_specs(
    model: torch.nn.Module, calls: Sequence[StateCall], ranks: int
) -> list[tuple[int, str, LayerSpec]]:
    """The layers of these calls in order: the calls of attention before each, its name, and its spec.

    A recurrence has the name of its module. A convolution is a layer of its own, named after the module of its weight.

    Raises:
        ModelConfigError: sizes that ranks cannot share, or that no StateDims has.
    """
    visits: dict[tuple[str, int], dict[str, StateCall]] = {}
    for call in calls:
        parts = visits.setdefault((call.path, call.visit), {})
        kind = "conv" if call.rule == "conv" else "state"
        if kind in parts:
            limit = f"{call.path}: {type(model.get_submodule(call.path)).__name__} computes two states of one kind"
            raise ModelConfigError(f"{limit} for one output, which a LayerSpec cannot describe")
        parts[kind] = call
    found, runs = [], Counter[str]()
    for (path, _), parts in visits.items():
        conv, state = parts.get("conv"), parts.get("state")
        runs[path] += 1
        again = "" if runs[path] == 1 else f"#{runs[path]}"
        if conv is not None:
            name = f"{path}.{_weight_of(model.get_submodule(path), conv)}"
            found.append((conv.after, name + again, _conv_spec(name, conv, state, ranks)))
        if state is not None:
            found.append((state.after, path + again, _recurrent_spec(path, state, conv, ranks)))
    return found


def _weight_of(module: torch.nn.Module, call: StateCall) -> str:
    """The name of the child with the weight of a convolution."""
    shape = (call.heads, 1, call.width)
    children = module.named_children()
    named = (
        name for name, each in children if getattr(getattr(each, "weight", None), "shape", None) == shape
    )
    return next(named, "conv")


def _key_heads(state: StateCall, conv: StateCall | None) -> int:
    """The key heads before they were copied for each value head: the channels of the convolution in front say it."""
    if state.key_heads:
        return state.key_heads
    if conv is None:
        return state.heads
    heads, rest = divmod(conv.heads - state.heads * state.size_v, 2 * state.size)
    return heads if heads > 0 and not rest and state.heads % heads == 0 else state.heads


def _recurrent_spec(path: str, state: StateCall, conv: StateCall | None, ranks: int) -> LayerSpec:
    fields: dict[str, Any] = {"head_size": state.size, "head_size_v": state.size_v}
    if state.rule == "linear":
        fields["scale"] = 1.0
    dims = _dims(path, state)
    heads = {"num_heads": state.heads, "num_kv_heads": _key_heads(state, conv)}
    return make_spec(path, **heads, ranks=ranks, dtype=_dtype(state), state=dims, **fields)


def _conv_spec(name: str, conv: StateCall, state: StateCall | None, ranks: int) -> LayerSpec:
    """The convolution of a rank: the channels of its value heads, and those of its key heads if they pass through it."""
    channels, shared = conv.heads, 0
    if state is not None and (both := conv.heads - state.heads * state.size_v) > 0:
        key_heads = _key_heads(state, conv)
        if both != 2 * key_heads * state.size:
            raise ModelConfigError(
                f"{name}: {conv.heads} channels are not those of {state.heads} value heads of {state.size_v} and "
                f"{key_heads} key heads of {state.size}"
            )
        channels -= both
        # Fewer key heads than ranks are replicated, as in `make_spec`.
        shared = 2 * state.size * max(1, key_heads // ranks)
    if channels % ranks:
        raise ModelConfigError(
            f"{name}: tensor_parallel_size={ranks} does not divide the {channels} channels of the convolution",
            argument="tensor_parallel_size",
        )
    count = channels // ranks + shared
    return LayerSpec(
        num_heads=count, num_kv_heads=count, head_size=1, dtype=_dtype(conv), state=_dims(name, conv)
    )


def _dims(path: str, call: StateCall) -> StateDims:
    fields: Any = {"decay": call.decay, "width": call.width, "activation": call.activation}
    try:
        return StateDims(rule=call.rule, **fields)
    except SpecError as error:
        raise ModelConfigError(f"{path}: {error}") from error


def _dtype(call: StateCall) -> str:
    return str(call.dtype).removeprefix("torch.")


def states_of_transformers(model: torch.nn.Module) -> str | None:
    """The sentence about layers with a state that transformers runs itself, for its own client; None without any."""
    # It passes their states to functions of its own: 5.17 has no registry of these, as it has of attention.
    own = [name for name, module in model.named_modules() if _keeps_state(module)]
    if not own:
        return None
    layers = f"{len(own)} layers that keep a state, such as {own[0]}"
    return f"transformers runs {layers}, by functions of its own: attnplug serves the attention layers alone"


def _keeps_state(module: torch.nn.Module) -> bool:
    """Whether a module has a place in transformers' cache, and a convolution of each channel or lightning's slopes."""
    if not isinstance(getattr(module, "layer_idx", None), int):
        return False
    convolutions = (each for each in module.children() if isinstance(each, torch.nn.Conv1d))
    return hasattr(module, "slope_rate") or any(each.groups == each.in_channels > 1 for each in convolutions)
