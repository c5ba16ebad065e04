"""A reference of DeepSeek's lightning indexer: the part of a model that fills the selection of its sparse layers."""

from __future__ import annotations

import torch

from attnplug.core import Selection


def index_scores(query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Scores `[T, S]` in float32 of index queries `[T, H, D]`, keys `[S, D]` and head weights `[T, H]`."""
    each = torch.einsum("thd,sd->ths", query.float(), key.float()).relu()
    return torch.einsum("ths,th->ts", each, weights.float())


def choose(scores: torch.Tensor, positions: torch.Tensor, topk: int, chosen: Selection) -> None:
    """Write the `topk` highest scores up to each query's own position; of equal ones the first positions."""
    hidden = torch.arange(scores.shape[1]) > positions[:, None]
    order = scores.masked_fill(hidden, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    counts = (positions + 1).clamp(0, min(topk, chosen.positions.shape[1]))
    chosen.clear()
    kept = torch.arange(min(order.shape[1], chosen.positions.shape[1])) < counts[:, None]
    chosen.positions[: len(order), : kept.shape[1]] = order[:, : kept.shape[1]].int().where(kept, -1)
    chosen.counts[: len(order)] = counts.int()
