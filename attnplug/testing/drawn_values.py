"""Random values of a batch: the tensors of a layer, and the queries, keys and values of its requests.

Random selections of keys for sparse layers.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from attnplug.core.impl import LayerTensors
from attnplug.core.selection import Selection
from attnplug.core.spec import LayerSpec
from attnplug.testing.oracle import Spans
from attnplug.testing.pages import rows_of_spans

# No powers of two, and neither is the inverse of the other, so that each confusion of them changes the result.
FP8_SCALES: dict[str, Any] = {"k_scale": 0.37, "v_scale": 1.9}

# A logit whose exponential overflows float32, in base e and in base 2.
_FAR = 100.0
_CONSTANT = 4.0
"""The last element of each key in a batch of Numbers.FAR."""
_SHARP = 50.0
_WIDE = 2.0**20
_LARGE = 1e4


class Numbers(enum.StrEnum):
    """The sizes of the numbers in a batch."""

    PLAIN = "plain"
    """Logits around 0."""
    FAR = "far"
    """Logits and sinks around 100 in even heads and around -100 in odd heads. A softmax that does not subtract
    the row's own largest logit overflows, or divides by zero. Its differences are those of PLAIN."""
    SHARP = "sharp"
    """Queries times 50, sinks of 100 and -100: the largest logit of each tile differs, and most weights vanish."""
    WIDE = "wide"
    """Queries and values of about 2**20, keys of 2**-20: float16 does not hold them. The logits are those of PLAIN."""
    STRANGERS = "strangers"
    """Of three requests, the second has keys and values of NaN, and the third has large ones. Only the results
    of the first are compared."""


def strange_requests(
    numbers: Numbers, query_lens: Sequence[int], key_lens: Sequence[int]
) -> Mapping[int, float]:
    """By request with strange keys, the number that its keys and values are multiplied with.

    Requests without queries or keys have no result that could be compared, so the others are counted.
    """
    if numbers is not Numbers.STRANGERS:
        return {}
    found, ordinary = dict[int, float](), 0
    for request, (new, held) in enumerate(zip(query_lens, key_lens, strict=True)):
        ordinary += new > 0 and held > 0
        if new == 0 or (held > 0 and ordinary % 3 != 1):
            found[request] = _LARGE if ordinary % 3 == 0 else math.nan
    return found


def layer_tensors(
    spec: LayerSpec,
    *,
    seed: int = 0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    numbers: Numbers = Numbers.PLAIN,
    device: str = "cpu",
) -> LayerTensors:
    """The tensors that `spec` needs: sinks around 1, slopes from 0.001 to 2 in no order, scales of fp8, W_UK and W_UV."""
    generator = torch.Generator().manual_seed(seed)
    heads = spec.num_heads
    # Sinks near 1 are different for each head, so swapped heads change the result.
    sinks = torch.randn(heads, generator=generator) + 1 + _sink_offsets(spec, numbers)
    # Slopes of models are geometric, and a backend that computes them itself must not pass.
    steps = (torch.randperm(heads, generator=generator) + torch.rand(heads, generator=generator)) / heads
    return LayerTensors(
        **_latent_weights(spec, device),
        sinks=sinks.to(device) if spec.has_sinks else None,
        alibi_slopes=(2.0 ** (1 - 11 * steps)).to(device) if spec.has_alibi else None,
        k_scale=k_scale if spec.has_kv_scales else 1.0,
        v_scale=v_scale if spec.has_kv_scales else 1.0,
    )


def _signs(heads: int) -> torch.Tensor:
    return 1.0 - 2.0 * (torch.arange(heads) % 2)


def _sink_offsets(spec: LayerSpec, numbers: Numbers) -> torch.Tensor:
    if numbers not in (Numbers.FAR, Numbers.SHARP):
        return torch.zeros(spec.num_heads)
    # A cap holds back the logits, and a sink far above them would leave no weight to compare.
    cap = spec.logits_soft_cap
    return _signs(spec.num_heads) * (_FAR if cap is None else cap * math.tanh(_FAR / cap))


def _latent_weights(spec: LayerSpec, device: str) -> dict[str, torch.Tensor]:
    """W_UK and W_UV of a layer with MLA."""
    if spec.mla is None:
        return {}
    rank, dtype = spec.mla.kv_lora_rank, getattr(torch, spec.dtype)
    shapes = {"w_uk": (spec.mla.qk_nope_head_dim, rank), "w_uv": (rank, spec.mla.v_head_dim)}
    # Not of the seed, because several steps run with the tensors of one layer.
    fixed = torch.Generator().manual_seed(1)
    # Expanded keys and values then have elements near 1, as the rotated parts of keys have.
    return {
        name: (torch.randn(spec.num_heads, *shape, generator=fixed) / _latent_size(spec) / rank**0.5)
        .to(dtype)
        .to(device)
        for name, shape in shapes.items()
    }


