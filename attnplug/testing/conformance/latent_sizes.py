"""The dimensions of latent attention to try with a backend."""

from __future__ import annotations

from typing import Any

from attnplug.core.backend import AttentionBackend
from attnplug.core.mla import MLADims

_PAIRS = ((64, 16), (512, 64), (256, 64), (512, 0), (256, 32))
"""Pairs of kv_lora_rank and qk_rope_head_dim: a small one for backends of any, and those of models."""


def latent_pairs(backend: type[AttentionBackend]) -> list[tuple[int, int]]:
    """The pairs (kv_lora_rank, qk_rope_head_dim) to try: those that the backend declares, else the common ones."""
    declared = getattr(backend, "latent_sizes", ())
    return [(int(rank), int(rope)) for rank, rope in declared] or list(_PAIRS)


def pair_of(backend: type[AttentionBackend], head_size: int) -> tuple[int, int]:
    """A pair to try whose sum is `head_size`; a quarter of it for positions if no listed pair has that sum."""
    rope = min(head_size // 4, 64)
    return next((pair for pair in latent_pairs(backend) if sum(pair) == head_size), (head_size - rope, rope))


def fields_of(pair: tuple[int, int], nope: int = 32, value: int = 24) -> dict[str, Any]:
    """The arguments of a LayerSpec with latents of a pair; keys and values of sizes that no other size equals."""
    rank, rope = pair
    dims = MLADims(
        q_lora_rank=None,
        kv_lora_rank=rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=value,
    )
    return {"mla": dims, "num_kv_heads": 1, "head_size": rank + rope}


def latent_fields(backend: type[AttentionBackend]) -> list[dict[str, Any]]:
    """As `fields_of`, for each pair to try, the plainest first; then with the key and value sizes of models."""
    pairs = latent_pairs(backend)
    return [*(fields_of(pair) for pair in pairs), *(fields_of(pair, 128, 128) for pair in pairs)]
