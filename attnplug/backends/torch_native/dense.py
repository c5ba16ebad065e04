"""Queries over the same keys: prefill, extend and encoders request by request, and a prefix that requests share.

Cascade attention: the keys that all requests share, attended once by every query, and merged with the rest.

From float32 scores to weights, in the contract's order: scale, soft cap, ALiBi, mask, sinks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from attnplug.backends.torch_native.metadata import TorchMetadata
from attnplug.backends.torch_native.source import KeySource, PagedKeys
from attnplug.ops.reach import Reach


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """The scale, cap, slopes and sinks of one layer's softmax.

    Args:
        scale: softmax scale times the scale of stored keys; with scales of heads float32 `[H, 1]`.
        value_scale: scale of stored values; with scales of heads float32 `[Hkv, 1, 1, 1]`.
        soft_cap: c of `c * tanh(logits / c)`.
        slopes: ALiBi, float32 `[Hkv, G]`.
        sinks: float32 `[Hkv, G]`; None if not used.
    """

    scale: Any
    value_scale: Any
    soft_cap: float | None
    slopes: torch.Tensor | None
    sinks: torch.Tensor | None

    @property
    def is_plain(self) -> bool:
        """Whether scaled_dot_product_attention can compute it: scale, mask and softmax only."""
        plain = self.soft_cap is None and self.slopes is None and self.sinks is None
        return plain and not isinstance(self.scale, torch.Tensor)

    def scale_values(self, output: torch.Tensor) -> torch.Tensor:
        """Multiply `output [..., Hkv, G, q, Dv]` with the scale of values, in place."""
        if isinstance(self.value_scale, torch.Tensor) or self.value_scale != 1.0:
            output *= self.value_scale
        return output

    def shape(self, scores: torch.Tensor, distance: torch.Tensor | None, hidden: torch.Tensor | None) -> None:
        """Cap, bias and mask scaled scores in place.

        Args:
            scores: float32 `[B, Hkv, G, q, L]`.
            distance: `abs(key_pos - query_pos)` as float32 `[B, q, L]`; needed with slopes.
            hidden: bool `[B, q, L]`, True where a key is not seen; None hides nothing.
        """
        if self.soft_cap is not None:
            scores.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        if self.slopes is not None and distance is not None:
            scores.addcmul_(distance[:, None, None], self.slopes[:, :, None, None], value=-1)
        if hidden is not None:
            scores.masked_fill_(hidden[:, None, None], -math.inf)

    def normalise(
        self, scores: torch.Tensor, wants_lse: bool, may_be_empty: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weights `[B, Hkv, G, q, L]`, and the log-sum-exp `[B, Hkv, G, q]` if wanted.

        Overwrites `scores`. A row that sees nothing has weights 0, and an LSE of -inf or its sink.
        """
        if self.sinks is None and not wants_lse and not may_be_empty:
            return scores.softmax(-1), None
        top = scores.amax(-1, keepdim=True)
        sinks = None if self.sinks is None else self.sinks[:, :, None, None]
        if sinks is not None:
            top = torch.maximum(top, sinks)
        top.masked_fill_(top == -math.inf, 0.0)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total += torch.exp(sinks - top)
        lse = (top + total.log()).squeeze(-1) if wants_lse else None
        return weights.div_(total.masked_fill(total == 0, 1.0)), lse

    def fill_empty(self, output: torch.Tensor, output_lse: torch.Tensor | None) -> None:
        """Write rows `[n, H, Dv]` and their LSE `[n, H]` that see no key at all."""
        output.zero_()
        if output_lse is not None:
            if self.sinks is None:
                output_lse.fill_(-math.inf)
            else:
                output_lse.copy_(self.sinks.reshape(1, -1).expand_as(output_lse))


_Ints = npt.NDArray[np.int64]

_SCORES_CPU = 1 << 21
_SCORES_DEVICE = 1 << 26
"""Float32 scores of a tile of rows."""
_FUSED_HEAD_SIZE = 256
"""The largest heads of torch's fused kernels for GPUs."""


