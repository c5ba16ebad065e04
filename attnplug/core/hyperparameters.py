"""Hyperparameters that a kernel library's plan fixes for all its layers: window, cap, scale, sinks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from attnplug.core.errors import BatchError
from attnplug.core.spec import LayerSpec

__all__ = [
    "PerLayerParameters",
    "get_per_layer_parameters",
    "group_by_hyperparameters",
    "infer_global_hyperparameters",
]


@dataclasses.dataclass(frozen=True, slots=True)
class PerLayerParameters:
    """The parameters of one layer; the last two do not count for equality and hash.

    Args:
        window_left: keys seen before the query's own position; -1 without limit.
        logits_soft_cap: c, where logits become c * tanh(logits / c); None without.
        sm_scale: softmax scale.
        has_sinks: whether sinks enter the softmax denominator.
        has_same_window_lefts: whether all layers of the group have this window.
        has_same_all_params: whether they have all parameters in common.
    """

    window_left: int
    logits_soft_cap: float | None
    sm_scale: float
    has_sinks: bool = False
    # Facts about a group are not compared, so that layers with equal parameters still share a plan.
    has_same_window_lefts: bool | None = dataclasses.field(default=None, compare=False)
    has_same_all_params: bool | None = dataclasses.field(default=None, compare=False)


def get_per_layer_parameters(
    layers: Mapping[str, Any], layer_names: Iterable[str], impl_cls: type[Any]
) -> dict[str, PerLayerParameters]:
    """The parameters of each named layer, in the order of `layer_names`.

    Args:
        layers: layers by name. An `impl` made by attnplug has a `spec`. Any other has the attributes of vLLM's:
            `scale`, and optionally `sliding_window` (left, right), `logits_soft_cap` and `sinks`.
        layer_names: the layers that share a plan.
        impl_cls: the class that their impls must have.

    Raises:
        BatchError: a layer that is not in `layers`, or whose impl has another class.
    """
    found = {}
    for name in layer_names:
        if name not in layers:
            raise BatchError("layer_names", name, f"is not among the {len(layers)} layers given")
        impl = layers[name].impl
        if not isinstance(impl, impl_cls):
            limit = f"must be a {impl_cls.__name__}, as the plan's is"
            raise BatchError(f"layers[{name!r}].impl", type(impl).__name__, limit)
        found[name] = _parameters(impl)
    return found


def infer_global_hyperparameters(per_layer_params: Mapping[str, PerLayerParameters]) -> PerLayerParameters:
    """The first layer's values, and whether all layers share the window and everything; a new value.

    Raises:
        BatchError: no layers.
    """
    if not per_layer_params:
        raise BatchError("per_layer_params", {}, "must have at least one layer")
    first, *others = per_layer_params.values()
    return dataclasses.replace(
        first,
        has_same_window_lefts=all(other.window_left == first.window_left for other in others),
        has_same_all_params=all(other == first for other in others),
    )


def group_by_hyperparameters(
    per_layer_params: Mapping[str, PerLayerParameters],
) -> dict[PerLayerParameters, list[str]]:
    """The layers that can share one plan, by their parameters, in the order of first appearance.

    The keys have both `has_same_...` flags True; they equal the parameters of each of their layers.
    """
    groups: dict[PerLayerParameters, list[str]] = {}
    for name, params in per_layer_params.items():
        alike = dataclasses.replace(params, has_same_window_lefts=True, has_same_all_params=True)
        groups.setdefault(alike, []).append(name)
    return groups


def _parameters(impl: Any) -> PerLayerParameters:
    spec = getattr(impl, "spec", None)
    if isinstance(spec, LayerSpec):
        return PerLayerParameters(spec.window[0], spec.logits_soft_cap, spec.scale, spec.has_sinks)
    window = getattr(impl, "sliding_window", None)
    return PerLayerParameters(
        window_left=-1 if window is None else int(window[0]),
        logits_soft_cap=getattr(impl, "logits_soft_cap", None),
        sm_scale=impl.scale,
        has_sinks=getattr(impl, "sinks", None) is not None,
    )
