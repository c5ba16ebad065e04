"""Batches with traps: shuffled pages, NaN in unused rows, table tails that must not be followed.

All tensors of a step are parts of larger ones, with traps in front and behind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attnplug.core.backend import AttentionBackend
from attnplug.core.impl import LayerTensors
from attnplug.core.metadata import PAD_SLOT_ID, CommonAttentionMetadata
from attnplug.core.mla.backend import MLADecodeBackend
from attnplug.core.spec import AttentionType, LayerSpec
from attnplug.testing.comparison import Tolerance, tolerance
from attnplug.testing.drawn_values import (
    Numbers,
    draw_tokens,
    layer_tensors,
    random_selection,
    stored_scale,
    strange_requests,
)
from attnplug.testing.oracle import OracleResult, Spans, attention_oracle, stored_values
from attnplug.testing.pages import (
    block_table,
    default_spans,
    fill_with_nan,
    poisoned_cache,
    put,
    rows_of_spans,
)
from attnplug.testing.views import between

if TYPE_CHECKING:
    from attnplug.testing.conformance.target import Target


@dataclasses.dataclass(frozen=True, slots=True)
class StepArguments:
    """The arguments of `Target.batch` that make a batch, and the fields of BuilderConfig that it is run with."""

    target: Target
    spec: LayerSpec
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    options: Mapping[str, Any]
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def batch(self) -> Batch:
        """A batch of these arguments; CheckSkipped if the backend serves another phase."""
        return self.target.batch(self.spec, self.query_lens, self.seq_lens, exact=True, **self.options)


@dataclasses.dataclass(slots=True, eq=False)
class Batch:
    """The input of one step for one layer, and the arguments of the oracle.

    Args:
        spec: the layer.
        common: the step.
        query: `[T + padding, H, D]`, with MLA of nope + rope elements; padding rows are NaN.
        key: new keys, or all keys with direct KV; padded like `query`.
        value: values of `key`.
        kv_cache: logical view with the computed tokens, unused rows NaN; None with direct KV.
        queries: rows of each request.
        keys: the keys that each request can attend, rounded by its cache.
        values: the values of `keys`.
        seq_lens: tokens of each request.
        tensors: sinks, slopes and scales.
        spans: for layers with mm_prefix, the multimodal spans of each request, as positions `[start, stop)`.
        numbers: the sizes of the numbers.
        strange: requests with keys of NaN or large ones, whose own results are not compared.
        made_of: the arguments that made it, if `Target.batch` did. Some checks change the batch afterwards.
        quantized_queries: whether the backend rounds queries to 8 bits, as it declares.
        sampled: sorted rows, int64, of a step too large for the oracle: no others are compared. None is all.
    """

    spec: LayerSpec
    common: CommonAttentionMetadata
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    kv_cache: torch.Tensor | None
    queries: list[torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    seq_lens: list[int]
    tensors: LayerTensors
    spans: list[Spans] | None = None
    numbers: Numbers = Numbers.PLAIN
    strange: frozenset[int] = frozenset()
    made_of: StepArguments | None = None
    quantized_queries: bool = False

    def row_bounds(self, expected: OracleResult) -> Tolerance[torch.Tensor]:
        """The bounds of each row of an answer."""
        return tolerance(self.spec, expected.logit_size, quantized_queries=self.quantized_queries)

    @property
    def bound(self) -> float:
        """The bound of outputs for about the largest logits."""
        return tolerance(self.spec, quantized_queries=self.quantized_queries).output

    sampled: torch.Tensor | None = None

    @property
    def is_compared(self) -> torch.Tensor:
        """Whether each row is compared with the oracle's, bool `[T]`."""
        starts = self.common.query_start_loc_cpu.tolist()
        chosen = torch.full((starts[-1],), self.sampled is None)
        if self.sampled is not None:
            chosen[self.sampled] = True
        for request in self.strange:
            chosen[starts[request] : starts[request + 1]] = False
        return chosen

    def compared(self, rows: torch.Tensor) -> torch.Tensor:
        """The batch's own rows `[T, ...]`, with zeros in those that are not compared: see `is_compared`."""
        if not self.strange and self.sampled is None:
            return rows
        rows = rows.clone()
        rows[~self.is_compared.to(rows.device)] = 0
        return rows

    def oracle(self, spec: LayerSpec | None = None, *, use_sinks: bool = True) -> OracleResult:
        """The reference result; with another `spec`, the result of a backend that misreads the layer.

        Rows that are not compared are zeros, as in `compared`.
        """
        spec = spec or self.spec
        tensors = LayerTensors(
            sinks=self.tensors.sinks if spec.has_sinks else None,
            alibi_slopes=self.tensors.alibi_slopes if spec.has_alibi else None,
            w_uk=self.tensors.w_uk,
            w_uv=self.tensors.w_uv,
            kv_b_proj=self.tensors.kv_b_proj,
        )
        result = attention_oracle(
            spec,
            self.queries,
            self.keys,
            self.values,
            self.seq_lens,
            tensors=tensors,
            use_sinks=use_sinks,
            causal=self.common.causal,
            spans=self.spans,
            # Read here, because an indexer may write the step's buffers after the batch was made.
            selection=None if spec.sparse is None else self.common.selection,
            rows=self.sampled,
        )
        parts = (getattr(result, field.name) for field in dataclasses.fields(result))
        return OracleResult(*map(self.compared, parts))


