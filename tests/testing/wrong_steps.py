"""One step of attention that is wrong: masks, scores, weights, scales or how the LSE is written."""

from __future__ import annotations

import math

import torch
from plain_attention import PlainImpl
from torch import Tensor

__all__ = [
    "AddsNoise",
    "AlignsAtTheStart",
    "BiasesByKeyPosition",
    "CapsAfterAlibi",
    "CapsAfterTheMask",
    "DividesZeroByZero",
    "ForgetsTheSinkInTheLse",
    "GivesTheSinkAValue",
    "IgnoresCausality",
    "IgnoresStoredScales",
    "InterleavesHeads",
    "IsAlwaysCausal",
    "MergesTwoSinks",
    "MissesTheNewestToken",
    "ScalesAfterTheCap",
    "ScalesAlibi",
    "SwapsStoredScales",
    "TakesSinksInBaseTwo",
    "WritesBaseTwo",
    "WritesHeadsFirst",
    "WritesPlusInfinity",
]


class IgnoresCausality(PlainImpl):
    def seen(self, at: Tensor, held: Tensor, *, causal: bool) -> Tensor:
        return super().seen(at, held, causal=False)


class IsAlwaysCausal(PlainImpl):
    def seen(self, at: Tensor, held: Tensor, *, causal: bool) -> Tensor:
        return super().seen(at, held, causal=True)


class AlignsAtTheStart(PlainImpl):
    def positions(self, new: int, seq_len: int) -> Tensor:
        return torch.arange(new)


class MissesTheNewestToken(PlainImpl):
    def positions(self, new: int, seq_len: int) -> Tensor:
        return torch.arange(seq_len - new, seq_len) - 1


class CapsAfterTheMask(PlainImpl):
    def score(self, raw: Tensor, at: Tensor, held: Tensor, seen: Tensor) -> Tensor:
        return self.cap(self.mask(self.bias(raw * self.spec.scale, at, held), seen))


class CapsAfterAlibi(PlainImpl):
    def score(self, raw: Tensor, at: Tensor, held: Tensor, seen: Tensor) -> Tensor:
        return self.mask(self.cap(self.bias(raw * self.spec.scale, at, held)), seen)


class ScalesAfterTheCap(PlainImpl):
    def score(self, raw: Tensor, at: Tensor, held: Tensor, seen: Tensor) -> Tensor:
        return self.mask(self.bias(self.cap(raw) * self.spec.scale, at, held), seen)


class ScalesAlibi(PlainImpl):
    def score(self, raw: Tensor, at: Tensor, held: Tensor, seen: Tensor) -> Tensor:
        return self.mask(self.cap(self.bias(raw, at, held) * self.spec.scale), seen)


class BiasesByKeyPosition(PlainImpl):
    """As FlashAttention 2 does for causal layers, where it shifts nothing but the LSE."""

    def bias(self, logits: Tensor, at: Tensor, held: Tensor) -> Tensor:
        slopes = self.tensors.alibi_slopes
        return logits if slopes is None else logits + slopes[:, None, None] * held


class InterleavesHeads(PlainImpl):
    def kv_heads(self) -> Tensor:
        return torch.arange(self.spec.num_heads) % self.spec.num_kv_heads


class GivesTheSinkAValue(PlainImpl):
    """The sink's weight goes to the first key that is seen, as if its logit were that key's."""

    def weigh(self, scores: Tensor, values: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        if scores.shape[2] == 0:
            return super().weigh(scores, values, sinks)
        first = (scores > -math.inf).int().argmax(2, keepdim=True)
        both = torch.logaddexp(scores.gather(2, first), sinks)
        return super().weigh(scores.scatter(2, first, both), values, torch.full_like(sinks, -math.inf))


class MergesTwoSinks(PlainImpl):
    """Two halves of the keys, each with the sink in its denominator, merged by their LSEs."""

    def weigh(self, scores: Tensor, values: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        half = scores.shape[2] // 2
        one, lse = super().weigh(scores[:, :, :half], values[:, :half], sinks)
        two, other = super().weigh(scores[:, :, half:], values[:, half:], sinks)
        merged = torch.logaddexp(lse, other)
        floor = merged.clamp_min(-1e300)
        return one * (lse - floor).exp() + two * (other - floor).exp(), merged


class TakesSinksInBaseTwo(PlainImpl):
    def sinks(self) -> Tensor:
        return super().sinks() * math.log(2)


class DividesZeroByZero(PlainImpl):
    def weigh(self, scores: Tensor, values: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        total = torch.cat([scores, sinks], 2).exp().sum(2, keepdim=True)
        return scores.exp() @ values / total, total.log()


class IgnoresStoredScales(PlainImpl):
    def read_scales(self) -> tuple[float, float]:
        return 1.0, 1.0


class SwapsStoredScales(PlainImpl):
    def read_scales(self) -> tuple[float, float]:
        k_scale, v_scale = super().read_scales()
        return v_scale, k_scale


class WritesBaseTwo(PlainImpl):
    def write_lse(self, lse: Tensor, output_lse: Tensor) -> None:
        output_lse[: lse.shape[0]] = lse * math.log2(math.e)


class WritesHeadsFirst(PlainImpl):
    def write_lse(self, lse: Tensor, output_lse: Tensor) -> None:
        output_lse.view(-1)[: lse.numel()] = lse.T.flatten()


class WritesPlusInfinity(PlainImpl):
    def write_lse(self, lse: Tensor, output_lse: Tensor) -> None:
        output_lse[: lse.shape[0]] = torch.where(lse == -math.inf, math.inf, lse)


class ForgetsTheSinkInTheLse(PlainImpl):
    def weigh(self, scores: Tensor, values: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        return super().weigh(scores, values, sinks)[0], scores.logsumexp(2, keepdim=True)


class AddsNoise(PlainImpl):
    def cap(self, logits: Tensor) -> Tensor:
        noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
        return super().cap(logits) + 0.1 * noise
