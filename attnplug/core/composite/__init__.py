"""Several backends as one: the first prefills, the second decodes, and ranges of steps may have members of their own.

Imports no torch, and its names when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.core._lazy import lazy_exports

if TYPE_CHECKING:
    from attnplug.core.composite.agreement import disagreements as disagreements
    from attnplug.core.composite.backend import CompositeBackend as CompositeBackend
    from attnplug.core.composite.backend import composite_backend as composite_backend
    from attnplug.core.composite.steps import StepChoice as StepChoice
    from attnplug.core.composite.steps import StepKind as StepKind
    from attnplug.core.composite.steps import StepPriority as StepPriority
    from attnplug.core.composite.steps import StepRange as StepRange

__getattr__, __dir__, _ = lazy_exports(
    __name__,
    {
        "agreement": "disagreements",
        "backend": "CompositeBackend composite_backend",
        "steps": "StepChoice StepKind StepPriority StepRange",
    },
)
