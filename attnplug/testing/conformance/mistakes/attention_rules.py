"""The conventions by which a layer attends, and the requests of a step, for attention with known mistakes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from attnplug.core.impl import host_scale
from attnplug.core.sparse import SparseSpec
from attnplug.core.spec import LayerSpec
from attnplug.testing.batches import Batch
from attnplug.testing.oracle import Spans, expanded_latents, latent_weights


class LatentWeights(NamedTuple):
    """The weights of a layer with MLA, float64: W_UK `[H, nope, rank]` and W_UV `[H, rank, v_head_dim]`."""

    up_key: torch.Tensor
    up_value: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AttentionRules:
    """The conventions by which a layer attends; `rules_of` gives the right ones, a mistake replaces some.

    Args:
        head_size: elements per query and key head.
        scale: softmax scale.
        causal: whether keys after the query are hidden.
        left: keys seen before the query; infinite without a limit.
        right: keys seen after the query; likewise.
        chunk: positions per chunk.
        cap: soft cap of the logits.
        slopes: ALiBi, float64 `[H]`.
        bias: the factor of a slope, from query and key positions that broadcast.
        sinks: float64 `[H]`.
        sink_value: the seen key (0 or -1) with the value for the sink's weight; None for no value.
        cap_of: the capped scores, from scores and the cap.
        order: of the operations on scores: "scale", "cap", "bias" (ALiBi) and "mask".
        renormalised: whether weights of hidden keys stay out of the denominator.
        kv_heads: the KV head of each query head, int64 `[H]`.
        places: by limit ("causal", "window", "chunk", "spans", "bias"), the place of a query if it is not its own: "local",
            counted from the request's first new token, or that of the "first" or "last" new token.
        chunk_start: the position at which the first chunk of a request begins.
        shift: added to the positions of the queries.
        length: the tokens of a request, from its index and all requests.
        cut: the keys of a request that are missed at its start and end.
        rows: the request whose pages a request reads, from its index and the number of requests.
        key_factors: of the keys stored before this step, and of the new ones.
        value_factors: likewise.
        spans: the multimodal spans that count, from those of a request; None without mm_prefix.
        lifted: the limits that a span lifts: "causal", and "near" for windows and chunks.
        sparse: of a sparse layer.
        picks: the positions that queries attend, int64 `[n, K]`, from the positions that the step selects (-1 for
            none), the request, and the positions of the queries `[n, 1]`; -1 for none.
        swapped: whether keys are taken as values and values as keys.
        read_slots: the slots that are read for some positions; None for those of the positions.
        read_as: the layout, "NHD" or "HND", as which the pages of the other layout are read.
        head_size_v: elements per value head.
        weights: of a layer with MLA.
        expand: the request with other queries, or keys and values expanded otherwise; None as they are.
        k_scale: stored key x k_scale = key; with scales of heads float64 `[Hkv, 1]`.
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
    k_scale: Any
    v_scale: Any
    bias: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda query, key: -(key - query).abs()
    cap_of: Callable[[torch.Tensor, float], torch.Tensor] = lambda scores, cap: cap * torch.tanh(scores / cap)
    sink_value: int | None = None
    order: tuple[str, ...] = ("scale", "cap", "bias", "mask")
    renormalised: bool = True
    places: Mapping[str, str] = dataclasses.field(default_factory=dict)
    chunk_start: Callable[[RequestContents], int] = lambda request: 0
    shift: int = 0
    length: Callable[[int, Sequence[RequestContents]], int] = lambda index, requests: requests[index].seq_len
    cut: Callable[[RequestContents], tuple[int, int]] = lambda request: (0, 0)
    rows: Callable[[int, int], int] = lambda request, requests: request
    key_factors: tuple[Any, Any] = (1.0, 1.0)
    value_factors: tuple[Any, Any] = (1.0, 1.0)
    swapped: bool = False
    spans: Callable[[Spans], Spans] | None = None
    lifted: frozenset[str] = frozenset({"causal", "near"})
    sparse: SparseSpec | None = None
    picks: Callable[[torch.Tensor, RequestContents, torch.Tensor], torch.Tensor] = (
        lambda chosen, request, query: chosen
    )
    read_slots: Callable[[RequestContents, torch.Tensor], torch.Tensor] | None = None
    read_as: str | None = None
    head_size_v: int = 0
    weights: LatentWeights | None = None
    expand: Callable[[RequestContents], RequestContents] | None = None

    @property
    def features(self) -> frozenset[str]:
        """The features of the layer that a mistake can concern."""
        by_head = isinstance(self.k_scale, torch.Tensor)
        scaled = by_head or (self.k_scale, self.v_scale) != (1.0, 1.0)
        window, kv_heads = min(self.left, self.right) < math.inf, int(self.kv_heads[-1]) + 1
        alibi, cap = self.slopes is not None, self.cap is not None
        each = {"window": window, "chunk": self.chunk is not None, "cap": cap, "alibi": alibi}
        each |= {"sinks": self.sinks is not None, "spans": self.spans is not None}
        each["sparse"] = self.sparse is not None
        present = {
            **each,
            "several": sum(each.values()) > 1,
            "left": self.left < math.inf,
            "right": self.right < math.inf,
            "near spans": self.spans is not None and (window or self.chunk is not None),
            "causal": self.causal,
            "causal window": self.causal and self.left < math.inf,
            "non-causal": not self.causal,
            "non-causal positions": not self.causal and (window or alibi),
            "cap and alibi": cap and alibi,
            "cap and sinks": cap and self.sinks is not None,
            "scale": self.scale != float(self.head_size**-0.5),
            "fp8": scaled,
            "two fp8 scales": self.weights is None and scaled,
            "head scales": by_head and kv_heads > 1,
            "head groups": 1 < kv_heads < len(self.kv_heads),
            "shared KV heads": kv_heads < len(self.kv_heads),
            "several KV heads": kv_heads > 1 and self.weights is None,
            "sinks of groups": self.sinks is not None and kv_heads < len(self.kv_heads),
            "alibi of groups": alibi and kv_heads < len(self.kv_heads),
            "two sides": not self.causal and window and self.left != self.right,
            "other value size": self.head_size_v != self.head_size,
            "hiding": self.causal or window or self.chunk is not None or self.sparse is not None,
            "latent": self.weights is not None,
            "latent fp8": self.weights is not None and self.k_scale != 1.0,
            "same value size": self.head_size_v == self.head_size,
        }
        return frozenset(name for name, is_present in present.items() if is_present)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RequestContents:
    """One request with the contents of its pages, float64.

    Args:
        query: `[n, H, D]`.
        key: `[m, Hkv, D]`, the last m; zeros in freed pages.
        value: `[m, Hkv, Dv]`, likewise.
        seq_len: number of all tokens.
        new: number of keys written in this step.
        spans: its multimodal spans.
        chosen: int64 `[n, K]`, the positions that the step selects for each query of a sparse layer, then -1.
        slots: int64 `[m]`, where each of the keys is stored.
        table: int64, the pages of the keys.
        page: tokens of a page; the slots of the first page hold zeros.
        latent: `[m, rank + rope]`, from which keys and values are expanded; None without MLA.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    seq_len: int
    new: int
    spans: Spans = ()
    chosen: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    table: torch.Tensor | None = None
    page: int = 0
    latent: torch.Tensor | None = None


def scales_of(scale: Any, spec: LayerSpec) -> Any:
    """A scale of a layer as a number, and those of heads as float64 `[Hkv, 1]`."""
    numbers = host_scale(scale, spec)
    return torch.tensor(numbers, dtype=torch.float64)[:, None] if isinstance(numbers, tuple) else numbers


def rules_of(batch: Batch) -> AttentionRules:
    """The right rules for the batch's layer."""
    spec, tensors = batch.spec, batch.tensors
    left, right = (math.inf if side < 0 else side for side in spec.window)
    # Latents are expanded: then each head has keys of its own.
    group = spec.num_heads // spec.num_kv_heads if spec.mla is None else 1
    return AttentionRules(
        head_size=spec.query_size,
        scale=spec.scale,
        causal=batch.common.causal_for(spec),
        left=left,
        right=math.inf if spec.causal else right,
        chunk=spec.chunk_size,
        cap=spec.logits_soft_cap,
        slopes=None if tensors.alibi_slopes is None else tensors.alibi_slopes.cpu().double(),
        sinks=None if tensors.sinks is None else tensors.sinks.cpu().double(),
        kv_heads=torch.arange(spec.num_heads) // group,
        k_scale=scales_of(tensors.k_scale, spec),
        v_scale=scales_of(tensors.v_scale, spec),
        spans=list if spec.mm_prefix else None,
        sparse=spec.sparse,
        head_size_v=spec.head_size_v if spec.mla is None else spec.mla.v_head_dim,
        weights=None if spec.mla is None else LatentWeights(*latent_weights(spec, tensors)),
    )


