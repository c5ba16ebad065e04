"""One attention layer over a random paged cache, a reference for it, and on a GPU timing by graph replay."""

from __future__ import annotations

import dataclasses
import random
import statistics
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from attnplug.core import BuilderConfig, CommonAttentionMetadata, LayerSpec, LayerTensors
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.core.kv_format import kv_format
from attnplug.ops.kv_codec import codec_of, read_pages, write_pages
from attnplug.ops.storage import STORAGE_DTYPES
from attnplug.tuning.timers import timed_ms

__all__ = ["Cell", "PagedLayer", "graph_us", "interleaved_us"]

_MORE_THAN_L2 = 200_000_000


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is measured: heads of query, heads of KV, head size; new tokens and all tokens of each request.

    `layer`, where it is given, says all of the layer, and `heads` and `page` must be its. The first `shared` tokens of
    all requests, whole pages of computed tokens, are on the same pages.
    """

    name: str
    kind: str
    heads: tuple[int, int, int]
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    fields: tuple[tuple[str, Any], ...] = ()
    page: int = 16
    layer: LayerSpec | None = None
    shared: int = 0

    @property
    def spec(self) -> LayerSpec:
        if self.layer is not None:
            return self.layer
        heads, kv_heads, size = self.heads
        return LayerSpec(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=size,
            dtype="bfloat16",
            block_size=self.page,
            **dict(self.fields),
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that some query sees; those of shared pages once."""
        spec = self.spec
        left = spec.window[0]
        seen = (
            n if left < 0 else min(n, left + q) for q, n in zip(self.query_lens, self.seq_lens, strict=True)
        )
        tokens = sum(seen) - self.shared * (len(self.seq_lens) - 1)
        return (
            tokens * spec.num_kv_heads * 2 * kv_format(spec.resolved_kv_cache_dtype).row_bytes(spec.head_size)
        )

    @property
    def flops(self) -> float:
        """The matrix products with the keys that each query sees: causal, and within a window."""
        left = self.spec.window[0]
        pairs = sum(
            place if left < 0 else min(place, left + 1)
            for new, length in zip(self.query_lens, self.seq_lens, strict=True)
            for place in range(length - new + 1, length + 1)
        )
        return 4 * self.heads[0] * self.heads[2] * pairs

    @property
    def is_prefill(self) -> bool:
        return max(self.query_lens) > 16


