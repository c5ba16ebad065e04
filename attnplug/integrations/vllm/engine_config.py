"""What attnplug's builders read of vLLM's configuration and layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attnplug.core.config import BuilderConfig
from attnplug.core.errors import SpecError
from attnplug.core.spec import LayerSpec

_CACHES = (
    *("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"),
    *("CrossAttentionSpec", "EncoderOnlyAttentionSpec", "MLAAttentionSpec"),
)
"""vLLM's KV cache specs that are served."""


def check_cache(kv_cache_spec: Any) -> None:
    """Refuse caches whose pages mean more than a layer's own tokens.

    vLLM changes the steps of such layers, such as those with static sinks, whose pages begin with keys of no token.


    SpecError: another kind of cache, or values of another size than keys.
    """
    kind, size = type(kv_cache_spec).__name__, kv_cache_spec.head_size
    if kind not in _CACHES:
        limit = "is a cache that attnplug does not know, and may change the result"
        raise SpecError("kv_cache_spec", kind, limit, "choose one of vLLM's own backends")
    size_v = getattr(kv_cache_spec, "head_size_v", None) or size
    if size_v != size:
        raise SpecError(
            "head_size_v", size_v, f"must be head_size={size} in vLLM, which does not tell the layer"
        )


def drafts_of(vllm_config: Any) -> int:
    """The draft tokens of a decode; 0 without speculation."""
    speculation = vllm_config.speculative_config
    return 0 if speculation is None else int(speculation.num_speculative_tokens or 0)


def builder_config(vllm_config: Any, kv_cache_spec: Any, layers: Mapping[str, Any]) -> BuilderConfig:
    """The settings for a builder of `layers`, which have one KV cache spec of vLLM."""
    scheduler, drafts = vllm_config.scheduler_config, drafts_of(vllm_config)
    requests, tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    chunk = getattr(kv_cache_spec, "attention_chunk_size", None)
    if chunk:
        # vLLM cuts the requests of such layers at the borders of chunks, into requests of their own.
        requests = 2 * requests + tokens // chunk
    model = vllm_config.model_config
    return BuilderConfig(
        layers=layers,
        num_speculative_tokens=drafts,
        max_num_seqs=requests,
        max_num_batched_tokens=tokens,
        max_model_len=None if model is None else model.max_model_len,
        cudagraph_batch_sizes=_graph_sizes(vllm_config.compilation_config, 1 + drafts, requests),
    )


def _graph_sizes(compilation: Any, queries: int, most: int) -> tuple[int, ...]:
    """How many requests the graphs of decodes have; vLLM counts their tokens."""
    mode = getattr(compilation, "cudagraph_mode", None)
    if mode is None or not mode.has_full_cudagraphs():
        return ()
    counts = {-(-tokens // queries) for tokens in compilation.cudagraph_capture_sizes or ()}
    return tuple(sorted(count for count in counts if count <= most))


def is_of_group(spec: LayerSpec, kv_cache_spec: Any) -> bool:
    """Whether a layer can be one of the group with vLLM's KV cache spec."""
    asked = {"head_size": spec.head_size, "num_kv_heads": spec.num_kv_heads}
    direct = "EncoderOnly" in type(kv_cache_spec).__name__
    return spec.direct_kv == direct and all(
        getattr(kv_cache_spec, name, value) == value for name, value in asked.items()
    )


class SeenLayer:
    """vLLM's layer as attnplug's builders read it: its scales, with the inner impl."""

    def __init__(self, layer: Any, impl: Any) -> None:
        self._layer, self.impl = layer, impl

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)
