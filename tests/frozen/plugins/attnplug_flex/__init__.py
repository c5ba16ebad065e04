"""The plugin: what attnplug finds through the entry point, light to import."""

from __future__ import annotations

from collections.abc import Sequence

from attnplug import AttentionBackend, hookimpl

from attnplug_flex.backend import FlexBackend, FlexOptions

__all__ = ["ATTNPLUG_API", "FlexBackend", "FlexOptions", "attnplug_backends"]

ATTNPLUG_API = (1, 1)
"""Lowest and highest version of the plugin API that this plugin speaks."""


@hookimpl
def attnplug_backends() -> Sequence[type[AttentionBackend]]:
    """The backends of this plugin."""
    return (FlexBackend,)
