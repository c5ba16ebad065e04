"""Attention request by request in float64, every step a method: a wrong backend overrides one of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.backends.torch_native.metadata import TorchMetadata
from attnplug.ops.checks import check_spans_given
from attnplug.testing.oracle import chosen_keys

__all__ = ["PlainImpl"]


class PlainImpl(TorchImpl):
    """TORCH without its kernels: only how K and V are stored and found is theirs."""

    @torch.no_grad()
    def attend(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        attn_metadata: TorchMetadata,
        output: torch.Tensor,
        *,
        output_lse: torch.Tensor | None = None,
        use_sinks: bool = True,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        check_spans_given(attn_metadata.spans is not None, self.spec)
        source = self._source(key, value, kv_cache, attn_metadata)
        k_scale, v_scale = self.read_scales()
        lses = torch.empty(query.shape[0], self.spec.num_heads, dtype=torch.float64)
        for request in np.flatnonzero(attn_metadata.query_lens).tolist():
            start, stop = attn_metadata.query_starts[request : request + 2].tolist()
            first, end = int(source.first[request]), int(source.end[request])
            keys, values = source.of_request(request, first, end)
            at = self.positions(stop - start, int(attn_metadata.seq_lens[request]))
            held = torch.arange(first, end)
            heads = self.kv_heads()
            raw = query[start:stop].double().transpose(0, 1) @ (keys.double() * k_scale)[heads].mT
            seen = self.seen(at[:, None], held[None, :], causal=self.spec.causal or attn_metadata.causal)
            if self.spec.mm_prefix:
                seen |= self.together(
                    torch.from_numpy(attn_metadata.spans[start:stop]), at[:, None], held[None, :]
                )
            if self.spec.sparse is not None:
                seen &= chosen_keys(self.spec, attn_metadata.selection[start:stop], held)
            scores = self.score(raw, at[:, None], held[None, :], seen)
            sinks = self.sinks() if use_sinks else torch.full_like(self.sinks(), -math.inf)
            sinks = sinks[:, None, None].expand(-1, stop - start, 1)
            out, lse = self.weigh(scores, (values.double() * v_scale)[heads], sinks)
            output[start:stop] = out.transpose(0, 1).to(output.dtype)
            lses[start:stop] = lse[:, :, 0].T
        if output_lse is not None:
            self.write_lse(lses[: attn_metadata.num_actual_tokens], output_lse)
        return output

    def read_scales(self) -> tuple[float, float]:
        """What stored keys and values are multiplied with."""
        return self._own_scales if self.spec.has_quantized_kv_cache else (1.0, 1.0)

    def kv_heads(self) -> torch.Tensor:
        """The KV head of each query head."""
        return torch.arange(self.spec.num_kv_heads).repeat_interleave(
            self.spec.num_heads // self.spec.num_kv_heads
        )

    def positions(self, new: int, seq_len: int) -> torch.Tensor:
        """Where the queries of a request stand."""
        return torch.arange(seq_len - new, seq_len)

    def seen(self, at: torch.Tensor, held: torch.Tensor, *, causal: bool) -> torch.Tensor:
        """Which keys a query sees."""
        left, right = (side if side >= 0 else math.inf for side in self.spec.window)
        if self.spec.causal:
            right = math.inf  # it says no more than that keys after the query are not seen
        seen = (at - held <= left) & (held - at <= right)
        if causal:
            seen &= held <= at
        if self.spec.chunk_size is not None:
            seen &= held // self.spec.chunk_size == at // self.spec.chunk_size
        return seen

    def together(self, spans: torch.Tensor, at: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        """Which keys are in the span of a query; `spans [n, 2]`."""
        return (held >= spans[:, :1]) & (held < spans[:, 1:])

    def score(
        self, raw: torch.Tensor, at: torch.Tensor, held: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:
        """Masked logits of raw products."""
        return self.mask(self.bias(self.cap(raw * self.spec.scale), at, held), seen)

    def cap(self, logits: torch.Tensor) -> torch.Tensor:
        """The soft cap."""
        limit = self.spec.logits_soft_cap
        return logits if limit is None else limit * (logits / limit).tanh()

    def bias(self, logits: torch.Tensor, at: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        """ALiBi."""
        slopes = self.tensors.alibi_slopes
        return logits if slopes is None else logits - slopes[:, None, None] * (held - at).abs()

    def mask(self, logits: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """-inf where a key is not seen."""
        return logits.masked_fill(~seen, -math.inf)

    def sinks(self) -> torch.Tensor:
        """One logit per head; -inf is none."""
        sinks = self.tensors.sinks
        return torch.full((self.spec.num_heads,), -math.inf).double() if sinks is None else sinks.double()

    def weigh(
        self, scores: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output `[H, n, Dv]` and LSE `[H, n, 1]`."""
        lse = torch.cat([scores, sinks], 2).logsumexp(2, keepdim=True)
        return (scores - lse.clamp_min(-1e300)).exp() @ values, lse

    def write_lse(self, lse: torch.Tensor, output_lse: torch.Tensor) -> None:
        """Write the LSE `[T, H]`."""
        output_lse[: lse.shape[0]] = lse
