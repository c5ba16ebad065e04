"""FLASHINFER: FlashInfer's paged attention, planned once per step for each group of layers with equal parameters."""

from __future__ import annotations

from collections.abc import Sequence

import pluggy

from attnplug.backends.flashinfer.backend import FlashInferBackend as FlashInferBackend
from attnplug.core.backend import AttentionBackend

ATTNPLUG_API = (1, 1)
"""Lowest and highest version of the plugin API that this plugin speaks."""

hookimpl = pluggy.HookimplMarker("attnplug")


@hookimpl
def attnplug_backends() -> Sequence[type[AttentionBackend]]:
    """The backends of this plugin."""
    return (FlashInferBackend,)
