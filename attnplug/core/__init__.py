"""The contract between engines and attention backends. Imports nothing else of attnplug, and no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.core._lazy import lazy_exports

# Type checkers do not run lazy_exports, so they read the same names here.
if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend as AttentionBackend
    from attnplug.core.backend import subclass_attention_backend as subclass_attention_backend
    from attnplug.core.backend import (
        subclass_attention_backend_with_overrides as subclass_attention_backend_with_overrides,
    )
    from attnplug.core.blocks import MultipleOf as MultipleOf
    from attnplug.core.composite import CompositeBackend as CompositeBackend
    from attnplug.core.composite import StepChoice as StepChoice
    from attnplug.core.composite import StepKind as StepKind
    from attnplug.core.composite import StepPriority as StepPriority
    from attnplug.core.composite import StepRange as StepRange
    from attnplug.core.composite import composite_backend as composite_backend
    from attnplug.core.config import BuilderConfig as BuilderConfig
    from attnplug.core.context_parallel import ContextParallel as ContextParallel
    from attnplug.core.device import Device as Device
    from attnplug.core.dtypes import is_quantized_kv_cache as is_quantized_kv_cache
    from attnplug.core.features import Feature as Feature
    from attnplug.core.impl import AttentionImpl as AttentionImpl
    from attnplug.core.impl import AttentionLayer as AttentionLayer
    from attnplug.core.impl import LayerTensors as LayerTensors
    from attnplug.core.impl import MLAAttentionImpl as MLAAttentionImpl
    from attnplug.core.kv_cache_spec import ChunkedLocalAttentionSpec as ChunkedLocalAttentionSpec
    from attnplug.core.kv_cache_spec import CrossAttentionSpec as CrossAttentionSpec
    from attnplug.core.kv_cache_spec import FullAttentionSpec as FullAttentionSpec
    from attnplug.core.kv_cache_spec import KVCacheConfig as KVCacheConfig
    from attnplug.core.kv_cache_spec import KVCacheGroupSpec as KVCacheGroupSpec
    from attnplug.core.kv_cache_spec import KVCacheSpec as KVCacheSpec
    from attnplug.core.kv_cache_spec import KVCacheTensor as KVCacheTensor
    from attnplug.core.kv_cache_spec import MLAAttentionSpec as MLAAttentionSpec
    from attnplug.core.kv_cache_spec import SlidingWindowSpec as SlidingWindowSpec
    from attnplug.core.metadata import PAD_SLOT_ID as PAD_SLOT_ID
    from attnplug.core.metadata import AttentionCGSupport as AttentionCGSupport
    from attnplug.core.metadata import AttentionMetadata as AttentionMetadata
    from attnplug.core.metadata import AttentionMetadataBuilder as AttentionMetadataBuilder
    from attnplug.core.metadata import CommonAttentionMetadata as CommonAttentionMetadata
    from attnplug.core.mla.backend import MLADecodeBackend as MLADecodeBackend
    from attnplug.core.mla.backend import QueryLens as QueryLens
    from attnplug.core.mla.dims import MLADims as MLADims
    from attnplug.core.mla.dims import get_mla_dims as get_mla_dims
    from attnplug.core.mla.weights import DenseProjection as DenseProjection
    from attnplug.core.mla.weights import LatentProjection as LatentProjection
    from attnplug.core.reasons import Reason as Reason
    from attnplug.core.selection import Selection as Selection
    from attnplug.core.sparse import SparseSpec as SparseSpec
    from attnplug.core.spec import AttentionType as AttentionType
    from attnplug.core.spec import LayerSpec as LayerSpec
    from attnplug.core.spec import Phase as Phase
    from attnplug.core.state.caches import StateCacheSpec as StateCacheSpec
    from attnplug.core.state.dims import StateDims as StateDims
    from attnplug.core.state.impl import StateImpl as StateImpl
    from attnplug.core.state.runs import StateRun as StateRun
    from attnplug.core.state.runs import state_runs as state_runs

# Some of these modules import torch, so each one is imported only when a name of it is used.
__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "backend": "AttentionBackend subclass_attention_backend subclass_attention_backend_with_overrides",
        "blocks": "MultipleOf",
        "composite": "CompositeBackend StepChoice StepKind StepPriority StepRange composite_backend",
        "config": "BuilderConfig",
        "context_parallel": "ContextParallel",
        "device": "Device",
        "dtypes": "is_quantized_kv_cache",
        "features": "Feature",
        "impl": "AttentionImpl AttentionLayer LayerTensors MLAAttentionImpl",
        "kv_cache_spec": (
            "ChunkedLocalAttentionSpec CrossAttentionSpec FullAttentionSpec KVCacheConfig "
            "KVCacheGroupSpec KVCacheSpec KVCacheTensor MLAAttentionSpec SlidingWindowSpec"
        ),
        "metadata": (
            "AttentionCGSupport AttentionMetadata AttentionMetadataBuilder CommonAttentionMetadata "
            "PAD_SLOT_ID"
        ),
        "mla.dims": "MLADims get_mla_dims",
        "mla.backend": "MLADecodeBackend QueryLens",
        "mla.weights": "DenseProjection LatentProjection",
        "reasons": "Reason",
        "selection": "Selection",
        "sparse": "SparseSpec",
        "spec": "AttentionType LayerSpec Phase",
        "state.caches": "StateCacheSpec",
        "state.dims": "StateDims",
        "state.impl": "StateImpl",
        "state.runs": "StateRun state_runs",
    },
)
