"""Attention of classes that do not use transformers' attention interface.

Their calls cannot be recorded, so each class has its own reader here. All other such classes are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from attnplug.core.errors import ModelConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class OwnAttention:
    """Causal self-attention of a class with its own reader, over all ranks."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    has_alibi: bool


def _bloom(module: Any, config: Any) -> OwnAttention:
    # Bloom adds slope * key_pos, which differs from -slope * (query_pos - key_pos) by a constant per row.
    heads = module.num_heads
    return OwnAttention(heads, heads, module.head_dim, module.inv_norm_factor, has_alibi=True)


def _falcon(module: Any, config: Any) -> OwnAttention:
    # The new architecture caches copies of each KV head; num_kv_heads counts each head once.
    heads, alibi = (module.num_heads, module.num_kv_heads), bool(config.alibi)
    return OwnAttention(*heads, module.head_dim, module.inv_norm_factor, has_alibi=alibi)


def _mpt(module: Any, config: Any) -> OwnAttention:
    attention = config.attn_config
    ignored = {
        "attn_type": attention.attn_type != "multihead_attention",
        "prefix_lm": attention.prefix_lm,
        "qk_ln": attention.qk_ln,
        "attn_uses_sequence_id": attention.attn_uses_sequence_id,
        "alibi": not attention.alibi,
    }
    for name, asked in ignored.items():
        if asked:
            raise ModelConfigError(
                f"attn_config.{name}={getattr(attention, name)!r}: transformers' MPT ignores it, "
                "so the model's own attention cannot be read"
            )
    heads = module.n_heads
    return OwnAttention(heads, heads, module.head_dim, module.softmax_scale, has_alibi=True)


_READERS: dict[tuple[str, str], Callable[[Any, Any], OwnAttention]] = {
    ("transformers.models.bloom.modeling_bloom", "BloomAttention"): _bloom,
    ("transformers.models.falcon.modeling_falcon", "FalconAttention"): _falcon,
    ("transformers.models.mpt.modeling_mpt", "MptAttention"): _mpt,
}


def read_own_attention(path: str, module: Any, config: Any) -> OwnAttention:
    """The attention of the module at `path`, by its class's reader. ModelConfigError without a reader."""
    cls = type(module)
    reader = _READERS.get((cls.__module__, cls.__name__))
    if reader is None:
        raise ModelConfigError(
            f"{path}: {cls.__name__} computes attention of its own, which cannot be checked against a LayerSpec"
        )
    return reader(module, config)
