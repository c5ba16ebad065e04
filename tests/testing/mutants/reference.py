"""A correct backend written from the contract alone: each step of it is a method that a mutant overrides."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch

from attnplug.core import AttentionImpl, AttentionMetadata, AttentionMetadataBuilder
from attnplug.core.errors import BatchError
from attnplug.core.kv_cache_spec import CrossAttentionSpec
from attnplug.core.metadata import CommonAttentionMetadata
from attnplug.core.selection import Selection
from attnplug.ops.checks import (
    check_cache_given,
    check_keys,
    check_kv_write,
    check_queries,
    check_rows,
    check_spans_given,
    kv_scales,
    pages_of,
)
from attnplug.ops.storage import FP8_OUTPUTS, check_output_scale, quantise_output

Tensor = torch.Tensor


@dataclasses.dataclass(eq=False)
class Step(AttentionMetadata):
    """One step: what the requests are, on the host; `prefix` tokens are read from the first request's pages."""

    slot_mapping: Tensor
    table: Tensor
    tokens: int
    starts: list[int]
    lengths: list[int]
    key_starts: list[int]
    causal: bool | None
    spans: Tensor | None
    selection: Selection | None
    prefix: int
    common: CommonAttentionMetadata


@dataclasses.dataclass(eq=False)
class Request:
    """A request of a call: its rows, the positions `at [n]` of its queries and `held [m]` of its keys."""

    step: Step
    index: int
    rows: slice
    length: int
    at: Tensor
    held: Tensor

    @property
    def new(self) -> int:
        """Queries of the request."""
        return self.rows.stop - self.rows.start


class ReferenceBuilder(AttentionMetadataBuilder[Step]):
    """Copies a step to the host."""

    supports_update_block_table: ClassVar[bool] = True

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Step:
        """The step; no form of it is trusted but the device's own lengths."""
        common = common_attn_metadata
        reqs, starts = common.num_reqs, common.query_start_loc_cpu.tolist()
        keys = starts if common.key_start_loc is None else common.key_start_loc.tolist()
        return Step(
            slot_mapping=self.slots(common.slot_mapping, common.num_actual_tokens),
            table=common.block_table_tensor,
            tokens=common.num_actual_tokens,
            starts=starts[: reqs + 1],
            lengths=self.lengths(common)[:reqs],
            key_starts=keys[: reqs + 1],
            causal=common.causal,
            spans=common.mm_prefix_spans,
            selection=common.selection,
            prefix=common_prefix_len,
            common=common,
        )

    def lengths(self, common: CommonAttentionMetadata) -> list[int]:
        """Tokens of each request."""
        return common.seq_lens.tolist()

    def slots(self, slots: Tensor, tokens: int) -> Tensor:
        """The slots of the step's new keys; those of a cross layer are the encoder's."""
        return slots if isinstance(self.kv_cache_spec, CrossAttentionSpec) else slots[:tokens]

    def update_block_table(self, metadata: Step, blk_table: Tensor, slot_mapping: Tensor) -> Step:
        """The step over other pages."""
        slots = self.slots(slot_mapping, metadata.tokens)
        return dataclasses.replace(metadata, table=blk_table, slot_mapping=slots)


