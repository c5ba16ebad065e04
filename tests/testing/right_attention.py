"""Correct attention computed in unusual ways: each class replaces one step of a plain float32 implementation."""

from __future__ import annotations

import math

import torch
from plain_attention import PlainImpl

__all__ = ["RIGHT_IMPLS", "RightImpl"]


class RightImpl(PlainImpl):
    """Float32 inside."""

    wide = torch.float32


class InFloat64(RightImpl):
    """Float64 inside."""

    wide = torch.float64


class Reversed(RightImpl):
    """The last request first."""

    def in_order(self, requests: list[int]) -> list[int]:
        return requests[::-1]


class Base2(RightImpl):
    """A softmax in base 2, whose LSE is converted."""

    def weigh(self, logits, values, sinks, span):
        terms = torch.cat([logits, sinks[:, None, None].expand(-1, logits.shape[1], 1)], 2) * math.log2(
            math.e
        )
        most = terms.amax(2, keepdim=True).nan_to_num(neginf=0.0)
        weights = (terms - most).exp2()
        total = weights.sum(2, keepdim=True)
        lse = ((most + total.log2()) * math.log(2))[..., 0]
        return weights[..., :-1] @ values / total.clamp_min(torch.finfo(total.dtype).tiny), lse


class Online(RightImpl):
    """An online softmax over tiles of 16 keys, whose weights are rounded to the layer's dtype."""

    tile = 16

    def weigh(self, logits, values, sinks, span):
        rows, dtype = logits.shape[:2], getattr(torch, self.spec.dtype)
        most, total = logits.new_full((*rows, 1), -math.inf), logits.new_zeros(*rows, 1)
        out = logits.new_zeros(*rows, values.shape[2])
        for start in range(0, logits.shape[2], self.tile):
            tile = logits[..., start : start + self.tile]
            higher = torch.maximum(most, tile.amax(2, keepdim=True))
            shrink = (most - higher).nan_to_num(nan=0.0, neginf=-math.inf).exp()
            weights = (tile - higher.nan_to_num(neginf=0.0)).exp()
            total = total * shrink + weights.sum(2, keepdim=True)
            out = out * shrink + weights.to(dtype).to(self.wide) @ values[:, start : start + self.tile]
            most = higher
        lse = (most + total.log())[..., 0]
        with_sinks = torch.logaddexp(lse, sinks[:, None])
        share = (lse - with_sinks).nan_to_num(nan=0.0, neginf=-math.inf).exp()
        return out / total.clamp_min(torch.finfo(total.dtype).tiny) * share[..., None], with_sinks


class HalfWeights(RightImpl):
    """Weights that are normalised and then rounded to the layer's dtype."""

    def weigh(self, logits, values, sinks, span):
        lse = torch.logaddexp(logits.logsumexp(2), sinks[:, None])
        weights = (logits - lse.nan_to_num(neginf=0.0)[..., None]).exp()
        return weights.to(getattr(torch, self.spec.dtype)).to(self.wide) @ values, lse


