"""The layer, device and phase that a backend is chosen for."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnplug.core.device import Device
    from attnplug.core.spec import LayerSpec, Phase

__all__ = ["Placement"]


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """One layer on one device in one phase; a phase of None means both."""

    spec: LayerSpec
    device: Device
    phase: Phase | None = None
