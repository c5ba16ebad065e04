"""Host buffers and their device twins, and a guarded ring of them, as an engine's runtime needs them too."""

from __future__ import annotations

from attnplug.ops.buffers import CpuGpuBuffer, StagingRing

__all__ = ["CpuGpuBuffer", "StagingRing"]
