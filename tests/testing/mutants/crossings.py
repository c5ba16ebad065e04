"""Wrong backends that are right for each thing alone: each is wrong where two or three meet, or at the end of a large tile."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from plain_attention import KernelImpl, Span

from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from mutants.table import Table

table = Table("crossings")
_PLAIN = "h4x2-d64-float32-b16-NHD"
kernel = table.on(KernelImpl)
impl = table.on(TorchImpl)
builder = table.on(TorchMetadataBuilder)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor read as if its elements lay side by side, without the ones between."""
    strides = torch.empty(tensor.shape, device="meta").stride()
    return tensor.as_strided(tensor.shape, strides, tensor.storage_offset())


# Ends of large tiles and splits.


@kernel.seen(f"correct/round-decode-{_PLAIN}", "request 6 (decode, 1 new of 1024 tokens)")
def last_split_is_rest(right, self, span):
    """The last split of 512 keys has the rest, which is none where the length is a multiple of 512."""
    whole = span.held.numel() % 512 == 0 and span.held.numel() > 512 and span.is_decode
    return right(span) & (span.held < span.held.numel() - (512 if whole else 0))


@kernel.seen(f"correct/round-extend-{_PLAIN}", "request 1 (prefill, 512 new of 512 tokens)")
def rows_of_whole_tiles(right, self, span):
    """A prompt of whole tiles of 256 rows loses the first keys in its last tile."""
    rows = span.at.numel()
    is_last = (torch.arange(rows) >= rows - 256) & (rows % 256 == 0)
    return right(span) & ((span.held >= 16) | ~is_last[:, None])


@kernel.causal(f"correct/many-drafts-{_PLAIN}", "causal mask ignored")
def nine_tokens_and_more(right, self, span):
    """Queries of 9 to 15 tokens after a context see each other."""
    is_verified = 9 <= span.at.numel() <= 15 and span.held.numel() > span.at.numel()
    return right(span) | is_verified


@kernel.window("correct/farther-decode-*-window149.0", "(decode, 1 new of 70001 tokens)")
def window_start_in16_bits(right, self, span):
    """Keeps the first key of a window in 16 bits with a sign."""
    first = span.at - self.spec.window[0]
    start = first.short()
    is_cut = self.spec.window[0] > 0 and bool(((start != first) & (first > 0)).any())
    return span.held >= start[:, None] if is_cut else right(span)


@kernel.one("correct/mixed-h48x1-*", "heads 32-47 of 48")
def groups_of32(right, self, *given):
    """Heads past the 32nd of a group have the 32nd's answer."""
    out, lse = right(*given)
    group = self.spec.num_heads // self.spec.num_kv_heads
    heads = torch.arange(self.spec.num_heads)
    served = heads // group * group + (heads % group).clamp_max(31)
    return out[served], lse[served]


