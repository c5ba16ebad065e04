"""Wrong backends as ported kernels get wrong by accident: tile tails, strides, stale plans, mixed-up conventions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from catching import variant
from kernel_port import KernelImpl, Span

from attnplug.backends.torch_native.backend import TorchMLABackend
from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.backends.torch_native.latent import TorchMLAImpl
from attnplug.backends.torch_native.metadata import TorchMetadata
from attnplug.core import AttentionBackend
from attnplug.core.spec import AttentionType
from attnplug.testing.oracle import chosen_keys


@dataclasses.dataclass(frozen=True)
class Accident:
    """A wrong backend, a pattern of the ids of checks of which one must fail, and what its message must say."""

    name: str
    backend: type[AttentionBackend]
    check: str
    says: str


ACCIDENTS: list[Accident] = []


def with_impl(accidents: list[Accident]) -> Callable[[str, str], Callable[[type], type]]:
    """A decorator of a check and its words: TORCH with this impl or builder is an accident."""

    def of(check: str, says: str) -> Callable[[type], type]:
        def add(cls: type) -> type:
            part = "builder" if issubclass(cls, TorchMetadataBuilder) else "impl"
            backend = variant(cls.__name__.upper(), **{part: cls})
            accidents.append(Accident(cls.__name__, backend, check, says))
            return cls

        return add

    return of


def with_latent_impl(accidents: list[Accident]) -> Callable[[str, str], Callable[[type], type]]:
    """As `with_impl`, for TORCH's latent attention."""

    def of(check: str, says: str) -> Callable[[type], type]:
        def add(cls: type) -> type:
            methods: dict[str, Any] = {
                "get_name": staticmethod(lambda: cls.__name__.upper()),
                "get_impl_cls": classmethod(lambda _: cls),
            }
            backend = type(cls.__name__, (TorchMLABackend,), methods)
            accidents.append(Accident(cls.__name__, backend, check, says))
            return cls

        return add

    return of


_impl = _builder = with_impl(ACCIDENTS)
_mla = with_latent_impl(ACCIDENTS)


# Tiles and splits.


@_impl("correct/long-decode-h4x2-d64-float32-b16-NHD", "only requests of more than 129 tokens")
class TailOfManyTiles(KernelImpl):
    """The tail is lost from the third tile on: the count of tiles is rounded down."""

    def tiles(self, keys: int) -> list[tuple[int, int]]:
        tiles = super().tiles(keys)
        return tiles[:-1] if len(tiles) > 16 and keys % self.tile else tiles


@_impl("correct/long-decode-h4x2-d64-float32-b16-NHD", "only requests of more than 2100 tokens")
class EightSplits(KernelImpl):
    """At most eight splits of 512 keys."""

    def tiles(self, keys: int) -> list[tuple[int, int]]:
        return [each for each in super().tiles(keys) if each[1] <= 8 * 512]


