"""Batches with traps: shuffled pages, NaN in unused rows, table tails that must not be followed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from attnplug.core.backend import AttentionBackend
from attnplug.core.impl import LayerTensors
from attnplug.core.metadata import PAD_SLOT_ID, CommonAttentionMetadata
from attnplug.core.spec import AttentionType, LayerSpec
from attnplug.ops.storage import STORAGE_DTYPES
from attnplug.testing.oracle import OracleResult, attention_oracle, stored_values

__all__ = ["Batch", "direct_batch", "layer_tensors", "paged_batch"]


@dataclasses.dataclass(slots=True, eq=False)
class Batch:
    """The input of one step for one layer, and the arguments of the oracle.

    Args:
        spec: the layer.
        common: the step.
        query: `[T + padding, H, D]`; padding rows are NaN.
        key: new keys, or all keys with direct KV; padded like `query`.
        value: values of `key`.
        kv_cache: logical view with the computed tokens, unused rows NaN; None with direct KV.
        queries: rows of each request.
        keys: the keys that each request can attend, rounded by its cache.
        values: the values of `keys`.
        seq_lens: tokens of each request.
        tensors: sinks, slopes and scales.
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

    def oracle(self, spec: LayerSpec | None = None, *, use_sinks: bool = True) -> OracleResult:
        """The reference result; with another `spec`, the result of a backend that misreads the layer."""
        spec = spec or self.spec
        tensors = LayerTensors(
            sinks=self.tensors.sinks if spec.has_sinks else None,
            alibi_slopes=self.tensors.alibi_slopes if spec.has_alibi else None,
        )
        return attention_oracle(
            spec,
            self.queries,
            self.keys,
            self.values,
            self.seq_lens,
            tensors=tensors,
            use_sinks=use_sinks,
            causal=self.common.causal,
        )


def layer_tensors(
    spec: LayerSpec, *, seed: int = 0, k_scale: float = 1.0, v_scale: float = 1.0, device: str = "cpu"
) -> LayerTensors:
    """The tensors that `spec` needs: sinks around 1, the usual geometric slopes, scales of fp8."""
    generator = torch.Generator().manual_seed(seed)
    sinks = torch.randn(spec.num_heads, generator=generator) + 1 if spec.has_sinks else None
    slopes = 2.0 ** (-8.0 * torch.arange(1, spec.num_heads + 1) / spec.num_heads) if spec.has_alibi else None
    return LayerTensors(
        sinks=None if sinks is None else sinks.to(device),
        alibi_slopes=None if slopes is None else slopes.float().to(device),
        k_scale=k_scale if spec.has_quantized_kv_cache else 1.0,
        v_scale=v_scale if spec.has_quantized_kv_cache else 1.0,
    )


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
        k_scale: scale of fp8 keys.
        v_scale: scale of fp8 values.
        seed: of all random values.
        device: of the tensors.
        backend: gives the cache's shape and stride order.
    """
    generator = torch.Generator().manual_seed(seed)
    size = block_size or spec.block_size or 16
    cross = spec.attn_type is AttentionType.ENCODER_DECODER
    new_lens = list(seq_lens) if cross else list(query_lens)
    queries, keys, values = _draw(spec, query_lens, seq_lens, generator)
    table, num_blocks = _block_table(seq_lens, size, generator)
    cache = _poisoned_cache(spec, num_blocks, size, layout, backend)
    k_pages, v_pages = backend.split_kv(cache, spec)

    slots = []
    for row, (seq_len, new) in enumerate(zip(seq_lens, new_lens, strict=True)):
        positions = torch.arange(seq_len)
        blocks = table[row].long()[positions // size]
        missing = torch.full((max(new - seq_len, 0),), PAD_SLOT_ID)
        old = slice(0, max(seq_len - new, 0))
        slots += [missing, (blocks * size + positions % size)[old.stop :]]
        for pages, tokens, scale in ((k_pages, keys[row], k_scale), (v_pages, values[row], v_scale)):
            stored = stored_values(tokens[old], spec, scale) / (scale if spec.has_quantized_kv_cache else 1.0)
            _put(pages, blocks[old], positions[old] % size, stored)
        if drop_window and spec.causal and spec.window[0] >= 0:
            table[row, : max(seq_len - new - spec.window[0], 0) // size] = 0

    new_keys = [_last(tokens, new) for tokens, new in zip(keys, new_lens, strict=True)]
    new_values = [_last(tokens, new) for tokens, new in zip(values, new_lens, strict=True)]
    pad_slots = torch.full((padding,), PAD_SLOT_ID)
    on_device = torch.empty_strided(cache.shape, cache.stride(), dtype=cache.dtype, device=device)
    return Batch(
        spec=spec,
        common=_common(
            query_lens,
            seq_lens,
            table,
            torch.cat([torch.empty(0, dtype=torch.int64), *slots, pad_slots]),
            spec.causal if causal is None else causal,
            device,
        ),
        query=_pack(queries, spec.num_heads, spec.head_size, padding, spec).to(device),
        key=_pack(new_keys, spec.num_kv_heads, spec.head_size, padding, spec).to(device),
        value=_pack(new_values, spec.num_kv_heads, spec.head_size_v, padding, spec).to(device),
        kv_cache=on_device.copy_(cache),
        queries=queries,
        keys=[stored_values(tokens, spec, k_scale) for tokens in keys],
        values=[stored_values(tokens, spec, v_scale) for tokens in values],
        seq_lens=list(seq_lens),
        tensors=layer_tensors(spec, seed=seed, k_scale=k_scale, v_scale=v_scale, device=device),
    )


def direct_batch(
    spec: LayerSpec,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    key_lens: Sequence[int] | None = None,
    causal: bool | None = None,
    padding: int = 0,
    seed: int = 0,
    device: str = "cpu",
) -> Batch:
    """A batch whose call passes K and V: the last `key_lens[i]` tokens of request i.

    Without `key_lens` the keys are packed like the queries and the batch has no `key_start_loc`. The
    other arguments are those of `paged_batch`.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = list(query_lens) if key_lens is None else list(key_lens)
    queries, keys, values = _draw(spec, query_lens, counts, generator)
    common = _common(
        query_lens,
        seq_lens,
        torch.randint(-(2**30), 2**30, (len(seq_lens), 1), generator=generator).int(),
        torch.full((sum(query_lens) + padding,), PAD_SLOT_ID),
        spec.causal if causal is None else causal,
        device,
    )
    if key_lens is not None:
        common.key_start_loc_cpu = _starts(key_lens)
        common.key_start_loc = common.key_start_loc_cpu.to(device)
    return Batch(
        spec=spec,
        common=common,
        query=_pack(queries, spec.num_heads, spec.head_size, padding, spec).to(device),
        key=_pack(keys, spec.num_kv_heads, spec.head_size, padding, spec).to(device),
        value=_pack(values, spec.num_kv_heads, spec.head_size_v, padding, spec).to(device),
        kv_cache=None,
        queries=queries,
        keys=keys,
        values=values,
        seq_lens=list(seq_lens),
        tensors=layer_tensors(spec, seed=seed, device=device),
    )


