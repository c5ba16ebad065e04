"""Batches over random latents, their reference, and the parts of a backend that serve them, for benchmarks/mla.py."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from attnplug.core import (
    AttentionBackend,
    BuilderConfig,
    CommonAttentionMetadata,
    LayerSpec,
    LayerTensors,
    Selection,
)
from attnplug.core.interface.impl_and_builder import make_builder, make_impl
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.core.mla.dims import MLADims
from attnplug.ops.storage import STORAGE_DTYPES

__all__ = [
    "DIMS",
    "MORE_THAN_L2",
    "TOLERANCE",
    "Call",
    "Cell",
    "Latents",
    "common_of",
    "parts_of",
    "table_of",
]

DIMS = MLADims(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
TOLERANCE = 1e-2
MORE_THAN_L2 = 200_000_000
Call = Callable[[int], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Cell:
    """A batch of `requests` of `length` tokens with `queries` new ones each, and the heads of a rank.

    `stored` is the dtype of the latents, and `page` the tokens of a page.
    """

    requests: int
    length: int
    heads: int
    queries: int = 1
    page: int = 64
    stored: str = "bfloat16"
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        parts = [f"{self.requests} x {self.length}", f"{self.heads} heads"]
        parts += [f"{self.queries} queries"] if self.queries > 1 else []
        parts += [f"pages of {self.page}"] if self.page != 64 else []
        parts += [self.stored] if self.stored != self.dtype else []
        return ", ".join(parts)

    @property
    def spec(self) -> LayerSpec:
        stored = "auto" if self.stored == self.dtype else self.stored
        sizes = {"num_heads": self.heads, "num_kv_heads": 1, "head_size": DIMS.latent_size, "mla": DIMS}
        return LayerSpec(**sizes, dtype=self.dtype, kv_cache_dtype=stored, block_size=self.page)

    @property
    def bytes(self) -> int:
        return self.requests * self.length * DIMS.latent_size * (1 if self.spec.has_quantized_kv_cache else 2)

    @property
    def flops(self) -> int:
        per_key = 2 * (2 * DIMS.kv_lora_rank + DIMS.qk_rope_head_dim)
        return self.requests * self.length * self.heads * self.queries * per_key


class Latents:
    """The tensors of a cell: absorbed queries, and as many caches as the L2 cannot hold."""

    def __init__(self, cell: Cell, device: str = "cuda") -> None:
        torch.manual_seed(0)
        self.device = torch.device(device)
        self.cell, self.spec = cell, cell.spec
        dtype, stored = (STORAGE_DTYPES[d] for d in (self.spec.dtype, self.spec.resolved_kv_cache_dtype))
        self.table, blocks = table_of([cell.length] * cell.requests, cell.page, self.device)
        copies = min(-(-MORE_THAN_L2 // cell.bytes), 32) if device == "cuda" else 1
        shape = blocks, cell.page, DIMS.latent_size
        self.caches = [torch.randn(shape, device=device, dtype=dtype).to(stored) for _ in range(copies)]
        tokens = cell.requests * cell.queries
        # Both parts are views of one tensor for kernels that read them packed.
        self.query = torch.randn(tokens, cell.heads, DIMS.latent_size, device=device, dtype=dtype)
        parts = self.query.tensor_split((DIMS.kv_lora_rank,), dim=2)
        self.q_nope, self.q_pe = (part.contiguous() for part in parts)
        self.output, self.scale = torch.empty_like(self.q_nope), self.spec.scale
        self.common = common_of([cell.queries] * cell.requests, [cell.length] * cell.requests, self.table)

    def cache(self, index: int) -> torch.Tensor:
        return self.caches[index % len(self.caches)]

    def error(self, output: torch.Tensor) -> float:
        """The relative error of the first and of the last request, the larger one; on the first cache."""
        return max(self._error(output, request) for request in {0, self.cell.requests - 1})

    def _error(self, output: torch.Tensor, request: int) -> float:
        cell, rank = self.cell, DIMS.kv_lora_rank
        own = slice(request * cell.queries, (request + 1) * cell.queries)
        rows = self.caches[0][self.table[request].long()].flatten(0, 1)[: cell.length].float()
        logits = torch.einsum("qhd,kd->qhk", self.query[own].float(), rows) * self.scale
        places = torch.arange(cell.length, device=self.device)
        logits.masked_fill_(places > places[cell.length - cell.queries :, None, None], -torch.inf)
        expected = torch.einsum("qhk,kd->qhd", logits.softmax(2), rows[:, :rank])
        return float((output[own].float() - expected).norm() / expected.norm())


def table_of(lengths: Sequence[int], page: int, device: torch.device) -> tuple[torch.Tensor, int]:
    """A table of shuffled pages for requests of some lengths, and how many pages the cache needs."""
    counts = [-(-length // page) for length in lengths]
    pages = torch.randperm(sum(counts)).int() + 1
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, own in enumerate(pages.split(counts)):
        table[row, : len(own)] = own
    return table.to(device), sum(counts) + 1


def common_of(
    queries: Sequence[int], lengths: Sequence[int], table: torch.Tensor, selection: Selection | None = None
) -> CommonAttentionMetadata:
    """A step whose new tokens are in the cache already: it writes none."""
    starts = torch.from_numpy(np.cumsum([0, *queries]).astype(np.int32))
    lens = np.asarray(lengths, dtype=np.int32)
    tokens = int(starts[-1])
    return CommonAttentionMetadata(
        query_start_loc=starts.to(table.device),
        query_start_loc_cpu=starts,
        seq_lens=torch.from_numpy(lens).to(table.device),
        num_reqs=len(lens),
        num_actual_tokens=tokens,
        max_query_len=max(queries),
        max_seq_len=int(lens.max()),
        block_table_tensor=table,
        slot_mapping=torch.full((tokens,), -1, device=table.device),
        seq_lens_host=lens,
        selection=selection,
    )


def parts_of(
    backend: type[AttentionBackend],
    spec: LayerSpec,
    device: torch.device,
    weight: torch.Tensor | None = None,
    **config: Any,
) -> tuple[Any, Any]:
    """The impl and the builder of one layer; without a `weight` of kv_b_proj, one of zeros."""
    if weight is None:
        rows = spec.num_heads * (DIMS.qk_nope_head_dim + DIMS.v_head_dim)
        weight = torch.zeros(rows, DIMS.kv_lora_rank, dtype=STORAGE_DTYPES[spec.dtype], device=device)
    impl: Any = make_impl(backend, spec, layer_name="layer", tensors=LayerTensors(kv_b_proj=weight))
    impl.process_weights_after_loading(weight.dtype)
    layers: Any = {"layer": types.SimpleNamespace(impl=impl)}
    pages: Any = kv_cache_spec_for(spec, spec.block_size)
    return impl, make_builder(backend, pages, ["layer"], BuilderConfig(layers=layers, **config), device)
