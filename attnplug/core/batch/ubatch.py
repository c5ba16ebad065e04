"""A step cut into micro-batches, which may begin or end inside a request."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from attnplug.core.arguments import Shape, instance, integer, one_of, sequence_of
from attnplug.core.batch.host import IntArray, known_seq_lens, optional_rows, query_spans
from attnplug.core.errors import BatchError
from attnplug.core.metadata import CommonAttentionMetadata

_STARTS, _LENGTHS, _TABLE = Shape("R+1: integers"), Shape("R: integers"), Shape("R M: integers")


@dataclasses.dataclass(frozen=True, slots=True)
class UBatchSlice:
    """The requests and the tokens of one micro-batch, as slices with both bounds given."""

    request_slice: slice
    token_slice: slice

    def is_empty(self) -> bool:
        """Whether it has no request or no token."""
        requests, tokens = self.request_slice, self.token_slice
        return bool(requests.start == requests.stop or tokens.start == tokens.stop)

    @property
    def num_tokens(self) -> int:
        """Tokens of the micro-batch."""
        return int(self.token_slice.stop - self.token_slice.start)


def slice_query_start_locs(query_start_loc: torch.Tensor, request_slice: slice) -> torch.Tensor:
    """Start locations of some requests, `[n + 1]`, rebased to 0: a new tensor, on the same device."""
    _STARTS.check("query_start_loc", query_start_loc, {})
    _range("request_slice", request_slice, query_start_loc.shape[0] - 1, may_be_open=True)
    start = request_slice.start or 0
    stop = query_start_loc.shape[0] if request_slice.stop is None else request_slice.stop + 1
    return query_start_loc[start:stop] - query_start_loc[start]


def split_attn_metadata(
    ubatch_slices: Sequence[UBatchSlice], common_attn_metadata: CommonAttentionMetadata
) -> list[CommonAttentionMetadata]:
    """The metadata of each micro-batch; the input is not modified.

    A batch with `causal=None` may be cut inside a request; layers that see later tokens then refuse the part.

    A first request that began in the micro-batch before has only the tokens that are left of it. A
    last request that goes on in the next has the tokens up to there, and is as long as that. Keys
    given with the call are counted from the micro-batch's first. Which logits are wanted is not
    carried over.

    Args:
        ubatch_slices: a token slice starts inside its first request and ends inside its last, or
            past the last request of the batch where tokens are padded.
        common_attn_metadata: the batch.

    Raises:
        BatchError: an empty slice, or one that leaves its requests; a cut inside a request whose tokens see later ones
            (`causal=False`, multimodal spans) or whose lengths per rank are already fixed; start locations
            that decrease; lengths or a table that are not one per request; the batch of cross attention with encoder
            tokens to write.
    """
    ubatch_slices = sequence_of(one_of(UBatchSlice), "UBatchSlice")("ubatch_slices", ubatch_slices)
    starts, _ = query_spans(common_attn_metadata)
    table = common_attn_metadata.block_table_tensor
    instance("block_table_tensor", table, torch.Tensor)
    if table.ndim != 2 or table.shape[0] != common_attn_metadata.num_reqs:
        limit = f"must be of shape ({common_attn_metadata.num_reqs}, max_blocks)"
        raise BatchError("block_table_tensor", tuple(table.shape), limit)
    _TABLE.check("block_table_tensor", table, {})
    slots = common_attn_metadata.slot_mapping.shape[0]
    encoder = common_attn_metadata.encoder_seq_lens
    if encoder is not None and common_attn_metadata.seq_lens is encoder and slots:
        limit = "are of the encoder's tokens, which no query owns"
        remedy = "split the decoder's batch, and make the batch of cross attention from each part"
        raise BatchError("slot_mapping", slots, limit, remedy)
    lengths = known_seq_lens(common_attn_metadata)
    if lengths is None or lengths is common_attn_metadata.seq_lens_host:
        _LENGTHS.check(
            "seq_lens", common_attn_metadata.seq_lens, {"R": (table.shape[0], "block_table_tensor")}
        )
    if lengths is not None and lengths.min(initial=0) < 0:
        raise BatchError("seq_lens", int(lengths.min()), "must be at least 0")
    return [_micro_batch(part, common_attn_metadata, starts, lengths) for part in ubatch_slices]


def _micro_batch(
    part: UBatchSlice, common: CommonAttentionMetadata, starts: IntArray, known: IntArray | None
) -> CommonAttentionMetadata:
    first, last, begin, end, missing = _bounds(part, common, starts)
    cut_last = missing > 0
    is_cut = cut_last or begin > starts[first]
    if is_cut and common.causal is False:
        raise BatchError(
            "token_slice", (begin, end), "cuts a request whose tokens see later ones (causal=False)"
        )
    if cut_last and common.dcp_local_seq_lens is not None:
        remedy = "compute dcp_local_seq_lens after splitting"
        raise BatchError(
            "token_slice", (begin, end), "shortens a request whose shares per rank are fixed", remedy
        )
    if begin > starts[first]:
        _check_span_cut(common, begin)
    if cut_last:
        _check_span_cut(common, end)
    reqs, bounds = slice(first, last), slice(first, last + 1)

    start_locs = starts[bounds].clip(begin, end)
    start_locs -= begin
    query_start_loc_cpu = torch.from_numpy(start_locs)
    query_start_loc = common.query_start_loc[bounds].clamp(begin, end).sub_(begin)

    host = common.seq_lens_host if known is None else known
    seq_lens, host = common.seq_lens[reqs], None if host is None else host[reqs]
    if cut_last:
        # The whole batch must keep its lengths.
        seq_lens = seq_lens.clone()
        seq_lens[-1:].sub_(missing)
        if host is not None:
            host = host.copy()
            host[-1] -= missing
    max_query_len = int((start_locs[1:] - start_locs[:-1]).max())
    return CommonAttentionMetadata(
        query_start_loc=query_start_loc,
        query_start_loc_cpu=query_start_loc_cpu,
        seq_lens=seq_lens,
        num_reqs=last - first,
        num_actual_tokens=end - begin,
        # A dummy run has tokens but start locations of 0.
        max_query_len=max_query_len or common.max_query_len,
        max_seq_len=common.max_seq_len if host is None else int(host.max()),
        block_table_tensor=common.block_table_tensor[reqs],
        slot_mapping=common.slot_mapping[begin:end],
        causal=common.causal,
        is_cut=common.is_cut or is_cut,
        seq_lens_host=host,
        seq_lens_host_exact=known is not None or common.seq_lens_host_exact,
        **_key_starts(common, reqs, missing),
        **optional_rows(common, reqs, slice(begin, end)),
    )


def _check_span_cut(common: CommonAttentionMetadata, token: int) -> None:
    """BatchError if a cut inside a request, before `token`, parts a multimodal span."""
    if common.mm_prefix_spans is None:
        return
    spans = common.host_mm_prefix_spans()
    if spans is None:
        limit = "is required on the host to cut inside a request: a copy would wait for the device"
        raise BatchError("mm_prefix_spans_cpu", None, limit, "give the batch both forms")
    (start, end), before = spans[token].tolist(), spans[token - 1].tolist()
    if end > start and before == [start, end]:
        limit = f"cuts a multimodal span, whose tokens {start} to {end - 1} see each other"
        raise BatchError("token_slice", token, limit, "cut before or after the span")


def _bounds(
    part: UBatchSlice, common: CommonAttentionMetadata, starts: IntArray
) -> tuple[int, int, int, int, int]:
    """Both slices' bounds, and how many tokens of the last request go to the next micro-batch."""
    first, last = _range("request_slice", part.request_slice, common.num_reqs)
    begin, end = _range("token_slice", part.token_slice, common.num_actual_tokens)
    low, high, limit = int(starts[first]), int(starts[first + 1]), int(starts[last])
    if not (low <= begin < high or low == begin):
        found = (begin, end)
        raise BatchError(
            "token_slice", found, f"must start inside request {first}, its tokens {low} to {high}"
        )
    if end < starts[last - 1] or (end > limit and last < common.num_reqs):
        found, low = (begin, end), int(starts[last - 1])
        raise BatchError(
            "token_slice", found, f"must end inside request {last - 1}, its tokens {low} to {limit}"
        )
    return first, last, begin, end, max(limit - end, 0)


def _range(field: str, part: slice, limit: int, *, may_be_open: bool = False) -> tuple[int, int]:
    text = f"must be a slice with bounds in 0 .. {limit} that holds something"
    if not isinstance(part, slice):
        raise BatchError(field, part, text)
    start, stop = part.start, part.stop
    if may_be_open:
        start, stop = 0 if start is None else start, limit if stop is None else stop
    begin, end = (-1 if each is None else integer(field, each, text) for each in (start, stop))
    if part.step not in (None, 1) or not 0 <= begin < end + may_be_open or end > limit:
        raise BatchError(field, part, text)
    return begin, end


def _key_starts(common: CommonAttentionMetadata, reqs: slice, missing: int) -> dict[str, Any]:
    """Where keys given with the call start, on both sides, where the batch has them."""
    fields: dict[str, Any] = {}
    for name in ("key_start_loc", "key_start_loc_cpu"):
        value = getattr(common, name)
        if value is not None:
            fields[name] = slice_query_start_locs(value, reqs)
            if missing:
                fields[name][-1:].sub_(missing)
    return fields
