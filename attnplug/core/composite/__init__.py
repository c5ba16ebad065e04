"""Two backends as one: the first prefills, the second decodes, on one KV cache. Imports no torch."""

from __future__ import annotations

from attnplug.core.composite.agreement import disagreements as disagreements
from attnplug.core.composite.backend import CompositeBackend as CompositeBackend
from attnplug.core.composite.backend import composite_backend as composite_backend
