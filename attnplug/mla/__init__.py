"""Multi-head latent attention: the bases of a backend that writes only the decode on the latents."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.core._lazy import lazy_exports

if TYPE_CHECKING:
    from attnplug.mla.builder import MLADecodeBuilder as MLADecodeBuilder
    from attnplug.mla.chunks import ContextChunk as ContextChunk
    from attnplug.mla.chunks import plan_context_chunks as plan_context_chunks
    from attnplug.mla.chunks import prefill_workspace_bytes as prefill_workspace_bytes
    from attnplug.mla.impl import MLADecodeImpl as MLADecodeImpl
    from attnplug.mla.impl import packed_query as packed_query
    from attnplug.mla.metadata import MLAMetadata as MLAMetadata

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "builder": "MLADecodeBuilder",
        "chunks": "ContextChunk plan_context_chunks prefill_workspace_bytes",
        "impl": "MLADecodeImpl packed_query",
        "metadata": "MLAMetadata",
    },
)
