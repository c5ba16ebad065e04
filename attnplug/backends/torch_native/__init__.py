"""TORCH: attention in plain PyTorch, on any device; the reference and the fallback."""

from __future__ import annotations

from collections.abc import Sequence

import pluggy

from attnplug.backends.torch_native.backend import TorchBackend as TorchBackend
from attnplug.core.backend import AttentionBackend

ATTNPLUG_API = (1, 1)
"""Lowest and highest version of the plugin API that this plugin speaks."""

hookimpl = pluggy.HookimplMarker("attnplug")


@hookimpl
def attnplug_backends() -> Sequence[type[AttentionBackend]]:
    """The backends of this plugin."""
    return (TorchBackend,)