def paged_batch(
    spec: LayerSpec,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    block_size: int | None = None,
    layout: str = "NHD",
    causal: bool | None = None,
    padding: int = 0,
    drop_window: bool = False,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    spans: Sequence[Spans] | None = None,
    numbers: Numbers = Numbers.PLAIN,
    skip_blocks: int = 0,
    seed: int = 0,
    device: str = "cpu",
    backend: type[AttentionBackend] = AttentionBackend,
) -> Batch:
    """A batch with a paged KV cache.

    Args:
        spec: the layer; a cross layer has the encoder's `seq_lens`, and writes all these tokens now.
        query_lens: new tokens of each request.
        seq_lens: all tokens of each request. A padding request has fewer than its new tokens: its first rows are
            before position 0, see no key and are not stored.
        block_size: tokens per page; default the spec's, else 16.
        layout: physical order of the cache, "NHD" or "HND".
        causal: `common.causal`; default the spec's.
        padding: rows past the batch's tokens, NaN in the queries, keys and values.
        drop_window: free the pages that a causal window has passed, like an engine.
        k_scale: scale of fp8 keys; with `head_scales` those of heads are around it.
        v_scale: scale of fp8 values; with MLA `k_scale` is theirs too.
        spans: for a layer with mm_prefix, the multimodal spans of each request as positions `[start, stop)`;
            default those of `attnplug.testing.pages.default_spans`.
        numbers: the sizes of the numbers.
        skip_blocks: blocks of the cache that no request has, in addition to the null block; they come first.
        seed: of all random values.
        device: of the tensors.
        backend: gives the cache's shape and stride order; by default the contract's.
    """
    generator = torch.Generator().manual_seed(seed)
    backend = MLADecodeBackend if spec.mla and backend is AttentionBackend else backend.for_layer(spec)
    size = block_size or spec.block_size or 16
    v_scale = v_scale if spec.mla is None else k_scale
    scales = stored_scale(spec, k_scale), stored_scale(spec, v_scale)
    cross = spec.attn_type is AttentionType.ENCODER_DECODER
    # A cross layer stores all tokens of the encoder in this step, whatever the number of queries.
    new_lens = list(seq_lens) if cross else list(query_lens)
    queries, keys, values = draw_tokens(spec, query_lens, seq_lens, generator, numbers, scales)
    table, num_blocks = block_table(seq_lens, size, generator, skip_blocks)
    cache = poisoned_cache(spec, num_blocks, size, layout, backend)
    k_pages, v_pages = backend.split_kv(cache, spec)
    held_keys = [stored_values(tokens, spec, scales[0]) for tokens in keys]
    held_values = [stored_values(tokens, spec, scales[1]) for tokens in values]
    chosen = _chosen_spans(spec, spans, query_lens, seq_lens)

    slots = []
    for row, (seq_len, new) in enumerate(zip(seq_lens, new_lens, strict=True)):
        positions = torch.arange(seq_len)
        blocks = table[row].long()[positions // size]
        # Rows before position 0 have no token to store.
        missing = torch.full((max(new - seq_len, 0),), PAD_SLOT_ID)
        old = slice(0, max(seq_len - new, 0))
        slots += [missing, (blocks * size + positions % size)[old.stop :]]
        for pages, tokens, held, scale in (
            (k_pages, keys[row], held_keys[row], scales[0]),
            (v_pages, values[row], held_values[row], scales[1]),
        ):
            put(pages, blocks[old], positions[old] % size, tokens[old], held[old], spec, scale)
        if drop_window and spec.causal and spec.window[0] >= 0:
            # Only pages that no new query can see, in its window or span, are dropped.
            begun = [start for start, stop in (chosen[row] if chosen else ()) if stop > seq_len - new]
            freed = max(min([seq_len - new - spec.window[0], *begun]), 0) // size
            fill_with_nan(cache, table[row, :freed].long())
            table[row, :freed] = 0

    new_keys = [_last(tokens, new) for tokens, new in zip(keys, new_lens, strict=True)]
    new_values = [_last(tokens, new) for tokens, new in zip(values, new_lens, strict=True)]
    pad_slots = torch.full((padding,), PAD_SLOT_ID)
    block = cache.numel() // cache.shape[0]
    return Batch(
        spec=spec,
        common=_common(
            spec,
            query_lens,
            seq_lens,
            table,
            torch.cat([torch.empty(0, dtype=torch.int64), *slots, pad_slots]),
            causal,
            chosen,
            padding,
            seed,
            device,
        ),
        query=_pack(queries, spec.num_heads, spec.query_size, padding, spec, device),
        key=_pack(new_keys, spec.num_kv_heads, spec.head_size, padding, spec, device),
        value=_pack(new_values, spec.num_kv_heads, spec.head_size_v, padding, spec, device),
        kv_cache=between(cache.to(device), block),
        queries=queries,
        keys=held_keys,
        values=held_values,
        seq_lens=list(seq_lens),
        tensors=layer_tensors(
            spec, seed=seed, k_scale=k_scale, v_scale=v_scale, numbers=numbers, device=device
        ),
        spans=chosen,
        numbers=numbers,
        strange=frozenset(strange_requests(numbers, query_lens, seq_lens)),
        quantized_queries=backend.quantizes_queries,
    )


def direct_batch(
    spec: LayerSpec,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    key_lens: Sequence[int] | None = None,
    causal: bool | None = None,
    padding: int = 0,
    spans: Sequence[Spans] | None = None,
    numbers: Numbers = Numbers.PLAIN,
    seed: int = 0,
    device: str = "cpu",
) -> Batch:
    """A batch whose call passes K and V: the last `key_lens[i]` tokens of request i.

    Without `key_lens` the keys are packed like the queries and the batch has no `key_start_loc`. The
    other arguments are those of `paged_batch`.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = list(query_lens) if key_lens is None else list(key_lens)
    queries, keys, values = draw_tokens(spec, query_lens, counts, generator, numbers)
    chosen = _chosen_spans(spec, spans, query_lens, seq_lens)
    common = _common(
        spec,
        query_lens,
        seq_lens,
        # Direct KV has no pages, so the block table must not be followed at all.
        torch.randint(-(2**30), 2**30, (len(seq_lens), 1), generator=generator).int(),
        torch.full((sum(query_lens) + padding,), PAD_SLOT_ID),
        causal,
        chosen,
        padding,
        seed,
        device,
    )
    if key_lens is not None:
        common.key_start_loc_cpu = between(_starts(key_lens))
        common.key_start_loc = between(common.key_start_loc_cpu.to(device))
    return Batch(
        spec=spec,
        common=common,
        query=_pack(queries, spec.num_heads, spec.query_size, padding, spec, device),
        key=_pack(keys, spec.num_kv_heads, spec.head_size, padding, spec, device),
        value=_pack(values, spec.num_kv_heads, spec.head_size_v, padding, spec, device),
        kv_cache=None,
        queries=queries,
        keys=keys,
        values=values,
        seq_lens=list(seq_lens),
        tensors=layer_tensors(spec, seed=seed, numbers=numbers, device=device),
        spans=chosen,
        numbers=numbers,
        strange=frozenset(strange_requests(numbers, query_lens, counts)),
    )


def _chosen_spans(
    spec: LayerSpec, given: Sequence[Spans] | None, query_lens: Sequence[int], seq_lens: Sequence[int]
) -> list[Spans] | None:
    if not spec.mm_prefix:
        return None
    return default_spans(query_lens, seq_lens) if given is None else [list(spans) for spans in given]


def _last(tokens: torch.Tensor, count: int) -> torch.Tensor:
    """The last `count` tokens; tokens that a padding request does not have are NaN."""
    missing = tokens.new_full((max(count - tokens.shape[0], 0), *tokens.shape[1:]), torch.nan)
    return torch.cat([missing, tokens[max(tokens.shape[0] - count, 0) :]])


def _pack(
    parts: Sequence[torch.Tensor], heads: int, size: int, padding: int, spec: LayerSpec, device: str
) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    nothing = torch.empty(0, heads, size, dtype=dtype)
    rows = [nothing, *parts, torch.full((padding, heads, size), torch.nan, dtype=dtype)]
    return between(torch.cat(rows).to(device))


def _starts(lengths: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32))


def _common(
    spec: LayerSpec,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    table: torch.Tensor,
    slots: torch.Tensor,
    causal: bool | None,
    spans: Sequence[Spans] | None,
    padding: int,
    seed: int,
    device: str,
) -> CommonAttentionMetadata:
    is_causal = spec.causal if causal is None else causal
    # Copies between traps, so tensors of the device and the host share no memory.
    host = np.asarray(seq_lens, dtype=np.int32)
    starts = _starts(query_lens)
    rows = None if spans is None else rows_of_spans(spans, query_lens, seq_lens)
    return CommonAttentionMetadata(
        query_start_loc=between(starts.to(device)),
        query_start_loc_cpu=between(starts),
        seq_lens=between(torch.from_numpy(host).to(device)),
        num_reqs=len(query_lens),
        num_actual_tokens=sum(query_lens),
        max_query_len=max(query_lens, default=0),
        max_seq_len=max(seq_lens, default=0),
        block_table_tensor=between(table.to(device)),
        slot_mapping=between(slots.to(device)),
        causal=is_causal,
        seq_lens_host=between(torch.from_numpy(host)).numpy(),
        mm_prefix_spans=None if rows is None else between(rows.to(device)),
        mm_prefix_spans_cpu=None if rows is None else between(rows),
        selection=random_selection(
            spec,
            query_lens,
            seq_lens,
            causal=is_causal,
            spans=spans,
            padding=padding,
            seed=seed,
            device=device,
        ),
    )
