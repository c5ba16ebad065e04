"""SGLang: its layer, its pools of tokens and its batches, as its model runner gives them to an attention backend."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch

from attnplug.core.spec import AttentionType, LayerSpec
from attnplug.engines.engine import Call, Engine
from attnplug.testing.conformance.check import CheckSkipped, SkipKind

_INVARIANT = ("batch", "rows")
_STORED = ("fp8", "fp8_e4m3", "fp8_e5m2")


def _refusals(spec: LayerSpec) -> Iterator[str]:
    kind = spec.attn_type
    flags = {
        "latent attention": spec.mla is not None,
        "states": spec.state is not None,
        "ALiBi slopes": spec.has_alibi,
        "selections of keys": spec.sparse is not None,
        "log-sum-exp": spec.needs_lse,
        "scales for each head": spec.head_scales,
        "multimodal spans": spec.mm_prefix,
        "values of another size than keys": spec.head_size_v != spec.head_size,
        "decoders that are not causal": kind is AttentionType.DECODER and not spec.causal,
        "decoders without pages": kind is AttentionType.DECODER and spec.direct_kv,
        "encoders of another kind than encoder_only": kind is AttentionType.ENCODER,
        "cross attention outside of pages of one token": kind is AttentionType.ENCODER_DECODER,
    }
    yield from (f"its layers have no {name}" for name, is_asked in flags.items() if is_asked)
    if spec.invariance and spec.invariance != _INVARIANT:
        yield f"its deterministic mode asks for {'+'.join(_INVARIANT)}"
    if spec.kv_cache_dtype not in ("auto", *_STORED):
        yield "its pools have other types"
    if spec.is_windowed and not spec.causal and spec.window[0] != spec.window[1]:
        yield "its encoders have windows as wide on both sides"


class MHATokenToKVPool:
    """A pool of one layer with the interface of SGLang's of that name, which a client reads."""

    is_quantized_kv_cache = post_capture_active = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, layout: str, dtype: torch.dtype) -> None:
        """`keys` and `values` are `[N, block_size, Hkv, D]`, and are copied."""
        self.kv_cache_layout, self.page_size, self.dtype = layout, keys.shape[1], dtype
        both = torch.stack((keys, values))
        both = both.transpose(2, 3).contiguous() if layout == "hnd" else both.flatten(1, 2)
        self._pair = both

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, `[slots, Hkv, D]`, or in the order HND `[N, Hkv, block_size, D]`."""
        return self._pair[0], self._pair[1]

    def copy_to(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the pool's bytes back."""
        for stored, pages in zip(self._pair, (keys, values), strict=True):
            own = stored.transpose(1, 2) if stored.ndim == 4 else stored.view(pages.shape)
            pages.view(torch.uint8).copy_(own.contiguous().view(torch.uint8))


def _attend(call: Call) -> None:
    from attnplug.integrations.sglang.backend import Backend

    spec, common, tokens = call.spec, call.common, call.common.num_actual_tokens
    new, lengths = call.new_lens(), common.seq_lens.tolist()
    if any(count > length for count, length in zip(new, lengths, strict=True)):
        raise CheckSkipped("sglang: its requests have no new tokens before their first", SkipKind.LAYER)
    if not tokens:
        return
    pages = call.pages() if call.kv_cache is not None else None
    pool = _pool(call, pages)
    layer = _layer(call)
    table, slots = _slots(call, pool.page_size)
    model = torch.nn.Module()
    model.layer = layer
    runner = types.SimpleNamespace(
        device=str(call.query.device),
        dtype=getattr(torch, spec.dtype),
        page_size=pool.page_size,
        token_to_kv_pool=pool,
        req_to_token_pool=types.SimpleNamespace(req_to_token=table),
        model=model,
        model_config=types.SimpleNamespace(is_encoder_decoder=False),
        server_args=types.SimpleNamespace(
            speculative_num_draft_tokens=None, enable_deterministic_inference=bool(spec.invariance)
        ),
        use_mla_backend=False,
        attention_chunk_size=spec.chunk_size,
        kv_index_translator=None,
    )
    backend = Backend(runner)
    batch = _batch(call, new, lengths, slots)
    backend.init_forward_metadata(batch)
    rows = (each.contiguous() for each in (call.query, call.key, call.value))
    query, key, value = rows
    output = backend.forward_extend(query.flatten(1), key, value, layer, batch, sinks=call.tensors.sinks)
    call.output[:tokens] = output[:tokens].view(tokens, spec.num_heads, spec.head_size_v)
    if pages is not None:
        pool.copy_to(*pages)