def requests_of(batch: Batch) -> list[RequestContents]:
    """The batch's requests, with zeros for pages in the null block, and with latents expanded."""
    found: list[RequestContents] = []
    start = 0
    for row, parts in enumerate(zip(batch.queries, batch.keys, batch.values, batch.seq_lens, strict=True)):
        query, key, value = (part.detach().cpu().double() for part in parts[:3])
        written = key.shape[0] if batch.spec.attn_type == "encoder_decoder" else query.shape[0]
        slots, table, size = None, None, 0
        if batch.kv_cache is not None and key.shape[0]:
            size = batch.spec.block_size or batch.kv_cache.shape[-3 if batch.spec.mla is None else 1]
            table = batch.common.block_table_tensor[row].cpu().long()
            pages = table[torch.arange(key.shape[0]) // size]
            slots = pages * size + torch.arange(key.shape[0]) % size
            freed = (pages == 0)[:, None, None]
            key, value = key.masked_fill(freed, 0.0), value.masked_fill(freed, 0.0)
        latent = None
        if batch.spec.mla is not None:
            latent = key[:, 0]
            key, value = expanded_latents(batch.spec, key, batch.tensors)
        spans = batch.spans[row] if batch.spans else ()
        rows = slice(start, start := start + query.shape[0])
        chosen = _choose(batch, rows)
        found.append(
            RequestContents(query, key, value, parts[3], written, spans, chosen, slots, table, size, latent)
        )
    return found


def _choose(batch: Batch, rows: slice) -> torch.Tensor | None:
    """The positions of single tokens that the step selects for some rows, int64 `[n, K]`."""
    sparse, selection = batch.spec.sparse, batch.common.selection
    if sparse is None or selection is None:
        return None
    chosen = selection.positions[rows].cpu().long()
    places = chosen[:, :, None] * sparse.block + torch.arange(sparse.block)
    return places.masked_fill(chosen[:, :, None] < 0, -1).flatten(1)
