"""SGLang's ForwardBatch: the lengths of its requests, and a reason for each field that no backend would see."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.errors import BatchError
from attnplug.integrations.sglang.caches import OTHER

READ = frozenset(
    (
        *(
            "forward_mode",
            "batch_size",
            "req_pool_indices",
            "seq_lens",
            "seq_lens_cpu",
            "out_cache_loc",
            "spec_info",
        ),
        *("extend_seq_lens", "extend_seq_lens_cpu", "extend_prefix_lens", "extend_prefix_lens_cpu"),
        *("encoder_lens", "encoder_lens_cpu", "encoder_out_cache_loc", "mm_inputs"),
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
    [
        "input_ids",
        "seq_lens_sum",
        "origin_out_cache_loc",
        "orig_seq_lens",
        "kv_loc_plan",
        "kv_loc_cols",
        "out_cache_loc_virtual",
        "out_cache_loc_dsv4",
        "out_cache_loc_is_physical",
        "input_embeds",
        "replace_embeds",
        "replace_positions",
        "token_type_ids",
        "positions",
        "return_logprob",
        "is_prefill_only",
        "spec_algorithm",
        "dimensions",
        "return_pooled_hidden_states",
        "is_extend_in_batch",
        "dp_spec_prefill_coordination_applied",
        "can_run_decode_cuda_graph",
        "can_run_dp_draft_cuda_graph",
        "can_run_dp_prefill_cuda_graph",
        "dp_prefill_cuda_graph_max_prefix_len",
        "global_forward_mode",
        "residual_stream",
        "tbo_split_seq_index",
        "req_pool_indices_cpu",
        "top_logprobs_nums",
        "token_ids_logprobs",
        "mm_token_modalities",
        "multi_gate_indices",
        "encoder_cached",
        "token_indices_to_pool",
        "decision_layouts",
        "sampling_info",
        "contains_last_prefill_chunk",
        "lora_ids",
        "rids",
        "watermark_prompt_tail_ids",
        "watermark_context_hash_history",
        "capture_hidden_mode",
        "defer_logits_to_eager",
        "full_prefill_cuda_graph_capture",
        "return_hidden_states_before_norm",
        "reuse_dsa_topk_indices",
        "extend_num_tokens",
        "extend_start_loc",
        "extend_logprob_start_lens_cpu",
        "extend_input_logprob_token_ids_gpu",
        "original_global_num_tokens_cpu",
        "global_num_tokens_cpu",
        "global_num_tokens_gpu",
        "global_num_tokens_for_logprob_cpu",
        "global_num_tokens_for_logprob_gpu",
        "global_num_token_non_padded",
        "global_num_token_non_padded_cpu",
        "num_token_non_padded",
        "attn_tp_sequence_sharded",
        "aux_hidden_states_buffer",
        "max_seq_len_override",
        "max_seq_len_host",
        "next_token_logits_buffer",
        "temperature",
        "top_p",
        "hidden_states",
        "residual",
        "model_specific_states",
        "split_index",
        "mm_input_embeds",
        "dp_padding_mode",
        "dp_local_start_pos",
        "dp_local_num_tokens",
        "global_dp_buffer_len",
        "global_num_tokens_padded_cpu",
        "global_late_layer_num_tokens_cpu",
        "mrope_positions",
        "tbo_parent_token_range",
        "tbo_padded_len",
        "tbo_children",
        "ngram_embedding_info",
        "engram_history",
        "engram_staged_rows",
        "rids_int",
        "bootstrap_room_ids_int",
        "req_all_ids_flat",
        "req_all_ids_lens",
        "forward_metadata_ready",
        "forward_metadata_planned_bs",
        "forward_metadata_planned_num_tokens",
        "forward_metadata_replan_equivalent",
        "mamba_track_indices",
        "mamba_track_mask",
        "mamba_track_seqlens",
        "mamba_prefill_track_mask_cpu",
        "mamba_track_seqlens_cpu",
        "mamba_cow_src_indices",
        "mamba_cow_dst_indices",
        "mamba_clear_indices",
        "num_prefix_chunks",
        "prefix_chunk_idx",
        "prefix_chunk_len",
        "prefix_chunk_starts",
        "prefix_chunk_starts_cpu",
        "prefix_chunk_seq_lens_cpu",
        "prefix_chunk_seq_lens",
        "prefix_chunk_cu_seq_lens",
        "prefix_chunk_max_seq_lens",
        "prefix_chunk_has_zero_kv",
        "prefix_chunk_num_tokens",
        "prefix_chunk_kv_indices",
        "prefix_all_kv_indices",
        "prefix_dense_kv_indices",
        "mha_empty_kv_indptr",
        "mha_one_shot_kv_indices",
        "actual_forward_mode",
        "num_padding",
    ]
)
"""The fields for other parts of SGLang: inputs, sampling, states of other layers, data parallelism and graphs."""
_FREE = READ | HARMLESS
_CHAINS = ("EagleVerifyInput", "FrozenKVMTPVerifyInput", "DFlashVerifyInput")
"""The verifications whose drafts of one branch see each other causally."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lengths:
    """The lengths of a batch's requests.

    Args:
        queries: int32 `[R]` on the host.
        keys: int32 `[R]` on the device.
        keys_host: the same on the host, if SGLang gave it.
    """

    queries: npt.NDArray[np.int32]
    keys: torch.Tensor
    keys_host: npt.NDArray[np.int32] | None

    @property
    def is_uniform(self) -> bool:
        """Whether all requests have as many queries."""
        return bool((self.queries == self.queries[:1]).all())