class PagedLayer:
    """A cell's tensors: as many caches as the L2 cannot hold, shuffled pages, one common metadata.

    Args:
        cell: what is measured.
        device: where; calls are timed on a GPU only.
        copies: caches; by default more than the L2 holds.
    """

    def __init__(self, cell: Cell, device: str = "cuda", copies: int | None = None) -> None:
        self.cell, self.spec, self.device = cell, cell.spec, torch.device(device)
        heads, kv_heads, size = cell.heads
        counts = [-(-each // cell.page) for each in cell.seq_lens]
        dtype, stored = (STORAGE_DTYPES[d] for d in (self.spec.dtype, self.spec.resolved_kv_cache_dtype))
        pages = sum(counts) + 1
        copies = copies or min(max(1, -(-_MORE_THAN_L2 // cell.kv_bytes)), 8)
        torch.manual_seed(0)
        shape = (pages, 2, cell.page, kv_heads, kv_format(self.spec.resolved_kv_cache_dtype).width(size))
        if codec_of(self.spec) is None:
            self.caches = [torch.randn(shape, device=device, dtype=dtype).to(stored) for _ in range(copies)]
        else:
            self.caches = [self._encoded(shape) for _ in range(copies)]
        tokens = sum(cell.query_lens)
        self.query = torch.randn(tokens, heads, size, device=device, dtype=dtype)
        self.output = torch.empty_like(self.query)
        self.tensors = LayerTensors(
            sinks=torch.randn(heads, device=device) if self.spec.has_sinks else None,
            alibi_slopes=2.0 ** (-8.0 * torch.arange(1, heads + 1, device=device) / heads)
            if self.spec.has_alibi
            else None,
            k_scale=1.0,
            v_scale=1.0,
        )
        order = (torch.randperm(sum(counts)) + 1).int()
        self.table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for row, part in enumerate(order.split(counts)):
            self.table[row, : len(part)] = part
        common = cell.shared // cell.page
        self.table[:, :common] = self.table[0, :common].clone()
        self.pages = torch.cat([row[:count] for row, count in zip(self.table, counts, strict=True)])
        self.counts = counts
        starts = torch.from_numpy(np.cumsum([0, *cell.query_lens]).astype(np.int32))
        lens = np.asarray(cell.seq_lens, dtype=np.int32)
        self.common = CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=torch.from_numpy(lens.copy()).to(device),
            num_reqs=len(lens),
            num_actual_tokens=tokens,
            max_query_len=max(cell.query_lens),
            max_seq_len=int(lens.max()),
            block_table_tensor=self.table.to(device),
            slot_mapping=torch.full((tokens,), -1, dtype=torch.int64, device=device),
            seq_lens_host=lens,
        )
        self.given = self._new_tokens() if cell.query_lens == cell.seq_lens else (None, None)

    def _encoded(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Pages with planes, of which some blocks at a time are encoded, and a few are the same as others."""
        cache = torch.empty(shape, dtype=torch.uint8, device=self.device)
        heads, size = self.spec.num_kv_heads, self.spec.head_size
        count = min(len(cache), 256)
        slots = torch.arange(count * self.cell.page, device=self.device)
        rows = torch.randn(2, len(slots), heads, size, device=self.device)
        write_pages(self.spec, (1.0, 1.0), rows[0], rows[1], cache[:, 0], cache[:, 1], slots)
        for begin in range(count, len(cache), count):
            part = cache[begin : begin + count]
            part.copy_(cache[: len(part)])
        return cache

    def cache(self, index: int) -> torch.Tensor:
        return self.caches[index % len(self.caches)]

    def keys_of(self, request: int, cache: torch.Tensor) -> torch.Tensor:
        """K and V `[2, seq_len, Hkv, D]` of one request."""
        count = self.counts[request]
        if codec_of(self.spec) is not None:
            blocks = self.common.block_table_tensor[request, :count].long()
            both = (read_pages(cache[:, at], blocks, self.spec, 1.0) for at in (0, 1))
            return torch.stack([each.flatten(0, 1) for each in both])[:, : self.cell.seq_lens[request]]
        pages = cache[self.common.block_table_tensor[request, :count].long()]
        return pages.transpose(0, 1).flatten(1, 2)[:, : self.cell.seq_lens[request]]

    def _new_tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        whole = torch.cat([self.keys_of(r, self.caches[0]) for r in range(len(self.counts))], 1)
        return whole[0].contiguous(), whole[1].contiguous()

    def attend(
        self, backend: Any, *, give_new: bool = False, options: Any = None, prefix: int = 0
    ) -> Callable[[int], torch.Tensor]:
        """A call of an attnplug backend on cache number `index`, built with a common prefix of `prefix` tokens."""
        spec = self.spec
        if options is None and backend.Options is not None:
            options = backend.Options()
        impl = backend.get_impl_cls().from_spec(
            spec, backend=backend, layer_name="layer", tensors=self.tensors, options=options
        )
        impl.process_weights_after_loading(getattr(torch, spec.dtype))
        told: Any = types.SimpleNamespace(impl=impl)
        config = BuilderConfig(layers={"layer": told})
        builder = backend.get_builder_cls()(
            kv_cache_spec_for(spec, self.cell.page), ["layer"], config, self.device
        )
        metadata = builder.build(prefix, self.common)
        given = self.given if give_new else (None, None)

        def call(index: int) -> torch.Tensor:
            return impl.attend(None, self.query, *given, self.cache(index), metadata, self.output)

        return call

    def error(self, found: torch.Tensor) -> float:
        """Relative error, against float32, of the last queries of the first and last requests on cache 0."""
        spec, worst = self.spec, 0.0
        for request in {0, len(self.counts) - 1}:
            end = sum(self.cell.query_lens[: request + 1])
            rows = min(self.cell.query_lens[request], 64)
            q = self.query[end - rows : end].float().transpose(0, 1)
            group = spec.num_heads // spec.num_kv_heads
            k, v = self.keys_of(request, self.caches[0]).float().repeat_interleave(group, 2).transpose(1, 2)
            logits = q @ k.transpose(1, 2) * spec.scale
            if spec.logits_soft_cap:
                logits = spec.logits_soft_cap * torch.tanh(logits / spec.logits_soft_cap)
            length = k.shape[1]
            at = torch.arange(length - rows, length, device=self.device)[:, None]
            keys = torch.arange(length, device=self.device)[None]
            if self.tensors.alibi_slopes is not None:
                logits -= self.tensors.alibi_slopes[:, None, None] * (at - keys)
            hidden = keys > at
            if spec.window[0] >= 0:
                hidden |= keys < at - spec.window[0]
            if spec.chunk_size is not None:
                hidden |= keys // spec.chunk_size != at // spec.chunk_size
            logits.masked_fill_(hidden, -torch.inf)
            if self.tensors.sinks is not None:
                sinks = self.tensors.sinks[:, None, None].expand(-1, rows, 1)
                weights = torch.cat([logits, sinks], 2).softmax(-1)[..., :-1]
            else:
                weights = logits.softmax(-1)
            expected = (weights @ v).transpose(0, 1)
            got = found[end - rows : end].float()
            worst = max(worst, ((got - expected).norm() / expected.norm()).item())
        return worst


def _captured(call: Callable[[int], object], count: int) -> torch.cuda.CUDAGraph:
    for index in range(max(count, 2)):
        call(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(count):
            call(index)
    return graph


def graph_us(call: Callable[[int], object], count: int, repeats: int = 7) -> float:
    """Microseconds of one call, of `count` replayed in one graph; the median of `repeats`."""
    return interleaved_us({"it": call}, count, repeats)["it"]


def interleaved_us(
    calls: dict[str, Callable[[int], object]], count: int, repeats: int = 7, graphs: bool = True
) -> dict[str, float]:
    """The same of several calls that take turns, each round in another order: replayed, or called where not `graphs`."""
    runs: dict[str, Callable[[], object]] = {}
    for name, call in calls.items():
        if graphs:
            runs[name] = _captured(call, count).replay
        else:
            call(0)
            runs[name] = lambda call=call: [call(index) for index in range(count)]
    times: dict[str, list[float]] = {name: [] for name in runs}
    order, shuffled = list(runs), random.Random(0)
    for repeat in range(repeats + 1):
        for name in order:
            spent = timed_ms(runs[name])
            if repeat:
                times[name].append(1e3 * spent / count)
        shuffled.shuffle(order)
    return {name: statistics.median(each) for name, each in times.items()}
