"""Random values of a batch: the tensors of a layer, and the queries, keys and values of its requests.

Random selections of keys for sparse layers.
"""

from __future__ import annotations

import enum
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from attnplug.core.impl import LayerTensors
from attnplug.core.selection import Selection
from attnplug.core.spec import LayerSpec
from attnplug.ops.storage import storage_dtype
from attnplug.testing.oracle import Spans
from attnplug.testing.pages import rows_of_spans
from attnplug.testing.views import between, column, scales_in_a_table, shard

# No powers of two, and neither is the inverse of the other, so that each confusion of them changes the result.
FP8_SCALES: dict[str, Any] = {"k_scale": 0.37, "v_scale": 1.9}

# A logit whose exponential overflows float32, in base e and in base 2.
_FAR = 100.0
_CONSTANT = 4.0
"""The last element of each key in a batch of Numbers.FAR."""
_SHARP = 50.0
_WIDE = 2.0**20
_LARGE = 1e4
_TINY = 2.0**-10
# A mean of all values that is far from 0: without weights, 3,000 of them are more than float16 holds.
_MEAN = 40.0
# Factors of queries and keys.
_BEYOND = 2.0**6, 2.0**7
# Float16 holds the queries whose products with such keys are ordinary logits.
_MOST_IN_FLOAT16 = 2.0**10


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
    ZEROS = "zeros"
    """Of each three keys, queries and values one is zero."""
    EQUAL = "equal"
    """All keys of a request are equal, so all its logits are. Values are around 40: their sum is large."""
    NEGATIVE = "negative"
    """As FAR, with logits and sinks around -100 in all heads: a hidden key that counts with a logit of 0 is all."""
    TINY = "tiny"
    """Queries and values of about 2**-10: weights are nearly equal, and outputs are small."""
    BEYOND = "beyond"
    """Products of queries and keys of about 2**17, which float16 does not hold. A layer with a scale of 2**-13 of
    the usual one has the logits of PLAIN."""
    RANGE = "range"
    """Keys and values up to the largest that the stored type holds; the logits are those of PLAIN."""
    EACH = "each"
    """Each request has the numbers of another of these."""


NUMBERS_IN_WORDS: Mapping[Numbers, str] = {
    Numbers.FAR: "logits and sinks around 100 in even heads, around -100 in odd ones",
    Numbers.SHARP: "queries times 50",
    Numbers.WIDE: "queries and values of about 2**20, keys of 2**-20",
    Numbers.ZEROS: "one of three keys, queries and values is zero",
    Numbers.EQUAL: "all keys of a request are equal, values are around 40",
    Numbers.NEGATIVE: "logits and sinks around -100",
    Numbers.TINY: "queries and values of about 2**-10",
    Numbers.BEYOND: "products of queries and keys beyond 65504",
    Numbers.RANGE: "stored keys and values up to the largest of their type",
    Numbers.EACH: "each request has other numbers: plain, sharp, zeros, equal or tiny ones",
}
"""For the messages of failing checks; PLAIN needs none."""

_OF_REQUESTS = (Numbers.PLAIN, Numbers.SHARP, Numbers.ZEROS, Numbers.EQUAL, Numbers.TINY)
"""The numbers of the requests of EACH, in turns."""


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


def stored_scale(spec: LayerSpec, scale: float) -> Any:
    """The scale with which a layer stores keys or values; with `head_scales` unlike ones around it, float32 `[Hkv, 1]`."""
    if not spec.head_scales:
        return scale
    # From 0.4 to 2.5 times the scale, in no order: no two heads have the same one.
    return scale * 2.5 ** torch.cos(3 + 2 * torch.arange(spec.num_kv_heads)).float()[:, None]


def layer_tensors(
    spec: LayerSpec,
    *,
    seed: int = 0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    numbers: Numbers = Numbers.PLAIN,
    device: str = "cpu",
) -> LayerTensors:
    """The tensors that `spec` needs: sinks around 1, slopes from 0.001 to 2 in no order, scales of fp8, W_UK and W_UV.

    Each is a part of a larger tensor, whose other numbers are far from its own.
    """
    generator = torch.Generator().manual_seed(seed)
    heads = spec.num_heads
    # Sinks near 1 are different for each head, so swapped heads change the result.
    sinks = torch.randn(heads, generator=generator) + 1 + _sink_offsets(spec, numbers)
    # Slopes of models are geometric, and a backend that computes them itself must not pass.
    steps = (torch.randperm(heads, generator=generator) + torch.rand(heads, generator=generator)) / heads
    # Each layer has one form in all processes, and layers of all kinds have both.
    is_shard, is_table = (zlib.crc32(f"{way} {spec}".encode()) % 2 for way in ("shard", "table"))
    part = shard if is_shard else column
    scales: list[Any] = [k_scale, v_scale] if spec.has_kv_scales else [1.0, 1.0]
    if spec.has_kv_scales and is_table:
        scales = scales_in_a_table(*scales, device=device)
    if spec.head_scales:
        scales = [part(stored_scale(spec, each).flatten().to(device)) for each in (k_scale, v_scale)]
    return LayerTensors(
        **_latent_weights(spec, device),
        sinks=part(sinks.to(device)) if spec.has_sinks else None,
        alibi_slopes=part((2.0 ** (1 - 11 * steps)).to(device)) if spec.has_alibi else None,
        k_scale=scales[0],
        v_scale=scales[1],
    )


