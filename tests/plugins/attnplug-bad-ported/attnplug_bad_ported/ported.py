"""Backend, impl and builder in one file, in the form of vLLM 0.15; its arithmetic is plain torch."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, ClassVar

import torch

from attnplug.core import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)


@dataclasses.dataclass
class PortedMetadata(AttentionMetadata):
    """The step as the kernel reads it."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class PortedBuilder(AttentionMetadataBuilder[PortedMetadata]):
    """Reads head counts from the engine's configuration."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    reorder_batch_threshold: int | None = None

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.num_heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PortedMetadata:
        """Copy what the kernel needs."""
        common = common_attn_metadata
        return PortedMetadata(
            common.query_start_loc, common.seq_lens, common.block_table_tensor, common.slot_mapping
        )


class BadPorted(AttentionBackend):
    """Declares half precision and pages of 16 tokens."""

    accept_output_buffer: bool = True
    forward_includes_kv_cache_update: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """Its name."""
        return "BAD_PORTED"

    @staticmethod
    def get_impl_cls() -> type[PortedImpl]:
        """The class that runs a layer."""
        return PortedImpl

    @staticmethod
    def get_builder_cls() -> type[PortedBuilder]:
        """The class that builds metadata."""
        return PortedBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        """Pages that the kernel reads."""
        return [MultipleOf(16)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """One tensor for K and V."""
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Tokens before heads."""
        return (1, 0, 2, 3, 4, 5) if include_num_layers_dimension else (0, 1, 2, 3, 4)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Sizes from 32."""
        return head_size >= 32

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Encoders too."""
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """GPUs from Ampere."""
        return bool(capability.major >= 8)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        device_capability: Any,
    ) -> str | None:
        """No large heads with sinks."""
        return "sinks need heads of at most 128" if has_sink and head_size > 128 else None


class PortedImpl(AttentionImpl[PortedMetadata]):
    """Writes the cache and attends in one `forward`."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.num_heads, self.num_kv_heads, self.scale = num_heads, num_kv_heads, scale
        self.sinks = sinks

    def forward(  # type: ignore[override]
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PortedMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the new keys and values, then attend request by request."""
        blocks, slots = kv_cache.shape[2], attn_metadata.slot_mapping
        kv_cache[slots // blocks, 0, slots % blocks] = key
        kv_cache[slots // blocks, 1, slots % blocks] = value
        starts = attn_metadata.query_start_loc.tolist()
        for row, (first, last) in enumerate(itertools.pairwise(starts)):
            length = int(attn_metadata.seq_lens[row])
            pages = kv_cache[attn_metadata.block_table[row, : -(-length // blocks)].long()]
            keys, values = pages.transpose(0, 1).flatten(1, 2)[:, :length]
            repeats = self.num_heads // self.num_kv_heads
            wide = (each.repeat_interleave(repeats, 1).transpose(0, 1) for each in (keys, values))
            positions = torch.arange(length)
            seen = positions <= positions[length - (last - first) :, None]
            output[first:last] = torch.nn.functional.scaled_dot_product_attention(
                query[first:last].transpose(0, 1), *wide, attn_mask=seen, scale=self.scale
            ).transpose(0, 1)
        return output
