"""What a backend says of one cell, without running anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.core.reasons import Reason
from attnplug.matrix.layers import phase_of, spec_of
from attnplug.registry.decision import Placement
from attnplug.registry.gates import configuration_reasons, fault
from attnplug.registry.plugin_calls import describe, guarded_call

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.core.device import Device
    from attnplug.matrix.model import Cell

__all__ = ["reasons_of"]


def reasons_of(backend: type[AttentionBackend], device: Device, cell: Cell) -> tuple[Reason, ...]:
    """Why a backend does not serve a cell on a device; empty where it does.

    What `validate_configuration` says, and whether it reads the layout, of which a layer says nothing.
    Nothing is looked up on this machine: its distributions are taken to be installed. Whatever the
    backend raises is a reason of code "plugin_error".

    Raises:
        SpecError: a cell that no layer can be.
    """
    reasons = configuration_reasons(backend, Placement(spec_of(cell), device, phase_of(cell)))
    return tuple(reasons if cell.layout is None else (*reasons, *_unread(backend, cell.layout)))


def _unread(backend: type[AttentionBackend], layout: str) -> tuple[Reason, ...]:
    layouts, error = guarded_call(lambda: tuple(backend.supported_kv_cache_layouts()))
    if error is not None:
        return (fault(backend, f"raised {describe(error)} in supported_kv_cache_layouts"),)
    if layout in layouts:
        return ()
    return (
        Reason(
            "KV layout not supported",
            code="kv_cache_layout",
            field="layout",
            requested=layout,
            supported=layouts,
        ),
    )