class Reference(AttentionImpl[Step]):
    """Attends request by request, with a mask and a softmax of its own."""

    can_return_lse_for_decode = True
    wide: ClassVar[torch.dtype] = torch.float32

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """fp8 with one scale."""
        return quant_key in FP8_OUTPUTS

    def update_kv_cache(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Store the rows of slots that are not negative."""
        k, v = self.pages(kv_cache)
        check_keys(key, value, slot_mapping.shape[0], self.spec)
        check_kv_write(key, value, k, v, slot_mapping)
        k_scale, v_scale = self.write_scales(layer)
        self.store(k, key, slot_mapping, k_scale)
        self.store(v, value, slot_mapping, v_scale)

    def pages(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """K `[blocks, size, Hkv, D]` and V."""
        return pages_of(self.backend, kv_cache, self.spec)

    def write_scales(self, layer: Any) -> tuple[float, float]:
        """The scales of what is stored."""
        return self.scales(layer)

    def scales(self, layer: Any) -> tuple[float, float]:
        """The scales of what is read."""
        return kv_scales(layer, self.tensors) if self.spec.has_quantized_kv_cache else (1.0, 1.0)

    def store(self, pages: Tensor, tokens: Tensor, slots: Tensor, scale: float) -> None:
        """Write one of K and V."""
        kept, size = slots >= 0, pages.shape[1]
        rows = self.encode(tokens[: slots.shape[0]][kept], pages.dtype, scale)
        if pages.dtype.itemsize == 1:
            pages, rows = pages.view(torch.uint8), rows.view(torch.uint8)
        pages[slots[kept] // size, slots[kept] % size] = rows

    def encode(self, tokens: Tensor, stored: torch.dtype, scale: float) -> Tensor:
        """What the pages keep."""
        if stored.itemsize > 1:
            return tokens.to(stored)
        limit = torch.finfo(stored).max
        return (tokens.float() / scale).clamp(-limit, limit).to(stored)

    def decode(self, stored: Tensor, scale: float) -> Tensor:
        """What is computed with."""
        return stored.to(self.wide) * scale

    @torch.no_grad()
    def attend(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        attn_metadata: Step,
        output: Tensor,
        *,
        output_lse: Tensor | None = None,
        use_sinks: bool = True,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Check the call, then attend each request."""
        step, spec = attn_metadata, self.spec
        into, given = output, {"output_scale": output_scale, "output_block_scale": output_block_scale}
        if output_scale is not None and output_block_scale is None:
            check_output_scale(output, output_scale)
            into, given = torch.empty_like(output, dtype=query.dtype), {}
        check_queries(query, into, output_lse, step.tokens, spec, **given)
        check_spans_given(step.spans is not None, spec)
        check_cache_given(kv_cache, spec)
        if spec.causal and step.causal is False:
            raise BatchError("causal", False, "cannot widen a causal layer")
        if output_scale is not None:
            into = torch.empty_like(output, dtype=torch.float32)
        check_rows("output", into, step.tokens, (spec.num_heads, spec.head_size_v), into.dtype)
        for request in self.requests(step, cross=kv_cache is not None):
            if kv_cache is None:
                held_k, held_v = self.given(request, key, value)
            else:
                held_k, held_v = self.held(request, kv_cache, layer)
            out, lse = self.answer(request, self.query_of(request, query), held_k, held_v, use_sinks)
            self.write(request, into, out)
            if output_lse is not None:
                self.write_lse(request, output_lse, lse)
        if output_scale is not None:
            rows = slice(0, step.starts[-1])
            quantise_output(into[rows], output_scale, output[rows])
        return output

    def requests(self, step: Step, cross: bool) -> Iterator[Request]:
        """The requests with queries."""
        self.check_selection(step)
        for index, length in enumerate(step.lengths):
            rows = slice(step.starts[index], step.starts[index + 1])
            first = 0
            if not cross:
                first = length - (step.key_starts[index + 1] - step.key_starts[index])
            at = torch.arange(length - (rows.stop - rows.start), length)
            if rows.stop > rows.start:
                yield Request(step, index, rows, length, at, torch.arange(first, length))

    def check_selection(self, step: Step) -> None:
        """Values that are not allowed are refused."""
        if self.spec.sparse is None:
            return
        if step.selection is None:
            raise BatchError("selection", None, "is required: the layer is sparse")
        ends = torch.zeros(step.tokens, dtype=torch.int64)
        for index, length in enumerate(step.lengths):
            start, stop = step.starts[index : index + 2]
            ends[start:stop] = torch.arange(length - (stop - start), length) + 1
            if not (self.spec.causal or step.causal):
                ends[start:stop] = length
            if step.spans is not None and self.spec.mm_prefix:
                ends[start:stop] = torch.maximum(ends[start:stop], step.spans[start:stop, 1].long())
        step.selection.check_values(self.spec.sparse, ends)

    def query_of(self, request: Request, query: Tensor) -> Tensor:
        """`[H, n, D]`."""
        return query[request.rows].to(self.wide).transpose(0, 1)

    def given(self, request: Request, key: Tensor | None, value: Tensor | None) -> Sequence[Tensor]:
        """Keys and values `[m, Hkv, D]` of the call."""
        starts = request.step.key_starts
        rows = slice(starts[request.index], starts[request.index + 1])
        return [each[rows].to(self.wide) for each in check_keys(key, value, starts[-1], self.spec)]

    def held(self, request: Request, kv_cache: Tensor, layer: Any) -> Sequence[Tensor]:
        """Keys and values `[m, Hkv, D]` in pages."""
        pages, scales = self.pages(kv_cache), self.scales(layer)
        return [self.gather(request, each, scale) for each, scale in zip(pages, scales, strict=True)]

    def gather(self, request: Request, pages: Tensor, scale: float) -> Tensor:
        """The rows of K or V pages that hold the request's keys."""
        size, held = pages.shape[1], request.held
        rows = pages.view(torch.uint8) if pages.dtype.itemsize == 1 else pages
        found = rows[self.blocks(request, size), held % size]
        return self.decode(found.view(pages.dtype), scale)

    def blocks(self, request: Request, size: int) -> Tensor:
        """The block of each key."""
        table, held = request.step.table.long(), request.held
        own = table[request.index][held // size]
        with_queries = [i for i in range(len(request.step.lengths)) if request.step.lengths[i]]
        return torch.where(held < request.step.prefix, table[with_queries[0]][held // size], own)

    def answer(
        self, request: Request, query: Tensor, key: Tensor, value: Tensor, use_sinks: bool
    ) -> tuple[Tensor, Tensor]:
        """Output `[H, n, Dv]` and LSE `[H, n]`."""
        heads = self.heads()
        seen = self.visible(request)
        logits = self.logits(request, query, key.transpose(0, 1)[heads])
        # Zeros in place of keys that no query sees: pages of dropped keys may hold anything.
        needed = seen.any(0)[None, :, None]
        return self.weigh(
            request,
            logits.masked_fill(~seen, -math.inf),
            value.transpose(0, 1)[heads].masked_fill(~needed, 0.0),
            self.sinks(request) if use_sinks else None,
        )

    def heads(self) -> Tensor:
        """The KV head of each query head."""
        return torch.arange(self.spec.num_heads) // (self.spec.num_heads // self.spec.num_kv_heads)

    def visible(self, request: Request) -> Tensor:
        """bool `[n, m]`."""
        at, held = request.at[:, None], request.held[None, :]
        seen = self.windowed(request, at, held)
        if self.spec.chunk_size is not None:
            seen &= self.chunked(request, at, held, self.spec.chunk_size)
        if self.spec.mm_prefix and request.step.spans is not None:
            seen |= self.together(request, request.step.spans[request.rows], at, held)
        if self.spec.sparse is not None and request.step.selection is not None:
            seen &= self.chosen(request, request.step.selection[request.rows], held)
        return seen

    def windowed(self, request: Request, at: Tensor, held: Tensor) -> Tensor:
        """Causality and windows."""
        left, right = self.spec.window
        seen = torch.ones(at.shape[0], held.shape[1], dtype=torch.bool)
        if self.spec.causal or request.step.causal:
            seen &= held <= at
        if left >= 0:
            seen &= held >= at - left
        if right >= 0:
            seen &= held <= at + right
        return seen

    def chunked(self, request: Request, at: Tensor, held: Tensor, size: int) -> Tensor:
        """Keys of the query's chunk."""
        return held // size == at // size

    def together(self, request: Request, spans: Tensor, at: Tensor, held: Tensor) -> Tensor:
        """Keys of the query's span, of `spans [n, 2]`."""
        return (held >= spans[:, :1]) & (held < spans[:, 1:])

    def chosen(self, request: Request, selection: Selection, held: Tensor) -> Tensor:
        """Keys that the indexer picked."""
        assert self.spec.sparse is not None
        kept = torch.arange(selection.positions.shape[1]) < selection.counts[:, None]
        picked = selection.positions.masked_fill(~kept, -1)
        return (held[:, :, None] // self.spec.sparse.block == picked[:, None, :]).any(-1)

    def logits(self, request: Request, query: Tensor, key: Tensor) -> Tensor:
        """`[H, n, m]`, before the mask."""
        logits = self.scaled(query, key)
        if self.spec.logits_soft_cap is not None:
            logits = self.cap(request, logits, self.spec.logits_soft_cap)
        if self.tensors.alibi_slopes is not None:
            logits = logits + self.bias(request, self.tensors.alibi_slopes.to(self.wide))
        return logits

    def scaled(self, query: Tensor, key: Tensor) -> Tensor:
        """Products of queries and keys, times the scale."""
        return query @ key.transpose(1, 2) * self.spec.scale

    def cap(self, request: Request, logits: Tensor, limit: float) -> Tensor:
        """The soft cap."""
        return limit * torch.tanh(logits / limit)

    def bias(self, request: Request, slopes: Tensor) -> Tensor:
        """ALiBi `[H, n, m]`."""
        distance = (request.held[None, :] - request.at[:, None]).abs()
        return -slopes[:, None, None] * distance

    def sinks(self, request: Request) -> Tensor | None:
        """One logit of each head."""
        return None if self.tensors.sinks is None else self.tensors.sinks.to(self.wide)

    def weigh(
        self, request: Request, logits: Tensor, value: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Softmax of masked logits, with the sinks in its denominator, and the sum of values."""
        most = self.largest(logits, sinks)
        weights = torch.exp(logits - most[:, :, None])
        total = weights.sum(2)
        if sinks is not None:
            total = total + torch.exp(sinks[:, None] - most)
        out = weights @ value / total.masked_fill(total == 0, 1.0)[:, :, None]
        return out, most + torch.log(total)

    def largest(self, logits: Tensor, sinks: Tensor | None) -> Tensor:
        """The maximum `[H, n]` that keeps exponents small; 0 for a query without keys."""
        low = logits.new_full((*logits.shape[:2], 1), -math.inf)
        terms = [logits, low] if sinks is None else [logits, low, sinks[:, None, None].expand_as(low)]
        return torch.cat(terms, 2).amax(2).nan_to_num(neginf=0.0)

    def write(self, request: Request, output: Tensor, out: Tensor) -> None:
        """Write the request's rows."""
        output[request.rows] = out.transpose(0, 1).to(output.dtype)

    def write_lse(self, request: Request, output_lse: Tensor, lse: Tensor) -> None:
        """Write the request's LSE."""
        output_lse[request.rows] = lse.T.float()