def attend_request(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: tuple[_Ints, _Ints],
    places: _Ints,
    scoring: Scoring,
    output: torch.Tensor,
    output_lse: torch.Tensor | None,
) -> None:
    """Attend n queries over the same keys, such as those of one request.

    A tile of rows at a time attends the keys that it can see.

    Args:
        query: `[n, H, D]`.
        key: `[Hkv, m, D]` in the dtype to compute in.
        value: `[Hkv, m, Dv]`.
        bounds: `[low, high)`, int64 `[n]` each, the keys that each row sees; neither decreases.
        places: the queries' places on the keys' axis, int64 `[n]`.
        scoring: turns scores into weights.
        output: `[n, H, Dv]`, written.
        output_lse: float32 `[n, H]`, written; None without.
    """
    low, high = bounds
    fused = scoring.is_plain and output_lse is None and key.shape[-1] == value.shape[-1]
    if not fused:
        key, value = key.float(), value.float()
    tiles = _fused_tiles(low, high, key) if fused else _explicit_tiles(low, high, query)
    for start, stop in tiles:
        rows = slice(start, stop)
        keys = slice(int(low[start]), int(high[stop - 1]))
        out = output[rows]
        lse = None if output_lse is None else output_lse[rows]
        if keys.stop <= keys.start:
            scoring.fill_empty(out, lse)
            continue
        reach = (low[rows] - keys.start, high[rows] - keys.start)
        k, v = key[:, keys], value[:, keys]
        if fused:
            out.copy_(_fused(query[rows], k, v, reach, scoring))
        else:
            _explicit(query[rows], k, v, reach, places[rows] - keys.start, scoring, out, lse)


def _fused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, reach: tuple[_Ints, _Ints], scoring: Scoring
) -> torch.Tensor:
    rows, heads, size = query.shape
    groups = heads // key.shape[0]
    # KV heads are the batch dimension, so that grouped queries share keys without a copy.
    grouped = query.to(key.dtype).view(rows, -1, groups, size).permute(1, 2, 0, 3)
    keys = key[:, None].expand(-1, groups, -1, -1)
    values = value[:, None].expand(-1, groups, -1, -1)
    causal = _is_square_causal(*reach)
    hidden = None if causal else _hidden(reach, key.shape[1], key.device)
    mask = None if hidden is None else ~hidden
    out = functional.scaled_dot_product_attention(
        grouped, keys, values, attn_mask=mask, is_causal=causal, scale=scoring.scale
    )
    out = out.permute(2, 0, 1, 3).reshape(rows, heads, -1)
    if scoring.value_scale != 1.0:
        out = out * scoring.value_scale
    empty = reach[1] <= reach[0]
    if empty.any():
        out = out.masked_fill(torch.from_numpy(empty).to(out.device)[:, None, None], 0.0)
    return out


def _explicit(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    reach: tuple[_Ints, _Ints],
    places: _Ints,
    scoring: Scoring,
    output: torch.Tensor,
    output_lse: torch.Tensor | None,
) -> None:
    rows, heads, size = query.shape
    kv_heads, keys, _ = key.shape
    groups = heads // kv_heads
    grouped = (query.float() * scoring.scale).view(rows, kv_heads, groups, size).permute(1, 2, 0, 3)
    scores = torch.bmm(grouped.reshape(kv_heads, groups * rows, size), key.transpose(1, 2))
    scores = scores.view(1, kv_heads, groups, rows, keys)
    hidden = _hidden(reach, keys, key.device)
    distance = None
    if scoring.slopes is not None:
        queries = torch.from_numpy(places).to(key.device)
        distance = (torch.arange(keys, device=key.device) - queries[:, None]).abs_().float()[None]
    scoring.shape(scores, distance, None if hidden is None else hidden[None])
    empty = bool((reach[1] <= reach[0]).any())
    weights, lse = scoring.normalise(scores, output_lse is not None, empty)
    out = torch.bmm(weights.view(kv_heads, groups * rows, keys), value)
    out = scoring.scale_values(out.view(kv_heads, groups, rows, -1))
    output.copy_(out.permute(2, 0, 1, 3).reshape(rows, heads, -1))
    if output_lse is not None and lse is not None:
        output_lse.copy_(lse[0].permute(2, 0, 1).reshape(rows, heads))


