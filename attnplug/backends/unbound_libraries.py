"""Kernels for the decode of latent attention that no backend of attnplug calls, and the reason for each.

Torch-free, and it imports no kernel library.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UnboundLibrary:
    """One row: a kernel that decodes over latents.

    Args:
        library: the common name.
        found_in: the distribution or distributions that have it, in words.
        distribution: the distribution that has nothing else of attnplug's; None if a backend calls other parts of it.
        capabilities: the compute capabilities as a specifier, such as ">=9.0,<10".
        what: the latents, pages, dtypes and queries that it takes, as its source says.
        why: the reason why no backend calls it.
        instead: the backend that serves such layers.
    """

    library: str
    found_in: str
    capabilities: str
    what: str
    why: str
    distribution: str | None = None
    instead: str = "TRITON"


_NEVER_RUN = "never run with attnplug, which has had no such GPU"

UNBOUND_LIBRARIES: tuple[UnboundLibrary, ...] = (
    UnboundLibrary(
        library="FlashMLA",
        found_in="`flash-mla`, built from source; a copy is part of `vllm`",
        distribution="flash-mla",
        capabilities=">=9.0,<10",
        what="latents of 512 + 64 or 512 in float16 or bfloat16; pages of exactly 64 tokens; the same number of "
        "queries for each request",
        why="it divides the requests in a step's first call, so a graph would keep the division of its capture; "
        "`sgl-flash-mla`, which FLASH_MLA calls, has a function for it",
        instead="FLASH_MLA",
    ),
    UnboundLibrary(
        library="FlashAttention 3, argument `qv`",
        found_in="`flash-attn-3`",
        capabilities=">=9.0,<10",
        what="latents of 512 + 64 in float16 or bfloat16; any number of queries",
        why="FLASH_ATTN_3 gives no `qv`, since no wheel of it was run with attnplug",
    ),
    UnboundLibrary(
        library="FlashAttention 4, argument `qv`",
        found_in="`flash-attn-4`",
        capabilities=">=10.0,<12",
        what="latents of 512 + 64; on 9.x it raises an error, and FLASH_ATTN_4 prefills the expanded keys there",
        why=_NEVER_RUN,
    ),
    UnboundLibrary(
        library="vLLM's Triton MLA",
        found_in="`vllm`",
        distribution="vllm",
        capabilities=">=8.0",
        what="any latents; it reads them again for every 16 heads and for each query of a request",
        why="it is part of an engine, and takes that engine's batches",
    ),
    UnboundLibrary(
        library="TensorRT-LLM's generated kernels (trtllm-gen)",
        found_in="`flashinfer-python` and `tensorrt-llm`, as compiled binaries",
        distribution="tensorrt-llm",
        capabilities=">=10.0,<11",
        what="latents of 512 + 64, also in fp8; pages of 32 or 64 tokens; several queries",
        why=_NEVER_RUN,
    ),
    UnboundLibrary(
        library="CUTLASS MLA",
        found_in="`vllm`, `sglang` and `flashinfer-python`",
        capabilities=">=10.0,<11",
        what="latents of 512 + 64; pages of 128 tokens in vLLM; one query of each request",
        why=_NEVER_RUN,
    ),
    UnboundLibrary(
        library="XQA MLA",
        found_in="`flashinfer-python`",
        capabilities=">=12.0",
        what="latents of 512 + 64 in fp8; one query of each request",
        why=_NEVER_RUN,
    ),
)
"""In the order of the compute capabilities."""
