"""The facts about an engine that a metadata builder needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from attnplug.core.checks import check_size
from attnplug.core.errors import SpecError

if TYPE_CHECKING:
    from attnplug.core.impl import AttentionLayer


CONTEXT_CHUNK_ROWS = 16_384
"""Rows of the workspace of expanded prefills by default: 1.4 GB for 128 heads in 16 bits."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BuilderConfig:
    """The engine's settings, given to a builder's constructor.

    Args:
        layers: the layers of the model by name; each has its `impl`.
        num_speculative_tokens: draft tokens verified per decode step; 0 without speculation.
        decode_context_parallel_size: ranks that share one request's KV.
        max_num_seqs: most requests in a step.
        max_num_batched_tokens: most tokens in a step.
        max_model_len: longest sequence; None without limit.
        context_chunk_rows: computed tokens that a prefill of latent attention expands at once: the rows of its
            workspace, at least a page. None for those of the plan, which are CONTEXT_CHUNK_ROWS by default.
        cudagraph_batch_sizes: batch sizes that will be captured; empty without CUDA graphs.

    Raises:
        SpecError: a count below its limit, or a value of another type.
    """

    layers: Mapping[str, AttentionLayer] = dataclasses.field(default_factory=dict)
    num_speculative_tokens: int = 0
    decode_context_parallel_size: int = 1
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    context_chunk_rows: int | None = None
    cudagraph_batch_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.layers, Mapping):
            raise SpecError("layers", self.layers, "must be a mapping of names to layers")
        for name in (field.name for field in dataclasses.fields(self)[1:-1]):
            value = getattr(self, name)
            if value is not None or name not in ("max_model_len", "context_chunk_rows"):
                least = 0 if name == "num_speculative_tokens" else 1
                object.__setattr__(self, name, check_size(name, value, least))
        # With a list, the caller could change this frozen value later.
        given = self.cudagraph_batch_sizes
        if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
            raise SpecError("cudagraph_batch_sizes", given, "must be a sequence of integers")
        try:
            listed = tuple(given)
        except Exception:  # noqa: BLE001  (`__iter__` is code of the caller)
            raise SpecError("cudagraph_batch_sizes", given, "must be a sequence of integers") from None
        sizes = tuple(check_size("cudagraph_batch_sizes", size) for size in listed)
        object.__setattr__(self, "cudagraph_batch_sizes", sizes)
