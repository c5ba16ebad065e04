"""Plain attention, request by request: each step of it is a method that wrong and unusual backends replace."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.ops.checks import check_spans_given
from attnplug.ops.reach import Reach
from attnplug.testing.oracle import chosen_keys

__all__ = ["KernelImpl", "PlainImpl", "Span"]


@dataclasses.dataclass
class Span:
    """One request of a step: its rows, its keys' positions `held [m]` and its queries' positions `at [n]`."""

    request: int
    rows: slice
    at: Tensor
    held: Tensor
    meta: Any

    @property
    def is_decode(self) -> bool:
        """Whether it has one new token."""
        return self.at.shape[0] == 1


class PlainImpl(TorchImpl):
    """TORCH checks calls, writes pages and finds keys; the rest is a mask and a softmax in float64."""

    wide = torch.float64

    def _attend_call(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_lse, use_sinks
    ) -> None:
        meta, spec = attn_metadata, self.spec
        check_spans_given(meta.spans is not None, spec)
        Reach.of(spec, meta.causal)  # refuses a step that is not causal for a causal layer
        if spec.sparse is not None:
            # The real path checks the indexer's values; its numbers are replaced below.
            super()._attend_call(layer, query, key, value, kv_cache, meta, output, output_lse, use_sinks)
        source, heads = self._decoded(layer, self._source(key, value, kv_cache, meta)), self.kv_heads()
        scales = tuple(self.of_heads(each, heads) for each in self.read_scales(layer, source.k.dtype))
        sinks = self.sinks(use_sinks)
        lses = torch.empty(query.shape[0], spec.num_heads, dtype=self.wide)
        for request in self.in_order(np.flatnonzero(meta.query_lens).tolist()):
            start, stop = meta.query_starts[request : request + 2].tolist()
            first, end = int(source.first[request]), int(source.end[request])
            wide = [each.to(self.wide)[heads] for each in source.of_request(request, first, end)]
            at = self.positions(stop - start, int(meta.seq_lens[request]))
            span = Span(request, slice(start, stop), at, torch.arange(first, end), meta)
            out, lse = self.one(query[start:stop].to(self.wide).transpose(0, 1), *wide, scales, sinks, span)
            output[start:stop] = out.transpose(0, 1).to(output.dtype)
            lses[start:stop] = lse.T
        if output_lse is not None:
            self.write_lse(lses[: meta.num_actual_tokens], output_lse)

    def in_order(self, requests: list[int]) -> list[int]:
        """The order in which requests are attended."""
        return requests

    def read_scales(self, layer: Any, stored: torch.dtype) -> tuple[float, float]:
        """What stored keys and values are multiplied with."""
        return self._scales(layer, stored)

    def of_heads(self, scale: Any, heads: Tensor) -> Any:
        """A number, or those of KV heads as `[H, 1, 1]`."""
        return torch.tensor(scale, dtype=self.wide)[heads, None, None] if isinstance(scale, tuple) else scale

    def kv_heads(self) -> Tensor:
        """The KV head of each query head."""
        group = self.spec.num_heads // self.spec.num_kv_heads
        return torch.arange(self.spec.num_kv_heads).repeat_interleave(group)

    def positions(self, new: int, seq_len: int) -> Tensor:
        """Where the queries of a request stand."""
        return torch.arange(seq_len - new, seq_len)

    def sinks(self, use_sinks: bool) -> Tensor | None:
        """One logit per head; -inf is none."""
        found = self.tensors.sinks if use_sinks else None
        return torch.full((self.spec.num_heads,), -math.inf) if found is None else found.to(self.wide)

    def one(self, query, keys, values, scales, sinks, span: Span) -> tuple[Tensor, Tensor]:
        """Output `[H, n, Dv]` and LSE `[H, n]` of one request, from `[H, n, D]` and `[H, m, ...]`."""
        scores = self.score(self.products(query, keys, scales[0]), span)
        return self.weigh(scores, values * scales[1], sinks, span)

    def products(self, query: Tensor, keys: Tensor, k_scale: float) -> Tensor:
        """Scaled logits `[H, n, m]`."""
        return query @ (keys * k_scale).mT * self.spec.scale

    def score(self, scaled: Tensor, span: Span) -> Tensor:
        """Masked logits."""
        return self.mask(self.logits(scaled, span), self.seen(span))

    def logits(self, scaled: Tensor, span: Span) -> Tensor:
        """Soft cap and ALiBi."""
        return self.bias(self.cap(scaled), span)

    def cap(self, logits: Tensor) -> Tensor:
        """The soft cap."""
        limit = self.spec.logits_soft_cap
        return logits if limit is None else limit * (logits / limit).tanh()

    def bias(self, logits: Tensor, span: Span) -> Tensor:
        """ALiBi."""
        slopes = self.tensors.alibi_slopes
        return logits if slopes is None else logits - slopes[:, None, None] * self.distance(span)

    def distance(self, span: Span) -> Tensor:
        """ALiBi's distances `[n, m]`."""
        return (span.held - span.at[:, None]).abs()

    def mask(self, logits: Tensor, seen: Tensor) -> Tensor:
        """-inf where a key is not seen."""
        return logits.masked_fill(~seen, -math.inf)

    def seen(self, span: Span) -> Tensor:
        """The keys that each query sees, bool `[n, m]`."""
        seen = self.window(span) & self.causal(span)
        if self.spec.mm_prefix:
            seen = seen | self.spans(span)
        if self.spec.sparse is not None:
            seen = seen & self.chosen(span)
        return seen

    def window(self, span: Span) -> Tensor:
        """The keys within the window and the chunk."""
        left, right = (side if side >= 0 else math.inf for side in self.spec.window)
        right = math.inf if self.spec.causal else right
        at, held = span.at[:, None], span.held
        seen = (at - held <= left) & (held - at <= right)
        if self.spec.chunk_size is not None:
            seen &= held // self.spec.chunk_size == at // self.spec.chunk_size
        return seen

    def causal(self, span: Span) -> Tensor:
        """The keys up to the query."""
        return (span.held <= span.at[:, None]) | (not (self.spec.causal or span.meta.causal))

    def spans(self, span: Span) -> Tensor:
        """The keys of the query's multimodal span."""
        spans = torch.from_numpy(span.meta.spans[span.rows])
        return (span.held >= spans[:, :1]) & (span.held < spans[:, 1:])

    def chosen(self, span: Span) -> Tensor:
        """The keys that the indexer picked."""
        return chosen_keys(self.spec, span.meta.selection[span.rows], span.held)

    def weigh(self, logits: Tensor, values: Tensor, sinks: Any, span: Span) -> tuple[Tensor, Tensor]:
        """Output `[H, n, Dv]` and LSE `[H, n]` of masked logits `[H, n, m]` and values `[H, m, Dv]`."""
        lse = torch.logaddexp(logits.logsumexp(2), sinks[:, None])
        return (logits - lse.nan_to_num(neginf=0.0)[..., None]).exp() @ values, lse

    def write_lse(self, lse: Tensor, output_lse: Tensor) -> None:
        """Write the LSE `[T, H]`."""
        output_lse[: lse.shape[0]] = lse


