"""Random values of a batch: the tensors of a layer, and the queries, keys and values of its requests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnplug.core.impl import LayerTensors
from attnplug.core.spec import LayerSpec


def layer_tensors(
    spec: LayerSpec, *, seed: int = 0, k_scale: float = 1.0, v_scale: float = 1.0, device: str = "cpu"
) -> LayerTensors:
    """The tensors that `spec` needs: sinks around 1, the usual geometric slopes, scales of fp8, W_UK and W_UV."""
    generator = torch.Generator().manual_seed(seed)
    # Sinks near 1 are different for each head, so swapped heads change the result.
    sinks = torch.randn(spec.num_heads, generator=generator) + 1 if spec.has_sinks else None
    slopes = 2.0 ** (-8.0 * torch.arange(1, spec.num_heads + 1) / spec.num_heads) if spec.has_alibi else None
    weights: dict[str, torch.Tensor] = {}
    if spec.mla is not None:
        rank, dtype = spec.mla.kv_lora_rank, getattr(torch, spec.dtype)
        shapes = {"w_uk": (spec.mla.qk_nope_head_dim, rank), "w_uv": (rank, spec.mla.v_head_dim)}
        # Not of the seed, because several steps run with the tensors of one layer.
        fixed = torch.Generator().manual_seed(1)
        # Expanded keys and values then have elements near 1, as the rotated parts of keys have.
        weights = {
            name: (torch.randn(spec.num_heads, *shape, generator=fixed) / _latent_size(spec) / rank**0.5)
            .to(dtype)
            .to(device)
            for name, shape in shapes.items()
        }
    return LayerTensors(
        **weights,
        sinks=None if sinks is None else sinks.to(device),
        alibi_slopes=None if slopes is None else slopes.float().to(device),
        k_scale=k_scale if spec.has_quantized_kv_cache else 1.0,
        v_scale=v_scale if spec.has_quantized_kv_cache else 1.0,
    )


def _latent_size(spec: LayerSpec) -> float:
    """The size of the elements of latents before those of positions, whose size is 1.

    In pages of 8 bits they are much smaller, as in trained models: a scale of theirs would saturate the others.
    """
    return 0.125 if spec.has_quantized_kv_cache else 1.0


def draw_tokens(
    spec: LayerSpec, query_lens: Sequence[int], key_lens: Sequence[int], generator: torch.Generator
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Random queries, keys and values of each request; with MLA keys are latents, and values their first part."""
    dtype = getattr(torch, spec.dtype)

    def tokens(count: int, heads: int, size: int) -> torch.Tensor:
        return torch.randn(count, heads, size, generator=generator).to(dtype)

    def latents(count: int) -> torch.Tensor:
        made = torch.randn(count, 1, spec.head_size, generator=generator)
        made[..., : spec.head_size_v] *= _latent_size(spec)
        return made.to(dtype)

    if spec.mla is not None:
        own = [latents(count) for count in key_lens]
        queries = [2 * tokens(count, spec.num_heads, spec.query_size) for count in query_lens]
        return queries, own, [each[..., : spec.head_size_v].clone() for each in own]
    return (
        # The factor 2 is near the norms of trained projections. It makes the weights sharp, so that each key matters.
        [2 * tokens(count, spec.num_heads, spec.head_size) for count in query_lens],
        [tokens(count, spec.num_kv_heads, spec.head_size) for count in key_lens],
        [tokens(count, spec.num_kv_heads, spec.head_size_v) for count in key_lens],
    )
