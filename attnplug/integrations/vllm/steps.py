"""vLLM's CommonAttentionMetadata as attnplug's: the same tensors under the same names.

Also the parts of vLLM's configuration and layers that attnplug's builders read.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.config import BuilderConfig
from attnplug.core.errors import BatchError, SpecError
from attnplug.core.kv_format import kv_format
from attnplug.core.metadata import CommonAttentionMetadata
from attnplug.core.spec import AttentionType, LayerSpec
from attnplug.integrations.engine_layers import with_direct_keys
from attnplug.integrations.vllm.spans import spans_of

_OF_A_GROUP = frozenset(("block_table_tensor", "slot_mapping"))
_UNSERVED = {
    "rswa_prefix_lens": "windows with a visible prefix are not served",
    "dcp_local_seq_lens": "no group of ranks shares the tokens of these layers",
}


def translate(
    step: Any, *, exact: bool, lengths: npt.NDArray[np.int32] | None = None, has_ranks: bool = False
) -> CommonAttentionMetadata:
    """A step of paged layers. `exact` says that the host's lengths, or those given in place of them, are no upper bounds.

    Args:
        step: vLLM's.
        exact: see above.
        lengths: of the requests, in place of those on the host.
        has_ranks: whether ranks share the tokens of requests.

    BatchError: the step asks for something that attnplug's backends would not see.
    """
    for field, why in _UNSERVED.items():
        served = has_ranks and field == "dcp_local_seq_lens"
        if getattr(step, field, None) is not None and not served:
            raise BatchError(field, "a value", why)
    if not isinstance(step.causal, bool):
        raise BatchError(
            "causal", type(step.causal).__name__, "must be a bool: requests that differ are not served"
        )
    starts, lengths = _host(step, lengths)
    tokens = int(step.num_actual_tokens)
    spans = spans_of(getattr(step, "mm_req_doc_ranges", None), starts.numpy(), lengths, tokens)
    return CommonAttentionMetadata(
        query_start_loc=step.query_start_loc,
        query_start_loc_cpu=starts,
        seq_lens=step.seq_lens,
        num_reqs=step.num_reqs,
        num_actual_tokens=step.num_actual_tokens,
        max_query_len=int(step.max_query_len),
        max_seq_len=int(step.max_seq_len),
        block_table_tensor=step.block_table_tensor,
        slot_mapping=step.slot_mapping,
        logits_indices_padded=step.logits_indices_padded,
        num_logits_indices=step.num_logits_indices,
        encoder_seq_lens=step.encoder_seq_lens,
        encoder_seq_lens_cpu=step.encoder_seq_lens_cpu,
        dcp_local_seq_lens=getattr(step, "dcp_local_seq_lens", None),
        mm_prefix_spans=None if spans is None else to_device(spans, step.seq_lens.device),
        mm_prefix_spans_cpu=spans,
        seq_lens_host=lengths,
        seq_lens_host_exact=exact,
    )


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on `device`, without a wait."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def is_same_batch(one: Any, other: Any) -> bool:
    """Whether two of vLLM's steps have the very same tensors and numbers, but for the table and slots of a KV group."""
    ours, theirs = vars(one), vars(other)
    if ours.keys() != theirs.keys():
        return False
    return _OF_A_GROUP.issuperset([name for name, value in ours.items() if value is not theirs[name]])


def _host(
    step: Any, lengths: npt.NDArray[np.int32] | None
) -> tuple[torch.Tensor, npt.NDArray[np.int32] | None]:
    """Start locations and lengths on the host, with the padding of a graph as attnplug's builders know it."""
    # A graph has a fixed number of requests. vLLM fills it up with requests of no
    # query, but counts their tokens. For attnplug padding requests have the queries
    # of a decode and one key, so that a padded step has the plan of the graph.
    reqs, tokens, given = step.num_reqs, step.num_actual_tokens, step.query_start_loc_cpu
    # Where vLLM cuts requests at the borders of chunks, only this field has the lengths of the parts.
    host = getattr(step, "_seq_lens_cpu", None)
    if host is None:
        host = step.seq_lens_cpu_upper_bound
    if lengths is None and host is not None and host.shape[0] >= reqs:
        lengths = host.numpy()
    starts = given.numpy()
    last = int(starts[reqs])
    if last == tokens:
        return given, lengths
    used = int(np.searchsorted(starts[: reqs + 1], last))
    each, rest = divmod(tokens - last, max(1, reqs - used))
    if used == reqs or rest or each != int(step.max_query_len):
        return given, lengths
    filled = starts[: reqs + 1].copy()
    filled[used:] += np.arange(reqs + 1 - used, dtype=filled.dtype) * each
    if lengths is not None:
        lengths = lengths[:reqs].copy()
        lengths[used:] = 1
    return torch.from_numpy(filled), lengths


