"""Runs a layer on TRITON: writes its pages, then runs a kernel for decodes and one for longer requests."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, TypeAlias

import torch

from attnplug.backends.impl import BuiltinImpl, Pages
from attnplug.backends.triton.bindings import BoundLayer
from attnplug.backends.triton.layout import tile_side
from attnplug.backends.triton.metadata import TritonMetadata
from attnplug.backends.triton.opened import Opened, PageOpener, gains, may_open
from attnplug.backends.triton.shares import SharesStep
from attnplug.backends.triton.specialized import tiles
from attnplug.core.errors import BatchError
from attnplug.core.impl import AttentionLayer
from attnplug.ops.checks import (
    check_cache_given,
    check_keys,
    check_queries,
    check_spans_given,
    refuse_output_scales,
)
from attnplug.ops.reach import Reach
from attnplug.ops.triton.kv_format_write import bound_codec_write
from attnplug.ops.triton.kv_write import BoundWrite
from attnplug.ops.triton.launch import on_device_of

_Call: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, outputs, LSE, sinks, slopes and spans; the queries fill in for a tensor that the kernels do not use."""
_New: TypeAlias = tuple[torch.Tensor | None, torch.Tensor | None]
"""Keys and values of the call."""

_MOST_FORMS = 8
"""Kinds of calls that a layer keeps bound: with and without sinks, with an LSE, with other strides."""


