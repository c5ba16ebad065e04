"""Attention as a layer might be misread: every convention is a field, in float64, one request at a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch

from attnplug.core.spec import LayerSpec
from attnplug.testing.batches import Batch

__all__ = ["Reading", "Request", "attend", "read", "requests_of"]


def _minus_distance(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return -(key - query).abs()


def _own(request: int, requests: int) -> int:
    return request


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """How a layer is understood; `read` gives the right one, and a mistake replaces fields of it.

    Args:
        head_size: elements per query and key head.
        scale: softmax scale.
        causal: whether keys after the query are hidden.
        left: keys seen before the query; infinity is no limit.
        right: keys seen after the query.
        chunk: positions per chunk.
        cap: soft cap of the logits.
        slopes: ALiBi, float64 `[H]`.
        bias: what a slope is multiplied with, of positions that broadcast.
        sinks: float64 `[H]`.
        sink_value: which of the seen keys (0 or -1) gives its value for the sink's weight; None gives none.
        order: in which scores are scaled ("scale"), capped ("cap"), biased ("bias") and masked ("mask").
        kv_heads: the KV head of each query head, int64 `[H]`.
        from_start: whether the queries stand at positions 0, 1, ...
        shift: how far the queries stand from their positions.
        rows: whose pages a request reads, of its number and how many there are.
        key_factors: of the keys stored before this step, and of its own.
        value_factors: likewise.
        k_scale: stored key x k_scale = key.
        v_scale: likewise.
    """

    head_size: int
    scale: float
    causal: bool
    left: float
    right: float
    chunk: int | None
    cap: float | None
    slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    kv_heads: torch.Tensor
    k_scale: float
    v_scale: float
    bias: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = _minus_distance
    sink_value: int | None = None
    order: tuple[str, ...] = ("scale", "cap", "bias", "mask")
    from_start: bool = False
    shift: int = 0
    rows: Callable[[int, int], int] = _own
    key_factors: tuple[float, float] = (1.0, 1.0)
    value_factors: tuple[float, float] = (1.0, 1.0)

    @property
    def is_windowed(self) -> bool:
        """Whether the window hides any key that causality does not."""
        return min(self.left, self.right) < math.inf


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request as its pages hold it, float64.

    Args:
        query: `[n, H, D]`.
        key: `[m, Hkv, D]`, the last m; zeros where the page was freed.
        value: `[m, Hkv, Dv]`, likewise.
        seq_len: tokens in all.
        new: how many of the keys were written in this step.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    seq_len: int
    new: int


def read(batch: Batch) -> Reading:
    """The right reading of the batch's layer."""
    spec, tensors = batch.spec, batch.tensors
    left, right = (math.inf if side < 0 else side for side in spec.window)
    group = spec.num_heads // spec.num_kv_heads
    return Reading(
        head_size=spec.head_size,
        scale=spec.scale,
        causal=spec.causal or batch.common.causal,
        left=left,
        right=math.inf if spec.causal else right,
        chunk=spec.chunk_size,
        cap=spec.logits_soft_cap,
        slopes=None if tensors.alibi_slopes is None else tensors.alibi_slopes.cpu().double(),
        sinks=None if tensors.sinks is None else tensors.sinks.cpu().double(),
        kv_heads=torch.arange(spec.num_heads) // group,
        k_scale=float(tensors.k_scale),
        v_scale=float(tensors.v_scale),
    )


def requests_of(batch: Batch) -> list[Request]:
    """The batch's requests, with zeros where their table says the null block."""
    found = []
    for row, parts in enumerate(zip(batch.queries, batch.keys, batch.values, batch.seq_lens, strict=True)):
        query, key, value = (part.detach().cpu().double() for part in parts[:3])
        written = key.shape[0] if batch.spec.attn_type == "encoder_decoder" else query.shape[0]
        if batch.kv_cache is not None and key.shape[0]:
            size = _block_size(batch.spec, batch.kv_cache)
            pages = batch.common.block_table_tensor[row].cpu()[torch.arange(key.shape[0]) // size]
            freed = (pages == 0)[:, None, None]
            key, value = key.masked_fill(freed, 0.0), value.masked_fill(freed, 0.0)
        found.append(Request(query, key, value, parts[3], written))
    return found


def _block_size(spec: LayerSpec, kv_cache: torch.Tensor) -> int:
    return spec.block_size or kv_cache.shape[-3]


def attend(reading: Reading, requests: Sequence[Request], index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What request `index` gets: output `[n, H, Dv]` and LSE `[n, H]`.

    Keys past another request's length, where its pages are read, are NaN.
    """
    request = requests[index]
    key, value = _stored(reading, requests, index)
    query = request.query.transpose(0, 1)
    count, keys = query.shape[1], key.shape[0]
    start = 0 if reading.from_start else request.seq_len - count
    at = (torch.arange(count) + start + reading.shift)[:, None]
    held = (torch.arange(keys) + request.seq_len - keys)[None, :]
    seen = _seen(reading, at, held)

    scores = query @ key[:, reading.kv_heads].permute(1, 2, 0)
    for step in reading.order:
        if step == "scale":
            scores = scores * reading.scale
        elif step == "cap" and reading.cap is not None:
            scores = reading.cap * torch.tanh(scores / reading.cap)
        elif step == "bias" and reading.slopes is not None:
            scores = scores + reading.slopes[:, None, None] * reading.bias(at, held)
        elif step == "mask":
            scores = scores.masked_fill(~seen, -math.inf)
    terms = scores
    sinks = None if reading.sinks is None else reading.sinks[:, None, None].expand(-1, count, 1)
    if sinks is not None:
        terms = torch.cat([scores, sinks], dim=2)
    lse = torch.logsumexp(terms, dim=2)
    total = lse[:, :, None].nan_to_num(neginf=0.0, nan=math.nan)
    weights = torch.exp(scores - total)
    if sinks is not None and reading.sink_value is not None and keys:
        weights = weights + torch.exp(sinks - total) * _end_of(seen, reading.sink_value)
    output = weights @ value[:, reading.kv_heads].transpose(0, 1)
    return output.transpose(0, 1), lse.transpose(0, 1)


def _stored(reading: Reading, requests: Sequence[Request], index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that the request reads, with the factors that a wrong scale leaves on them."""
    request, other = requests[index], requests[reading.rows(index, len(requests))]
    count = request.key.shape[0]
    is_new = (torch.arange(other.key.shape[0]) >= other.key.shape[0] - other.new)[:, None, None]
    tensors = []
    for tokens, (before, now) in (
        (other.key, reading.key_factors),
        (other.value, reading.value_factors),
    ):
        held = torch.where(is_new, tokens * now, tokens * before)[:count]
        missing = held.new_full((count - held.shape[0], *held.shape[1:]), math.nan)
        tensors.append(torch.cat([held, missing]))
    return tensors[0], tensors[1]


def _seen(reading: Reading, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    seen = torch.ones(query.shape[0], key.shape[1], dtype=torch.bool)
    if reading.causal:
        seen &= key <= query
    seen &= (query - key <= reading.left) & (key - query <= reading.right)
    if reading.chunk is not None:
        seen &= query // reading.chunk == key // reading.chunk
    return seen


def _end_of(seen: torch.Tensor, which: int) -> torch.Tensor:
    """1 at the first (0) or last (-1) key that each query sees, `[n, m]`; nowhere if it sees none."""
    ranks = seen.cumsum(1)
    wanted = torch.ones_like(ranks[:, -1:]) if which == 0 else ranks[:, -1:]
    return (seen & (ranks == wanted)).double()