def _draw(
    spec: LayerSpec, query_lens: Sequence[int], key_lens: Sequence[int], generator: torch.Generator
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Random queries, keys and values of each request."""
    dtype = getattr(torch, spec.dtype)

    def tokens(count: int, heads: int, size: int) -> torch.Tensor:
        return torch.randn(count, heads, size, generator=generator).to(dtype)

    return (
        # The factor 2 is near the norms of trained projections. It makes the weights sharp, so that each key matters.
        [2 * tokens(count, spec.num_heads, spec.head_size) for count in query_lens],
        [tokens(count, spec.num_kv_heads, spec.head_size) for count in key_lens],
        [tokens(count, spec.num_kv_heads, spec.head_size_v) for count in key_lens],
    )


def _block_table(
    seq_lens: Sequence[int], block_size: int, generator: torch.Generator
) -> tuple[torch.Tensor, int]:
    counts = [-(-seq_len // block_size) for seq_len in seq_lens]
    blocks = torch.randperm(sum(counts) + 3, generator=generator)[: sum(counts)] + 1
    width = max(counts, default=0) + 2
    table = torch.randint(-(2**30), 2**30, (len(counts), width), generator=generator).int()
    for row, count in enumerate(counts):
        table[row, :count], blocks = blocks[:count].int(), blocks[count:]
    return table, sum(counts) + 4


def _poisoned_cache(
    spec: LayerSpec, num_blocks: int, block_size: int, layout: str, backend: type[AttentionBackend]
) -> torch.Tensor:
    shape = backend.get_kv_cache_shape(
        num_blocks, block_size, spec.num_kv_heads, spec.head_size, spec.kv_cache_dtype, spec.head_size_v
    )
    order = backend.get_kv_cache_stride_order(layout=layout, spec=spec)
    dtype = STORAGE_DTYPES[spec.resolved_kv_cache_dtype]
    physical = torch.full([shape[dim] for dim in order], torch.nan).to(dtype)
    cache = physical.permute([order.index(dim) for dim in range(len(order))])
    cache[0].zero_() if dtype.itemsize > 1 else cache.view(torch.uint8)[0].zero_()
    return cache


def _put(pages: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor, stored: torch.Tensor) -> None:
    tokens = stored.to(pages.dtype)
    if pages.dtype.itemsize == 1:
        pages, tokens = pages.view(torch.uint8), tokens.view(torch.uint8)
    pages[blocks, offsets] = tokens


def _last(tokens: torch.Tensor, count: int) -> torch.Tensor:
    """The last `count` tokens; tokens that a padding request does not have are NaN."""
    missing = tokens.new_full((max(count - tokens.shape[0], 0), *tokens.shape[1:]), torch.nan)
    return torch.cat([missing, tokens[max(tokens.shape[0] - count, 0) :]])


def _pack(
    parts: Sequence[torch.Tensor], heads: int, size: int, padding: int, spec: LayerSpec
) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    nothing = torch.empty(0, heads, size, dtype=dtype)
    return torch.cat([nothing, *parts, torch.full((padding, heads, size), torch.nan, dtype=dtype)])


def _starts(lengths: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32))


def _common(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    table: torch.Tensor,
    slots: torch.Tensor,
    causal: bool,
    device: str,
) -> CommonAttentionMetadata:
    host = np.asarray(seq_lens, dtype=np.int32)
    starts = _starts(query_lens)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=torch.from_numpy(host.copy()).to(device),
        num_reqs=len(query_lens),
        num_actual_tokens=sum(query_lens),
        max_query_len=max(query_lens, default=0),
        max_seq_len=max(seq_lens, default=0),
        block_table_tensor=table.to(device),
        slot_mapping=slots.to(device),
        causal=causal,
        seq_lens_host=host,
    )