def check_fields(batch: Any, has_image_masks: bool) -> None:
    """BatchError for a field that no backend would see.

    Args:
        batch: a ForwardBatch, or a view with a part of its fields.
        has_image_masks: whether the model gives its images masks that SGLang passes to its TRITON backend alone.
    """
    for name in vars(batch).keys() - _FREE:
        value = getattr(batch, name)
        if value is not None and value is not False and not name.startswith("_"):
            why = REFUSED.get(name, "is a field that attnplug does not know, and may change the result")
            raise BatchError(name, type(value).__name__, why, OTHER)
    if has_image_masks and any(item is not None for item in getattr(batch, "mm_inputs", None) or ()):
        limit = "has images that see all of themselves, which is not served in SGLang"
        raise BatchError("mm_inputs", "images", limit, "send text, or choose --attention-backend triton")


def lengths_of(batch: Any) -> Lengths:
    """The lengths of a batch that has queries.

    BatchError: a mode that is not served, drafts in a tree, or a batch without lengths on the host.
    """
    mode, reqs = batch.forward_mode, batch.batch_size
    keys, given = batch.seq_lens[:reqs], getattr(batch, "seq_lens_cpu", None)
    host = None if given is None else given[:reqs].numpy().astype(np.int32)
    if mode.is_decode():
        if batch.spec_info is not None:
            limit = "is a draft that decodes, which needs SGLang's backend for drafts"
            raise BatchError("spec_info", type(batch.spec_info).__name__, limit)
        return Lengths(np.ones(reqs, dtype=np.int32), _int32(keys), host)
    if mode.is_target_verify():
        drafts = drafts_of(batch)
        queries = np.full(reqs, drafts, dtype=np.int32)
        return Lengths(queries, _int32(keys) + drafts, None if host is None else host + np.int32(drafts))
    if mode.is_draft_extend_v2():
        check_spec(batch.spec_info)
        return Lengths(_extended(batch, reqs), _int32(keys), host)
    if mode.name not in ("EXTEND", "MIXED", "SPLIT_PREFILL"):
        raise BatchError("forward_mode", mode.name, "is not served in SGLang", OTHER)
    check_spec(batch.spec_info)
    queries = _extended(batch, reqs)
    prefixes = getattr(batch, "extend_prefix_lens_cpu", None)
    if prefixes is not None:
        host = np.asarray(prefixes[:reqs], dtype=np.int32) + queries
    return Lengths(queries, _int32(keys), host)


def drafts_of(batch: Any) -> int:
    """The tokens that a verification has for each request.

    BatchError: drafts with branches, or of unlike numbers.
    """
    info = batch.spec_info
    check_spec(info)
    kind = type(info).__name__
    branches = getattr(info, "topk", None)
    if getattr(info, "custom_mask", None) is not None and (kind not in _CHAINS or branches != 1):
        limit = "has a mask of its own, because its drafts may have branches, which is not served"
        raise BatchError("spec_info", kind, limit, "pass --speculative-eagle-topk 1")
    return int(info.draft_token_num)


def check_spec(info: Any) -> None:
    """BatchError for drafts whose numbers differ between requests."""
    if info is not None and getattr(info, "ragged_verify_layout", None) is not None:
        raise BatchError("ragged_verify_layout", "a layout", "is not served: drafts of unlike numbers", OTHER)


def _extended(batch: Any, reqs: int) -> npt.NDArray[np.int32]:
    given = getattr(batch, "extend_seq_lens_cpu", None)
    if given is None:
        # Views for graphs have no lists: each request has as many tokens.
        each = getattr(batch.spec_info, "num_tokens_per_req", None)
        if each is None or each < 1:
            raise BatchError("extend_seq_lens_cpu", None, "is required: queries are counted on the host")
        return np.full(reqs, each, dtype=np.int32)
    return np.asarray(given[:reqs], dtype=np.int32)


def _int32(lengths: torch.Tensor) -> torch.Tensor:
    return lengths if lengths.dtype == torch.int32 else lengths.int()
