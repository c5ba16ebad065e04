"""The layers that the prefill kernel with specialised warps can serve, said without torch for priorities."""

from __future__ import annotations

from attnplug.core.spec import LayerSpec


def has_specialized_prefill(spec: LayerSpec) -> bool:
    """Whether the prefill kernel with specialised warps, which is for compute capability 9.0, can serve a layer."""
    plain = spec.logits_soft_cap is None and not spec.has_alibi and not spec.mm_prefix
    has_16_bits = spec.dtype != "float32" and not spec.has_quantized_kv_cache
    size = spec.head_size
    return plain and has_16_bits and spec.head_size_v == size and size % 16 == 0 and 64 <= size <= 256