def for_layer(common: CommonAttentionMetadata, spec: LayerSpec) -> CommonAttentionMetadata:
    """The step as the builder of such layers needs it: encoders have their keys in the call, cross layers in pages."""
    if spec.direct_kv:
        return with_direct_keys(common)
    if spec.attn_type is AttentionType.ENCODER_DECODER and common.encoder_seq_lens is None:
        # vLLM's builder of cross attention has put the encoder's lengths in place of the sequences'.
        host = common.seq_lens_host
        return dataclasses.replace(common, encoder_seq_lens=common.seq_lens, encoder_seq_lens_cpu=host)
    return common


_CACHES = (
    *("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"),
    *("CrossAttentionSpec", "EncoderOnlyAttentionSpec", "MLAAttentionSpec"),
)
"""vLLM's KV cache specs that are served."""


def check_cache(kv_cache_spec: Any) -> None:
    """Refuse caches whose pages mean more than a layer's own tokens.

    SpecError: another kind of cache, or values of another size than keys.
    """
    # vLLM changes the steps of such layers, such as those with static sinks, whose pages begin with keys of no token.
    kind, size = type(kv_cache_spec).__name__, kv_cache_spec.head_size
    if kind not in _CACHES:
        limit = "is a cache that attnplug does not know, and may change the result"
        raise SpecError("kv_cache_spec", kind, limit, "choose one of vLLM's own backends")
    size_v = getattr(kv_cache_spec, "head_size_v", None) or size
    if size_v != size:
        raise SpecError(
            "head_size_v", size_v, f"must be head_size={size} in vLLM, which does not tell the layer"
        )


INVARIANT = ("batch", "rows")
"""What vLLM's batch-invariant mode asks of layers: its scheduler cuts prompts by what else is in a step."""


def asked_invariance() -> tuple[str, ...]:
    """The words that all layers ask for: INVARIANT in vLLM's batch-invariant mode."""
    # All versions with such a mode read this variable, and they keep it in different places.
    return INVARIANT if int(os.environ.get("VLLM_BATCH_INVARIANT") or 0) else ()


def asked_head_scales(config: Any, kv_cache_dtype: str) -> bool:
    """Whether the checkpoint has scales for each KV head of the layer's pages, as vLLM reads it."""
    scheme = getattr(getattr(config, "quant_config", None), "kv_cache_scheme", None) or {}
    return scheme.get("strategy") == "attn_head" and has_scales(kv_cache_dtype)


def has_scales(kv_cache_dtype: str) -> bool:
    """Whether pages of this type are of 8-bit floats; other layers of a checkpoint with scales have none."""
    return kv_cache_dtype != "auto" and kv_format(kv_cache_dtype).feature == "fp8_kv"


def check_spans(name: str, layer: Any, kv_cache_spec: Any) -> None:
    """Refuse spans of multimodal tokens that vLLM cuts: by a layer's window, or at the borders of chunks.

    SpecError: the layer asks for such spans.
    """
    if not getattr(layer.impl, "has_spans", False):
        return
    if getattr(layer, "mm_prefix_clamp_sliding_window", False):
        limit = f"is not served in {name}: attnplug's spans reach past windows"
        raise SpecError("mm_prefix_clamp_sliding_window", True, limit, "choose one of vLLM's own backends")
    if getattr(kv_cache_spec, "attention_chunk_size", None):
        limit = f"cannot be served in {name}: vLLM cuts its requests at chunks, without their ranges"
        raise SpecError("mm_prefix", True, limit, "choose one of vLLM's own backends")


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
    """The batch sizes of the graphs of decodes."""
    # vLLM counts their tokens: a decode with drafts has several.
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
