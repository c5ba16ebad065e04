"""The kernel libraries called directly, as well as they can be called, on the layers of paged_layers.py."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from paged_layers import PagedLayer

__all__ = ["PEERS"]

Call = Callable[[int], torch.Tensor]


def flash_attention_4(layer: PagedLayer) -> Call | None:
    spec = layer.spec
    if spec.has_quantized_kv_cache:
        return None
    from flash_attn.cute.interface import flash_attn_varlen_func

    common = layer.common
    left = spec.window[0]

    def call(index: int) -> torch.Tensor:
        cache = layer.cache(index)
        found = flash_attn_varlen_func(
            layer.query,
            cache[:, 0],
            cache[:, 1],
            cu_seqlens_q=common.query_start_loc,
            max_seqlen_q=common.max_query_len,
            max_seqlen_k=common.max_seq_len,
            seqused_k=common.seq_lens,
            page_table=common.block_table_tensor,
            softmax_scale=spec.scale,
            causal=True,
            window_size=(None if left < 0 else left, None if left < 0 else 0),
            softcap=spec.logits_soft_cap or 0.0,
            learnable_sink=None if layer.tensors.sinks is None else layer.tensors.sinks.bfloat16(),
        )
        return found[0] if isinstance(found, tuple) else found

    return call


def flash_attention_2(layer: PagedLayer) -> Call | None:
    spec = layer.spec
    if spec.has_quantized_kv_cache or spec.has_sinks or layer.cell.page % 256:
        return None
    from flash_attn import flash_attn_varlen_func

    common, left = layer.common, spec.window[0]
    ends = torch.tensor([0, *layer.cell.seq_lens], device=layer.device).cumsum(0).int()

    def call(index: int) -> torch.Tensor:
        cache = layer.cache(index)
        return flash_attn_varlen_func(
            layer.query,
            cache[:, 0],
            cache[:, 1],
            cu_seqlens_q=common.query_start_loc,
            cu_seqlens_k=ends,
            max_seqlen_q=common.max_query_len,
            max_seqlen_k=common.max_seq_len,
            softmax_scale=spec.scale,
            causal=True,
            window_size=(left, 0 if left >= 0 else -1),
            softcap=spec.logits_soft_cap or 0.0,
            block_table=common.block_table_tensor,
        )

    return call


def flashinfer(layer: PagedLayer) -> Call | None:
    spec, cell = layer.spec, layer.cell
    heads, kv_heads, size = cell.heads
    # With other sizes its kernels end with an illegal instruction, which stops the whole run.
    if spec.has_sinks or cell.kind == "mixed" or size not in (64, 128, 256):
        return None
    import flashinfer as library

    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=layer.device)
    indptr = torch.tensor([0, *layer.counts]).cumsum(0).int()
    last = torch.tensor([(n - 1) % cell.page + 1 for n in cell.seq_lens], dtype=torch.int32)
    common = {
        "window_left": spec.window[0],
        "logits_soft_cap": spec.logits_soft_cap,
        "sm_scale": spec.scale,
        "q_data_type": torch.bfloat16,
        "kv_data_type": layer.caches[0].dtype,
    }
    if max(cell.query_lens) > 1:
        template = os.environ.get("FLASHINFER_PREFILL", "fa2")  # fa3 compiles for minutes
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=template)
        wrapper.plan(
            layer.common.query_start_loc_cpu, indptr, layer.pages, last, heads, kv_heads, size, cell.page,
            causal=True, **common,
        )  # fmt: skip
    else:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(indptr, layer.pages.to(layer.device), last, heads, kv_heads, size, cell.page, **common)
    return lambda index: wrapper.run(layer.query, layer.cache(index), out=layer.output)


def cudnn_sdpa(layer: PagedLayer) -> Call | None:
    cell = layer.cell
    lens = set(cell.query_lens)
    plain = layer.given[0] is not None and not cell.fields and len(lens) == 1
    if not plain or cell.heads[2] > 128:
        return None
    from torch.nn.attention import SDPBackend, sdpa_kernel

    batch = len(cell.query_lens)
    q, k, v = (each.view(batch, -1, *each.shape[1:]).transpose(1, 2) for each in (layer.query, *layer.given))

    def call(index: int) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            found = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=layer.spec.scale, enable_gqa=True
            )
        return found.transpose(1, 2).flatten(0, 1)

    return call


PEERS: dict[str, Callable[[PagedLayer], Call | None]] = {
    "FlashInfer": flashinfer,
    "FlashAttention 4": flash_attention_4,
    "FlashAttention 2": flash_attention_2,
    "cuDNN SDPA": cudnn_sdpa,
}
