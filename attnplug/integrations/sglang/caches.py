"""SGLang's KV pools as attnplug's logical caches: views of the same memory, or a reason."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from attnplug.core.errors import LayoutError, SpecError

OTHER = "choose one of SGLang's own attention backends"
"""The remedy for what no backend of attnplug serves in SGLang."""
_PAIRS = "MHATokenToKVPool"
_WINDOWS = "SWAKVPool"
_HYBRID = "HybridLinearKVPool"
_STORED = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}
"""attnplug's names of the types of 8 bits that SGLang stores."""
_WHY = {
    "MLATokenToKVPool": "has latents, which are not served in SGLang",
    "DSATokenToKVPool": "has latents for sparse attention, which are not served in SGLang",
    "MHATokenToKVPoolFP4": "has values of 4 bits with scales of its own",
    "MHATokenToKVPoolMXFP8": "has a scale for every 32 values",
    "PageMajorMHATokenToKVPool": "has the layers of a page side by side",
}


@dataclasses.dataclass(frozen=True, slots=True)
class LayerPool:
    """The pool that has one layer's keys and values.

    Args:
        pool: an MHATokenToKVPool.
        windowed: whether its slots are numbered apart, as those of layers with windows can be.
    """

    pool: Any
    windowed: bool

    @property
    def layout(self) -> str:
        """NHD (token, head) or HND (head, token)."""
        return str(self.pool.kv_cache_layout).upper()

    def kv_cache_dtype(self, dtype: torch.dtype) -> str:
        """Attnplug's name for the stored type, for a layer that computes in `dtype`.

        SpecError: another type.
        """
        stored = self.pool.dtype
        if stored == dtype:
            return "auto"
        if stored not in _STORED:
            limit = f"must be the layer's {dtype}, or one of {', '.join(map(str, _STORED))}"
            raise SpecError("kv_cache_dtype", stored, limit, OTHER)
        return _STORED[stored]


def check_pool(pool: Any) -> None:
    """SpecError for a pool that is not served, with its class and the reason."""
    kind = type(pool).__name__
    if kind == _WINDOWS:
        inner = [pool.full_kv_pool, pool.swa_kv_pool]
    elif kind == _HYBRID:
        inner = [pool.full_kv_pool]
    else:
        inner = [pool]
    for each in inner:
        _check_pairs(each)


def _check_pairs(pool: Any) -> None:
    kind = type(pool).__name__
    if kind != _PAIRS:
        limit = _WHY.get(kind, "is a KV pool that attnplug does not know, and may change the result")
        raise SpecError("token_to_kv_pool", kind, limit, OTHER)
    if str(pool.kv_cache_layout).lower() not in ("nhd", "hnd"):
        raise SpecError("kv_cache_layout", pool.kv_cache_layout, "must be nhd or hnd", OTHER)
    if pool.is_quantized_kv_cache:
        raise SpecError("kv_cache_dtype", pool.dtype, "has scales for blocks of values", OTHER)
    if pool.post_capture_active:
        remedy = "unset SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"
        raise SpecError("post_capture_active", True, "gives K and V memory of their own", remedy)


def pool_of(pool: Any, layer_id: int) -> LayerPool:
    """The pool with the layer's keys and values."""
    kind = type(pool).__name__
    if kind == _WINDOWS:
        _, windowed = pool.layers_mapping[layer_id]
        return LayerPool(pool.swa_kv_pool if windowed else pool.full_kv_pool, windowed)
    return LayerPool(pool.full_kv_pool if kind == _HYBRID else pool, False)


def logical(key: torch.Tensor, value: torch.Tensor, page_size: int) -> torch.Tensor:
    """K and V in attnplug's logical order `(pages, 2, tokens, heads, size)`, without a copy.

    Args:
        key: `[slots, heads, size]`, or `[pages, heads, tokens, size]` in the order HND.
        value: of the same shape, in the same allocation, and behind the keys.
        page_size: tokens in a page.

    Raises:
        SpecError: values of another size than keys.
        LayoutError: K and V are not two parts of one allocation.
    """
    if key.shape[-1] != value.shape[-1]:
        limit = f"must be head_dim={key.shape[-1]}: SGLang allocates such K and V apart"
        raise SpecError("v_head_dim", value.shape[-1], limit, OTHER)
    apart, item = value.data_ptr() - key.data_ptr(), key.element_size()
    same = key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    if not same or apart <= 0 or apart % item or (key.shape, key.stride()) != (value.shape, value.stride()):
        limit = "must be two equal parts of one allocation, the keys first"
        raise LayoutError("kv_buffer", f"{tuple(key.shape)} and {tuple(value.shape)}", limit, OTHER)
    if key.ndim == 4:
        (page, head, slot, element), (pages, heads, _, size) = key.stride(), key.shape
    else:
        (slot, head, element), (slots, heads, size) = key.stride(), key.shape
        page, pages = page_size * slot, slots // page_size
    shape = (pages, 2, page_size, heads, size)
    return key.as_strided(shape, (page, apart // item, slot, head, element), key.storage_offset())
