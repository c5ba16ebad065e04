"""What an engine would otherwise write itself: KV caches, batches, and metadata for all layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.core._lazy import lazy_exports

if TYPE_CHECKING:
    from attnplug.runtime.allocation import allocate_kv_cache as allocate_kv_cache
    from attnplug.runtime.allocation import bind_kv_cache as bind_kv_cache
    from attnplug.runtime.allocation import init_kv_cache as init_kv_cache
    from attnplug.runtime.allocation import reshape_kv_cache as reshape_kv_cache
    from attnplug.runtime.allocation import view_kv_cache as view_kv_cache
    from attnplug.runtime.attention_groups import AttentionGroup as AttentionGroup
    from attnplug.runtime.attention_groups import WorkspaceUser as WorkspaceUser
    from attnplug.runtime.attention_groups import build_attn_metadata as build_attn_metadata
    from attnplug.runtime.attention_groups import cross_metadata as cross_metadata
    from attnplug.runtime.attention_groups import init_attn_backend as init_attn_backend
    from attnplug.runtime.attention_runtime import AttentionRuntime as AttentionRuntime
    from attnplug.runtime.block_pool import BlockPool as BlockPool
    from attnplug.runtime.budget import MemoryBudget as MemoryBudget
    from attnplug.runtime.budget import blocks_needed as blocks_needed
    from attnplug.runtime.budget import bytes_per_block as bytes_per_block
    from attnplug.runtime.budget import fit_kv_cache as fit_kv_cache
    from attnplug.runtime.budget import parse_memory as parse_memory
    from attnplug.runtime.buffers import CpuGpuBuffer as CpuGpuBuffer
    from attnplug.runtime.buffers import StagingRing as StagingRing
    from attnplug.runtime.graph_buffers import GraphInputBuffers as GraphInputBuffers
    from attnplug.runtime.graph_state import GraphState as GraphState
    from attnplug.runtime.grouping import get_kv_cache_spec as get_kv_cache_spec
    from attnplug.runtime.grouping import group_kv_caches as group_kv_caches
    from attnplug.runtime.grouping import num_padding_layers as num_padding_layers
    from attnplug.runtime.grouping import unify_page_sizes as unify_page_sizes
    from attnplug.runtime.grouping import with_num_blocks as with_num_blocks
    from attnplug.runtime.layout import KVCacheLayoutType as KVCacheLayoutType
    from attnplug.runtime.layout import get_kv_cache_layout as get_kv_cache_layout
    from attnplug.runtime.layout import is_valid_kv_cache_layout as is_valid_kv_cache_layout
    from attnplug.runtime.layout import set_kv_cache_layout as set_kv_cache_layout
    from attnplug.runtime.model_plan import ModelPlan as ModelPlan
    from attnplug.runtime.placeholders import PlaceholderMap as PlaceholderMap
    from attnplug.runtime.planning import plan as plan
    from attnplug.runtime.step_batch import StepBatch as StepBatch
    from attnplug.runtime.step_batch import StepBatchBuilder as StepBatchBuilder
    from attnplug.runtime.warm_up import WarmUpReport as WarmUpReport
    from attnplug.runtime.warm_up import WarmUpStep as WarmUpStep

__all__ = [
    "AttentionGroup",
    "AttentionRuntime",
    "BlockPool",
    "CpuGpuBuffer",
    "GraphInputBuffers",
    "GraphState",
    "KVCacheLayoutType",
    "MemoryBudget",
    "ModelPlan",
    "PlaceholderMap",
    "StagingRing",
    "StepBatch",
    "StepBatchBuilder",
    "WarmUpReport",
    "WarmUpStep",
    "WorkspaceUser",
    "allocate_kv_cache",
    "bind_kv_cache",
    "blocks_needed",
    "build_attn_metadata",
    "bytes_per_block",
    "cross_metadata",
    "fit_kv_cache",
    "get_kv_cache_layout",
    "get_kv_cache_spec",
    "group_kv_caches",
    "init_attn_backend",
    "init_kv_cache",
    "is_valid_kv_cache_layout",
    "num_padding_layers",
    "parse_memory",
    "plan",
    "reshape_kv_cache",
    "set_kv_cache_layout",
    "unify_page_sizes",
    "view_kv_cache",
    "with_num_blocks",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "plan": "planning",
        "ModelPlan": "model_plan",
        "BlockPool": "block_pool",
        "AttentionRuntime": "attention_runtime",
        "AttentionGroup": "attention_groups",
        "CpuGpuBuffer": "buffers",
        "GraphInputBuffers": "graph_buffers",
        "GraphState": "graph_state",
        "KVCacheLayoutType": "layout",
        "MemoryBudget": "budget",
        "PlaceholderMap": "placeholders",
        "StagingRing": "buffers",
        "StepBatch": "step_batch",
        "StepBatchBuilder": "step_batch",
        "WarmUpReport": "warm_up",
        "WarmUpStep": "warm_up",
        "WorkspaceUser": "attention_groups",
        "allocate_kv_cache": "allocation",
        "bind_kv_cache": "allocation",
        "blocks_needed": "budget",
        "build_attn_metadata": "attention_groups",
        "bytes_per_block": "budget",
        "cross_metadata": "attention_groups",
        "fit_kv_cache": "budget",
        "get_kv_cache_layout": "layout",
        "get_kv_cache_spec": "grouping",
        "group_kv_caches": "grouping",
        "init_attn_backend": "attention_groups",
        "init_kv_cache": "allocation",
        "is_valid_kv_cache_layout": "layout",
        "num_padding_layers": "grouping",
        "parse_memory": "budget",
        "reshape_kv_cache": "allocation",
        "set_kv_cache_layout": "layout",
        "unify_page_sizes": "grouping",
        "view_kv_cache": "allocation",
        "with_num_blocks": "grouping",
    },
)