class TritonImpl(BuiltinImpl[TritonMetadata]):
    """Attention in two Triton kernels.

    Tensors are checked and bound once for each combination of shapes, strides and types.
    """

    can_return_lse_for_decode = True
    _reads_adjacent = True
    _bind_write = BoundWrite
    _bind_codec = staticmethod(bound_codec_write)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._bound: dict[object, BoundLayer] = {}
        self._openers: dict[bool, tuple[object, PageOpener]] = {}

    def attend(
        self,
        layer: AttentionLayer | None,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        attn_metadata: TritonMetadata,
        output: torch.Tensor,
        *,
        output_lse: torch.Tensor | None = None,
        use_sinks: bool = True,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As AttentionImpl.attend; output scales are not supported."""
        meta, tensors = attn_metadata, self.tensors
        if output_scale is not None or output_block_scale is not None:
            refuse_output_scales(output_scale=output_scale, output_block_scale=output_block_scale)
        if query.stride()[2:] != (1,):
            check_queries(query, output, output_lse, meta.num_actual_tokens, self.spec)
            query = query.contiguous()
        if output_lse is not None and output_lse.stride()[1:] != (1,):
            # Kernels write the heads of a token side by side, and some libraries keep the LSE as [H, T].
            dense = torch.empty_like(output_lse, memory_format=torch.contiguous_format)
            given = layer, query, key, value, kv_cache, meta, output
            self.attend(*given, output_lse=dense, use_sinks=use_sinks)
            output_lse[: meta.num_actual_tokens] = dense[: meta.num_actual_tokens]
            return output
        scales = self._scales(layer, query.dtype if kv_cache is None else kv_cache.dtype)
        bound = self._bound_for(query, output, output_lse, use_sinks, meta, scales, kv_cache is not None)
        lse = query if output_lse is None else output_lse
        # Without a copy of a column of a larger tensor, kernels would read what is beside it.
        sinks = tensors.sinks.contiguous() if use_sinks and tensors.sinks is not None else query
        slopes = query if tensors.alibi_slopes is None else tensors.alibi_slopes.contiguous()
        spans = query
        if self.spec.mm_prefix:
            check_spans_given(meta.spans is not None, self.spec)
            spans = query if meta.spans is None else meta.spans
        if kv_cache is None or self.spec.direct_kv:
            check_cache_given(kv_cache, self.spec)
        with on_device_of(query):
            call = query, output, lse, sinks, slopes, spans
            if kv_cache is None:
                _over_given(bound, meta, call, check_keys(key, value, meta.key_rows, self.spec))
                return output
            longest = max(meta.max_query_len, meta.max_decode_len)
            pages = self._pages_with_room(kv_cache, meta.block_table, longest)
            self._over_pages(bound, meta, call, (key, value), pages)
        return output

    def _over_pages(
        self, bound: BoundLayer, meta: TritonMetadata, call: _Call, new: _New, pages: Pages
    ) -> None:
        """Attend all requests over pages, in turned rows if the format rotates."""
        query, output = call[:2]
        is_opened = self._gains(bound, meta, pages)
        numbers = self._numbers(bound, meta, call, pages) if is_opened else None
        only_decodes = numbers is not None
        if bound.rotation is None:
            self._run(bound, meta, call, new, pages, is_opened, only_decodes)
        else:
            every = meta.num_reqs, meta.num_actual_tokens
            # Rows over opened numbers are turned for themselves.
            part = (meta.num_decodes, meta.num_decode_tokens) if only_decodes else every
            sizes = 2, part[1], *query.shape[1:]
            turned, found = torch.empty(sizes, dtype=torch.float32, device=query.device)
            bound.rotation.turn(query, turned, meta.query_start_loc, *part)
            self._run(bound, meta, (turned, found, *call[2:]), new, pages, is_opened, only_decodes)
            bound.rotation.turn(found, output, meta.query_start_loc, *part, back=True)
            if only_decodes:
                # A later step may have too many keys.
                bound.rotation.turn(query, turned, meta.query_start_loc, *every, is_run=False)
                bound.rotation.turn(found, output, meta.query_start_loc, *every, back=True, is_run=False)
        if numbers is not None:
            self._over_numbers(bound, meta, call, pages, numbers)

    def _run(
        self,
        bound: BoundLayer,
        meta: TritonMetadata,
        call: _Call,
        new: _New,
        pages: Pages,
        is_opened: bool,
        only_decodes: bool,
    ) -> None:
        """Attend all requests over pages; with `only_decodes` other kernels are only compiled."""
        is_whole = meta.max_query_len > 0 and not bound.one_kernel and _is_whole(bound, meta)
        # Then a prefill is launched right behind the decode, and reads no result of it.
        is_mixed = is_whole and meta.max_decode_len > 0 and not is_opened
        if meta.max_decode_len:
            tokens, table = meta.num_decode_tokens, meta.block_table
            _by_shares(bound, meta, call, pages, meta.decode_shares, table, tokens, is_followed=is_mixed)
        if meta.max_query_len:
            starts, lens, table, _ = meta.others
            first, reqs = meta.num_decode_tokens, meta.num_reqs - meta.num_decodes
            if not is_whole:
                tokens = meta.num_actual_tokens - first
                _by_shares(bound, meta, call, pages, meta.other_shares, table, tokens)
                return
            keys = self._given(*new, meta) or (pages.k, pages.v)
            given = (starts, lens, table, starts), (first, reqs), meta.max_query_len
            if is_opened:
                # A later step may have too many keys, which those of a warm-up never have.
                _prefill(bound, meta, call, keys, *given, is_run=False)
                if only_decodes:
                    return
                opened = self._opener_of(meta, pages)(meta, pages)
                keys, bound = (opened.k, opened.v), bound.over_opened(opened, *call[:3])
                given = (starts, lens, opened.table, starts), *given[1:]
            _prefill(bound, meta, call, keys, *given, is_next=is_mixed)

    def _gains(self, bound: BoundLayer, meta: TritonMetadata, pages: Pages) -> bool:
        """Whether the longer requests read opened pages."""
        may = meta.max_query_len > 0 and self._opens and _is_whole(bound, meta)
        return may and gains(self.spec, meta, pages.k.shape[1])

    def _numbers(self, bound: BoundLayer, meta: TritonMetadata, call: _Call, pages: Pages) -> _Numbers | None:
        """What the longer requests need to read pages opened as numbers; None if no kernel serves them."""
        if not bound.numbers:
            return None
        opened = self._opener_of(meta, pages, bound.reach).places(meta)
        over, keys = bound.over_opened(opened, *call[:3]), (opened.k, opened.v)
        most_keys = meta.max_query_len if meta.all_new else None
        stride, longest = meta.block_table.stride(0), meta.max_query_len
        tokens, reqs = meta.num_actual_tokens - meta.num_decode_tokens, meta.num_reqs - meta.num_decodes
        prefill = over.prefill(*keys, call[:2], stride, longest, most_keys, (tokens, reqs))
        return _Numbers(opened, over) if prefill.is_specialized else None

    def _over_numbers(
        self, bound: BoundLayer, meta: TritonMetadata, call: _Call, pages: Pages, numbers: _Numbers
    ) -> None:
        """Attend the longer requests over pages opened as numbers."""
        opened, over = numbers
        self._opener_of(meta, pages, bound.reach)(meta, pages, opened)
        starts, lens, _, _ = meta.others
        first, reqs = meta.num_decode_tokens, meta.num_reqs - meta.num_decodes
        given = (opened.k, opened.v), (starts, lens, opened.table, starts), (first, reqs), meta.max_query_len
        matrix = call[0] if bound.rotation is None else bound.rotation.matrix
        _prefill(over, meta, call, *given, factors=(matrix, opened.powers))

    @functools.cached_property
    def _opens(self) -> bool:
        return may_open(self.spec)

    def _opener_of(self, meta: TritonMetadata, pages: Pages, reach: Reach | None = None) -> PageOpener:
        """Opens the pages of the longer requests; with a `reach` as numbers."""
        most = tile_side(max(meta.workspace.most_reqs, meta.num_reqs - meta.num_decodes))
        form = pages.form, meta.block_table.stride(0), most, reach
        known = self._openers.get(reach is None)
        if known is None or known[0] != form:
            known = self._openers[reach is None] = form, PageOpener(self.spec, pages, *form[1:])
        return known[1]

    def _given(
        self, key: torch.Tensor | None, value: torch.Tensor | None, meta: TritonMetadata
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The new tokens' keys and values, if the longer requests attend no others; faster than their pages."""
        if key is None or value is None or not meta.all_new:
            return None
        # A quantised cache rounds keys, and a shared or cross cache holds other keys than the call's.
        if self.spec.has_quantized_kv_cache or not self._attends_own_keys:
            return None
        check_keys(key, value, meta.num_actual_tokens, self.spec)
        return None if key.stride(2) != 1 or value.stride(2) != 1 else (key, value)

    def _bound_for(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        output_lse: torch.Tensor | None,
        use_sinks: bool,
        meta: TritonMetadata,
        scales: tuple[Any, Any],
        paged: bool,
    ) -> BoundLayer:
        """The layer bound for calls like this; the first such call is checked."""
        tokens, asked, written = meta.num_actual_tokens, query.shape, output.shape
        form: tuple[object, ...] = (meta.causal, use_sinks, scales, query.device, paged)
        form += (asked[1:], query.stride(), query.dtype, written[1:], output.stride(), output.dtype)
        least = tokens
        if output_lse is not None:
            form += (output_lse.shape[1:], output_lse.stride(), output_lse.dtype)
            least = min(output_lse.shape[:1], default=0)
        bound = self._bound.get(form)
        if bound is not None and asked[0] >= tokens <= written[0] and least >= tokens:
            return bound
        check_queries(query, output, output_lse, tokens, self.spec)
        if output.stride(2) != 1:
            limit = "must be 1: a head's elements are contiguous"
            raise BatchError("output.stride(2)", output.stride(2), limit)
        for name, tensor in (("sinks", self.tensors.sinks), ("alibi_slopes", self.tensors.alibi_slopes)):
            if tensor is not None and tensor.device != query.device:
                limit = f"must be {query.device}, that of the queries"
                raise BatchError(f"{name}.device", str(tensor.device), limit)
        reach = Reach.of(self.spec, meta.causal)
        tensors = self.tensors if use_sinks else dataclasses.replace(self.tensors, sinks=None)
        if len(self._bound) == _MOST_FORMS:
            self._bound.clear()
        given = query, output, output_lse
        logits = scales[0], scales[1]
        if isinstance(logits[0], tuple):
            # The kernels read products with the softmax scale.
            logits = tuple(self.spec.scale * each for each in logits[0]), logits[1]
        own = self._on_device(logits, query.device)
        bound = self._bound[form] = BoundLayer(self.spec, tensors, reach, *given, own, paged)
        return bound


class _Numbers(NamedTuple):
    """A step over pages opened as numbers."""

    opened: Opened
    over: BoundLayer


def _is_whole(bound: BoundLayer, meta: TritonMetadata) -> bool:
    """Whether the longer requests need no division of their keys."""
    # Prompts see few keys, and their tiles have unlike numbers of them.
    tokens, reqs = meta.num_actual_tokens - meta.num_decode_tokens, meta.num_reqs - meta.num_decodes
    return meta.all_new or bound.fills_gpu(tokens, reqs)


def _over_given(
    bound: BoundLayer, meta: TritonMetadata, call: _Call, keys: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Attend all requests over the keys and values of the call."""
    k, v = (each if each.stride(2) == 1 else each.contiguous() for each in keys)
    if longest := max(meta.max_query_len, meta.max_decode_len):
        batch = meta.query_start_loc, meta.seq_lens, meta.block_table, meta.key_start_loc
        _prefill(bound, meta, call, (k, v), batch, (0, meta.num_reqs), longest)


def _by_shares(
    bound: BoundLayer,
    meta: TritonMetadata,
    call: _Call,
    pages: Pages,
    step: SharesStep,
    table: torch.Tensor,
    tokens: int,
    *,
    is_followed: bool = False,
) -> None:
    query, output, lse, sinks, slopes, spans = call
    if bound.fixed and step.prefix:
        # A prefix that is attended once is summed apart, so its keys come as each request's own.
        step = dataclasses.replace(step, prefix=0, part=2)
    attend = bound.shares(pages, table.stride(0), step.max_query_len, tokens if step.prefix else 0)
    tensors = query, pages.k, pages.v, output, lse
    attend(
        step, meta.workspace.shares, tensors, table, (sinks, slopes, spans), tokens, is_followed=is_followed
    )


def _prefill(
    bound: BoundLayer,
    meta: TritonMetadata,
    call: _Call,
    keys: tuple[torch.Tensor, torch.Tensor],
    batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    part: tuple[int, int],
    longest: int,
    *,
    is_run: bool = True,
    is_next: bool = False,
    factors: tuple[torch.Tensor, torch.Tensor | None] | None = None,
) -> None:
    """Attend `part`, a first token and a number of requests; `longest` is its longest query.

    Without `is_run` the kernel is only compiled. With `is_next` the launch before is a decode of other requests. `factors` are
    the matrix and the powers of opened numbers.
    """
    query, output, lse, sinks, slopes, spans = call
    first_token, reqs = part
    most_keys = longest if meta.all_new else None
    tokens = meta.num_actual_tokens - first_token
    stride, sizes = meta.block_table.stride(0), (tokens, reqs)
    prefill = bound.prefill(*keys, (query, output), stride, longest, most_keys, sizes)
    given = (query, *keys, output, lse, *batch, sinks, slopes, spans, first_token, reqs)
    if not is_run:
        prefill.kernel.compile(*given)
    elif prefill.is_specialized:
        count, each = tiles(tokens * bound.group, reqs, longest * bound.group, prefill.tokens)
        programs, by_place = bound.programs(count, reqs, most_keys)
        each = -each if by_place else each
        prefill.kernel((programs,), *given, count, each, int(is_next), *(factors or (query, query)))
    else:
        # An upper bound: the host does not read the start locations from the device.
        prefill.kernel((tokens // prefill.tokens + reqs, bound.kv_heads * prefill.parts), *given)
