"""vLLM: its layer, its builder of a group's metadata and its pages, as its model runner calls them."""

from __future__ import annotations

import os
import types
from collections.abc import Iterator
from typing import Any, get_args

import torch

from attnplug.core.impl import host_scale
from attnplug.core.kv_format import kv_format
from attnplug.core.spec import AttentionType, LayerSpec
from attnplug.engines.engine import Call, Engine
from attnplug.testing.conformance.check import CheckSkipped, SkipKind

_INVARIANT = ("batch", "rows")
_LAYER = "layer"


def _refusals(spec: LayerSpec) -> Iterator[str]:
    from vllm.config.cache import CacheDType

    flags = {
        "is driven by the suite with latent attention": spec.mla is not None,
        "has states": spec.state is not None,
        "gives selections of keys without latents": spec.sparse is not None and spec.mla is None,
        "returns the log-sum-exp": spec.needs_lse,
        "has values of another size than keys": spec.head_size_v != spec.head_size,
        "has a decoder without pages": spec.direct_kv and spec.attn_type is AttentionType.DECODER,
        "has multimodal spans in layers with chunks": spec.mm_prefix and spec.chunk_size is not None,
        "has multimodal spans in layers that are not causal": spec.mm_prefix and not spec.causal,
        "has slopes in layers with chunks": spec.has_alibi and spec.chunk_size is not None,
    }
    yield from (f"no layer of it {name}" for name, is_asked in flags.items() if is_asked)
    if spec.invariance and spec.invariance != _INVARIANT:
        yield f"its batch-invariant mode asks for {'+'.join(_INVARIANT)}"
    stored = spec.kv_cache_dtype
    if stored not in get_args(CacheDType) or (stored != "auto" and kv_format(stored).planes):
        yield "its pages have other types"
    left, right = spec.window
    if (
        spec.is_windowed
        and not spec.causal
        and (left != right or spec.attn_type is AttentionType.ENCODER_DECODER)
    ):
        yield "its windows are as wide on both sides of layers that are not causal"


def _asked(spec: LayerSpec) -> Iterator[LayerSpec]:
    """The layer itself; for steps that are not causal also the causal decoder that vLLM makes, and chunks as requests."""
    if spec.chunk_size is not None:
        yield spec.replace(chunk_size=None)
    elif spec.attn_type is AttentionType.DECODER and not spec.causal:
        yield spec.replace(causal=True, window=(spec.window[0], -1))


def _attend(call: Call) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config

    spec, common = call.spec, call.common
    config = VllmConfig()
    config.scheduler_config.max_num_seqs = max(common.num_reqs, 1)
    config.scheduler_config.max_num_batched_tokens = max(common.num_actual_tokens, 1)
    model: Any = types.SimpleNamespace(
        dtype=getattr(torch, spec.dtype), is_mm_prefix_lm=spec.mm_prefix, max_model_len=1 << 17
    )
    config.model_config = model
    if spec.head_scales:
        config.quant_config = types.SimpleNamespace(kv_cache_scheme={"strategy": "attn_head"})
    before = os.environ.get("VLLM_BATCH_INVARIANT")
    os.environ["VLLM_BATCH_INVARIANT"] = str(int(bool(spec.invariance)))
    try:
        with set_current_vllm_config(config):
            _run(call, config)
    finally:
        if before is None:
            del os.environ["VLLM_BATCH_INVARIANT"]
        else:
            os.environ["VLLM_BATCH_INVARIANT"] = before


def _run(call: Call, config: Any) -> None:
    from attnplug.integrations.vllm.backends import backend_class
    from attnplug.integrations.vllm.names import AUTOMATIC

    spec, tensors = call.spec, call.tensors
    cache = _cache(call)
    group, backend = _group(call, cache, backend_class(AUTOMATIC))
    left = spec.window[0]
    impl = backend.get_impl_cls()(
        spec.num_heads,
        spec.head_size,
        spec.scale,
        spec.num_kv_heads,
        None if tensors.alibi_slopes is None else tensors.alibi_slopes.tolist(),
        left + 1 if left >= 0 else None,
        spec.kv_cache_dtype,
        spec.logits_soft_cap,
        str(spec.attn_type),
        None,
        **({} if tensors.sinks is None else {"sinks": tensors.sinks}),
    )
    layer = types.SimpleNamespace(impl=impl, **_scales(call))
    config.compilation_config.static_forward_context = {_LAYER: layer}
    impl.process_weights_after_loading(getattr(torch, spec.dtype))
    builder = backend.get_builder_cls()(group, [_LAYER], config, call.query.device)
    metadata = builder.build(0, _step(call))
    if not spec.direct_kv:
        impl.do_kv_cache_update(layer, call.key, call.value, cache, call.common.slot_mapping)
    key, value = call.key, call.value
    impl.forward(layer, call.query, key, value, cache, metadata, call.output)


