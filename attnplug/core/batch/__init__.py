"""Parts of a batch: splits, orders, virtual requests, shares and slots; imported when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.core._lazy import lazy_exports

if TYPE_CHECKING:
    from attnplug.core.batch.context_parallel import get_dcp_local_seq_lens as get_dcp_local_seq_lens
    from attnplug.core.batch.conv1d import compute_causal_conv1d_metadata as compute_causal_conv1d_metadata
    from attnplug.core.batch.kv_sharing import KVSharingFastPrefillMetadata as KVSharingFastPrefillMetadata
    from attnplug.core.batch.kv_sharing import (
        create_fast_prefill_custom_backend as create_fast_prefill_custom_backend,
    )
    from attnplug.core.batch.kv_sharing import (
        make_kv_sharing_fast_prefill_common_attn_metadata as make_kv_sharing_fast_prefill_common_attn_metadata,
    )
    from attnplug.core.batch.kv_sharing import subclass_attention_metadata as subclass_attention_metadata
    from attnplug.core.batch.local_attention import (
        make_local_attention_virtual_batches as make_local_attention_virtual_batches,
    )
    from attnplug.core.batch.prefill_decode import PrefillDecodeMetadata as PrefillDecodeMetadata
    from attnplug.core.batch.prefill_decode import (
        get_num_prefill_decode_query_kv_tokens as get_num_prefill_decode_query_kv_tokens,
    )
    from attnplug.core.batch.prefill_decode import (
        get_seq_len_block_table_args as get_seq_len_block_table_args,
    )
    from attnplug.core.batch.prefill_decode import (
        is_all_cross_attn_metadata_set as is_all_cross_attn_metadata_set,
    )
    from attnplug.core.batch.prefill_decode import (
        is_all_encoder_attn_metadata_set as is_all_encoder_attn_metadata_set,
    )
    from attnplug.core.batch.reorder import InputBatch as InputBatch
    from attnplug.core.batch.reorder import SchedulerOutput as SchedulerOutput
    from attnplug.core.batch.reorder import (
        reorder_batch_to_split_decodes_and_prefills as reorder_batch_to_split_decodes_and_prefills,
    )
    from attnplug.core.batch.slots import compute_slot_mapping as compute_slot_mapping
    from attnplug.core.batch.slots import compute_slot_mapping_start_idx as compute_slot_mapping_start_idx
    from attnplug.core.batch.slots import is_block_tables_empty as is_block_tables_empty
    from attnplug.core.batch.splitting import (
        reshape_attn_output_for_spec_decode as reshape_attn_output_for_spec_decode,
    )
    from attnplug.core.batch.splitting import reshape_query_for_spec_decode as reshape_query_for_spec_decode
    from attnplug.core.batch.splitting import split_decodes_and_prefills as split_decodes_and_prefills
    from attnplug.core.batch.splitting import (
        split_decodes_prefills_and_extends as split_decodes_prefills_and_extends,
    )
    from attnplug.core.batch.splitting import split_prefill_chunks as split_prefill_chunks
    from attnplug.core.batch.ubatch import UBatchSlice as UBatchSlice
    from attnplug.core.batch.ubatch import slice_query_start_locs as slice_query_start_locs
    from attnplug.core.batch.ubatch import split_attn_metadata as split_attn_metadata

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "context_parallel": "get_dcp_local_seq_lens",
        "conv1d": "compute_causal_conv1d_metadata",
        "kv_sharing": (
            "KVSharingFastPrefillMetadata create_fast_prefill_custom_backend "
            "make_kv_sharing_fast_prefill_common_attn_metadata subclass_attention_metadata"
        ),
        "local_attention": "make_local_attention_virtual_batches",
        "prefill_decode": (
            "PrefillDecodeMetadata get_num_prefill_decode_query_kv_tokens "
            "get_seq_len_block_table_args is_all_cross_attn_metadata_set "
            "is_all_encoder_attn_metadata_set"
        ),
        "reorder": "InputBatch SchedulerOutput reorder_batch_to_split_decodes_and_prefills",
        "slots": "compute_slot_mapping compute_slot_mapping_start_idx is_block_tables_empty",
        "splitting": (
            "reshape_attn_output_for_spec_decode reshape_query_for_spec_decode split_decodes_and_prefills "
            "split_decodes_prefills_and_extends split_prefill_chunks"
        ),
        "ubatch": "UBatchSlice slice_query_start_locs split_attn_metadata",
    },
)