def _hidden(reach: tuple[_Ints, _Ints], keys: int, device: torch.device) -> torch.Tensor | None:
    low, high = reach
    if (low <= 0).all() and (high >= keys).all():
        return None
    places = torch.arange(keys, device=device)
    lows, highs = (torch.from_numpy(bound).to(device)[:, None] for bound in (low, high))
    return (places < lows) | (places >= highs)


def _is_square_causal(low: _Ints, high: _Ints) -> bool:
    return bool(low[-1] == low[0]) and np.array_equal(high - low[0], np.arange(1, low.size + 1))


def _fused_tiles(low: _Ints, high: _Ints, key: torch.Tensor) -> Iterator[tuple[int, int]]:
    # No fused GPU kernel takes larger heads; without one torch makes the whole score matrix, so rows are tiled.
    whole = key.device.type == "cpu" or key.shape[-1] <= _FUSED_HEAD_SIZE
    rows = low.size
    edges = np.flatnonzero(np.diff(low)) + 1
    if edges.size > rows // 64:
        edges = edges[:0]
    for start, stop in zip([0, *edges.tolist()], [*edges.tolist(), rows], strict=True):
        step = stop - start
        lows, highs = low[start:stop], high[start:stop]
        # `low` may change at `edges` only, unless those were dropped.
        simple = lows[-1] == lows[0] and (highs[-1] == highs[0] or _is_square_causal(lows, highs))
        if not (whole and simple):
            span = int((highs - lows).max())
            step = min(max(span // 2, 64), 512)
        for first in range(start, stop, step):
            yield first, min(first + step, stop)


def _explicit_tiles(low: _Ints, high: _Ints, query: torch.Tensor) -> Iterator[tuple[int, int]]:
    rows, heads, _ = query.shape
    budget = _SCORES_CPU if query.device.type == "cpu" else _SCORES_DEVICE
    span = int((high - low).max())
    step = min(max(budget // (heads * max(span, 1)), 1), 128 if query.device.type == "cpu" else 1024)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def shared_prefix_len(metadata: TorchMetadata, source: KeySource, reach: Reach) -> int:
    """The step's shared prefix if the layer can attend it once: keys in pages that all its queries see; else 0."""
    # It depends on the step, the kind of source and `reach` only, as the gather plans in `metadata.plans` need.
    shared = metadata.common_prefix_len
    if not shared or not isinstance(source, PagedKeys):
        return 0
    has_queries = metadata.query_lens > 0
    ends = metadata.seq_lens[has_queries]
    # A request's last query sees the fewest of the first keys.
    low, _ = reach.bounds(ends - 1, np.zeros_like(ends), ends)
    return 0 if low.any() else shared


def attend_shared(
    query: torch.Tensor,
    source: PagedKeys,
    metadata: TorchMetadata,
    scoring: Scoring,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend the shared prefix by all packed queries at once: one product of all queries and its keys.

    Args:
        query: `[T, H, D]`.
        source: the pages; the first request with queries has the prefix, like all others.
        metadata: the step, with `common_prefix_len` P > 0.
        scoring: without sinks, which belong to the rest.
        dtype: of the keys to compute with.

    Returns:
        Float32 `[T, H, Dv]` and LSE `[T, H]`; rows before the first query are unspecified.
    """
    shared, starts = metadata.common_prefix_len, metadata.query_starts
    first, stop = int(starts[0]), int(starts[-1])
    lens = metadata.query_lens
    key, value = source.of_request(int(lens.argmax()), 0, shared)
    positions = np.arange(first, stop) + np.repeat(metadata.seq_lens - starts[1:], lens)
    everything = np.zeros(stop - first, dtype=np.int64), np.full(stop - first, shared)
    output = query.new_empty((stop, query.shape[1], value.shape[-1]), dtype=torch.float32)
    lse = output.new_empty(output.shape[:2])
    attend_request(
        query[first:stop],
        key.to(dtype),
        value.to(dtype),
        everything,
        positions,
        dataclasses.replace(scoring, sinks=None),
        output[first:],
        lse[first:],
    )
    return output, lse
