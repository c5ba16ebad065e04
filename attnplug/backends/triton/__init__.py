"""TRITON: attention in Triton kernels, on any GPU that Triton compiles for, and under its interpreter on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import pluggy

from attnplug.backends.triton.backend import TritonBackend as TritonBackend
from attnplug.core.backend import AttentionBackend

ATTNPLUG_API = (1, 1)
"""Lowest and highest version of the plugin API that this plugin speaks."""

hookimpl = pluggy.HookimplMarker("attnplug")


@hookimpl
def attnplug_backends() -> Sequence[type[AttentionBackend]]:
    """The backends of this plugin."""
    return (TritonBackend,)
