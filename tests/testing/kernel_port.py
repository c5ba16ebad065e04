"""A kernel with tiles of keys and an online softmax, as ports have it; wrong backends replace one step of it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch

from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.ops.checks import check_spans_given
from attnplug.ops.reach import Reach
from attnplug.testing.oracle import chosen_keys

__all__ = ["KernelImpl", "Span"]


@dataclasses.dataclass
class Span:
    """One request of a step: its rows, its keys' positions `held [m]` and its queries' positions `at [n]`."""

    request: int
    rows: slice
    at: torch.Tensor
    held: torch.Tensor
    meta: Any
    wants_lse: bool

    @property
    def is_decode(self) -> bool:
        """Whether it has one new token."""
        return self.at.shape[0] == 1


class KernelImpl(TorchImpl):
    """TORCH checks calls, writes pages and finds keys; the rest is one tiled kernel in float32."""

    tile = 32

    def _attend_call(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        attn_metadata: Any,
        output: torch.Tensor,
        output_lse: torch.Tensor | None,
        use_sinks: bool,
    ) -> None:
        meta, spec = attn_metadata, self.spec
        check_spans_given(meta.spans is not None, spec)
        Reach.of(spec, meta.causal)  # refuses a step that is not causal for a causal layer
        if spec.sparse is not None:
            # The real path checks the indexer's values; its numbers are replaced below.
            super()._attend_call(layer, query, key, value, kv_cache, meta, output, output_lse, use_sinks)
        source = self._source(key, value, kv_cache, meta)
        scales = self._scales(layer, source.k.dtype)
        group = spec.num_heads // spec.num_kv_heads
        sinks = self.tensors.sinks if use_sinks else None
        for request in np.flatnonzero(meta.query_lens).tolist():
            start, stop = meta.query_starts[request : request + 2].tolist()
            first, end = int(source.first[request]), int(source.end[request])
            keys, values = source.of_request(request, first, end)
            at = torch.arange(stop - start) + int(meta.seq_lens[request]) - (stop - start)
            span = Span(
                request, slice(start, stop), at, torch.arange(first, end), meta, output_lse is not None
            )
            wide = [each.float().repeat_interleave(group, 0) for each in (keys, values)]
            out, lse = self.one(query[start:stop].float().transpose(0, 1), *wide, scales, sinks, span)
            output[start:stop] = out.transpose(0, 1).to(output.dtype)
            if output_lse is not None:
                output_lse[start:stop] = lse.T

    def one(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scales: tuple[float, float],
        sinks: torch.Tensor | None,
        span: Span,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output `[H, n, Dv]` and LSE `[H, n]` of one request, from `[H, n, D]` and `[H, m, ...]`."""
        logits = self.logits(query @ keys.mT * (self.spec.scale * scales[0]), span)
        logits = logits.masked_fill(~self.seen(span), -math.inf)
        return self.weigh(logits, values * scales[1], sinks, span)

    def logits(self, scaled: torch.Tensor, span: Span) -> torch.Tensor:
        """Soft cap and ALiBi."""
        cap, slopes = self.spec.logits_soft_cap, self.tensors.alibi_slopes
        if cap is not None:
            scaled = cap * (scaled / cap).tanh()
        if slopes is not None:
            scaled = scaled - slopes[:, None, None] * self.distance(span)
        return scaled

    def distance(self, span: Span) -> torch.Tensor:
        """ALiBi's distances `[n, m]`."""
        return (span.held - span.at[:, None]).abs()

    def window(self, span: Span) -> torch.Tensor:
        """The keys within the window and the chunk."""
        left, right = (side if side >= 0 else math.inf for side in self.spec.window)
        right = math.inf if self.spec.causal else right
        at, held = span.at[:, None], span.held
        seen = (at - held <= left) & (held - at <= right)
        if self.spec.chunk_size is not None:
            seen &= held // self.spec.chunk_size == at // self.spec.chunk_size
        return seen

    def causal(self, span: Span) -> torch.Tensor:
        """The keys up to the query."""
        return (span.held <= span.at[:, None]) | (not (self.spec.causal or span.meta.causal))

    def spans(self, span: Span) -> torch.Tensor:
        """The keys of the query's multimodal span."""
        spans = torch.from_numpy(span.meta.spans[span.rows])
        return (span.held >= spans[:, :1]) & (span.held < spans[:, 1:])

    def seen(self, span: Span) -> torch.Tensor:
        """The keys that each query sees, bool `[n, m]`."""
        seen = self.window(span) & self.causal(span)
        if self.spec.mm_prefix:
            seen = seen | self.spans(span)
        if self.spec.sparse is not None:
            seen = seen & self.chosen(span)
        return seen

    def chosen(self, span: Span) -> torch.Tensor:
        """The keys that the indexer picked."""
        return chosen_keys(self.spec, span.meta.selection[span.rows], span.held)

    def weigh(
        self, logits: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None, span: Span
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Online softmax, then the sinks."""
        out, lse = self.online(logits, values)
        if sinks is None:
            return out, lse
        both = torch.logaddexp(lse, sinks[:, None])
        return out * (lse - both).nan_to_num(neginf=-math.inf, nan=-math.inf).exp()[..., None], both

    def online(self, logits: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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
