"""The built-in backends, each a plugin of the kind that a third party would ship.

The package shares its name with `attnplug.backends()`, and importing any of its modules puts it in
that function's place. So it can be called, and gives the same.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend


class _CallablePackage(types.ModuleType):
    def __call__(self) -> Mapping[str, type[AttentionBackend]]:
        """The loaded backends by name, as `attnplug.backends()` gives them."""
        from attnplug.registry.default import backends

        return backends()


sys.modules[__name__].__class__ = _CallablePackage
