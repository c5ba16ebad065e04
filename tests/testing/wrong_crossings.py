"""Wrong backends that are right for each thing alone: each is wrong where two or three meet, or at the end of a large tile."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from kernel_port import KernelImpl, Span
from wrong_accidents import Accident, with_impl

from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl

__all__ = ["WRONG_CROSSINGS"]

WRONG_CROSSINGS: list[Accident] = []
_add = with_impl(WRONG_CROSSINGS)
_PLAIN = "h4x2-d64-float32-b16-NHD"


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor read as if its elements lay side by side, without the ones between."""
    strides = torch.empty(tensor.shape, device="meta").stride()
    return tensor.as_strided(tensor.shape, strides, tensor.storage_offset())


# Ends of large tiles and splits.


@_add(f"correct/round-decode-{_PLAIN}", "request 6 (decode, 1 new of 1024 tokens)")
class LastSplitIsRest(KernelImpl):
    """The last split of 512 keys has the rest, which is none where the length is a multiple of 512."""

    def seen(self, span: Span) -> torch.Tensor:
        whole = span.held.numel() % 512 == 0 and span.held.numel() > 512 and span.is_decode
        return super().seen(span) & (span.held < span.held.numel() - (512 if whole else 0))


@_add(f"correct/round-extend-{_PLAIN}", "request 1 (prefill, 512 new of 512 tokens)")
class RowsOfWholeTiles(KernelImpl):
    """A prompt of whole tiles of 256 rows loses the first keys in its last tile."""

    def seen(self, span: Span) -> torch.Tensor:
        rows = span.at.numel()
        is_last = (torch.arange(rows) >= rows - 256) & (rows % 256 == 0)
        return super().seen(span) & ((span.held >= 16) | ~is_last[:, None])


@_add(f"correct/many-drafts-{_PLAIN}", "causal mask ignored")
class NineTokensAndMore(KernelImpl):
    """Queries of 9 to 15 tokens after a context see each other."""

    def causal(self, span: Span) -> torch.Tensor:
        is_verified = 9 <= span.at.numel() <= 15 and span.held.numel() > span.at.numel()
        return super().causal(span) | is_verified


@_add(f"correct/far-decode-{_PLAIN}-window149.0", "(decode, 1 new of 33003 tokens)")
class WindowStartIn16Bits(KernelImpl):
    """Keeps the first key of a window in 16 bits with a sign."""

    def window(self, span: Span) -> torch.Tensor:
        start = (span.at - self.spec.window[0]).short()
        seen = super().window(span)
        return span.held >= start[:, None] if self.spec.window[0] > 0 and bool((start < -150).any()) else seen


