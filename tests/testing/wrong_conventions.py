"""Backends that follow another convention of attention, each with the layer that shows it and the mistake's name."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from plain_attention import PlainImpl

from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core import ContextParallel
from attnplug.core.batch import get_dcp_local_seq_lens

__all__ = ["CONVENTIONS", "RANK_MISTAKES", "Convention"]


class Convention(NamedTuple):
    """An impl, the fields of a layer and the options of its batch, and the name that its failure must have."""

    impl: type[TorchImpl]
    says: str
    fields: dict[str, Any]
    options: dict[str, Any]


class SlopePerKVHead(PlainImpl):
    def bias(self, logits: torch.Tensor, at: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        slopes = self.tensors.alibi_slopes
        assert slopes is not None
        return logits - slopes[self.kv_heads()][:, None, None] * (held - at).abs()


class LocalAlibi(PlainImpl):
    def bias(self, logits: torch.Tensor, at: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        return super().bias(logits, at - at[0], held)


class UsualSlopes(PlainImpl):
    def bias(self, logits: torch.Tensor, at: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        heads = len(logits)
        slopes = torch.tensor([2 ** (-8 * (head + 1) / heads) for head in range(heads)])
        return logits - slopes[:, None, None].double() * (held - at).abs()


class SinkPerKVHead(PlainImpl):
    def sinks(self) -> torch.Tensor:
        return super().sinks()[self.kv_heads()]


class SymmetricWindow(PlainImpl):
    def seen(self, at: torch.Tensor, held: torch.Tensor, *, causal: bool) -> torch.Tensor:
        return (at - held).abs() <= self.spec.window[0]


class WindowOfTheLastQuery(PlainImpl):
    def seen(self, at: torch.Tensor, held: torch.Tensor, *, causal: bool) -> torch.Tensor:
        return (held <= at) & (at.max() - held <= self.spec.window[0])


class WindowOfTheFirstQuery(PlainImpl):
    def seen(self, at: torch.Tensor, held: torch.Tensor, *, causal: bool) -> torch.Tensor:
        return (held <= at) & (at.min() - held <= self.spec.window[0])


class ChunksOfNewTokens(PlainImpl):
    def seen(self, at: torch.Tensor, held: torch.Tensor, *, causal: bool) -> torch.Tensor:
        size = self.spec.chunk_size
        assert size is not None
        first = at[0]
        return (held <= at) & ((held - first) // size == (at - first) // size)


class CapWithoutItsFactor(PlainImpl):
    def cap(self, logits: torch.Tensor) -> torch.Tensor:
        return super().cap(logits) / (self.spec.logits_soft_cap or 1.0)


class CapWithoutItsDivisor(PlainImpl):
    def cap(self, logits: torch.Tensor) -> torch.Tensor:
        return (self.spec.logits_soft_cap or 1.0) * logits.tanh()


class ClampsForACap(PlainImpl):
    def cap(self, logits: torch.Tensor) -> torch.Tensor:
        limit = self.spec.logits_soft_cap or math.inf
        return torch.clamp(logits, -limit, limit)


class MasksTheWeights(PlainImpl):
    """Multiplies the weights of a softmax over all keys with the mask."""

    def mask(self, logits: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        self._seen = seen
        return logits

    def weigh(
        self, scores: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lse = scores.logsumexp(2, keepdim=True)
        return ((scores - lse).exp() * self._seen) @ values, lse


class MissesTheLastKey(PlainImpl):
    def seen(self, at: torch.Tensor, held: torch.Tensor, *, causal: bool) -> torch.Tensor:
        return super().seen(at, held, causal=causal) & (held < held.max())


class MissesTheFirstKey(PlainImpl):
    def seen(self, at: torch.Tensor, held: torch.Tensor, *, causal: bool) -> torch.Tensor:
        return super().seen(at, held, causal=causal) & (held > 0)


class ReadsBeforeItWrites(PlainImpl):
    def seen(self, at: torch.Tensor, held: torch.Tensor, *, causal: bool) -> torch.Tensor:
        return super().seen(at, held, causal=causal) & (held < at[0])


class ForgetsEarlierSteps(PlainImpl):
    def seen(self, at: torch.Tensor, held: torch.Tensor, *, causal: bool) -> torch.Tensor:
        return super().seen(at, held, causal=causal) & (held >= at[0])


class ReadsWholeBlocks(PlainImpl):
    def seen(self, at: torch.Tensor, held: torch.Tensor, *, causal: bool) -> torch.Tensor:
        return super().seen(at, held, causal=causal) & (held < held.numel() // 16 * 16)


class FirstKVHead(PlainImpl):
    def kv_heads(self) -> torch.Tensor:
        return torch.zeros(self.spec.num_heads, dtype=torch.int64)


class SwapsKeysAndValues(PlainImpl):
    def _source(self, *given: Any) -> Any:
        source = super()._source(*given)

        class Swapped:
            first, end = source.first, source.end

            def of_request(self, *place: int) -> tuple[torch.Tensor, torch.Tensor]:
                return source.of_request(*place)[::-1]

        return Swapped()


class ScaleOfTheValues(PlainImpl):
    def score(
        self, raw: torch.Tensor, at: torch.Tensor, held: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:
        return super().score(raw * self.spec.head_size_v**-0.5 / self.spec.scale, at, held, seen)


class LseBeforeTheCap(PlainImpl):
    def cap(self, logits: torch.Tensor) -> torch.Tensor:
        self._uncapped = logits
        return super().cap(logits)

    def mask(self, logits: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        self._uncapped = super().mask(self._uncapped, seen)
        return super().mask(logits, seen)

    def weigh(
        self, scores: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().weigh(scores, values, sinks)[0], self._uncapped.logsumexp(2, keepdim=True)


class LseWithoutTheScale(PlainImpl):
    def weigh(
        self, scores: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.cat([scores / self.spec.scale, sinks], 2).logsumexp(2, keepdim=True)
        return super().weigh(scores, values, sinks)[0], lse


class SumOfExponentials(PlainImpl):
    def write_lse(self, lse: torch.Tensor, output_lse: torch.Tensor) -> None:
        super().write_lse(lse.exp(), output_lse)


class NegativeLse(PlainImpl):
    def write_lse(self, lse: torch.Tensor, output_lse: torch.Tensor) -> None:
        super().write_lse(-lse, output_lse)


class RoundedLse(PlainImpl):
    def write_lse(self, lse: torch.Tensor, output_lse: torch.Tensor) -> None:
        super().write_lse(lse.bfloat16(), output_lse)


class BaseTwoLse(PlainImpl):
    def write_lse(self, lse: torch.Tensor, output_lse: torch.Tensor) -> None:
        super().write_lse(lse / math.log(2), output_lse)


class OneScale(PlainImpl):
    def read_scales(self) -> tuple[float, float]:
        return (super().read_scales()[0],) * 2


class DividesByScales(PlainImpl):
    def read_scales(self) -> tuple[float, float]:
        k_scale, v_scale = super().read_scales()
        return 1 / k_scale, 1 / v_scale


class AlwaysCausal(PlainImpl):
    def seen(self, at: torch.Tensor, held: torch.Tensor, *, causal: bool) -> torch.Tensor:
        return super().seen(at, held, causal=True)


class ZeroForEmptyRows(PlainImpl):
    def write_lse(self, lse: torch.Tensor, output_lse: torch.Tensor) -> None:
        super().write_lse(lse.masked_fill(lse == -math.inf, 0.0), output_lse)


class SinksOnEveryRank(TorchImpl):
    def attend(self, *given: Any, use_sinks: bool = True, **options: Any) -> torch.Tensor:
        return super().attend(*given, use_sinks=True, **options)


class SharesAgain(PlainImpl):
    """Takes the lengths of its own keys for those of all ranks, and computes its share."""

    def seen(self, at: torch.Tensor, held: torch.Tensor, *, causal: bool) -> torch.Tensor:
        seen = super().seen(at, held, causal=causal)
        if self.dcp_world_size == 1:
            return seen
        own = get_dcp_local_seq_lens(torch.tensor([held.numel()]), self.dcp_world_size, self.dcp_rank)
        return seen & (held < own)


class OwnerOffByTheInterleave(TorchImpl):
    """Knows the whole length of each request, and takes single tokens for what goes round the ranks, not blocks."""

    def attend(
        self,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Any,
        output: Any,
        **asked: Any,
    ) -> Any:
        size = 16
        whole = [1, 5 * size + 3, size, 2 * size + 1, 7]
        if self.dcp_world_size == 3 and len(attn_metadata.seq_lens) == len(whole):
            place = ContextParallel(3, self.dcp_rank)
            own = [place.local_length(length) for length in whole]
            attn_metadata = dataclasses.replace(
                attn_metadata, seq_lens=np.minimum(attn_metadata.seq_lens, own)
            )
        return super().attend(layer, query, key, value, kv_cache, attn_metadata, output, **asked)


def _of(impl: type[TorchImpl], says: str, options: dict[str, Any] | None = None, **fields: Any) -> Convention:
    return Convention(impl, says, fields, options or {})


_SCALES = {"k_scale": 0.37, "v_scale": 1.9}

CONVENTIONS = [
    _of(SlopePerKVHead, "ALiBi slope per KV head", has_alibi=True),
    _of(UsualSlopes, "ALiBi slopes of the usual formula, not the layer's", has_alibi=True),
    _of(LocalAlibi, "ALiBi of positions counted from the query's first row", has_alibi=True),
    _of(SinkPerKVHead, "sink per KV head", has_sinks=True),
    _of(SymmetricWindow, "symmetric window: keys after the query are seen too", sliding_window=6),
    _of(WindowOfTheLastQuery, "window counted from the request's last token", sliding_window=6),
    _of(WindowOfTheFirstQuery, "window counted from the first new token", sliding_window=6),
    _of(ChunksOfNewTokens, "chunks counted from the first new token", chunk_size=7),
    _of(CapWithoutItsFactor, "soft cap without its factor", logits_soft_cap=2.7),
    _of(CapWithoutItsDivisor, "soft cap without its divisor", logits_soft_cap=2.7),
    _of(ClampsForACap, "soft cap taken as a clamp", logits_soft_cap=1.3),
    _of(MasksTheWeights, "mask after the softmax, not normalised again"),
    _of(MissesTheLastKey, "last key missed", causal=False),
    _of(MissesTheFirstKey, "first key missed"),
    _of(ReadsBeforeItWrites, "new tokens missed: only keys of earlier steps are read"),
    _of(ForgetsEarlierSteps, "keys of earlier steps missed: only new tokens are read"),
    _of(ReadsWholeBlocks, "keys in a partial last block missed"),
    _of(FirstKVHead, "KV head 0 for all heads"),
    _of(SwapsKeysAndValues, "K and V swapped"),
    _of(ScaleOfTheValues, "scale of head_size_v", head_size_v=8),
    _of(LseBeforeTheCap, "LSE before the soft cap", needs_lse=True, logits_soft_cap=2.7),
    _of(LseWithoutTheScale, "LSE without the scale", needs_lse=True),
    _of(SumOfExponentials, "sum of exponentials instead of its logarithm", needs_lse=True),
    _of(NegativeLse, "LSE with the wrong sign", needs_lse=True),
    _of(RoundedLse, "LSE rounded to bfloat16", needs_lse=True),
    _of(OneScale, "k_scale used for values too", _SCALES, kv_cache_dtype="fp8_e4m3"),
    _of(DividesByScales, "fp8 scales divide where keys are read", _SCALES, kv_cache_dtype="fp8_e4m3"),
]

RANK_MISTAKES = {
    "LSE in base 2": BaseTwoLse,
    "LSE without the scale": LseWithoutTheScale,
    "LSE rounded to bfloat16": RoundedLse,
    "sink counted twice in a merge": SinksOnEveryRank,
    "LSE of rows that see nothing is 0, not -inf": ZeroForEmptyRows,
    "non-causal taken as causal": AlwaysCausal,
    "local lengths shared among the ranks again": SharesAgain,
    "owner rule with runs of 1 tokens": OwnerOffByTheInterleave,
}
"""By the name of the mistake, impls that are wrong on one rank of several."""
