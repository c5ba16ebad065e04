"""The entry points of FlashAttention as recorded from its releases, to bind our calls to."""

from __future__ import annotations

RECORDED = {
    "flash_attn 2.8.3 flash_attn_varlen_func": (
        "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, "
        "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
        "deterministic=False, return_attn_probs=False, block_table=None"
    ),
    "flash_attn 2.8.3 _flash_attn_varlen_forward": (
        "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, "
        "window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, "
        "block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False"
    ),
    "flash_attn 2.8.3 flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
        "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
        "return_softmax_lse=False"
    ),
    "flash_attn_3 3.0.0b1 flash_attn_varlen_func": (
        "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, "
        "softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, "
        "window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, "
        "deterministic=False, sm_margin=0, return_attn_probs=False"
    ),
    "flash_attn_3 3.0.0b1 flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, "
        "cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, "
        "v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, "
        "softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, "
        "sm_margin=0, return_softmax_lse=False"
    ),
    "flash_attn_4 4.0.0b26 _flash_attn_fwd": (
        "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, "
        "max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, "
        "causal=False, softcap=None, window_size_left=None, window_size_right=None, learnable_sink=None, "
        "tile_mn=None, mma_pv_is_rs=None, intra_wg_overlap=None, num_threads=384, num_splits=1, "
        "pack_gqa=None, _arch=None, score_mod=None, mask_mod=None, block_sparse_tensors=None, "
        "return_lse=False, out=None, lse=None, aux_tensors=None, aux_scalars=None, q_descale=None, "
        "k_descale=None, v_descale=None, gather_kv_indices=None, scheduler_metadata=None, "
        "seqlen_k_per_split=None, disable_scheduler_metadata=False"
    ),
    "flash_attn_4 4.0.0b36 _flash_attn_fwd": (
        "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, "
        "max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, "
        "causal=False, softcap=None, window_size_left=None, window_size_right=None, learnable_sink=None, "
        "tile_mn=None, mma_pv_is_rs=None, intra_wg_overlap=None, num_threads=384, num_splits=1, "
        "pack_gqa=None, _arch=None, score_mod=None, mask_mod=None, block_sparse_tensors=None, "
        "return_lse=False, out=None, lse=None, aux_tensors=None, aux_scalars=None, q_descale=None, "
        "k_descale=None, v_descale=None, gather_kv_indices=None, scheduler_metadata=None, "
        "seqlen_k_per_split=None, disable_scheduler_metadata=False, gather_bwd_recompute_p=False"
    ),
}
"""Names and defaults, without annotations."""