def _cache(call: Call) -> torch.Tensor:
    """The pages as vLLM gives them: the kit's own memory where its version has the logical shape."""
    from attnplug.integrations.vllm.impl import HAS_CACHE_SHAPE

    if call.kv_cache is None:
        return call.query.new_empty(0)
    keys, _ = call.pages()
    if call.kv_cache.shape != (keys.shape[0], 2, *keys.shape[1:]):
        raise CheckSkipped("vllm: it allocates pages of the contract's shape", SkipKind.LAYER)
    if HAS_CACHE_SHAPE:
        return call.kv_cache
    # Later versions have K and V of a token and head side by side.
    blocks, _, tokens, heads, size = call.kv_cache.shape
    return call.kv_cache.permute(0, 3, 2, 1, 4).reshape(blocks, heads, tokens, 2 * size)


def _group(call: Call, cache: torch.Tensor, backend: Any) -> tuple[Any, Any]:
    """The spec of the layer's pages in vLLM, and the backend class of its builder."""
    from vllm.v1 import kv_cache_interface as theirs

    spec = call.spec
    fields: dict[str, Any] = {
        "block_size": 16 if call.kv_cache is None else call.pages()[0].shape[1],
        "num_kv_heads": spec.num_kv_heads,
        "head_size": spec.head_size,
        "dtype": call.key.dtype if call.kv_cache is None else cache.dtype,
    }
    if spec.chunk_size is not None:
        from vllm.model_executor.layers.attention.chunked_local_attention import (
            create_chunked_local_attention_backend,
        )

        if spec.chunk_size % fields["block_size"]:
            raise CheckSkipped("vllm: its chunks are whole pages", SkipKind.LAYER)
        chunked = create_chunked_local_attention_backend(backend, spec.chunk_size)
        return theirs.ChunkedLocalAttentionSpec(**fields, attention_chunk_size=spec.chunk_size), chunked
    if spec.is_encoder:
        return theirs.EncoderOnlyAttentionSpec(**fields), backend
    if spec.attn_type is AttentionType.ENCODER_DECODER:
        return theirs.CrossAttentionSpec(**fields), backend
    if spec.is_windowed:
        return theirs.SlidingWindowSpec(**fields, sliding_window=spec.window[0] + 1), backend
    return theirs.FullAttentionSpec(**fields), backend


def _scales(call: Call) -> dict[str, Any]:
    """The attributes of vLLM's layer that have its scales."""
    given = {"k": call.tensors.k_scale, "v": call.tensors.v_scale}
    scales = {name: host_scale(each, call.spec) for name, each in given.items()} | {"q": 1.0, "prob": 1.0}
    device = call.query.device
    # The float of a layer whose heads have scales of their own is the largest of them.
    found: dict[str, Any] = {
        f"_{name}_scale_float": max(each) if isinstance(each, tuple) else each
        for name, each in scales.items()
    }
    return found | {f"_{name}_scale": torch.tensor(each, device=device) for name, each in scales.items()}


def _step(call: Call) -> Any:
    """The step as vLLM's model runner describes it."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    spec, common = call.spec, call.common
    host = common.seq_lens.cpu()
    ranges = None
    if spec.mm_prefix and common.mm_prefix_spans_cpu is not None:
        rows = call.by_request(common.mm_prefix_spans_cpu)
        found = [sorted({(a, b - 1) for a, b in own.tolist() if b > a}) for own in rows]
        ranges = {request: own for request, own in enumerate(found) if own}
    return CommonAttentionMetadata(
        query_start_loc=common.query_start_loc,
        query_start_loc_cpu=common.query_start_loc_cpu,
        seq_lens=common.seq_lens,
        num_reqs=common.num_reqs,
        num_actual_tokens=common.num_actual_tokens,
        max_query_len=common.max_query_len,
        max_seq_len=common.max_seq_len,
        block_table_tensor=common.block_table_tensor,
        slot_mapping=common.slot_mapping,
        causal=spec.causal_in(common.causal) and spec.attn_type is AttentionType.DECODER,
        seq_lens_cpu_upper_bound=host,
        **({} if ranges is None else {"mm_req_doc_ranges": ranges}),
    )


ENGINE = Engine("vllm", _refusals, _asked, _attend, orders=True)