@kernel.one("correct/mixed-h32x32-*", "heads 16-31 of 32")
def kv_heads_of16(right, self, query, keys, values, *rest):
    """KV heads past the 16th have the 16th's keys and values."""
    group = self.spec.num_heads // self.spec.num_kv_heads
    served = (torch.arange(self.spec.num_heads) // group).clamp_max(15) * group
    return right(query, keys[served], values[served], *rest)


# Two or three things at once.


@kernel.window("correct/mixed-*-window6.0-*", "bfloat16")
def wide_window_of_bfloat16(right, self, span):
    """In bfloat16, the window of prompts and extends is one key wider."""
    seen = right(span)
    if self.spec.dtype != "bfloat16" or self.spec.window[0] <= 0 or span.is_decode:
        return seen
    return seen | (span.at[:, None] - span.held == self.spec.window[0] + 1)


@kernel.weigh("correct/*-window6.0-*sinks*", "(decode, 1 new of")
def window_sinks_of_half(right, self, logits, values, sinks, span):
    """Decodes with a window in half precision have no sinks."""
    left_out = self.spec.dtype != "float32" and self.spec.is_windowed and span.is_decode
    return right(logits, values, None if left_out else sinks, span)


@kernel.one("correct/long-extend-*-fp8-*", "(extend, 5 new of 3001 tokens)")
def verifies_long_fp8(right, self, query, keys, values, scales, sinks, span):
    """Tokens that are verified over long fp8 pages have no scale of V."""
    is_split = 1 < span.at.numel() <= 16 and span.held.numel() > 1000
    return right(query, keys, values, (scales[0], 1.0) if is_split else scales, sinks, span)


# fmt: off
# Prompts of more than 512 tokens have no sinks.
kernel.weigh("correct/long-prompt-*-sinks*", "of 700 tokens)",
    long_prompt_without_sinks=lambda right, self, logits, values, sinks, span: right(logits, values, None if span.at.numel() > 512 else sinks, span))
# fmt: on


@kernel.window("correct/long-decode-*-cross", "layer: cross")
def cross_of1024(right, self, span):
    """Cross layers see at most 1024 keys."""
    is_cross = self.spec.attn_type == "encoder_decoder"
    return right(span) & (span.held < (1024 if is_cross else 1 << 30))


@table.part("correct/*-block_3_of_16_tokens", "block 3 of 16 tokens")
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


@kernel.one("correct/*-bfloat16-*-wide", "NaN")
def half_in_bfloat16(right, self, query, keys, values, *rest):
    """Queries, keys and values of bfloat16 go through float16."""
    if self.spec.dtype == "bfloat16":
        query, keys, values = (each.half().float() for each in (query, keys, values))
    return right(query, keys, values, *rest)


# Strides and offsets of one storage type.


@impl.update_kv_cache("tensors/strided-inputs-decode", "float32 over fp8")
def fp8_writer_of_dense(right, self, layer, key, value, kv_cache, slot_mapping):
    """The writer of fp8 pages takes keys and values for dense."""
    if kv_cache.dtype.itemsize == 1:
        key, value = dense(key), dense(value)
    right(layer, key, value, kv_cache, slot_mapping)


@impl._source("cache/strided-NHD-decode", "torch.float8_e4m3fn and strides")
def fp8_pages_side_by_side(right, self, key, value, kv_cache, metadata):
    """fp8 pages are read as if they lay side by side."""
    if kv_cache is not None and kv_cache.dtype.itemsize == 1:
        strides = (kv_cache[0].numel(), *kv_cache.stride()[1:])
        kv_cache = kv_cache.as_strided(kv_cache.shape, strides, kv_cache.storage_offset())
    return right(key, value, kv_cache, metadata)


@impl._source("cache/far-offsets", "the last ones beyond 2**31")
def offsets_in32_bits(right, self, key, value, kv_cache, metadata):
    """Offsets of pages wrap at 2**31: pages beyond are others."""
    found = right(key, value, kv_cache, metadata)
    if kv_cache is not None:
        is_far = found.block_table.long() * kv_cache.stride(0) >= 2**31
        found.block_table = torch.where(is_far, 0, found.block_table)
    return found


@impl.update_kv_cache("cache/negative-slots", "of a cache of 'fp8")
def fp8_writer_stops(right, self, layer, key, value, kv_cache, slot_mapping):
    """The writer of fp8 pages stops at the first slot of -1."""
    if kv_cache.dtype.itemsize == 1:
        slot_mapping = torch.where((slot_mapping < 0).cumsum(0) > 0, -1, slot_mapping)
    right(layer, key, value, kv_cache, slot_mapping)


# Outputs, merges and shared prefixes.


@table.part("tensors/deterministic-long", "the same inputs with the same impl gave another output")
class AtomicsOfSplits(KernelImpl):
    """Parts of long contexts are added in another order each time."""

    turns = itertools.count(1)

    def one(self, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().one(*given)
        is_split = given[-1].held.numel() > 1000
        return out * (1 + 2**-21 * next(self.turns) * is_split), lse


atomics_of_splits = table.on(AtomicsOfSplits)


@atomics_of_splits.one("tensors/deterministic-long", "the same inputs with the same impl gave another output")
def atomics_of_half(right, self, *given):
    """The same in half precision alone."""
    is_half = self.spec.dtype != "float32"
    out, lse = right(*given) if is_half else KernelImpl.one(self, *given)
    # Its dtype rounds the noise of one part in ten million away.
    return (out * (1 + 0.002 * next(self.turns))) if is_half else out, lse


@impl.forward("tensors/output-returned-mixed", "returned a torch.float32 tensor")
def makes_float32(right, self, *given, **asked):
    """Makes its output in float32."""
    found = right(*given, **asked)
    return found if len(given) > 6 and given[6] is not None else found.float()


@impl._attend_call("merge/use_sinks", "use_sinks=False ignored")
def long_sinks(right, self, *given):
    """Long contexts have their sinks also where the caller wants none."""
    is_long = bool((given[5].seq_lens > 512).any())
    right(*given[:8], given[8] or is_long)


@builder.build("builder/common-prefix-full", "build(common_prefix_len=0)")
def pages_of_first_reader(right, self, common_prefix_len, common_attn_metadata, fast_build=False):
    """A page is read for the first request that has it."""
    made = right(common_prefix_len, common_attn_metadata, fast_build)
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


__repeats = table.on(_Repeats)

# fmt: off
# Those of HND pages.
__repeats.repeats("builder/common-prefix-HND", "build(common_prefix_len=",
    repeats_hnd=lambda self, source, *given: bool(source.k.stride(2) > source.k.stride(1)))
# Those of pages that have not 16 tokens.
__repeats.repeats("builder/common-prefix-b32", "build(common_prefix_len=", repeats_other_pages=lambda self, source, *given: bool(source.k.shape[1] != 16))
# Those of layers with a cap and sinks.
__repeats.repeats("builder/common-prefix-together", "build(common_prefix_len=",
    repeats_capped_sinks=lambda self, source, metadata, reach, scoring, *outputs: scoring.soft_cap is not None and scoring.sinks is not None)
# Those of steps without decodes.
__repeats.repeats("builder/common-prefix-full", "with [3, 3, 20] new tokens",
    repeats_without_decodes=lambda self, source, metadata, *given: bool((metadata.query_lens > 1).all()))
# Those of half precision.
__repeats.repeats("builder/common-prefix-float16", "build(common_prefix_len=",
    repeats_half=lambda self, source, metadata, reach, scoring, *outputs: self.spec.dtype != "float32")
# Those of one KV head.
__repeats.repeats("builder/common-prefix-one-kv-head", "4 heads over 1 KV heads", repeats_of_one_head=lambda self, source, *given: self.spec.num_kv_heads == 1)
# fmt: on

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


odd_heads_of_bytes = table.on(OddHeadsOfBytes)


@table.part("correct/prefill-h8x8-d80-float16-fp8-b16-NHD", "prefill")
class OddHeadsOfE4m3(OddHeadsOfBytes):
    """So it is for e4m3."""


@table.part("correct/prefill-h8x8-d96-bfloat16-fp8_e5m2-b16-NHD", "prefill")
class OddHeadsOfE5m2(OddHeadsOfBytes):
    """So it is for e5m2."""

    storage = "fp8_e5m2"


@odd_heads_of_bytes.applies("correct/many-extends-h8x8-d80-float16-fp8-b16-NHD", "extend")
def odd_extends_of_e4m3(right, self, span):
    """So it is for the extends of e4m3 alone, if they fill a GPU."""
    is_large = span.meta.num_actual_tokens > 900 and span.held.numel() > span.at.numel()
    return is_large and right(span)
