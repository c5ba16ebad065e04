"""The conformance kit: does a backend do what it says, on this machine, with these versions?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.core._lazy import lazy_exports

if TYPE_CHECKING:
    from attnplug.testing.conformance.check import Check as Check
    from attnplug.testing.conformance.check import CheckSkipped as CheckSkipped
    from attnplug.testing.conformance.check import ConformanceError as ConformanceError
    from attnplug.testing.conformance.check import Level as Level
    from attnplug.testing.conformance.listing import conformance_checks as conformance_checks

__getattr__, __dir__, __all__ = lazy_exports(
    __name__, {"check": "Check CheckSkipped ConformanceError Level", "listing": "conformance_checks"}
)
