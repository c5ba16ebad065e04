"""Each field of SGLang's ForwardBatch in 0.5.23: read, refused if it has a value, or for other parts of SGLang."""

from __future__ import annotations

READ = frozenset(
    (
        *("forward_mode", "batch_size", "req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc"),
        *("spec_info", "mm_inputs"),
        *("extend_seq_lens", "extend_seq_lens_cpu", "extend_prefix_lens", "extend_prefix_lens_cpu"),
        *("encoder_lens", "encoder_lens_cpu", "encoder_out_cache_loc"),
    )
)
"""The fields that are read."""
REFUSED = {
    "cross_attention_custom_mask": "masks of cross attention are not served",
    "multi_item_delimiter_indices": "several items in one prompt need a mask that is not served",
    "attn_cp_metadata": "context parallelism is not served in SGLang",
    "attn_dcp_metadata": "decode context parallelism is not served in SGLang",
    "dcp_kv_mask": "decode context parallelism is not served in SGLang",
    "encoder_swa_replay": "replays of an encoder's window are not served",
    "encoder_swa_row_floor": "replays of an encoder's window are not served",
    "encoder_swa_compress_rows": "replays of an encoder's window are not served",
    "mha_return_lse": "the log-sum-exp of outputs is not returned in SGLang",
    "attn_attend_prefix_cache": "prefixes of latent attention are not served in SGLang",
    "mha_one_shot": "latent attention is not served in SGLang",
    "fused_prefix_k": "latent attention is not served in SGLang",
    "fused_prefix_v": "latent attention is not served in SGLang",
    "dllm_prompt_mask": "diffusion models are not served in SGLang",
    "dllm_input_preparation_state": "diffusion models are not served in SGLang",
    "llada_image_conditioning_text_lens_cpu": "diffusion models are not served in SGLang",
    "minimax_m3_precached_sparse_layers": "sparse attention is not served in SGLang",
    "hisparse_coordinator": "sparse attention is not served in SGLang",
}
"""The fields that change which keys a query sees, or what a layer returns."""
HARMLESS = frozenset(
    (
        # Slots in other spaces, and lengths by other counts.
        *("actual_forward_mode", "extend_num_tokens", "extend_start_loc", "kv_loc_cols", "kv_loc_plan"),
        *("max_seq_len_host", "max_seq_len_override", "num_padding", "orig_seq_lens"),
        *("origin_out_cache_loc", "out_cache_loc_dsv4", "out_cache_loc_is_physical"),
        *("out_cache_loc_virtual", "positions", "req_pool_indices_cpu", "seq_lens_sum", "spec_algorithm"),
        # Chunks of a prefix of latent attention.
        *("mha_empty_kv_indptr", "mha_one_shot_kv_indices", "num_prefix_chunks", "prefix_all_kv_indices"),
        *("prefix_chunk_cu_seq_lens", "prefix_chunk_has_zero_kv", "prefix_chunk_idx"),
        *("prefix_chunk_kv_indices", "prefix_chunk_len", "prefix_chunk_max_seq_lens"),
        *("prefix_chunk_num_tokens", "prefix_chunk_seq_lens", "prefix_chunk_seq_lens_cpu"),
        *("prefix_chunk_starts", "prefix_chunk_starts_cpu", "prefix_dense_kv_indices"),
        # States of other layers.
        *("engram_history", "engram_staged_rows", "mamba_clear_indices", "mamba_cow_dst_indices"),
        *("mamba_cow_src_indices", "mamba_prefill_track_mask_cpu", "mamba_track_indices"),
        *("mamba_track_mask", "mamba_track_seqlens", "mamba_track_seqlens_cpu", "ngram_embedding_info"),
        *("reuse_dsa_topk_indices",),
        # Data parallelism, two batches at once, and graphs.
        *("attn_tp_sequence_sharded", "can_run_decode_cuda_graph", "can_run_dp_draft_cuda_graph"),
        *("can_run_dp_prefill_cuda_graph", "contains_last_prefill_chunk", "dp_local_num_tokens"),
        *("dp_local_start_pos", "dp_padding_mode", "dp_prefill_cuda_graph_max_prefix_len"),
        *("dp_spec_prefill_coordination_applied", "forward_metadata_planned_bs"),
        *("forward_metadata_planned_num_tokens", "forward_metadata_ready"),
        *("forward_metadata_replan_equivalent", "full_prefill_cuda_graph_capture", "global_dp_buffer_len"),
        *("global_forward_mode", "global_late_layer_num_tokens_cpu", "global_num_token_non_padded"),
        *("global_num_token_non_padded_cpu", "global_num_tokens_cpu", "global_num_tokens_for_logprob_cpu"),
        *("global_num_tokens_for_logprob_gpu", "global_num_tokens_gpu", "global_num_tokens_padded_cpu"),
        *("is_extend_in_batch", "num_token_non_padded", "num_token_non_padded_cpu"),
        *("original_global_num_tokens_cpu", "split_index", "tbo_children", "tbo_padded_len"),
        *("tbo_parent_token_range", "tbo_split_seq_index"),
        # Inputs, outputs, sampling and bookkeeping.
        *("aux_hidden_states_buffer", "bootstrap_room_ids_int", "capture_hidden_mode", "decision_layouts"),
        *("defer_logits_to_eager", "dimensions", "encoder_cached", "extend_input_logprob_token_ids_gpu"),
        *("extend_logprob_start_lens_cpu", "hidden_states", "input_embeds", "input_ids", "is_prefill_only"),
        *("lora_ids", "mm_input_embeds", "mm_token_modalities", "model_specific_states", "mrope_positions"),
        *("multi_gate_indices", "next_token_logits_buffer", "replace_embeds", "replace_positions"),
        *("req_all_ids_flat", "req_all_ids_lens", "residual", "residual_stream"),
        *("return_hidden_states_before_norm", "return_logprob", "return_pooled_hidden_states", "rids"),
        *("rids_int", "sampling_info", "temperature", "token_ids_logprobs", "token_indices_to_pool"),
        *("token_type_ids", "top_logprobs_nums", "top_p", "watermark_context_hash_history"),
        *("watermark_prompt_tail_ids",),
    )
)
"""The fields for other parts of SGLang."""