def _latent_size(spec: LayerSpec) -> float:
    """The size of the elements of latents before those of positions, whose size is 1."""
    # In pages of 8 bits they are much smaller, as in trained models: a scale of theirs would saturate the others.
    return 0.125 if spec.has_quantized_kv_cache else 1.0


def draw_tokens(
    spec: LayerSpec,
    query_lens: Sequence[int],
    key_lens: Sequence[int],
    generator: torch.Generator,
    numbers: Numbers = Numbers.PLAIN,
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Random queries, keys and values of each request; with MLA keys are latents, and values their first part."""
    dtype = getattr(torch, spec.dtype)

    def tokens(count: int, heads: int, size: int) -> torch.Tensor:
        return torch.randn(count, heads, size, generator=generator).to(dtype)

    def latents(count: int) -> torch.Tensor:
        made = torch.randn(count, 1, spec.head_size, generator=generator)
        made[..., : spec.head_size_v] *= _latent_size(spec)
        return made.to(dtype)

    # The factor 2 is near the norms of trained projections. It makes the weights sharp, so that each key matters.
    if spec.mla is not None:
        keys = [latents(count) for count in key_lens]
        queries = [2 * tokens(count, spec.num_heads, spec.query_size) for count in query_lens]
        values = [each[..., : spec.head_size_v].clone() for each in keys]
    else:
        queries = [2 * tokens(count, spec.num_heads, spec.head_size) for count in query_lens]
        keys = [tokens(count, spec.num_kv_heads, spec.head_size) for count in key_lens]
        values = [tokens(count, spec.num_kv_heads, spec.head_size_v) for count in key_lens]
    if numbers is Numbers.SHARP:
        queries = [query * _SHARP for query in queries]
    if numbers is Numbers.WIDE:
        queries = [query * _WIDE for query in queries]
        keys, values = [key / _WIDE for key in keys], [value * _WIDE for value in values]
    if numbers is Numbers.FAR:
        # An element that all keys have in common moves all logits of a query by the same. With MLA it is one of
        # the rotated part, which is not multiplied with weights.
        for query in queries:
            query[:, :, -1] = _signs(spec.num_heads) * _FAR / (spec.scale * _CONSTANT)
        for key in keys:
            key[:, :, -1] = _CONSTANT
    for request, factor in strange_requests(numbers, query_lens, key_lens).items():
        for part in (keys[request], values[request]):
            part.mul_(factor)
    return queries, keys, values


_WIDER = 3
"""Columns of a selection beyond the layer's topk."""
_ROUND, _FEWER, _NONE = 7, 4, 2
"""In each row of so many queries, this one chooses half as many keys as it may, and this one none."""


def random_selection(
    spec: LayerSpec,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    causal: bool,
    spans: Sequence[Spans] | None = None,
    padding: int = 0,
    seed: int = 0,
    device: str = "cpu",
) -> Selection | None:
    """A selection for a sparse layer, in no order; None for other layers.

    Args:
        spec: the layer.
        query_lens: new tokens of each request.
        seq_lens: all tokens of each request.
        causal: whether queries choose no key after their own position, but for the rest of their span.
        spans: the multimodal spans of each request.
        padding: rows past the batch's tokens, which are not given.
        seed: of the random choice.
        device: of the tensors.
    """
    # Most queries choose as many keys as they may, or all where these are fewer. Some choose fewer,
    # and some none. The buffer is wider than the layer's topk, as if another layer chooses more keys.
    sparse = spec.sparse
    if sparse is None:
        return None
    # Not the seed of the keys, so that both can change alone.
    generator = torch.Generator().manual_seed(seed + 7919)
    chosen = Selection.allocate(sum(query_lens) + padding, sparse.topk + _WIDER, "cpu")
    inside = [(0, 0)] * sum(query_lens)
    if spans is not None:
        inside = [(start, stop) for start, stop in rows_of_spans(spans, query_lens, seq_lens).tolist()]
    token = 0
    for new, length in zip(query_lens, seq_lens, strict=True):
        for position in range(length - new, length):
            end = max(position + 1, inside[token][1]) if causal else length
            among = -(-max(end, 0) // sparse.block)
            most = min(among, sparse.topk)
            count = {_FEWER: (most + 1) // 2, _NONE: 0}.get(token % _ROUND, most)
            chosen.positions[token, :count] = torch.randperm(among, generator=generator)[:count].int()
            chosen.counts[token] = count
            token += 1
    return Selection(chosen.positions.to(device), chosen.counts.to(device))
