"""The KV cache of one layer: its kind, its sizes, and the bytes of its pages."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from attnplug.core.checks import check_instances, check_names, check_size
from attnplug.core.dtypes import kv_cache_dtype_name
from attnplug.core.errors import SpecError
from attnplug.core.kv_format import kv_format
from attnplug.core.spec import AttentionType, LayerSpec

# torch takes sizes of 64 bits.
_MOST_BYTES = 2**63 - 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """One layer's KV cache; the subclass tells which tokens must stay in it.

    Args:
        block_size: tokens per page.
        num_kv_heads: key and value heads on this rank.
        head_size: elements per key head.
        head_size_v: elements per value head; 0 means `head_size`.
        dtype: storage dtype, such as "bfloat16" or "fp8_e4m3"; a torch.dtype becomes its name.
        padding: unused bytes at the end of each page, where layers of unlike formats share a pool.
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    head_size_v: int = 0
    dtype: str
    padding: int = 0

    def __post_init__(self) -> None:
        # False == 0, so without the second test False would count as the default.
        if isinstance(self.head_size_v, int) and self.head_size_v == 0 and self.head_size_v is not False:
            object.__setattr__(self, "head_size_v", self.head_size)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "dtype":
                value = kv_cache_dtype_name(value, "dtype")
                # Called for its error: pages of an unknown element size cannot be measured in bytes.
                kv_format(value).row_bytes(self.head_size)
            else:
                value = check_size(field.name, value, 0 if field.name == "padding" else 1)
            object.__setattr__(self, field.name, value)

    @property
    def bytes_per_token(self) -> int:
        """Bytes stored for one token: K and V of every head, with the scales that its format has for rows."""
        row_bytes = kv_format(self.dtype).row_bytes
        return self.num_kv_heads * (row_bytes(self.head_size) + row_bytes(self.head_size_v))

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one page of this layer: K and V of `block_size` tokens, and the padding."""
        return self.block_size * self.bytes_per_token + self.padding


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FullAttentionSpec(KVCacheSpec):
    """Every token stays."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowSpec(KVCacheSpec):
    """Only the last `sliding_window` tokens are needed, the query's own included."""

    sliding_window: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLocalAttentionSpec(KVCacheSpec):
    """Only the tokens of the current chunk of `chunk` positions are needed."""

    chunk: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MLAAttentionSpec(KVCacheSpec):
    """One latent vector of `head_size` elements per token instead of K and V."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes stored for one token: the latent, which includes the value."""
        return self.num_kv_heads * kv_format(self.dtype).row_bytes(self.head_size)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CrossAttentionSpec(KVCacheSpec):
    """The encoder's tokens, written once per request."""


@dataclasses.dataclass(frozen=True, slots=True)
class KVCacheTensor:
    """One raw allocation of `size` bytes, viewed by each of the layers in `shared_by`."""

    size: int
    shared_by: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", check_size("size", self.size, 0, _MOST_BYTES))
        object.__setattr__(self, "shared_by", check_names("shared_by", self.shared_by))


@dataclasses.dataclass(frozen=True, slots=True)
class KVCacheGroupSpec:
    """Layers that share one block table and slot mapping."""

    layer_names: tuple[str, ...]
    kv_cache_spec: KVCacheSpec

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_names", check_names("layer_names", self.layer_names))
        if not isinstance(self.kv_cache_spec, KVCacheSpec):
            raise SpecError("kv_cache_spec", self.kv_cache_spec, "must be a KVCacheSpec")


@dataclasses.dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """Everything needed to allocate the caches: blocks per group, raw tensors, groups."""

    num_blocks: int
    kv_cache_tensors: tuple[KVCacheTensor, ...]
    kv_cache_groups: tuple[KVCacheGroupSpec, ...]

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "num_blocks", check_size("num_blocks", self.num_blocks, -_MOST_BYTES, _MOST_BYTES)
        )
        for name, kind in (("kv_cache_tensors", KVCacheTensor), ("kv_cache_groups", KVCacheGroupSpec)):
            object.__setattr__(self, name, check_instances(name, getattr(self, name), kind))


@functools.lru_cache(maxsize=4096, typed=True)
def kv_cache_spec_for(spec: LayerSpec, block_size: int) -> KVCacheSpec | None:
    """The cache of a layer, in pages of `block_size` tokens; None with direct K and V, and for state layers.

    Raises:
        SpecError: the spec has another block size.
    """
    if not spec.has_pages:
        return None
    if spec.block_size not in (None, block_size):
        raise SpecError("block_size", block_size, f"is not the layer's own block_size={spec.block_size}")
    common: dict[str, Any] = {
        "block_size": block_size,
        "num_kv_heads": spec.num_kv_heads,
        "head_size": spec.head_size,
        "head_size_v": spec.head_size_v,
        "dtype": spec.resolved_kv_cache_dtype,
    }
    if spec.mla is not None:
        return MLAAttentionSpec(**common)
    if spec.attn_type is AttentionType.ENCODER_DECODER:
        return CrossAttentionSpec(**common)
    # A window that is not causal has no sliding_window, so all tokens of its layer stay.
    if spec.sliding_window is not None:
        return SlidingWindowSpec(**common, sliding_window=spec.sliding_window)
    if spec.chunk_size is not None:
        return ChunkedLocalAttentionSpec(**common, chunk=spec.chunk_size)
    return FullAttentionSpec(**common)
