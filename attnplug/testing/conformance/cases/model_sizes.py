"""The one table of the sizes of real models' attention, which feeds the axes of cases, and the steps of their lengths.

A new model is a new row: values of axes of one of its layers. A size that no row has is tried only if an axis of the
kit's own has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from attnplug.core.mla.dims import MLADims
from attnplug.core.sparse import SparseSpec


def _latents(nope: int, value: int) -> MLADims:
    return MLADims(
        q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=nope, qk_rope_head_dim=64, v_head_dim=value
    )


# A window of 4096 tokens is the query's own and 4095 before it. Expanded latents are layers of prefills, whose values
# are smaller than their keys. A page of 544 tokens is as large as the state of a model's other layers.
MODELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama-3.1-8b": {"heads": (32, 8), "head_size": 128},
    "llama-3.1-70b": {"heads": (64, 8), "head_size": 128},
    "llama-3.1-405b": {"heads": (128, 8), "head_size": 128},
    "llama-2-13b": {"heads": (40, 40), "head_size": 128},
    "qwen3-30b-a3b": {"heads": (32, 4), "head_size": 128},
    "nemotron-3-nano-30b": {"heads": (32, 2), "head_size": 128},
    "falcon-7b": {"heads": (71, 1), "head_size": 64},
    "mistral-7b-v0.1": {"heads": (32, 8), "head_size": 128, "window": (4095, 0)},
    "phi-3-mini-4k": {"heads": (32, 32), "head_size": 96, "window": (2046, 0)},
    "gemma-2-9b": {"heads": (16, 8), "head_size": 256, "window": (4095, 0), "logits_soft_cap": 50.0},
    "gemma-3-27b-text": {"heads": (32, 16), "head_size": 128, "window": (1023, 0)},
    "gemma-4-26b-a4b": {"heads": (16, 2), "head_size": 512},
    "gpt-oss-20b": {"heads": (64, 8), "head_size": 64, "window": (127, 0), "has_sinks": True},
    "llama-4-scout-text": {"heads": (40, 8), "head_size": 128, "chunk_size": 8192},
    "minicpm4-8b": {"heads": (32, 2), "head_size": 128, "sparse": SparseSpec("block", 64, 64)},
    "bloom-7b1": {"heads": (32, 32), "head_size": 128, "has_alibi": True},
    "qwen3-next-80b": {"heads": (16, 2), "head_size": 256, "block_size": 544},
    "bert-base-uncased": {"heads": (12, 12), "head_size": 64, "kind": "encoder"},
    "whisper-large-v3": {"heads": (20, 20), "head_size": 64, "kind": "cross"},
    "deepseek-v2-lite, expanded": {"heads": (16, 16), "head_size": 192, "values": 128},
    "deepseek-v2-lite": {"heads": (16, 1), "mla": _latents(128, 128)},
    "deepseek-v3": {"heads": (128, 1), "mla": _latents(128, 128)},
    "deepseek-v3.2": {"heads": (128, 1), "mla": _latents(128, 128), "sparse": SparseSpec("token_topk", 2048)},
    "glm-4.7-flash": {"heads": (20, 1), "mla": _latents(192, 256)},
    "kimi-k2": {"heads": (64, 1), "mla": _latents(128, 128)},
}
"""By model, the values of axes of one of its layers: of its pair 192/128 the second is `values`."""


def of_models(axis: str, beside: str | None = None) -> list[Any]:
    """The values that models have on an axis, each once, in the order of the table; those with a value `beside` it."""
    rows = (fields for fields in MODELS.values() if beside is None or beside in fields)
    return list(dict.fromkeys(fields[axis] for fields in rows if axis in fields))


# Whisper encodes 1500 tokens, and DeepSeek, Llama 4 and others have contexts of 128k and more. The lengths of
# `far-decode` and `far-extend` are beyond all windows, chunks and selections above; one of `far-decode` ends at a
# chunk's end, and queries of `far-extend` are on both sides of it. Neither 16 bits with a sign nor without hold a
# length of `farther-decode` and `farther-extend`.
FAR: Final[Mapping[str, tuple[Sequence[int], Sequence[int]]]] = {
    "audio": ((1500, 1), (1500, 1500)),
    "longer-prompt": ((2500, 1), (2500, 40)),
    "far-prompt": ((9000,), (9000,)),
    "far-decode": ((1, 1, 1), (9001, 8192, 5)),
    "far-extend": ((12, 3), (8198, 9001)),
    "farther-decode": ((1, 1), (70_001, 5)),
    "farther-extend": ((3, 1), (70_001, 5)),
}
"""Steps as long as those of models: new and all tokens. Layers of few heads have them, since backends compute all of it."""

FAR_LIMITS: Final[Mapping[str, Any]] = {
    "window": (4095, 0),
    "chunk_size": 8192,
    "sparse": SparseSpec("token_topk", 2048),
}
"""Limits of models that the steps of FAR pass."""
