"""The names of vLLM's base classes, with the first and the last release that has each.

Made by `python ci/vllm_names.py`, which reads the class bodies in vLLM's source; do not edit it by hand.
"""

from __future__ import annotations

from collections.abc import Mapping


def _releases(text: str) -> dict[str, tuple[str, str]]:
    rows = (row.split() for row in text.split(","))
    return {name: (first, last) for name, first, last in rows}


VLLM_VERSIONS = "0.8.0", "0.33.0"
"""The first and the last of the 50 releases that were read."""

VLLM_BACKEND_NAMES: Mapping[str, tuple[str, str]] = _releases("""
accept_output_buffer 0.8.0 0.19.1, advance_step 0.8.0 0.10.0, copy_blocks 0.8.0 0.10.2, customize_spec 0.28.0
0.33.0, forward_includes_kv_cache_update 0.15.0 0.33.0, full_cls_name 0.10.1 0.33.0, get_builder_cls 0.8.0
0.33.0, get_impl_cls 0.8.0 0.33.0, get_kv_cache_block_dim 0.17.1 0.28.0, get_kv_cache_shape 0.8.0 0.28.0,
get_kv_cache_stride_order 0.8.5 0.28.0, get_metadata_cls 0.8.0 0.11.0, get_name 0.8.0 0.33.0,
get_preferred_block_size 0.18.0 0.33.0, get_required_kv_cache_layout 0.11.1 0.28.0, get_state_cls 0.8.0
0.10.2, get_supported_head_sizes 0.11.1 0.33.0, get_supported_kernel_block_sizes 0.12.0 0.33.0,
indexes_kv_by_block_stride 0.24.0 0.28.0, is_mla 0.11.1 0.33.0, is_sparse 0.11.1 0.33.0, is_ssm 0.20.0 0.33.0,
make_metadata 0.8.0 0.11.0, supported_dtypes 0.11.1 0.33.0, supported_kernel_block_sizes 0.11.1 0.11.2,
supported_kv_cache_dtypes 0.11.1 0.33.0, supported_kv_cache_layouts 0.29.0 0.33.0, supports_alibi_sqrt 0.15.0
0.33.0, supports_attn_type 0.11.1 0.33.0, supports_batch_invariance 0.20.0 0.33.0, supports_block_size 0.11.1
0.33.0, supports_combination 0.11.1 0.33.0, supports_compute_capability 0.11.1 0.33.0, supports_dcp 0.30.0
0.33.0, supports_device_cpu_query_lens_mismatch 0.28.0 0.33.0, supports_dtype 0.11.1 0.33.0,
supports_head_size 0.11.1 0.33.0, supports_kv_cache_dtype 0.11.1 0.33.0, supports_kv_cache_update_bypass
0.33.0 0.33.0, supports_kv_connector 0.23.0 0.33.0, supports_mm_prefix 0.13.0 0.33.0, supports_non_causal
0.20.0 0.33.0, supports_non_causal_dcp 0.29.0 0.33.0, supports_pcp 0.26.0 0.33.0,
supports_per_head_quant_scales 0.17.0 0.33.0, supports_quant_query_input 0.11.0 0.11.0, supports_rswa 0.30.0
0.33.0, supports_sink 0.11.1 0.33.0, supports_sliding_window 0.26.0 0.33.0, swap_blocks 0.8.0 0.10.2,
validate_configuration 0.11.1 0.33.0
""")
"""Of AttentionBackend."""

VLLM_IMPL_NAMES: Mapping[str, tuple[str, str]] = _releases("""
can_return_lse_for_decode 0.10.2 0.33.0, dcp_rank 0.10.2 0.33.0, dcp_world_size 0.10.2 0.33.0,
do_kv_cache_update 0.17.0 0.33.0, do_qk_norm_mrope_kvcache_update 0.31.0 0.33.0,
do_qk_norm_rope_kvcache_update 0.26.0 0.33.0, do_rope_and_kv_cache_update 0.17.0 0.33.0, forward 0.8.0 0.33.0,
forward_mha 0.16.0 0.33.0, forward_mqa 0.16.0 0.33.0, fused_output_quant_supported 0.9.2 0.33.0,
fused_qk_norm_mrope_kvcache_supported 0.31.0 0.33.0, fused_qk_norm_rope_kvcache_supported 0.26.0 0.33.0,
fused_rope_kvcache_supported 0.17.0 0.33.0, get_impl_variants 0.30.0 0.33.0, head_size 0.14.0 0.33.0,
hisparse_cache 0.30.0 0.33.0, is_sparse 0.26.0 0.33.0, kv_cache_dtype 0.20.0 0.33.0, kv_quant_mode 0.20.0
0.33.0, lse_base_on_e 0.25.0 0.33.0, need_to_return_lse_for_decode 0.10.2 0.33.0, num_heads 0.14.0 0.33.0,
pcp_rank 0.12.0 0.33.0, pcp_world_size 0.12.0 0.33.0, prepare_for_batch 0.30.0 0.33.0,
process_weights_after_loading 0.11.1 0.33.0, reserve_workspace 0.33.0 0.33.0, scale 0.14.0 0.33.0,
set_interleaved_v_cache 0.33.0 0.33.0, supports_dcp 0.26.0 0.33.0, supports_dense_mha_prefill 0.27.0 0.33.0,
supports_mtp_with_cp_non_trivial_interleave_size 0.13.0 0.33.0, supports_pcp 0.13.0 0.33.0,
supports_per_head_quant_scales 0.15.0 0.16.0, supports_quant_query_input 0.11.1 0.33.0, total_cp_rank 0.12.0
0.33.0, total_cp_world_size 0.12.0 0.33.0
""")
"""Of AttentionImpl, AttentionImplBase, MLAAttentionImpl, SparseMLAAttentionImpl."""

VLLM_BUILDER_NAMES: Mapping[str, tuple[str, str]] = _releases("""
_cudagraph_support 0.11.1 0.33.0, _init_reorder_batch_threshold 0.11.0 0.33.0, build 0.8.0 0.33.0,
build_for_cudagraph_capture 0.9.2 0.33.0, build_for_drafting 0.10.1 0.33.0, can_run_in_cudagraph 0.9.2 0.10.0,
cudagraph_support 0.10.1 0.11.0, device 0.10.2 0.33.0, full_cudagraph_supported 0.9.2 0.10.0,
get_cudagraph_support 0.11.1 0.33.0, get_varlen_cudagraph_max_query_len 0.31.0 0.33.0, kernel_block_size
0.30.0 0.31.0, kv_cache_spec 0.10.0 0.33.0, layer_names 0.10.2 0.33.0, prepare 0.8.0 0.10.2, reorder_batch
0.9.2 0.11.0, reorder_batch_threshold 0.10.1 0.33.0, requires_block_table_width 0.27.0 0.33.0,
set_kernel_block_size 0.30.0 0.31.0, supports_draft_decode_metadata_update 0.28.0 0.33.0,
supports_update_block_table 0.14.0 0.33.0, update_block_table 0.14.0 0.33.0, update_draft_decode_metadata
0.28.0 0.33.0, use_cascade_attention 0.9.2 0.31.0, vllm_config 0.10.2 0.33.0
""")
"""Of AttentionMetadataBuilder."""