class SplitKeys(RightImpl):
    """Three parts of the keys, merged by their LSE; the sinks are in the last one."""

    def weigh(self, logits, values, sinks, span):
        size = max(-(-logits.shape[2] // 3), 1)
        none = torch.full_like(sinks, -math.inf)
        parts = [
            super(SplitKeys, self).weigh(logits[..., at : at + size], values[:, at : at + size], given, span)
            for at, given in ((0, none), (size, none), (2 * size, sinks))
        ]
        lses = torch.stack([lse for _, lse in parts])
        lse = lses.logsumexp(0)
        shares = (lses - lse.nan_to_num(neginf=0.0)).exp()
        return sum(out * share[..., None] for (out, _), share in zip(parts, shares, strict=True)), lse


class RowByRow(RightImpl):
    """Each query on its own."""

    def weigh(self, logits, values, sinks, span):
        rows = [super(RowByRow, self).weigh(row[:, None], values, sinks, span) for row in logits.unbind(1)]
        outs, lses = zip(*rows, strict=True)
        return torch.cat(outs, 1), torch.cat(lses, 1)


class Padded(RightImpl):
    """Rows padded to 16, keys to 64 and head sizes to 128."""

    def products(self, query: torch.Tensor, keys: torch.Tensor, k_scale: float) -> torch.Tensor:
        more = -query.shape[2] % 128
        padded = (torch.nn.functional.pad(each, (0, more)) for each in (query, keys))
        return super().products(*padded, k_scale)

    def weigh(self, logits, values, sinks, span):
        rows, keys = logits.shape[1:]
        wide = torch.nn.functional.pad(logits, (0, -keys % 64, 0, -rows % 16), value=-math.inf)
        out, lse = super().weigh(wide, torch.nn.functional.pad(values, (0, 0, 0, -keys % 64)), sinks, span)
        return out[:, :rows], lse[:, :rows]


class ScaledQuery(RightImpl):
    """The scale folded into the query, which is rounded to its own dtype again."""

    def products(self, query: torch.Tensor, keys: torch.Tensor, k_scale: float) -> torch.Tensor:
        scaled = (query.float() * self.spec.scale).to(getattr(torch, self.spec.dtype))
        return scaled.to(self.wide) @ keys.to(self.wide).mT * k_scale


class ScaledKeys(RightImpl):
    """The scale folded into the keys, which are rounded to the layer's dtype."""

    def products(self, query: torch.Tensor, keys: torch.Tensor, k_scale: float) -> torch.Tensor:
        scaled = (keys.float() * (self.spec.scale * k_scale)).to(getattr(torch, self.spec.dtype))
        return query.to(self.wide) @ scaled.to(self.wide).mT


class ScaledForBase2(Base2):
    """The scale and the factor of base 2 folded into the query, which is rounded to its own dtype again."""

    def products(self, query: torch.Tensor, keys: torch.Tensor, k_scale: float) -> torch.Tensor:
        factor = self.spec.scale * math.log2(math.e)
        scaled = (query.float() * factor).to(getattr(torch, self.spec.dtype))
        return scaled.to(self.wide) @ keys.to(self.wide).mT * (k_scale / math.log2(math.e))


class RoughTanh(RightImpl):
    """In half precision the tanh of a soft cap has an error of 2**-11, as the hardware's has."""

    def tanh(self, logits: torch.Tensor) -> torch.Tensor:
        exact = logits.tanh()
        return exact if self.spec.dtype == "float32" else exact.half().to(self.wide)


class OwnBuffer(RightImpl):
    """The output and the LSE are computed in a workspace that grows with the steps, and then copied."""

    _outputs = _lses = torch.empty(0)

    def _attend_call(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_lse, use_sinks
    ) -> None:
        tokens, heads, size = attn_metadata.num_actual_tokens, self.spec.num_heads, self.spec.head_size_v
        if self._outputs.shape[0] < max(tokens, 1):
            self._outputs = torch.empty(2 * tokens + 1, heads, size, dtype=torch.float32)
            self._lses = torch.empty(2 * tokens + 1, heads, dtype=torch.float32)
        own, lse = self._outputs, self._lses
        super()._attend_call(layer, query, key, value, kv_cache, attn_metadata, own, lse, use_sinks)
        output[:tokens].copy_(own[:tokens])
        if output_lse is not None:
            output_lse[:tokens].copy_(lse[:tokens])


class Flushed(RightImpl):
    """Numbers below the smallest normal one of float32 are zero."""

    def weigh(self, logits, values, sinks, span):
        out, lse = super().weigh(logits, values, sinks, span)
        return out.where(out.abs() >= torch.finfo(torch.float32).smallest_normal, 0.0), lse


RIGHT_IMPLS: tuple[type[RightImpl], ...] = (
    *(RightImpl, InFloat64, Reversed, Base2, Online, HalfWeights, SplitKeys, RowByRow, Padded),
    *(ScaledQuery, ScaledKeys, ScaledForBase2, RoughTanh, OwnBuffer, Flushed),
)
