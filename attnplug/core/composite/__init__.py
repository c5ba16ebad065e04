"""Two backends as one: the first prefills, the second decodes, on one KV cache. Imports no torch."""

from __future__ import annotations

from attnplug.core.composite.agreement import disagreements
from attnplug.core.composite.backend import CompositeBackend, composite_backend

__all__ = ["CompositeBackend", "composite_backend", "disagreements"]
