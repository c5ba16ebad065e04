"""Decodes of selected keys for benchmarks/mla.py: 2048 of long contexts, beside a dense decode of 2048 tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from mla_latents import DIMS, MORE_THAN_L2, TOLERANCE, Call, Cell, Latents, common_of, parts_of
from paged_layers import interleaved_us

from attnplug.core import AttentionBackend, Selection, SparseSpec

__all__ = ["CONTEXTS", "TOPK", "measured_selections"]

TOPK = 2048
CONTEXTS = (8192, 32768, 131072)


def measured_selections(
    backend: type[AttentionBackend],
    heads: Sequence[int] = (16, 128),
    *,
    requests: int = 64,
    topk: int = TOPK,
    contexts: Sequence[int] = CONTEXTS,
    device: str = "cuda",
    **fields: Any,
) -> Iterator[dict[str, Any]]:
    """For each number of heads, the dense decode and those of every context: errors, and microseconds on a GPU.

    A time has the table of chosen keys in it, which each layer writes before it decodes.
    """
    for count in heads:
        calls: dict[str, Call] = {}
        errors: dict[str, float] = {}
        for length in (topk, *contexts):
            cell = Cell(requests, length, count, **fields)
            name = "dense" if length == topk else str(length)
            # The others share their time with it, so all must be in memory at once.
            layer = _Layer(cell, backend, None if length == topk else topk, device)
            errors[name] = layer.error(layer.call(0))
            if errors[name] < TOLERANCE:
                calls[name] = layer.call
        times = interleaved_us(calls, 4) if device == "cuda" else {}
        print(f"{topk} keys of each of {requests} queries, {count} heads")
        for name, error in errors.items():
            spent = f"{times[name]:8.1f} us   " if name in times else ""
            title = f"a dense context of {topk}" if name == "dense" else f"of a context of {name}"
            print(f"    {title:28}{spent}relative error {error:.1e}", flush=True)
        yield {"requests": requests, "heads": count, "topk": topk, "us": times, "relative_errors": errors}


class _Layer:
    """A layer's decode from absorbed queries on; with `topk` of that many keys, drawn for each query."""

    def __init__(self, cell: Cell, backend: type[AttentionBackend], topk: int | None, device: str) -> None:
        latents = Latents(dataclasses.replace(cell), device)
        self.latents, self.chosen = latents, None
        spec, common = latents.spec, latents.common
        if topk is not None:
            spec = spec.replace(sparse=SparseSpec("token_topk", topk))
            tokens = cell.requests * cell.queries
            selection = Selection.allocate(tokens, topk, device)
            for row in range(tokens):
                selection.positions[row] = torch.randperm(cell.length, device=device)[:topk].int()
            selection.counts.fill_(topk)
            self.chosen = selection.positions
            common = common_of(
                [cell.queries] * cell.requests, [cell.length] * cell.requests, latents.table, selection
            )
            # Only the chosen latents are read, so more caches are needed to exceed the L2.
            read = max(cell.bytes * topk // cell.length, 1)
            more = min(-(-MORE_THAN_L2 // read), 4) - len(latents.caches) if device == "cuda" else 0
            latents.caches += [latents.caches[0].clone() for _ in range(more)]
        self.impl, builder = parts_of(
            backend.for_layer(spec), spec, latents.device, max_num_seqs=cell.requests
        )
        self.metadata = builder.build(0, common)

    def call(self, index: int) -> torch.Tensor:
        latents = self.latents
        query = latents.q_nope, latents.q_pe
        found: torch.Tensor = self.impl.forward_mqa(query, latents.cache(index), self.metadata, None)[0]
        return found

    def error(self, output: torch.Tensor) -> float:
        """The relative error of the last query, against float32."""
        latents = self.latents
        if self.chosen is None:
            return latents.error(output)
        rows = latents.cache(0)[latents.table[-1].long()].flatten(0, 1)
        rows = rows[self.chosen[-1].long()].float()
        weights = (latents.query[-1].float() @ rows.T * latents.scale).softmax(1)
        expected = weights @ rows[:, : DIMS.kv_lora_rank]
        return float((output[-1].float() - expected).norm() / expected.norm())
