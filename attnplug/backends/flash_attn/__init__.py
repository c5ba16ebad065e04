"""FLASH_ATTN: the FlashAttention library in its three generations, each a backend of its own."""

from __future__ import annotations

from collections.abc import Sequence

import pluggy

from attnplug.backends.flash_attn.backend import FlashAttn2Backend, FlashAttn3Backend, FlashAttn4Backend
from attnplug.core.backend import AttentionBackend

ATTNPLUG_API = (1, 1)
"""Lowest and highest version of the plugin API that this plugin speaks."""

hookimpl = pluggy.HookimplMarker("attnplug")


@hookimpl
def attnplug_backends() -> Sequence[type[AttentionBackend]]:
    """The backends of this plugin."""
    return (FlashAttn4Backend, FlashAttn3Backend, FlashAttn2Backend)
