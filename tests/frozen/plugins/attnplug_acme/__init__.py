"""The plugin: what attnplug imports to list the backend, and so light: no torch, no kernels."""

from __future__ import annotations

from attnplug import AttentionBackend, hookimpl

from attnplug_acme.backend import AcmeBackend

__all__ = ["ATTNPLUG_API", "AcmeBackend", "attnplug_backends"]

ATTNPLUG_API = (1, 1)
"""The lowest and the highest version of attnplug's plugin interface that this package speaks."""


@hookimpl
def attnplug_backends() -> list[type[AttentionBackend]]:
    """The backends of this package."""
    return [AcmeBackend]
