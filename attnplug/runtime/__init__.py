"""The engine side of attention: KV caches, batches of steps, and metadata for all layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.core._lazy import lazy_exports

if TYPE_CHECKING:
    from attnplug.runtime.attention_runtime import AttentionRuntime as AttentionRuntime
    from attnplug.runtime.batch.forest_prices import SharingPrices as SharingPrices
    from attnplug.runtime.batch.placeholders import PlaceholderMap as PlaceholderMap
    from attnplug.runtime.batch.staging import CpuGpuBuffer as CpuGpuBuffer
    from attnplug.runtime.batch.staging import StagingRing as StagingRing
    from attnplug.runtime.batch.step_batch import StepBatch as StepBatch
    from attnplug.runtime.batch.step_batch_builder import StepBatchBuilder as StepBatchBuilder
    from attnplug.runtime.caches.allocation import allocate_kv_cache as allocate_kv_cache
    from attnplug.runtime.caches.allocation import bind_kv_cache as bind_kv_cache
    from attnplug.runtime.caches.allocation import init_kv_cache as init_kv_cache
    from attnplug.runtime.caches.allocation import reshape_kv_cache as reshape_kv_cache
    from attnplug.runtime.caches.allocation import view_kv_cache as view_kv_cache
    from attnplug.runtime.caches.block_pool import BlockPool as BlockPool
    from attnplug.runtime.graph_state import GraphState as GraphState
    from attnplug.runtime.plan.budget import MemoryBudget as MemoryBudget
    from attnplug.runtime.plan.budget import blocks_needed as blocks_needed
    from attnplug.runtime.plan.budget import bytes_per_block as bytes_per_block
    from attnplug.runtime.plan.budget import fit_kv_cache as fit_kv_cache
    from attnplug.runtime.plan.budget import parse_memory as parse_memory
    from attnplug.runtime.plan.grouping import KVCacheLayoutType as KVCacheLayoutType
    from attnplug.runtime.plan.grouping import get_kv_cache_layout as get_kv_cache_layout
    from attnplug.runtime.plan.grouping import get_kv_cache_spec as get_kv_cache_spec
    from attnplug.runtime.plan.grouping import group_kv_caches as group_kv_caches
    from attnplug.runtime.plan.grouping import is_valid_kv_cache_layout as is_valid_kv_cache_layout
    from attnplug.runtime.plan.grouping import num_padding_layers as num_padding_layers
    from attnplug.runtime.plan.grouping import set_kv_cache_layout as set_kv_cache_layout
    from attnplug.runtime.plan.grouping import unify_page_sizes as unify_page_sizes
    from attnplug.runtime.plan.grouping import with_num_blocks as with_num_blocks
    from attnplug.runtime.plan.model_plan import ModelPlan as ModelPlan
    from attnplug.runtime.plan.sharding import SharingCost as SharingCost
    from attnplug.runtime.plan.state_plan import StatePlan as StatePlan
    from attnplug.runtime.plan.state_plan import serving_states as serving_states
    from attnplug.runtime.ranks.rank_groups import RankWatch as RankWatch
    from attnplug.runtime.ranks.rank_groups import check_same_plan as check_same_plan
    from attnplug.runtime.ranks.rank_groups import context_parallel as context_parallel
    from attnplug.runtime.shared_graphs import SharedGraph as SharedGraph
    from attnplug.runtime.shared_graphs import SharedGraphs as SharedGraphs
    from attnplug.runtime.states.state_step import StateStep as StateStep
    from attnplug.runtime.states.state_table import StateTable as StateTable
    from attnplug.runtime.steps.attention_groups import AttentionGroup as AttentionGroup
    from attnplug.runtime.steps.attention_groups import WorkspaceUser as WorkspaceUser
    from attnplug.runtime.steps.attention_groups import build_attn_metadata as build_attn_metadata
    from attnplug.runtime.steps.attention_groups import cross_metadata as cross_metadata
    from attnplug.runtime.steps.attention_groups import init_attn_backend as init_attn_backend
    from attnplug.runtime.steps.graph_buffers import GraphInputBuffers as GraphInputBuffers
    from attnplug.runtime.steps.warm_up import WarmUpReport as WarmUpReport
    from attnplug.runtime.steps.warm_up import WarmUpStep as WarmUpStep

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "caches.allocation": "allocate_kv_cache bind_kv_cache init_kv_cache reshape_kv_cache view_kv_cache",
        "steps.attention_groups": "AttentionGroup WorkspaceUser build_attn_metadata cross_metadata init_attn_backend",
        "attention_runtime": "AttentionRuntime",
        "caches.block_pool": "BlockPool",
        "plan.budget": "MemoryBudget blocks_needed bytes_per_block fit_kv_cache parse_memory",
        "steps.graph_buffers": "GraphInputBuffers",
        "graph_state": "GraphState",
        "shared_graphs": "SharedGraph SharedGraphs",
        "plan.grouping": (
            "KVCacheLayoutType get_kv_cache_layout get_kv_cache_spec group_kv_caches is_valid_kv_cache_layout "
            "num_padding_layers set_kv_cache_layout unify_page_sizes with_num_blocks"
        ),
        "plan.model_plan": "ModelPlan",
        "batch.forest_prices": "SharingPrices",
        "batch.placeholders": "PlaceholderMap",
        "ranks.rank_groups": "RankWatch check_same_plan context_parallel",
        "plan.sharding": "SharingCost",
        "plan.state_plan": "StatePlan serving_states",
        "states.state_step": "StateStep",
        "states.state_table": "StateTable",
        "batch.staging": "CpuGpuBuffer StagingRing",
        "batch.step_batch": "StepBatch",
        "batch.step_batch_builder": "StepBatchBuilder",
        "steps.warm_up": "WarmUpReport WarmUpStep",
    },
)
