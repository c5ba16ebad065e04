"""The tensors that captured graphs read under context parallelism, beside those of GraphInputBuffers."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy.typing as npt
import torch

from attnplug._system.one_commit import NotCopied
from attnplug.core.context_parallel import ContextParallel
from attnplug.core.metadata import PAD_SLOT_ID
from attnplug.runtime.sharded_step import ShardedStep

_Ints = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ShardedGraphBuffers(NotCopied):
    """The keys on this rank, for the requests of one captured graph.

    Args:
        place: of this rank.
        groups: the KV groups whose tokens the ranks share.
        query_len: queries q of each request.
        local_lens: int32 `[B]`, the keys on this rank: computed ones, in a decode of one token the new one too.
        new_lens: int32 `[B]`, the new tokens of each request, always q.
        no_slots: int64 `[B * q]`, always -1.
        row_lens: int32 `[B * q]`, the keys on this rank that each new token sees; None without latent attention.
        row_starts: int32 `[B * q + 1]`, 0, 1, 2, ...; None without.
        row_tables: int32 `[G, B * q, max_blocks]`, the block table of each new token; None without.
    """

    place: ContextParallel
    groups: frozenset[int]
    query_len: int
    local_lens: torch.Tensor
    new_lens: torch.Tensor
    no_slots: torch.Tensor
    row_lens: torch.Tensor | None = None
    row_starts: torch.Tensor | None = None
    row_tables: torch.Tensor | None = None

    @classmethod
    def allocate(
        cls,
        place: ContextParallel,
        groups: frozenset[int],
        block_tables: torch.Tensor,
        query_len: int,
        has_latents: bool,
    ) -> ShardedGraphBuffers:
        """New buffers beside `block_tables [G, B, max_blocks]`; rows only with latents and several queries."""
        (count, reqs, width), device = block_tables.shape, block_tables.device
        rows, ints = reqs * query_len, {"dtype": torch.int32, "device": device}
        by_row: dict[str, torch.Tensor] = {}
        if has_latents and query_len > 1:
            by_row["row_lens"] = torch.ones(rows, **ints)  # type: ignore[call-overload]
            by_row["row_starts"] = torch.arange(rows + 1, **ints)  # type: ignore[call-overload]
            by_row["row_tables"] = torch.zeros(count, rows, width, **ints)  # type: ignore[call-overload]
        return cls(
            place,
            groups,
            query_len,
            local_lens=torch.ones(reqs, dtype=torch.int32, device=device),
            new_lens=torch.ones(reqs, dtype=torch.int32, device=device),
            no_slots=torch.full((rows,), PAD_SLOT_ID, dtype=torch.int64, device=device),
            **by_row,
        )

    def first(self, batch_size: int, query_len: int) -> ShardedGraphBuffers:
        """Views for a graph of the first `batch_size` requests with `query_len` queries each."""
        rows = batch_size * query_len
        lens, starts, tables = self.row_lens, self.row_starts, self.row_tables
        by_row: dict[str, torch.Tensor] = {}
        if query_len > 1 and lens is not None and starts is not None and tables is not None:
            by_row = {
                "row_lens": lens[:rows],
                "row_starts": starts[: rows + 1],
                "row_tables": tables[:, :rows],
            }
        return ShardedGraphBuffers(
            self.place,
            self.groups,
            query_len,
            self.local_lens[:batch_size],
            self.new_lens[:batch_size],
            self.no_slots[:rows],
            **by_row,
        )

    def copy_from(self, step: ShardedStep) -> None:
        """Copy a step's lengths; `pad` then fills the rest."""
        self.local_lens[: step.local_lens.shape[0]].copy_(step.local_lens, non_blocking=True)
        if self.row_lens is not None and step.row_lens is not None:
            self.row_lens[: step.row_lens.shape[0]].copy_(step.row_lens, non_blocking=True)

    def pad(self, reqs: int, block_tables: torch.Tensor) -> None:
        """Turn all requests but the first `reqs` into padding, of length 1; the tables are filled already."""
        self.local_lens[reqs:].fill_(1)
        # Graphs of other query lengths use the same memory.
        self.new_lens.fill_(self.query_len)
        if self.row_lens is not None and self.row_tables is not None:
            self.row_lens[reqs * self.query_len :].fill_(1)
            for query in range(self.query_len):
                self.row_tables[:, query :: self.query_len].copy_(block_tables)

    def step(self, local: _Ints, rows: _Ints | None, *, for_capture: bool) -> ShardedStep:
        """The step over these buffers, with the lengths on the host of requests and of rows."""
        return ShardedStep(
            self.place,
            self.groups,
            is_decode=self.query_len == 1,
            # A graph attends pages in each step, also if no request has any.
            has_context=True,
            local_lens=self.local_lens,
            local_lens_host=local,
            row_lens=self.row_lens,
            row_lens_host=rows,
            new_lens=self.new_lens,
            no_slots=self.no_slots,
            row_starts=self.row_starts,
            row_tables=self.row_tables,
            for_capture=for_capture,
        )
