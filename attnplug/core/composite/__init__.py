"""Two backends as one: the first prefills, the second decodes. Imports no torch, and its names when they are used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.core._lazy import lazy_exports

if TYPE_CHECKING:
    from attnplug.core.composite.agreement import disagreements as disagreements
    from attnplug.core.composite.backend import CompositeBackend as CompositeBackend
    from attnplug.core.composite.backend import composite_backend as composite_backend

__getattr__, __dir__, _ = lazy_exports(
    __name__, {"agreement": "disagreements", "backend": "CompositeBackend composite_backend"}
)
