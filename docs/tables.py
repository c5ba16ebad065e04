"""Writes the tables of the reference from the docstrings: `python docs/tables.py`."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

PAGE = Path(__file__).parent / "reference" / "batch-and-kv-cache.md"

SECTIONS = {
    "A step's batch and its metadata": {
        "attnplug.core": [
            "CommonAttentionMetadata",
            "AttentionMetadata",
            "AttentionMetadataBuilder",
            "AttentionCGSupport",
            "BuilderConfig",
        ],
    },
    "Splitting and ordering": {
        "attnplug.core.batch": [
            "split_decodes_and_prefills",
            "split_decodes_prefills_and_extends",
            "reorder_batch_to_split_decodes_and_prefills",
            "split_prefill_chunks",
            "split_attn_metadata",
            "UBatchSlice",
            "slice_query_start_locs",
        ],
    },
    "Local attention, sharing, speculative decoding": {
        "attnplug.core.batch": [
            "make_local_attention_virtual_batches",
            "make_kv_sharing_fast_prefill_common_attn_metadata",
            "create_fast_prefill_custom_backend",
            "KVSharingFastPrefillMetadata",
            "subclass_attention_metadata",
            "reshape_query_for_spec_decode",
            "reshape_attn_output_for_spec_decode",
        ],
        "attnplug.core": ["subclass_attention_backend", "subclass_attention_backend_with_overrides"],
    },
    "Context parallelism, convolution, slots": {
        "attnplug.core.batch": [
            "get_dcp_local_seq_lens",
            "compute_causal_conv1d_metadata",
            "compute_slot_mapping",
            "compute_slot_mapping_start_idx",
            "is_block_tables_empty",
            "get_num_prefill_decode_query_kv_tokens",
            "get_seq_len_block_table_args",
            "is_all_encoder_attn_metadata_set",
            "is_all_cross_attn_metadata_set",
        ],
        "attnplug.core": ["ContextParallel", "MLADims", "get_mla_dims", "Selection"],
        "attnplug.ops": ["write_kv_cache", "merge_attn_states", "merge", "chosen_keys", "slots_of_keys"],
    },
    "Hyperparameters that a plan fixes": {
        "attnplug.core.hyperparameters": [
            "PerLayerParameters",
            "get_per_layer_parameters",
            "infer_global_hyperparameters",
            "group_by_hyperparameters",
        ],
    },
    "KV cache": {
        "attnplug.core": [
            "KVCacheSpec",
            "FullAttentionSpec",
            "SlidingWindowSpec",
            "ChunkedLocalAttentionSpec",
            "MLAAttentionSpec",
            "CrossAttentionSpec",
            "KVCacheTensor",
            "KVCacheGroupSpec",
            "KVCacheConfig",
        ],
        "attnplug.runtime": [
            "get_kv_cache_spec",
            "group_kv_caches",
            "unify_page_sizes",
            "allocate_kv_cache",
            "reshape_kv_cache",
            "bind_kv_cache",
            "init_kv_cache",
            "fit_kv_cache",
            "is_valid_kv_cache_layout",
            "set_kv_cache_layout",
            "get_kv_cache_layout",
        ],
    },
    "Steps": {
        "attnplug.runtime": [
            "StepBatchBuilder",
            "StepBatch",
            "CpuGpuBuffer",
            "StagingRing",
            "init_attn_backend",
            "build_attn_metadata",
            "AttentionGroup",
            "WorkspaceUser",
        ],
    },
    "Whole models": {
        "attnplug": ["plan"],
        "attnplug.runtime": ["ModelPlan", "AttentionRuntime", "BlockPool", "GraphState", "GraphInputBuffers"],
    },
}
"""The content of the page: heading, public module, names in reading order."""

INTRODUCTION = """# Batches, metadata and KV caches

This page lists functions and classes by the names that authors of attention backends know. You can use each function
without the others. The classes differ in a few
signatures; see [Port a backend from vLLM](../guides/port-from-vllm.md). Counts are Python ints; bad input raises a `ValueError` subclass that names the argument, the
value and the limit; inputs are never modified. This page is written by `docs/tables.py` from the docstrings.
"""


def rows() -> list[tuple[str, str, str, str]]:
    """Heading, name, module and first sentence of the docstring, for every name."""
    found = []
    for heading, modules in SECTIONS.items():
        for module, names in modules.items():
            for name in names:
                value = getattr(importlib.import_module(module), name)
                line = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
                found.append((heading, name, module, line))
    return found


def page() -> str:
    """The whole page as Markdown."""
    parts = [INTRODUCTION]
    heading = ""
    for section, name, module, line in rows():
        if section != heading:
            heading = section
            parts.append(f"\n## {heading}\n\n| name | module | |\n|---|---|---|\n")
        parts.append(f"| `{name}` | `{module}` | {line.replace('|', chr(92) + '|')} |\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
