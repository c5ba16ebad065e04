"""What a backend says of one cell, without running anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnplug.core.reasons import Reason
from attnplug.matrix.layers import phase_of, spec_of
from attnplug.registry.containment import attempt, describe

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
    found, error = attempt(backend.validate_configuration, spec_of(cell), device, phase_of(cell))
    if error is not None:
        return (_fault(backend, f"raised {describe(error)} in validate_configuration"),)
    if isinstance(found, str) or not isinstance(found, Sequence):
        what = f"returned {found!r} from validate_configuration, which must be a list of reasons"
        return (_fault(backend, what),)
    # Backends ported from vLLM return plain sentences.
    reasons = tuple(
        item if isinstance(item, Reason) else Reason(str(item), code="combination") for item in found
    )
    return reasons if cell.layout is None else (*reasons, *_unread(backend, cell.layout))


def _unread(backend: type[AttentionBackend], layout: str) -> tuple[Reason, ...]:
    layouts, error = attempt(lambda: tuple(backend.supported_kv_cache_layouts()))
    if error is not None:
        return (_fault(backend, f"raised {describe(error)} in supported_kv_cache_layouts"),)
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


def _fault(backend: type[AttentionBackend], what: str) -> Reason:
    owner = f"{backend.__module__}.{backend.__qualname__}"
    return Reason(f"{owner} {what}", code="plugin_error", remedy="tell its author")