class KernelImpl(PlainImpl):
    """A kernel in float32 with tiles of keys and an online softmax, as ports have it."""

    wide, tile = torch.float32, 32

    def sinks(self, use_sinks: bool) -> Tensor | None:
        return self.tensors.sinks if use_sinks else None

    def products(self, query: Tensor, keys: Tensor, k_scale: float) -> Tensor:
        return query @ keys.mT * (self.spec.scale * k_scale)

    def weigh(self, logits: Tensor, values: Tensor, sinks: Any, span: Span) -> tuple[Tensor, Tensor]:
        """Online softmax, then the sinks."""
        out, lse = self.online(logits, values)
        if sinks is None:
            return out, lse
        both = torch.logaddexp(lse, sinks[:, None])
        return out * (lse - both).nan_to_num(neginf=-math.inf, nan=-math.inf).exp()[..., None], both

    def online(self, logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Output and LSE over tiles of keys."""
        most = logits.new_full((*logits.shape[:2], 1), -math.inf)
        total, out = torch.zeros_like(most), logits.new_zeros(*logits.shape[:2], values.shape[2])
        for start, stop in self.tiles(logits.shape[2]):
            part = logits[..., start:stop]
            higher = torch.maximum(most, part.amax(2, keepdim=True))
            safe = higher.nan_to_num(neginf=0.0)
            shrink, weights = (most - safe).exp(), (part - safe).exp()
            total = total * shrink + weights.sum(2, keepdim=True)
            out = out * shrink + weights @ values[:, start:stop]
            most = higher
        lse = (most + total.log())[..., 0]
        return out / torch.where(total == 0, 1.0, total), lse

    def tiles(self, keys: int) -> list[tuple[int, int]]:
        """Where tiles of keys begin and end."""
        return [(start, min(start + self.tile, keys)) for start in range(0, keys, self.tile)]
