"""One step's metadata of latent attention: decodes in front, then prefills with their context chunks."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from attnplug.core.metadata import AttentionMetadata
from attnplug.mla.selected import SelectedMetadata


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ChunkMetadata:
    """A chunk of computed tokens, and the queries that attend it.

    Args:
        queries: their rows among those of the prefill.
        rows: tokens of the chunk.
        block_table: int32 `[r, max_blocks]` of its requests.
        cu_lens: int32 `[r + 1]`, where the tokens of each request start.
        starts: int32 `[r]`, the first position of each.
        attend: the step of the prefill backend, not causal.
    """

    queries: slice
    rows: int
    block_table: torch.Tensor
    cu_lens: torch.Tensor
    starts: torch.Tensor
    attend: AttentionMetadata


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MLAPrefillMetadata:
    """The prefills of a step.

    Args:
        num_tokens: their queries.
        new: the step of the prefill backend for the new tokens, causal.
        key_rows: int64, the new tokens that are keys; None if all are. Only padding requests have others.
        slots: int64 `[num_tokens]`, where the new latents are.
        chunks: the computed tokens, in order.
        workspace: uint8, where a chunk is expanded; None for new tensors in each call.
    """

    num_tokens: int
    new: AttentionMetadata
    key_rows: torch.Tensor | None
    slots: torch.Tensor
    chunks: tuple[ChunkMetadata, ...]
    workspace: torch.Tensor | None = None


@dataclasses.dataclass(eq=False)
class MLAMetadata(AttentionMetadata):
    """One step of latent attention.

    Args:
        slot_mapping: int64, where the new latents go.
        num_actual_tokens: query rows of the step.
        num_decode_tokens: query rows that are decoded; they come first.
        decode: what `build_decode` returned; None without decodes.
        prefill: the other requests; None without.
        selected: of sparse layers, whose queries are all decoded, each as a request of its own; None for others.
    """

    slot_mapping: torch.Tensor
    num_actual_tokens: int
    num_decode_tokens: int
    decode: Any
    prefill: MLAPrefillMetadata | None
    selected: SelectedMetadata | None = None
