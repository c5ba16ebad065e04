"""Wrong backends as ported kernels get wrong by accident: tile tails, strides, stale plans and shared prefixes."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from plain_attention import KernelImpl

from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from mutants.parts import Altered
from mutants.table import NAN_ROWS, Table

table = Table("accidents")
kernel = table.on(KernelImpl)
impl = table.on(TorchImpl)
builder = table.on(TorchMetadataBuilder)
step = table.on(Altered)


# Tiles and splits.


@kernel.tiles("correct/long-decode-h4x2-d64-float32-b16-NHD", "only requests of more than 129 tokens")
def tail_of_many_tiles(right, self, keys):
    """The tail is lost from the third tile on: the count of tiles is rounded down."""
    tiles = right(keys)
    return tiles[:-1] if len(tiles) > 16 and keys % self.tile else tiles


# fmt: off
# At most eight splits of 512 keys.
kernel.tiles("correct/long-decode-h4x2-d64-float32-b16-NHD", "only requests of more than 2100 tokens",
    eight_splits=lambda right, self, keys: [each for each in right(keys) if each[1] <= 8 * 512])
# fmt: on


@kernel.online("correct/mixed-h4x2-d64-float32-b256-NHD", "only rows up to position 255")
def empty_split_counts(self, logits, values):
    """A split of which nothing is seen has the LSE 0 in the merge."""
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


@kernel.weigh("correct/long-decode-h4x2-d64-float32-b16-NHD-sinks-lse", "a wrong sum of weights")
def sink_in_each_split(right, self, logits, values, sinks, span):
    """Each split of 512 keys has the sink."""
    splits = -(-logits.shape[2] // 512)
    more = None if sinks is None else sinks + math.log(max(splits, 1))
    return right(logits, values, more, span)


@kernel.window("correct/mixed-h4x2-d64-float32-b16-NHD-window6.0", "only requests with prefill")
def window_tile_skip(right, self, span):
    """With more than 8 tiles, the first tile of a window is found from the last row of the query tile."""
    seen = right(span)
    left = self.spec.window[0]
    if left >= 0 and span.at.shape[0] > 64:
        rows = span.at.shape[0]
        last = span.at[((torch.arange(rows) // 64 + 1) * 64).clamp(max=rows) - 1]
        seen = seen & (span.held // 64 >= (last[:, None] - left) // 64)
    return seen


@kernel.causal("correct/mixed-h4x2-d64-float32-b16-NHD", "only the first request")
def diagonal_of_last_tile(right, self, span):
    """Only the last tile of 128 keys of a query tile of 128 rows has the causal mask; unaligned contexts need two."""
    seen = right(span)
    rows = span.at.shape[0]
    tile = torch.arange(rows) // 128
    end = span.at[((tile + 1) * 128).clamp(max=rows) - 1] + 1
    unmasked = span.held // 128 < ((end - 1) // 128)[:, None]
    return seen | (unmasked & (span.held < end[:, None]))


@kernel._source("correct/far-blocks-h4x2-d64-float32-b1-NHD", NAN_ROWS)
def half_table(right, self, key, value, kv_cache, metadata):
    """The block table is copied as int16."""
    table = metadata.block_table.to(torch.int16).int() & 0x7FFF
    return right(key, value, kv_cache, dataclasses.replace(metadata, block_table=table))


@kernel.online("correct/long-decode-h4x2-d64-float32-b16-NHD", "as half precision gives")
def half_weights(right, self, logits, values):
    """Weights are accumulated in float16, which loses the small ones of long contexts."""
    out, lse = right(logits, values)
    if logits.shape[2] > 2048:
        weights = (logits - lse[..., None].nan_to_num(neginf=0.0)).exp().half().float()
        out = weights @ values
    return out, lse


# Layouts and strides.


@impl._attend_call(
    "tensors/strided-inputs-decode", "with query, key and value as views of one packed projection"
)
def packed_queries(right, self, layer, query, *rest):
    """The strides of queries are those of a dense tensor."""
    dense = query.as_strided(query.shape, (query.shape[1] * query.shape[2], query.shape[2], 1))
    right(layer, dense, *rest)


@impl._attend_call("correct/mixed-h4x2-d64-float32-b16-NHD-lse", "LSE transposed")
def lse_by_head(right, self, *given):
    """The LSE is written as `[H, T]`."""
    right(*given)
    lse, meta = given[7], given[5]
    if lse is not None and lse.is_contiguous():
        rows = lse[: meta.num_actual_tokens]
        rows.copy_(rows.T.reshape(rows.shape))


@kernel.update_kv_cache("cache/block-size-64", NAN_ROWS)
def pages_of_sixteen(right, self, layer, key, value, kv_cache, slot_mapping):
    """Slots become block and offset by 16, when the block size is a power of two."""
    size = self._pages_of(kv_cache).k.shape[1]
    if size == 64:
        slot_mapping = torch.where(
            slot_mapping >= 0,
            slot_mapping // 16 % (kv_cache.shape[0] or 1) * size + slot_mapping % 16,
            -1,
        )
    right(layer, key, value, kv_cache, slot_mapping)


@impl.update_kv_cache("correct/mixed-h4x2-d64-float32-b16-NHD-cross", NAN_ROWS)
def pad_slot_wraps(right, self, layer, key, value, kv_cache, slot_mapping):
    """-1 writes the last slot of the cache."""
    pages = self._pages_of(kv_cache)
    last = pages.k.shape[0] * pages.k.shape[1] - 1
    slots = torch.where(slot_mapping < 0, last, slot_mapping)
    right(layer, key, value, kv_cache, slots)


@impl._source("correct/mixed-h4x2-d64-float32-b16-HND", NAN_ROWS)
def dense_tokens_of_hnd(right, self, key, value, kv_cache, metadata):
    """HND pages of one block are read as NHD."""
    source = right(key, value, kv_cache, metadata)
    if kv_cache is not None and not kv_cache[0].is_contiguous() and source.k.stride(1) < source.k.stride(2):
        b, n, h, d = source.k.shape
        source.k = source.k.as_strided(
            (b, n, h, d),
            (source.k.stride(0), h * source.k.stride(1), source.k.stride(1), 1),
            source.k.storage_offset(),
        )
    return source


# Builders and plans.


@builder.build("builder/build-full", "another step's block table", state={"_kept": None})
def plan_by_shape(right, self, common_prefix_len, common_attn_metadata, fast_build=False):
    """A plan is kept for batches of the same shape."""
    c = common_attn_metadata
    made = right(common_prefix_len, c, fast_build)
    self._kept = self._kept or {}
    key = (c.num_reqs, c.num_actual_tokens, c.max_seq_len, c.max_query_len)
    kept = self._kept.setdefault(key, made)
    return dataclasses.replace(made, block_table=kept.block_table)


@builder.update_block_table("builder/update_block_table-full", "after update_block_table")
def old_slots(right, self, metadata, blk_table, slot_mapping):
    """update_block_table keeps the slots."""
    made = right(metadata, blk_table, slot_mapping)
    return dataclasses.replace(made, slot_mapping=metadata.slot_mapping)


@builder.build_for_drafting("builder/build_for_drafting-full", "build_for_drafting with draft_index=2")
def draft_lengths(right, self, common_attn_metadata, draft_index):
    """A draft adds its index to the lengths, which the engine has already raised."""
    made = right(common_attn_metadata, draft_index)
    if draft_index > 1:
        most = made.block_table.shape[1] * self.kv_cache_spec.block_size
        made.seq_lens = np.minimum(made.seq_lens + draft_index - 1, most)
    return made


@builder.build("builder/build_for_drafting-spans", "spans ignored")
def fast_without_spans(right, self, common_prefix_len, common_attn_metadata, fast_build=False):
    """A fast build leaves out the multimodal spans."""
    made = right(common_prefix_len, common_attn_metadata, fast_build)
    if fast_build and made.spans is not None:
        made.spans = np.zeros_like(made.spans)
    return made


@builder.build("batch/idle-decode", "with requests of [0, 1, 0, 1, 1] new tokens")
def row_per_request(right, self, common_prefix_len, common_attn_metadata, fast_build=False):
    """With at most one query per request, row i is of request i."""
    c = common_attn_metadata
    made = right(common_prefix_len, c, fast_build)
    if c.max_query_len == 1:
        starts = np.minimum(np.arange(c.num_reqs + 1), c.num_actual_tokens)
        made.query_starts = starts.astype(np.int64)
    return made


@step.altered("builder/host-lengths-upper_bound-full", "upper bounds taken for exact lengths")
def host_lengths(self, made, common):
    """The lengths of the host are taken for exact."""
    host = common.seq_lens_host
    if host is not None:
        made.seq_lens = np.asarray(host[: made.seq_lens.size]).astype(np.int64)
    return made


@step.altered("builder/max_seq_len-full", "max_seq_len taken for the longest length")
def longest_is_all(self, made, common):
    """max_seq_len is read as the length of all requests where the batch is uniform."""
    if made.seq_lens.size and (made.seq_lens == made.seq_lens[0]).all() and made.query_lens.all():
        most = made.block_table.shape[1] * getattr(self.kv_cache_spec, "block_size", 0)
        longest = common.max_seq_len
        if longest <= most:
            made.seq_lens = np.full_like(made.seq_lens, longest)
    return made


@step.altered("tensors/sees-nothing-direct", "forward")
def direct_like_queries(self, made, common):
    """Direct keys are packed like the queries, unless a request has no query."""
    if made.key_starts is not None and made.key_starts[-1] <= made.query_starts[-1]:
        made.key_starts = None
    return made


# Prefixes.


@impl._attend_cascade(
    "builder/common-prefix-lse", "build(common_prefix_len=16) of 4 requests with [1, 1, 1, 1] new tokens"
)
def prefix_lse(right, self, *given):
    """With a shared prefix, the LSE is that of the rest."""
    right(*given)
    query, source, rest, meta, reach, scoring, _, lse = given
    if lse is not None:
        scratch = query.new_empty(query.shape[0], query.shape[1], source.v.shape[3], dtype=torch.float32)
        self._attend(query, rest, None, meta, reach, scoring, scratch, lse)


@impl._attend_cascade("builder/common-prefix-fp8", "v_scale ignored")
def prefix_without_scale(right, self, query, source, rest, meta, reach, scoring, *more):
    """The prefix of fp8 pages is attended without the scale of V."""
    if source.k.dtype.itemsize == 1:
        scoring = dataclasses.replace(scoring, value_scale=1.0)
    right(query, source, rest, meta, reach, scoring, *more)
