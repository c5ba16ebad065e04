"""FLASH_MLA: FlashMLA's decode of latent attention on Hopper, over all latents or over chosen ones."""

from __future__ import annotations

from collections.abc import Sequence

import pluggy

from attnplug.backends.flash_mla.backend import FlashMLABackend as FlashMLABackend
from attnplug.core.backend import AttentionBackend

ATTNPLUG_API = (1, 1)
"""Lowest and highest version of the plugin API that this plugin speaks."""

hookimpl = pluggy.HookimplMarker("attnplug")


@hookimpl
def attnplug_backends() -> Sequence[type[AttentionBackend]]:
    """The backends of this plugin."""
    return (FlashMLABackend,)