@_add("correct/mixed-h48x1-*", "heads 32-47 of 48")
class GroupsOf32(KernelImpl):
    """Heads past the 32nd of a group have the 32nd's answer."""

    def one(self, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().one(*given)
        group = self.spec.num_heads // self.spec.num_kv_heads
        heads = torch.arange(self.spec.num_heads)
        served = heads // group * group + (heads % group).clamp_max(31)
        return out[served], lse[served]


@_add("correct/mixed-h32x32-*", "heads 16-31 of 32")
class KvHeadsOf16(KernelImpl):
    """KV heads past the 16th have the 16th's keys and values."""

    def one(self, query: Any, keys: Any, values: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        group = self.spec.num_heads // self.spec.num_kv_heads
        served = (torch.arange(self.spec.num_heads) // group).clamp_max(15) * group
        return super().one(query, keys[served], values[served], *rest)


# Two or three things at once.


@_add("correct/mixed-*-window6.0-*", "bfloat16")
class WideWindowOfBfloat16(KernelImpl):
    """In bfloat16, the window of prompts and extends is one key wider."""

    def window(self, span: Span) -> torch.Tensor:
        seen = super().window(span)
        if self.spec.dtype != "bfloat16" or self.spec.window[0] <= 0 or span.is_decode:
            return seen
        return seen | (span.at[:, None] - span.held == self.spec.window[0] + 1)


@_add("correct/*-window6.0-*sinks*", "(decode, 1 new of")
class WindowSinksOfHalf(KernelImpl):
    """Decodes with a window in half precision have no sinks."""

    def weigh(self, logits: Any, values: Any, sinks: Any, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        left_out = self.spec.dtype != "float32" and self.spec.is_windowed and span.is_decode
        return super().weigh(logits, values, None if left_out else sinks, span)


@_add("correct/long-extend-*-fp8-*", "(extend, 5 new of 3001 tokens)")
class VerifiesLongFp8(KernelImpl):
    """Tokens that are verified over long fp8 pages have no scale of V."""

    def one(
        self, query: Any, keys: Any, values: Any, scales: tuple[float, float], sinks: Any, span: Span
    ) -> tuple[torch.Tensor, torch.Tensor]:
        is_split = 1 < span.at.numel() <= 16 and span.held.numel() > 1000
        return super().one(query, keys, values, (scales[0], 1.0) if is_split else scales, sinks, span)


@_add("correct/long-prompt-*-sinks*", "of 700 tokens)")
class LongPromptWithoutSinks(KernelImpl):
    """Prompts of more than 512 tokens have no sinks."""

    def weigh(self, logits: Any, values: Any, sinks: Any, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        return super().weigh(logits, values, None if span.at.numel() > 512 else sinks, span)


@_add("correct/long-decode-*-cross", "layer: cross")
class CrossOf1024(KernelImpl):
    """Cross layers see at most 1024 keys."""

    def window(self, span: Span) -> torch.Tensor:
        is_cross = self.spec.attn_type == "encoder_decoder"
        return super().window(span) & (span.held < (1024 if is_cross else 1 << 30))


@_add("correct/*-block_3_of_16_tokens", "block 3 of 16 tokens")
class BlocksArePages(KernelImpl):
    """The blocks of a selection are pages."""

    page = 1

    def _source(self, key: Any, value: Any, kv_cache: Any, metadata: Any) -> Any:
        found = super()._source(key, value, kv_cache, metadata)
        self.page = 16 if kv_cache is None else found.k.shape[1]
        return found

    def chosen(self, span: Span) -> torch.Tensor:
        own, sparse = self.spec, self.spec.sparse
        if sparse is not None and sparse.block > 1:
            self.spec = own.replace(sparse=dataclasses.replace(sparse, block=self.page))
        try:
            return super().chosen(span)
        finally:
            self.spec = own


@_add("correct/*-bfloat16-*-wide", "NaN")
class HalfInBfloat16(KernelImpl):
    """Queries, keys and values of bfloat16 go through float16."""

    def one(self, query: Any, keys: Any, values: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if self.spec.dtype == "bfloat16":
            query, keys, values = (each.half().float() for each in (query, keys, values))
        return super().one(query, keys, values, *rest)


# Strides and offsets of one storage type.


@_add("tensors/strided-inputs-decode", "float32 over fp8")
class Fp8WriterOfDense(TorchImpl):
    """The writer of fp8 pages takes keys and values for dense."""

    def update_kv_cache(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        if kv_cache.dtype.itemsize == 1:
            key, value = dense(key), dense(value)
        super().update_kv_cache(layer, key, value, kv_cache, slot_mapping)


@_add("cache/strided-NHD-decode", "torch.float8_e4m3fn and strides")
class Fp8PagesSideBySide(TorchImpl):
    """fp8 pages are read as if they lay side by side."""

    def _source(self, key: Any, value: Any, kv_cache: Any, metadata: Any) -> Any:
        if kv_cache is not None and kv_cache.dtype.itemsize == 1:
            strides = (kv_cache[0].numel(), *kv_cache.stride()[1:])
            kv_cache = kv_cache.as_strided(kv_cache.shape, strides, kv_cache.storage_offset())
        return super()._source(key, value, kv_cache, metadata)


@_add("cache/far-offsets", "the last ones beyond 2**31")
class OffsetsIn32Bits(TorchImpl):
    """Offsets of pages wrap at 2**31: pages beyond are others."""

    def _source(self, key: Any, value: Any, kv_cache: Any, metadata: Any) -> Any:
        found = super()._source(key, value, kv_cache, metadata)
        if kv_cache is not None:
            is_far = found.block_table.long() * kv_cache.stride(0) >= 2**31
            found.block_table = torch.where(is_far, 0, found.block_table)
        return found


@_add("cache/negative-slots", "of a cache of 'fp8")
class Fp8WriterStops(TorchImpl):
    """The writer of fp8 pages stops at the first slot of -1."""

    def update_kv_cache(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        if kv_cache.dtype.itemsize == 1:
            slot_mapping = torch.where((slot_mapping < 0).cumsum(0) > 0, -1, slot_mapping)
        super().update_kv_cache(layer, key, value, kv_cache, slot_mapping)


# Outputs, merges and shared prefixes.


@_add("tensors/deterministic-long", "the same inputs with the same impl gave another output")
class AtomicsOfSplits(KernelImpl):
    """Parts of long contexts are added in another order each time."""

    turns = itertools.count(1)

    def one(self, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().one(*given)
        is_split = given[-1].held.numel() > 1000
        return out * (1 + 2**-21 * next(self.turns) * is_split), lse


@_add("tensors/deterministic-long", "the same inputs with the same impl gave another output")
class AtomicsOfHalf(AtomicsOfSplits):
    """The same in half precision alone."""

    def one(self, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        is_half = self.spec.dtype != "float32"
        out, lse = super().one(*given) if is_half else KernelImpl.one(self, *given)
        # Its dtype rounds the noise of one part in ten million away.
        return (out * (1 + 0.002 * next(self.turns))) if is_half else out, lse


@_add("tensors/output-returned-mixed", "returned a torch.float32 tensor")
class MakesFloat32(TorchImpl):
    """Makes its output in float32."""

    def forward(self, *given: Any, **asked: Any) -> torch.Tensor:
        found = super().forward(*given, **asked)
        return found if len(given) > 6 and given[6] is not None else found.float()


@_add("merge/use_sinks", "use_sinks=False ignored")
class LongSinks(TorchImpl):
    """Long contexts have their sinks also where the caller wants none."""

    def _attend_call(self, *given: Any) -> None:
        is_long = bool((given[5].seq_lens > 512).any())
        super()._attend_call(*given[:8], given[8] or is_long)


@_add("builder/common-prefix-full", "build(common_prefix_len=0)")
class PagesOfFirstReader(TorchMetadataBuilder):
    """A page is read for the first request that has it."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if common_prefix_len or len(made.seq_lens) < 2 or made.query_lens.min() == 0:
            return made
        is_shared = (made.block_table[1:, 0] == made.block_table[0, 0]).numpy()
        lens = made.seq_lens.copy()
        lens[1:][is_shared] = made.query_lens[1:][is_shared]
        return dataclasses.replace(made, seq_lens=lens)


class _Repeats(TorchImpl):
    """Attends some shared prefixes twice."""

    def _attend_cascade(self, query: Any, source: Any, rest: Any, *given: Any) -> None:
        super()._attend_cascade(query, source, source if self.repeats(source, *given) else rest, *given)

    def repeats(self, source: Any, metadata: Any, reach: Any, scoring: Any, *outputs: Any) -> bool:
        raise NotImplementedError


@_add("builder/common-prefix-HND", "build(common_prefix_len=")
class RepeatsHnd(_Repeats):
    """Those of HND pages."""

    def repeats(self, source: Any, *given: Any) -> bool:
        return bool(source.k.stride(2) > source.k.stride(1))


@_add("builder/common-prefix-b32", "build(common_prefix_len=")
class RepeatsOtherPages(_Repeats):
    """Those of pages that have not 16 tokens."""

    def repeats(self, source: Any, *given: Any) -> bool:
        return bool(source.k.shape[1] != 16)


@_add("builder/common-prefix-together", "build(common_prefix_len=")
class RepeatsCappedSinks(_Repeats):
    """Those of layers with a cap and sinks."""

    def repeats(self, source: Any, metadata: Any, reach: Any, scoring: Any, *outputs: Any) -> bool:
        return scoring.soft_cap is not None and scoring.sinks is not None


@_add("builder/common-prefix-full", "with [3, 3, 20] new tokens")
class RepeatsWithoutDecodes(_Repeats):
    """Those of steps without decodes."""

    def repeats(self, source: Any, metadata: Any, *given: Any) -> bool:
        return bool((metadata.query_lens > 1).all())


@_add("builder/common-prefix-float16", "build(common_prefix_len=")
class RepeatsHalf(_Repeats):
    """Those of half precision."""

    def repeats(self, source: Any, metadata: Any, reach: Any, scoring: Any, *outputs: Any) -> bool:
        return self.spec.dtype != "float32"


@_add("builder/common-prefix-one-kv-head", "4 heads over 1 KV heads")
class RepeatsOfOneHead(_Repeats):
    """Those of one KV head."""

    def repeats(self, source: Any, *given: Any) -> bool:
        return self.spec.num_kv_heads == 1


# Large steps of odd heads over elements of 8 bits.


class OddHeadsOfBytes(KernelImpl):
    """Past 64 rows of a request in 16 bits, elements past the 64th of an odd head over fp8 are others'."""

    storage = "fp8_e4m3"

    def applies(self, span: Span) -> bool:
        """Whether the answer of a request is wrong."""
        size = self.spec.head_size
        is_odd = size > 64 and size & (size - 1) > 0 and self.spec.resolved_kv_cache_dtype == self.storage
        return is_odd and self.spec.dtype != "float32" and span.at.numel() > 64

    def one(self, query: Any, keys: Any, values: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().one(query, keys, values, *rest)
        if self.applies(rest[-1]):
            out = torch.cat([out[..., :64], out[..., : self.spec.head_size - 64]], -1)
        return out, lse


@_add("correct/prefill-h8x8-d80-float16-fp8-b16-NHD", "prefill")
class OddHeadsOfE4m3(OddHeadsOfBytes):
    """So it is for e4m3."""


@_add("correct/prefill-h8x8-d96-bfloat16-fp8_e5m2-b16-NHD", "prefill")
class OddHeadsOfE5m2(OddHeadsOfBytes):
    """So it is for e5m2."""

    storage = "fp8_e5m2"


@_add("correct/many-extends-h8x8-d80-float16-fp8-b16-NHD", "extend")
class OddExtendsOfE4m3(OddHeadsOfBytes):
    """So it is for the extends of e4m3 alone, if they fill a GPU."""

    def applies(self, span: Span) -> bool:
        is_large = span.meta.num_actual_tokens > 900 and span.held.numel() > span.at.numel()
        return is_large and super().applies(span)
