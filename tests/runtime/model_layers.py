"""Layers of models, small in width and true in their kinds and counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attnplug.core import LayerSpec
from attnplug.runtime import get_kv_cache_spec

BLOCK = 16
PAGE = BLOCK * 2 * (8 + 8) * 2
"""Bytes of a page of the layers here: tokens, heads, K and V elements, bytes of a bfloat16."""


def layer(**asked: Any) -> LayerSpec:
    return LayerSpec(**{"num_heads": 4, "num_kv_heads": 2, "head_size": 8} | asked)


def model(kinds: Sequence[dict[str, Any]]) -> dict[str, LayerSpec]:
    """A layer `layers.i` for each set of what it asks beyond the plain layer."""
    return {f"layers.{index}": layer(**asked) for index, asked in enumerate(kinds)}


def every(count: int, period: int, usual: dict[str, Any], other: dict[str, Any]) -> list[dict[str, Any]]:
    """`count` layers, of which every `period`-th is the other kind."""
    return [other if index % period == period - 1 else usual for index in range(count)]


SLIDING: dict[str, Any] = {"sliding_window": 128}
CHUNKED: dict[str, Any] = {"chunk_size": 64}
FULL: dict[str, Any] = {}


def llama() -> dict[str, LayerSpec]:
    return model([FULL] * 32)


def gpt_oss() -> dict[str, LayerSpec]:
    return model(every(24, 2, SLIDING, FULL))


def gemma_3() -> dict[str, LayerSpec]:
    """62 layers, every sixth full: 52 sliding, 10 full."""
    return model(every(62, 6, SLIDING, FULL))


def llama_4() -> dict[str, LayerSpec]:
    return model(every(48, 4, CHUNKED, FULL))


def whisper() -> dict[str, LayerSpec]:
    """An encoder that keeps nothing, and a decoder of self and cross attention."""
    specs = {f"encoder.layers.{i}.self_attn": layer(attn_type="encoder", direct_kv=True) for i in range(4)}
    for i in range(4):
        specs[f"decoder.layers.{i}.self_attn"] = layer()
        specs[f"decoder.layers.{i}.encoder_attn"] = layer(attn_type="encoder_decoder")
    return specs


def caches(of: Callable[[], dict[str, LayerSpec]]) -> dict[str, Any]:
    return get_kv_cache_spec(of(), BLOCK)
