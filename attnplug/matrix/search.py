"""Searches for the cells of a backend: the plainest that it serves for each two values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attnplug.core.blocks import MultipleOf
from attnplug.core.features import Feature
from attnplug.core.reasons import Reason
from attnplug.matrix.axes import FEATURES, PLAIN, goes_with, own_latents
from attnplug.matrix.layers import phase_of, spec_of
from attnplug.matrix.model import Cell
from attnplug.registry.decision import Placement
from attnplug.registry.gates import configuration_reasons, fault
from attnplug.registry.plugin_calls import describe, guarded_call
from attnplug.testing.design.search import Axes, Row, Search

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.core.device import Device

_AXIS_OF_CODE = {
    **{flag.code: "feature" for flag in Feature},
    **{axis: axis for axis in ("head_size", "dtype", "kv_cache_dtype", "phase")},
    Feature.FP8_KV.code: "kv_cache_dtype",
}
"""The axis whose value a reason refuses, by the reason's code."""
_REFUSE_ALL = ("device_type", "compute_capability", "plugin_error")
"""Codes of reasons that refuse every layer."""


class CellSearch(Search):
    """Asks one backend on one device about cells.

    Args:
        backend: the class. The libraries that it requires count as installed.
        device: that its layers are validated for.
        axes: the values to pair, from `axes_of`.
    """

    order = ("block_size", "head_size", "dtype", "kv_cache_dtype", "phase", "feature", "layout")
    joined = ("block_size", "head_size", "dtype", "kv_cache_dtype", "feature")
    """`supports_combination` sees these in a layer, and may refuse two of them together."""

    def __init__(self, backend: type[AttentionBackend], device: Device, axes: Axes) -> None:
        self._backend = backend
        self._device = device
        latents = own_latents(backend)
        self._fitting: dict[str, dict[str, tuple[Any, ...]]] = {
            feature: {
                axis: tuple(value for value in (*values, None) if goes_with(feature, axis, value, latents))
                for axis, values in axes.items()
                if axis != "feature"
            }
            for feature in FEATURES
        }
        blocks, _ = guarded_call(lambda: tuple(backend.get_supported_kernel_block_sizes()))
        self._blocks: tuple[int | MultipleOf, ...] = blocks or ()
        self._plainest: dict[str, Row] = {}
        super().__init__(axes)

    def ask(self, row: Row) -> tuple[Reason, ...]:
        """The reasons of `validate_configuration`, and one if the backend cannot read the layout of the pages."""
        cell = Cell(**row)
        reasons = configuration_reasons(self._backend, Placement(spec_of(cell), self._device, phase_of(cell)))
        return (*reasons, *(() if cell.layout is None else self._unread(cell.layout)))

    def start_from(self, base: Row) -> None:
        """For each feature, the plainest row has the base's values where they have a meaning with the feature."""
        super().start_from(base)
        self._plainest = {
            feature: {
                "feature": feature,
                **{
                    axis: base[axis] if base[axis] in values else values[0]
                    for axis, values in fitting.items()
                },
            }
            for feature, fitting in self._fitting.items()
        }

    def complete(self, fixed: Mapping[str, Any]) -> Row | None:
        """The plainest row of the fixed feature, or of the first feature that the other values go with."""
        features = (
            (fixed["feature"],) if "feature" in fixed else (self.base["feature"], PLAIN, "fp8_kv", "mla")
        )
        for feature in features:
            fitting = self._fitting[feature]
            if all(value in fitting[axis] for axis, value in fixed.items() if axis != "feature"):
                return {**self._plainest[feature], **fixed}
        return None

    def is_hopeless(self, fixed: Mapping[str, Any], row: Row) -> bool:
        """Whether the code of a reason names the axis of a fixed value."""
        for reason in self.reasons(row):
            code = reason.code
            if code in _REFUSE_ALL:
                return True
            if _AXIS_OF_CODE.get(code) in fixed and reason.field != "head_size_v":
                return True
            if code == "block_size" and "block_size" in fixed:
                allowed, error = guarded_call(MultipleOf.allows, self._blocks, row["block_size"])
                if error is None and not allowed:
                    return True
        return False

    def _unread(self, layout: str) -> tuple[Reason, ...]:
        layouts, error = guarded_call(lambda: tuple(self._backend.supported_kv_cache_layouts()))
        if error is not None:
            what = f"raised {describe(error)} in supported_kv_cache_layouts"
            return (fault(self._backend, what),)
        if layout in layouts:
            return ()
        text = "KV layout not supported"
        return (Reason(text, code="kv_cache_layout", field="layout", requested=layout, supported=layouts),)