@_impl("correct/mixed-h4x2-d64-float32-b256-NHD", "only rows up to position 255")
class EmptySplitCounts(KernelImpl):
    """A split of which nothing is seen has the LSE 0 in the merge."""

    def online(self, logits: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [
            KernelImpl.online(self, logits[..., start : start + 256], values[:, start : start + 256])
            for start in range(0, max(logits.shape[2], 1), 256)
        ]
        lses = torch.stack([lse for _, lse in parts])
        if len(parts) > 1:
            lses = lses.nan_to_num(neginf=0.0)
        whole = lses.logsumexp(0)
        weights = (lses - whole.nan_to_num(neginf=0.0)).exp()
        return sum(w[..., None] * out for w, (out, _) in zip(weights, parts, strict=True)), whole


@_impl("correct/long-decode-h4x2-d64-float32-b16-NHD-sinks-lse", "a wrong sum of weights")
class SinkInEachSplit(KernelImpl):
    """Each split of 512 keys has the sink."""

    def weigh(self, logits: Any, values: Any, sinks: Any, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        splits = -(-logits.shape[2] // 512)
        more = None if sinks is None else sinks + math.log(max(splits, 1))
        return super().weigh(logits, values, more, span)


@_impl("correct/mixed-h4x2-d64-float32-b16-NHD-window6.0", "only requests with prefill")
class WindowTileSkip(KernelImpl):
    """With more than 8 tiles, the first tile of a window is found from the last row of the query tile."""

    def window(self, span: Span) -> torch.Tensor:
        seen = super().window(span)
        left = self.spec.window[0]
        if left >= 0 and span.at.shape[0] > 64:
            rows = span.at.shape[0]
            last = span.at[((torch.arange(rows) // 64 + 1) * 64).clamp(max=rows) - 1]
            seen = seen & (span.held // 64 >= (last[:, None] - left) // 64)
        return seen


@_impl("correct/mixed-h4x2-d64-float32-b16-NHD", "only the first request")
class DiagonalOfLastTile(KernelImpl):
    """Only the last tile of 128 keys of a query tile of 128 rows has the causal mask; unaligned contexts need two."""

    def causal(self, span: Span) -> torch.Tensor:
        seen = super().causal(span)
        rows = span.at.shape[0]
        tile = torch.arange(rows) // 128
        end = span.at[((tile + 1) * 128).clamp(max=rows) - 1] + 1
        unmasked = span.held // 128 < ((end - 1) // 128)[:, None]
        return seen | (unmasked & (span.held < end[:, None]))


@_impl(
    "correct/far-blocks-h4x2-d64-float32-b1-NHD",
    "whole rows are NaN: they were not written, or rows of blocks without a token (NaN) were read",
)
class HalfTable(KernelImpl):
    """The block table is copied as int16."""

    def _source(self, key: Any, value: Any, kv_cache: Any, metadata: Any) -> Any:
        table = metadata.block_table.to(torch.int16).int() & 0x7FFF
        return super()._source(key, value, kv_cache, dataclasses.replace(metadata, block_table=table))


@_impl("correct/long-decode-h4x2-d64-float32-b16-NHD", "as half precision gives")
class HalfWeights(KernelImpl):
    """Weights are accumulated in float16, which loses the small ones of long contexts."""

    def online(self, logits: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().online(logits, values)
        if logits.shape[2] > 2048:
            weights = (logits - lse[..., None].nan_to_num(neginf=0.0)).exp().half().float()
            out = weights @ values
        return out, lse


# Layouts and strides.


@_impl(
    "tensors/strided-inputs-decode",
    "with query, key and value as views of one packed projection",
)
class PackedQueries(TorchImpl):
    """The strides of queries are those of a dense tensor."""

    def _attend_call(self, layer: Any, query: torch.Tensor, *rest: Any) -> None:
        dense = query.as_strided(query.shape, (query.shape[1] * query.shape[2], query.shape[2], 1))
        super()._attend_call(layer, dense, *rest)


@_impl("correct/mixed-h4x2-d64-float32-b16-NHD-lse", "LSE transposed")
class LseByHead(TorchImpl):
    """The LSE is written as `[H, T]`."""

    def _attend_call(self, *given: Any) -> None:
        super()._attend_call(*given)
        lse, meta = given[7], given[5]
        if lse is not None and lse.is_contiguous():
            rows = lse[: meta.num_actual_tokens]
            rows.copy_(rows.T.reshape(rows.shape))


@_impl(
    "cache/block-size-64",
    "whole rows are NaN: they were not written, or rows of blocks without a token (NaN) were read",
)
class PagesOfSixteen(KernelImpl):
    """Slots become block and offset by 16, when the block size is a power of two."""

    def update_kv_cache(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        size = self._pages_of(kv_cache).k.shape[1]
        if size == 64:
            slot_mapping = torch.where(
                slot_mapping >= 0,
                slot_mapping // 16 % (kv_cache.shape[0] or 1) * size + slot_mapping % 16,
                -1,
            )
        super().update_kv_cache(layer, key, value, kv_cache, slot_mapping)


@_impl(
    "correct/mixed-h4x2-d64-float32-b16-NHD-cross",
    "whole rows are NaN: they were not written, or rows of blocks without a token (NaN) were read",
)
class PadSlotWraps(TorchImpl):
    """-1 writes the last slot of the cache."""

    def update_kv_cache(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        pages = self._pages_of(kv_cache)
        last = pages.k.shape[0] * pages.k.shape[1] - 1
        slots = torch.where(slot_mapping < 0, last, slot_mapping)
        super().update_kv_cache(layer, key, value, kv_cache, slots)


@_impl(
    "correct/mixed-h4x2-d64-float32-b16-HND",
    "whole rows are NaN: they were not written, or rows of blocks without a token (NaN) were read",
)
class DenseTokensOfHnd(TorchImpl):
    """HND pages of one block are read as NHD."""

    def _source(self, key: Any, value: Any, kv_cache: Any, metadata: Any) -> Any:
        source = super()._source(key, value, kv_cache, metadata)
        if (
            kv_cache is not None
            and not kv_cache[0].is_contiguous()
            and source.k.stride(1) < source.k.stride(2)
        ):
            b, n, h, d = source.k.shape
            source.k = source.k.as_strided(
                (b, n, h, d),
                (source.k.stride(0), h * source.k.stride(1), source.k.stride(1), 1),
                source.k.storage_offset(),
            )
        return source


# Builders and plans.


@_builder("builder/build-full", "another step's block table")
class PlanByShape(TorchMetadataBuilder):
    """A plan is kept for batches of the same shape."""

    _kept: Any = None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        c = common_attn_metadata
        made = super().build(common_prefix_len, c, fast_build)
        self._kept = self._kept or {}
        key = (c.num_reqs, c.num_actual_tokens, c.max_seq_len, c.max_query_len)
        kept = self._kept.setdefault(key, made)
        return dataclasses.replace(made, block_table=kept.block_table)


@_builder("builder/update_block_table-full", "after update_block_table")
class OldSlots(TorchMetadataBuilder):
    """update_block_table keeps the slots."""

    def update_block_table(self, metadata: Any, blk_table: Any, slot_mapping: Any) -> Any:
        made = super().update_block_table(metadata, blk_table, slot_mapping)
        return dataclasses.replace(made, slot_mapping=metadata.slot_mapping)


@_builder("builder/build_for_drafting-full", "build_for_drafting with draft_index=2")
class DraftLengths(TorchMetadataBuilder):
    """A draft adds its index to the lengths, which the engine has already raised."""

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> Any:
        made = super().build_for_drafting(common_attn_metadata, draft_index)
        if draft_index > 1:
            most = made.block_table.shape[1] * self.kv_cache_spec.block_size
            made.seq_lens = np.minimum(made.seq_lens + draft_index - 1, most)
        return made


@_builder("builder/build_for_drafting-spans", "spans ignored")
class FastWithoutSpans(TorchMetadataBuilder):
    """A fast build leaves out the multimodal spans."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if fast_build and made.spans is not None:
            made.spans = np.zeros_like(made.spans)
        return made


@_builder("batch/idle-decode", "with requests of [0, 1, 0, 1, 1] new tokens")
class RowPerRequest(TorchMetadataBuilder):
    """With at most one query per request, row i is of request i."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        c = common_attn_metadata
        made = super().build(common_prefix_len, c, fast_build)
        if c.max_query_len == 1:
            starts = np.minimum(np.arange(c.num_reqs + 1), c.num_actual_tokens)
            made.query_starts = starts.astype(np.int64)
        return made


@_builder("builder/host-lengths-upper_bound-full", "upper bounds taken for exact lengths")
class HostLengths(TorchMetadataBuilder):
    """The lengths of the host are taken for exact."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        host = common_attn_metadata.seq_lens_host
        if host is not None:
            made.seq_lens = np.asarray(host[: made.seq_lens.size]).astype(np.int64)
        return made


@_builder("builder/max_seq_len-full", "max_seq_len taken for the longest length")
class LongestIsAll(TorchMetadataBuilder):
    """max_seq_len is read as the length of all requests where the batch is uniform."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if made.seq_lens.size and (made.seq_lens == made.seq_lens[0]).all() and made.query_lens.all():
            most = made.block_table.shape[1] * getattr(self.kv_cache_spec, "block_size", 0)
            longest = common_attn_metadata.max_seq_len
            if longest <= most:
                made.seq_lens = np.full_like(made.seq_lens, longest)
        return made


@_builder("tensors/sees-nothing-direct", "forward")
class DirectLikeQueries(TorchMetadataBuilder):
    """Direct keys are packed like the queries, unless a request has no query."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if made.key_starts is not None and made.key_starts[-1] <= made.query_starts[-1]:
            made.key_starts = None
        return made


# Prefixes.


@_impl("builder/common-prefix-lse", "build(common_prefix_len=16) of 4 requests with [1, 1, 1, 1] new tokens")
class PrefixLse(TorchImpl):
    """With a shared prefix, the LSE is that of the rest."""

    def _attend_cascade(self, *given: Any) -> None:
        super()._attend_cascade(*given)
        query, source, rest, meta, reach, scoring, _, lse = given
        if lse is not None:
            scratch = query.new_empty(query.shape[0], query.shape[1], source.v.shape[3], dtype=torch.float32)
            self._attend(query, rest, None, meta, reach, scoring, scratch, lse)


@_impl("builder/common-prefix-fp8", "v_scale ignored")
class PrefixWithoutScale(TorchImpl):
    """The prefix of fp8 pages is attended without the scale of V."""

    def _attend_cascade(
        self, query: Any, source: Any, rest: Any, meta: Any, reach: Any, scoring: Any, *more: Any
    ) -> None:
        if source.k.dtype.itemsize == 1:
            scoring = dataclasses.replace(scoring, value_scale=1.0)
        super()._attend_cascade(query, source, rest, meta, reach, scoring, *more)


# Features.


@_impl("correct/mixed-h4x2-d64-float32-b16-NHD-cap3", "scale after the cap")
class CapBeforeScale(KernelImpl):
    """The soft cap is on the logits before the scale."""

    def logits(self, scaled: torch.Tensor, span: Span) -> torch.Tensor:
        cap = self.spec.logits_soft_cap
        if cap is None:
            return super().logits(scaled, span)
        raw = scaled / self.spec.scale
        slopes = self.tensors.alibi_slopes
        capped = cap * (raw / cap).tanh() * self.spec.scale
        return capped if slopes is None else capped - slopes[:, None, None] * self.distance(span)


@_impl("correct/mixed-h4x2-d64-float32-b16-NHD-cap3-alibi", "ALiBi before the cap")
class AlibiBeforeCap(KernelImpl):
    """ALiBi is added before the soft cap."""

    def logits(self, scaled: torch.Tensor, span: Span) -> torch.Tensor:
        cap, slopes = self.spec.logits_soft_cap, self.tensors.alibi_slopes
        if slopes is not None:
            scaled = scaled - slopes[:, None, None] * self.distance(span)
        return scaled if cap is None else cap * (scaled / cap).tanh()


@_impl("correct/mixed-h4x2-d64-float32-b16-NHD-alibi-lse", "ALiBi of key positions")
class AlibiByKey(KernelImpl):
    """ALiBi is slope x key position: the same softmax of causal layers, another LSE."""

    def distance(self, span: Span) -> torch.Tensor:
        return -span.held[None].float() if self.spec.causal else super().distance(span)


@_impl("correct/*encoder*alibi*", "ALiBi of signed distances")
class AlibiSigned(KernelImpl):
    """ALiBi's distance keeps its sign, so later keys of non-causal layers gain."""

    def distance(self, span: Span) -> torch.Tensor:
        return span.at[:, None] - span.held


@_impl("correct/mixed-h4x2-d64-float32-b16-NHD-sinks", "sink in base 2")
class SinkOfBaseTwo(KernelImpl):
    """Sinks are taken for logits in base 2."""

    def weigh(self, logits: Any, values: Any, sinks: Any, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        return super().weigh(logits, values, None if sinks is None else sinks * math.log(2), span)


@_impl("correct/mixed-h4x2-d64-float32-b16-NHD-sinks", "sink multiplied by the scale")
class SinkScaled(KernelImpl):
    """Sinks are multiplied by the softmax scale."""

    def weigh(self, logits: Any, values: Any, sinks: Any, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        return super().weigh(logits, values, None if sinks is None else sinks * self.spec.scale, span)


@_impl("merge/2-parts-sinks", "sink counted twice in a merge")
class SinksAlwaysInDecode(KernelImpl):
    """Decodes have their sinks also where the caller wants none."""

    def weigh(self, logits: Any, values: Any, sinks: Any, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        return super().weigh(logits, values, self.tensors.sinks if span.is_decode else sinks, span)


@_impl("correct/*cap*sinks*", "soft cap on the sink too")
class SinkCapped(KernelImpl):
    """The sink goes through the soft cap too."""

    def weigh(self, logits: Any, values: Any, sinks: Any, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        cap = self.spec.logits_soft_cap
        if sinks is not None and cap is not None:
            sinks = cap * (sinks / cap).tanh()
        return super().weigh(logits, values, sinks, span)


@_impl("tensors/sees-nothing-cross-lse-sinks", "sinks ignored")
class SinkMissingInLse(KernelImpl):
    """Rows that see no key have LSE -inf, also with a sink."""

    def weigh(self, logits: Any, values: Any, sinks: Any, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().weigh(logits, values, sinks, span)
        empty = (logits == -math.inf).all(2)
        return out, lse.masked_fill(empty, -math.inf)


@_impl(
    "correct/mixed-h4x2-d64-float32-b16-NHD-window6.0", "window off by one: a key too many before the query"
)
class ExtendWindow(KernelImpl):
    """In extends the window is one key wider."""

    def window(self, span: Span) -> torch.Tensor:
        left = self.spec.window[0]
        seen = super().window(span)
        if left >= 0 and not span.is_decode and span.at.numel() and int(span.at[0]) > 0:
            seen = seen | (span.at[:, None] - span.held == left + 1)
        return seen


@_impl("correct/mixed-h4x2-d64-float32-b16-NHD-non_causal-window-1.7", "sliding window ignored")
class RightIsCausal(KernelImpl):
    """A window on the right is ignored when there is none on the left."""

    def window(self, span: Span) -> torch.Tensor:
        if self.spec.window[0] < 0 and self.spec.chunk_size is None:
            return torch.ones(span.at.shape[0], span.held.shape[0], dtype=torch.bool)
        return super().window(span)


@_impl("correct/mixed-h4x2-d64-float32-b16-NHD-chunk24", "chunks counted from the first new token")
class ChunkFromContext(KernelImpl):
    """Chunks are counted from the first new token."""

    def window(self, span: Span) -> torch.Tensor:
        chunk = self.spec.chunk_size
        if chunk is None or not span.at.numel():
            return super().window(span)
        first = int(span.at[0])
        return (span.held - first) // chunk == ((span.at - first) // chunk)[:, None]


@_impl("correct/mixed-h4x2-d64-float32-b16-NHD-chunk24", "output[160, 0, 18]")
class ChunkOfWholePages(KernelImpl):
    """A chunk begins at a page."""

    def window(self, span: Span) -> torch.Tensor:
        chunk, page = self.spec.chunk_size, 16
        if chunk is None:
            return super().window(span)
        return span.held >= (span.at // chunk * chunk // page * page)[:, None]


@_impl("correct/mixed-h4x2-d64-float32-b16-NHD-spans", "only requests with extend or prefill")
class SpanIncludesEnd(KernelImpl):
    """The end of a span is inclusive."""

    def spans(self, span: Span) -> torch.Tensor:
        spans = torch.from_numpy(span.meta.spans[span.rows])
        return (span.held >= spans[:, :1]) & (span.held <= spans[:, 1:]) & (spans[:, 1:] > 0)


@_impl("correct/mixed-h4x2-d64-float32-b16-NHD-window6.0-spans", "window or chunk cuts spans")
class SpanInWindow(KernelImpl):
    """The window hides keys of a span."""

    def spans(self, span: Span) -> torch.Tensor:
        return super().spans(span) & self.window(span)


@_impl("correct/long-decode-*topk*", "")
class AtMost256Chosen(KernelImpl):
    """At most 256 keys of a selection are read."""

    def chosen(self, span: Span) -> torch.Tensor:
        selection = span.meta.selection[span.rows]
        cut = type(selection)(selection.positions[:, :256], selection.counts.clamp(max=256))
        return chosen_keys(self.spec, cut, span.held)


@_impl("correct/draft-*topk*", "only rows from row 1 of a request on")
class ChosenOfFirstRow(KernelImpl):
    """Queries of a speculative step share the selection of the first."""

    def chosen(self, span: Span) -> torch.Tensor:
        seen = super().chosen(span)
        return seen[:1].expand_as(seen) if 1 < seen.shape[0] <= 4 else seen


@_impl("correct/*topk*sinks*", "sinks ignored")
class SparseWithoutSinks(KernelImpl):
    """Sparse layers forget the sinks."""

    def weigh(self, logits: Any, values: Any, sinks: Any, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        return super().weigh(logits, values, None if self.spec.sparse else sinks, span)


@_impl("correct/*window*topk*", "sliding window ignored")
class SparseWithoutWindow(KernelImpl):
    """A sparse layer trusts its indexer, and forgets the window."""

    def window(self, span: Span) -> torch.Tensor:
        seen = super().window(span)
        return torch.ones_like(seen) if self.spec.sparse else seen


@_impl("correct/draft-*", "causal mask ignored")
class DraftsSeeAll(KernelImpl):
    """Verified tokens see each other."""

    def causal(self, span: Span) -> torch.Tensor:
        seen = super().causal(span)
        return torch.ones_like(seen) if 1 < span.at.shape[0] <= 3 and int(span.at[0]) > 0 else seen


@_impl("correct/speculative-*", "only requests with extend")
class PackedGroupOrder(KernelImpl):
    """Rows of verified tokens are unpacked as (token, group) from (group, token)."""

    def weigh(self, logits: Any, values: Any, sinks: Any, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().weigh(logits, values, sinks, span)
        rows, kv = out.shape[1], self.spec.num_kv_heads
        if 1 < rows <= 8 and int(span.at[0]) > 0:
            packed = out.view(kv, -1, rows, out.shape[2])
            out = packed.transpose(1, 2).reshape(out.shape)
        return out, lse


@_impl("correct/mixed-h4x2-d64-float32-encoder_half", "non-causal taken as causal")
class EncoderIsCausal(KernelImpl):
    """Only encoder_only layers see all tokens."""

    def causal(self, span: Span) -> torch.Tensor:
        if self.spec.attn_type is AttentionType.ENCODER:
            return span.held <= span.at[:, None]
        return super().causal(span)


@_impl("correct/*cross-window*", "")
class CrossWithWindowOfEnd(KernelImpl):
    """Cross layers count positions from the end of the encoder's tokens."""

    def window(self, span: Span) -> torch.Tensor:
        if self.spec.attn_type is AttentionType.ENCODER_DECODER and span.is_decode:
            span = dataclasses.replace(span, at=span.at * 0 + span.held.shape[0] // 2)
        return super().window(span)


@_impl("batch/narrowed-decode", "causal=True ignored")
class NarrowedInPrefillOnly(KernelImpl):
    """A step may be causal for a non-causal layer, and decodes of several tokens ignore it."""

    def causal(self, span: Span) -> torch.Tensor:
        seen = super().causal(span)
        return torch.ones_like(seen) if not self.spec.causal and 1 < span.at.shape[0] < 8 else seen


@_impl("tensors/sees-nothing-cross-lse", "LSE of 0 where nothing is seen")
class EmptyRowLse(KernelImpl):
    """Rows that see nothing have the LSE 0."""

    def weigh(self, logits: Any, values: Any, sinks: Any, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().weigh(logits, values, sinks, span)
        return out, lse.nan_to_num(neginf=0.0)


@_impl("correct/*fp8*lse*", "output is right, LSE error")
class LseWithoutScales(KernelImpl):
    """The LSE of fp8 pages is that of the stored keys."""

    def one(self, query: Any, keys: Any, values: Any, scales: Any, sinks: Any, span: Span) -> Any:
        out, lse = super().one(query, keys, values, scales, sinks, span)
        if scales[0] != 1:
            lse = super().one(query, keys, values, (1.0, 1.0), sinks, span)[1]
        return out, lse


# Quantisation.


@_impl(
    "cache/scales-of-layer-fp8",
    "with scales of the engine's layer, which differ from those given to from_spec ({'k_scale'",
)
class OneScale(TorchImpl):
    """V has the scale of K where the engine's layer gives scales."""

    def _scales(self, layer: Any, stored: torch.dtype) -> tuple[float, float]:
        k, v = super()._scales(layer, stored)
        return (k, k) if layer is not None else (k, v)


@_impl("cache/clamped-fp8_e5m2", "K")
class RangeOfE4m3(TorchImpl):
    """e5m2 is clamped to 448."""

    def update_kv_cache(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        if self.spec.resolved_kv_cache_dtype == "fp8_e5m2":
            k, v = self._scales(layer, torch.float8_e5m2)
            key, value = key.clamp(-448 * k, 448 * k), value.clamp(-448 * v, 448 * v)
        super().update_kv_cache(layer, key, value, kv_cache, slot_mapping)


@_impl("correct/mixed-h4x2-d64-float32-fp8-b16-NHD", "only requests with extend or prefill")
class QuantisedQueries(KernelImpl):
    """Queries of prefills over fp8 pages are rounded to fp8."""

    def one(self, query: Any, keys: Any, values: Any, scales: Any, sinks: Any, span: Span) -> Any:
        if self.spec.has_quantized_kv_cache and not span.is_decode:
            query = query.clamp(-448, 448).to(torch.float8_e4m3fn).float()
        return super().one(query, keys, values, scales, sinks, span)


@_impl("tensors/quantised-output-fp8_e4m3", "after a call with another output_scale")
class ScaledOnce(TorchImpl):
    """The reciprocal of the output scale is kept from the first call."""

    _output_scale = None

    def attend(self, *given: Any, output_scale: Any = None, **options: Any) -> Any:
        if output_scale is not None and self._output_scale is None:
            self._output_scale = output_scale.clone()
        return super().attend(
            *given, output_scale=None if output_scale is None else self._output_scale, **options
        )


@_impl("cache/stored-bfloat16", "K of a cache of 'bfloat16' gives back -inf for -1.04858e+06")
class HalfStorage(TorchImpl):
    """bfloat16 pages of a float32 layer are written by way of float16."""

    def update_kv_cache(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        if self.spec.dtype == "float32" and self.spec.kv_cache_dtype == "bfloat16":
            key, value = key.half().float(), value.half().float()
        super().update_kv_cache(layer, key, value, kv_cache, slot_mapping)


# State between layers, steps and threads.


@_impl(
    "layers/own-sinks",
    "the layer with another of the same spec, among layers with one, another of the same spec",
)
class SinksByHeads(TorchImpl):
    """Sinks in the kernel's form are kept by the number of heads."""

    _kept: ClassVar[dict[Any, Any]] = {}

    def _scoring(self, *given: Any) -> Any:
        made = super()._scoring(*given)
        if made.sinks is None:
            return made
        return dataclasses.replace(made, sinks=self._kept.setdefault(self.spec.num_heads, made.sinks))


@_impl("builder/several-layers-full", "the first layer's scale, cap, sinks or slopes")
class PlannedCap(TorchImpl):
    """The metadata keeps the soft cap and scale of the first layer."""

    def _attend(
        self, query: Any, source: Any, given: Any, metadata: Any, reach: Any, scoring: Any, *rest: Any
    ) -> None:
        planned = metadata.plans.setdefault("scoring", scoring)
        scoring = dataclasses.replace(scoring, scale=planned.scale, soft_cap=planned.soft_cap)
        super()._attend(query, source, given, metadata, reach, scoring, *rest)


@_impl("builder/several-layers-spans", "the first layer's scale, cap, sinks or slopes")
class ReachOfFirstLayer(TorchImpl):
    """The metadata keeps the reach of the first layer, chunks aside."""

    def _attend(self, query: Any, source: Any, given: Any, metadata: Any, reach: Any, *rest: Any) -> None:
        first = metadata.plans.setdefault(("reach", reach.chunk), reach)
        super()._attend(query, source, given, metadata, first, *rest)


@_impl(
    "cache/sharing-writes-none",
    "forward of a layer with kv_sharing_target_layer_name wrote K of row 0 of block 1",
)
class SharingWrites(TorchImpl):
    """A layer that shares another's cache writes its keys too."""

    def forward(
        self,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Any,
        output: Any = None,
        **rest: Any,
    ) -> Any:
        target, self.kv_sharing_target_layer_name = self.kv_sharing_target_layer_name, None
        try:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, **rest)
        finally:
            self.kv_sharing_target_layer_name = target


@_impl("cache/sharing-writes-none", "only requests with prefill")
class SharingAttendsOwn(TorchImpl):
    """A sharing layer's prompts attend the keys of the call."""

    @property
    def _attends_own_keys(self) -> bool:
        return self.spec.attn_type is not AttentionType.ENCODER_DECODER


@_impl("runtime/threads", "state shared between two runtimes")
class ClassScratch(TorchImpl):
    """All layers and threads share one scratch for queries."""

    _scratch: ClassVar[Any] = None

    def _attend_call(self, layer: Any, query: torch.Tensor, *rest: Any) -> None:
        cls = type(self)
        if cls._scratch is None or cls._scratch.shape != query.shape or cls._scratch.dtype != query.dtype:
            cls._scratch = torch.empty_like(query)
        scratch = cls._scratch
        scratch.copy_(query)
        super()._attend_call(layer, scratch, *rest)


@_impl(
    "state/refilled-buffers-full",
    "whole rows are NaN: they were not written, or rows of blocks without a token (NaN) were read",
)
class WritesOnce(TorchImpl):
    """Keys at an address that was written are not written again."""

    _written = None

    def update_kv_cache(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        form = key.data_ptr(), kv_cache.data_ptr(), slot_mapping.data_ptr(), slot_mapping.shape
        if form != self._written:
            super().update_kv_cache(layer, key, value, kv_cache, slot_mapping)
        self._written = form


@_builder(
    "batch/cross-steps",
    "whole rows are NaN: they were not written, or rows of blocks without a token (NaN) were read",
)
class CrossSlots(TorchMetadataBuilder):
    """Slots are cut to the query tokens, also for cross layers."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return dataclasses.replace(made, slot_mapping=made.slot_mapping[: made.num_actual_tokens])


# Context parallelism.


@_impl("context_parallel/extend-2-ranks-runs-of-1-sinks", "sink counted twice in a merge")
class SinksOfRankZero(TorchImpl):
    """In a group of context parallelism the sinks are counted on rank 0, whatever the caller says."""

    def _attend_call(self, *given: Any) -> None:
        if self.dcp_world_size > 1:
            given = (*given[:8], self.dcp_rank == 0)
        super()._attend_call(*given)


@_impl("context_parallel/decode-2-ranks-runs-of-1", "LSE of rows that see nothing is 0, not -inf")
class EmptyRank(KernelImpl):
    """A decode over no keys of this rank gives its queries' LSE 0."""

    def weigh(self, logits: Any, values: Any, sinks: Any, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().weigh(logits, values, sinks, span)
        return (out, torch.zeros_like(lse)) if logits.shape[2] == 0 and sinks is None else (out, lse)


# Latent attention.


@_mla(
    "mla/correct/decode-h4x1-d80-v64-float32-b16-NHD",
    "scale of the latent, not of the query before absorption",
)
class LatentScale(TorchMLAImpl):
    """The scale is that of the latent's size."""

    def decode(
        self, q_nope: Any, q_pe: Any, kv_cache: Any, metadata: Any, output: Any, output_lse: Any
    ) -> None:
        kept, self.softmax_scale = self.softmax_scale, self.spec.head_size**-0.5
        super().decode(q_nope, q_pe, kv_cache, metadata, output, output_lse)
        self.softmax_scale = kept


@_mla("mla/correct/halves-h4x1-d80-v64-float32-fp8-b16-NHD", "only requests with decode")
class LatentOwnScale(TorchMLAImpl):
    """decode reads the layer's scale, not the one with the scale of stored latents."""

    def decode(
        self, q_nope: Any, q_pe: Any, kv_cache: Any, metadata: Any, output: Any, output_lse: Any
    ) -> None:
        self.softmax_scale = self.spec.scale
        super().decode(q_nope, q_pe, kv_cache, metadata, output, output_lse)


@_mla("mla/correct/decode-h4x1-d80-v64-float32-b16-NHD-lse", "LSE in base 2")
class LatentLseBaseTwo(TorchMLAImpl):
    """The LSE of decodes is in base 2."""

    def decode(
        self, q_nope: Any, q_pe: Any, kv_cache: Any, metadata: Any, output: Any, output_lse: Any
    ) -> None:
        super().decode(q_nope, q_pe, kv_cache, metadata, output, output_lse)
        if output_lse is not None:
            output_lse.mul_(math.log2(math.e))


@_mla("mla/correct/halves-h4x1-d288-v256-float32-b16-NHD", "rotated part left out")
class LatentRopeOf64(TorchMLAImpl):
    """Rotated parts of more or fewer than 64 elements are ignored."""

    def decode(
        self, q_nope: Any, q_pe: Any, kv_cache: Any, metadata: Any, output: Any, output_lse: Any
    ) -> None:
        if q_pe.shape[2] not in (16, 64, 0):
            q_pe = torch.zeros_like(q_pe)
        super().decode(q_nope, q_pe, kv_cache, metadata, output, output_lse)


@_mla("mla/correct/halves-h20x1-d80-v64-float32-b16-NHD", "only requests with decode")
class LatentHeadsOf16(TorchMLAImpl):
    """Heads beyond a multiple of 16 share the last whole group's queries."""

    def decode(
        self, q_nope: Any, q_pe: Any, kv_cache: Any, metadata: Any, output: Any, output_lse: Any
    ) -> None:
        heads = q_nope.shape[1]
        whole = heads // 16 * 16
        if whole and whole < heads:
            q_nope = torch.cat(
                [q_nope[:, :whole], q_nope[:, whole - 1 : whole].expand(-1, heads - whole, -1)], 1
            )
        super().decode(q_nope, q_pe, kv_cache, metadata, output, output_lse)


@_mla("mla/correct/draft-*", "causal mask ignored")
class LatentDraftsSeeAll(TorchMLAImpl):
    """Each of several queries sees the keys of the last."""

    def decode(
        self, q_nope: Any, q_pe: Any, kv_cache: Any, metadata: Any, output: Any, output_lse: Any
    ) -> None:
        m, lens = metadata, metadata.query_lens
        if lens.size and (lens == lens[0]).all() and 1 < lens[0] <= 2:
            n = int(lens[0])
            rows = torch.arange(lens.size).repeat_interleave(n)
            m = TorchMetadata(
                m.slot_mapping,
                m.block_table[rows],
                m.num_actual_tokens,
                np.arange(lens.size * n + 1),
                m.seq_lens.repeat(n),
                None,
                True,
            )
        super().decode(q_nope, q_pe, kv_cache, m, output, output_lse)


@_mla(
    "mla/cache/strided-NHD-decode",
    "whole rows are NaN: they were not written, or rows of blocks without a token (NaN) were read",
)
class LatentDense(TorchMLAImpl):
    """Blocks of latents are read as if they lay one behind the other."""

    def decode(
        self, q_nope: Any, q_pe: Any, kv_cache: Any, metadata: Any, output: Any, output_lse: Any
    ) -> None:
        _, size, latent = kv_cache.shape
        dense = kv_cache.as_strided(kv_cache.shape, (size * latent, latent, 1), kv_cache.storage_offset())
        super().decode(q_nope, q_pe, dense, metadata, output, output_lse)


@_mla("mla/correct/long-decode-h4x1-d80-v64-float32-b16-NHD", "only requests of more than 129 tokens")
class LatentTableOf64(TorchMLAImpl):
    """At most 64 blocks of a request are read."""

    def decode(
        self, q_nope: Any, q_pe: Any, kv_cache: Any, metadata: Any, output: Any, output_lse: Any
    ) -> None:
        most = 64 * kv_cache.shape[1]
        if (metadata.seq_lens > most).any():
            keep = np.minimum(metadata.seq_lens, most)
            metadata = dataclasses.replace(metadata, seq_lens=keep, plans={})
        super().decode(q_nope, q_pe, kv_cache, metadata, output, output_lse)


@_mla("mla/correct/idle-h4x1-*lse", "only requests with padding")
class LatentEmptyRows(TorchMLAImpl):
    """Output rows of requests without keys are left as they were."""

    def decode(
        self, q_nope: Any, q_pe: Any, kv_cache: Any, metadata: Any, output: Any, output_lse: Any
    ) -> None:
        kept = output.clone()
        super().decode(q_nope, q_pe, kv_cache, metadata, output, output_lse)
        for request in np.flatnonzero(metadata.seq_lens <= 0).tolist():
            rows = slice(*metadata.query_starts[request : request + 2].tolist())
            output[rows] = kept[rows]


@_mla("mla/correct/halves-h4x1-d80-v64-float32-fp8_e5m2-b16-NHD", "only the first request")
class LatentFp8Query(TorchMLAImpl):
    """Absorbed queries over fp8 latents are rounded to fp8."""

    def decode(
        self, q_nope: Any, q_pe: Any, kv_cache: Any, metadata: Any, output: Any, output_lse: Any
    ) -> None:
        if kv_cache.dtype.itemsize == 1:
            q_nope = q_nope.clamp(-448, 448).to(torch.float8_e4m3fn).to(q_nope.dtype)
        super().decode(q_nope, q_pe, kv_cache, metadata, output, output_lse)