def _pool(call: Call, pages: tuple[torch.Tensor, torch.Tensor] | None) -> MHATokenToKVPool:
    """The call's cache as a pool; a layer whose keys come with the call has one of a page that it does not read."""
    if pages is None:
        empty = call.key.new_zeros(1, 1, call.spec.num_kv_heads, call.spec.head_size)
        return MHATokenToKVPool(empty, empty, "nhd", empty.dtype)
    layouts = call.backend.for_layer(call.spec).supported_kv_cache_layouts()
    layout = "nhd" if "NHD" in layouts else "hnd"
    stored = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    return MHATokenToKVPool(*pages, layout, stored.get(call.spec.kv_cache_dtype, pages[0].dtype))


def _layer(call: Call) -> Any:
    """A RadixAttention with the layer's values; its constructor would read the arguments of a server."""
    from sglang.srt.layers.radix_attention import RadixAttention

    spec, tensors = call.spec, call.tensors
    layer: Any = RadixAttention.__new__(RadixAttention)
    torch.nn.Module.__init__(layer)
    vars(layer).update(
        tp_q_head_num=spec.num_heads,
        tp_k_head_num=spec.num_kv_heads,
        tp_v_head_num=spec.num_kv_heads,
        head_dim=spec.head_size,
        qk_head_dim=spec.head_size,
        v_head_dim=spec.head_size_v,
        scaling=spec.scale,
        layer_id=0,
        logit_cap=spec.logits_soft_cap or 0.0,
        logit_capping_method="tanh",
        sliding_window_size=spec.window[0],
        is_cross_attention=False,
        use_irope=spec.chunk_size is not None,
        attn_type=str(spec.attn_type),
        pos_encoding_mode="NONE",
        xai_temperature_len=-1,
        k_scale=None,
        v_scale=None,
        k_scale_float=float(tensors.k_scale),
        v_scale_float=float(tensors.v_scale),
    )
    return layer


def _slots(call: Call, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The slot of each token of each request, int32 `[R, tokens]`, and those of the new tokens."""
    common = call.common
    places = torch.arange(max(common.max_seq_len, 1), device=call.query.device)
    if call.kv_cache is None:
        return places.int().expand(common.num_reqs, -1).contiguous(), places[:0].new_zeros(
            common.num_actual_tokens
        )
    blocks = common.block_table_tensor.long()
    # Entries past a request's pages are leftovers, which no one may follow.
    columns = (places // page_size).clamp(max=blocks.shape[1] - 1)
    table = blocks[:, columns] * page_size + places % page_size
    return table.int(), common.slot_mapping[: common.num_actual_tokens]


def _batch(call: Call, new: list[int], lengths: list[int], slots: torch.Tensor) -> Any:
    """The batch as SGLang describes it: one new token for each request is a decode, unless an encoder computes it."""
    is_decode = {*new} == {1} and not call.spec.is_encoder
    mode = types.SimpleNamespace(
        name="DECODE" if is_decode else "EXTEND",
        is_decode=lambda: is_decode,
        is_idle=lambda: False,
        is_target_verify=lambda: False,
        is_draft_extend_v2=lambda: False,
    )
    batch = types.SimpleNamespace(
        forward_mode=mode,
        batch_size=len(new),
        req_pool_indices=torch.arange(len(new), device=call.query.device),
        seq_lens=call.common.seq_lens.long(),
        seq_lens_cpu=call.common.seq_lens.cpu().long(),
        out_cache_loc=slots.long(),
        encoder_lens=None,
        encoder_out_cache_loc=None,
        spec_info=None,
        mm_inputs=None,
    )
    if not is_decode:
        batch.extend_seq_lens_cpu = new
        batch.extend_prefix_lens_cpu = [length - count for length, count in zip(lengths, new, strict=True)]
    return batch


ENGINE = Engine("sglang", _refusals, lambda spec: iter(()), _attend)