def _signs(heads: int) -> torch.Tensor:
    return 1.0 - 2.0 * (torch.arange(heads) % 2)


def _far_signs(numbers: Numbers, heads: int) -> torch.Tensor:
    return -torch.ones(heads) if numbers is Numbers.NEGATIVE else _signs(heads)


def _sink_offsets(spec: LayerSpec, numbers: Numbers) -> torch.Tensor:
    if numbers not in (Numbers.FAR, Numbers.SHARP, Numbers.NEGATIVE):
        return torch.zeros(spec.num_heads)
    # A cap holds back the logits, and a sink far above them would leave no weight to compare.
    cap = spec.logits_soft_cap
    return _far_signs(numbers, spec.num_heads) * (_FAR if cap is None else cap * math.tanh(_FAR / cap))


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
        name: shard(
            (torch.randn(spec.num_heads, *shape, generator=fixed) / _latent_size(spec) / rank**0.5)
            .to(dtype)
            .to(device)
        )
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
    scales: tuple[Any, Any] = (1.0, 1.0),
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Random queries, keys and values of each request; with MLA keys are latents, and values their first part.

    The `scales` are those with which keys and values are stored, see `stored_scale`.
    """
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
    for request, parts in enumerate(zip(queries, keys, values, strict=True)):
        own = _OF_REQUESTS[request % len(_OF_REQUESTS)] if numbers is Numbers.EACH else numbers
        _change(spec, own, *parts, scales)
        if spec.mla is not None:
            values[request] = keys[request][..., : spec.head_size_v].clone()
    for request, factor in strange_requests(numbers, query_lens, key_lens).items():
        for part in (keys[request], values[request]):
            part.mul_(factor)
    return queries, keys, values


def _change(
    spec: LayerSpec,
    numbers: Numbers,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scales: tuple[Any, Any],
) -> None:
    """Change the tokens of a request, which are PLAIN, in place."""
    if numbers is Numbers.SHARP:
        query *= _SHARP
    elif numbers is Numbers.WIDE:
        query *= _WIDE
        key /= _WIDE
        value *= _WIDE
    elif numbers in (Numbers.FAR, Numbers.NEGATIVE):
        # An element that all keys have in common moves all logits of a query by the same. With MLA it is one of
        # the rotated part, which is not multiplied with weights.
        query[:, :, -1] = _far_signs(numbers, spec.num_heads) * _FAR / (spec.scale * _CONSTANT)
        key[:, :, -1] = _CONSTANT
    elif numbers is Numbers.ZEROS:
        for part, first in ((query, 1), (key, 0), (value, 2)):
            part[first::3] = 0
    elif numbers is Numbers.EQUAL:
        key[1:] = key[:1]
        value += _MEAN
    elif numbers is Numbers.TINY:
        query *= _TINY
        value *= _TINY
    elif numbers is Numbers.BEYOND:
        query *= _BEYOND[0]
        key *= _BEYOND[1]
    elif numbers is Numbers.RANGE:
        for part, scale in ((key, scales[0]), (value, scales[1])):
            most = torch.as_tensor(_most_stored(spec) * scale)
            most = most.clamp(max=_MOST_IN_FLOAT16) if spec.dtype == "float16" else most
            # The normal distribution's own function makes the numbers uniform.
            part.copy_(torch.special.erf(part.float() * 0.5**0.5) * most)
            if part is key:
                of_heads = most.repeat_interleave(query.shape[1] // len(most), 0) if most.dim() else most
                query /= of_heads * 3**-0.5


def _most_stored(spec: LayerSpec) -> float:
    dtype = storage_dtype(spec)
    return torch.finfo(dtype).max if dtype.is_floating_point else float(torch.iinfo(dtype).max)


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
    return Selection(between(chosen.positions.to(device)), between(chosen.counts.to(device)))
