"""The tensors that captured graphs read: one set of the largest size for all graphs.

The tensors that captured graphs read under context parallelism, beside those of GraphInputBuffers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import numpy.typing as npt
import torch

from attnplug._system.one_commit import NotCopied
from attnplug.core.arguments import integer
from attnplug.core.context_parallel import ContextParallel
from attnplug.core.errors import BatchError
from attnplug.core.metadata import PAD_SLOT_ID, STEP_INPUTS
from attnplug.core.selection import Selection
from attnplug.runtime.batch.sharded_step import ShardedStep
from attnplug.runtime.batch.step_batch import StepBatch, StepSerial
from attnplug.runtime.states.state_graphs import StateGraphBuffers
from attnplug.runtime.states.state_step import StateStep

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


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class GraphInputBuffers(NotCopied):
    """The inputs of one captured graph: views of the first rows of the shared buffers.

    Args:
        batch_size: requests B of the graph.
        query_len: queries q of each request.
        query_start_loc: int32 `[B + 1]`.
        seq_lens: int32 `[B]`.
        block_tables: int32 `[G, B, max_blocks]` of the G KV groups.
        slot_mappings: int64 `[G, B * q]`; always -1 in cross groups.
        inputs: the optional inputs of the graph's layers by field, for B requests and `B * q` tokens; an indexer inside
            the graph fills the selection.
        sharded: the keys on this rank; None without context parallelism.
        states: the pages of layers that keep a state; None without any.
        serial: counts what the shared buffers have held; steps in them are out of date once they hold another.
    """

    batch_size: int
    query_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mappings: torch.Tensor
    inputs: Mapping[str, Any]
    sharded: ShardedGraphBuffers | None = None
    states: StateGraphBuffers | None = None
    serial: StepSerial = dataclasses.field(default_factory=StepSerial)

    @property
    def num_tokens(self) -> int:
        """Query rows of the graph."""
        return self.batch_size * self.query_len

    @property
    def encoder_seq_lens(self) -> torch.Tensor | None:
        """int32 `[B]`; None without cross groups."""
        return self.inputs.get("encoder_seq_lens")

    @property
    def mm_prefix_spans(self) -> torch.Tensor | None:
        """int32 `[B * q, 2]`; None without layers with mm_prefix."""
        return self.inputs.get("mm_prefix_spans")

    @property
    def selection(self) -> Selection | None:
        """The keys of `B * q` queries, which an indexer inside the graph picks; None without sparse layers."""
        return self.inputs.get("selection")

    @classmethod
    def allocate(
        cls,
        batch_size: int,
        query_len: int,
        *,
        groups: int,
        max_blocks: int,
        inputs: Collection[str] = (),
        sparse_topk: int = 0,
        has_states: bool = False,
        device: torch.device,
    ) -> GraphInputBuffers:
        """New buffers for `groups` KV groups, with tables of `max_blocks` pages and optional inputs of these names.

        `has_states` adds the pages of layers that keep a state.

        Raises:
            BatchError: an input is none of a step's.
        """
        if unknown := set(inputs) - {each.name for each in STEP_INPUTS}:
            raise BatchError("inputs", sorted(unknown), "are no optional inputs of a step")
        # Padding requests have length 1 and the null block, and slot -1 keeps them from writing.
        tokens = batch_size * query_len
        return cls(
            batch_size=batch_size,
            query_len=query_len,
            query_start_loc=torch.zeros(batch_size + 1, dtype=torch.int32, device=device),
            seq_lens=torch.ones(batch_size, dtype=torch.int32, device=device),
            block_tables=torch.zeros(groups, batch_size, max_blocks, dtype=torch.int32, device=device),
            slot_mappings=torch.full((groups, tokens), PAD_SLOT_ID, dtype=torch.int64, device=device),
            inputs={
                each.name: Selection.allocate(tokens, sparse_topk, device)
                if each.name == "selection"
                else each.padded(each.count(batch_size, tokens), device)
                for each in STEP_INPUTS
                if each.name in inputs
            },
            states=StateGraphBuffers.allocate(batch_size, tokens, device) if has_states else None,
        )

    def first(self, batch_size: int, query_len: int) -> GraphInputBuffers:
        """Views for a graph of the first `batch_size` requests with `query_len` queries each.

        Raises:
            BatchError: a size is below 1 or above the allocated one.
        """
        batch_size, query_len = integer("batch_size", batch_size), integer("query_len", query_len)
        if not 1 <= batch_size <= self.batch_size:
            raise BatchError("batch_size", batch_size, f"must be in 1 .. {self.batch_size}")
        if not 1 <= query_len <= self.query_len:
            raise BatchError("query_len", query_len, f"must be in 1 .. {self.query_len}")
        tokens = batch_size * query_len
        return GraphInputBuffers(
            batch_size=batch_size,
            query_len=query_len,
            query_start_loc=self.query_start_loc[: batch_size + 1],
            seq_lens=self.seq_lens[:batch_size],
            block_tables=self.block_tables[:, :batch_size],
            slot_mappings=self.slot_mappings[:, :tokens],
            inputs={
                each.name: self.inputs[each.name][: each.count(batch_size, tokens)]
                for each in STEP_INPUTS
                if each.name in self.inputs
            },
            sharded=None if self.sharded is None else self.sharded.first(batch_size, query_len),
            states=None if self.states is None else self.states.first(batch_size, tokens),
            serial=self.serial,
        )

    def clear(self) -> None:
        """Turn all requests into padding: length 1, null pages, slots -1."""
        self.serial.advance("clear of the graph's buffers")
        self._pad(0, 0)
        if self.states is not None:
            self.states.clear()

    def copy_from(self, batch: StepBatch, states: StateStep | None = None) -> None:
        """Copy a step's values and pad to the graph's size, without waiting for the device.

        Padding requests have length 1, null pages, slots -1, and start locations that continue by `query_len`.
        """
        # Before the copies, so that after an interrupt no earlier step in these buffers counts as current.
        self.serial.advance("prepare_graph_input_buffers")
        common, reqs = batch.common, batch.common.num_reqs
        # On a device, a step's table is only as wide as its longest request needs.
        width = min(self.block_tables.shape[2], batch.block_tables.shape[2])
        self.query_start_loc[: reqs + 1].copy_(common.query_start_loc, non_blocking=True)
        self.seq_lens[:reqs].copy_(common.seq_lens, non_blocking=True)
        self.block_tables[:, :reqs, :width].copy_(batch.block_tables[:, :, :width], non_blocking=True)
        most = max(batch.num_slots)
        if min(batch.num_slots) == most:
            self.slot_mappings[:, :most].copy_(batch.slot_mappings[:, :most], non_blocking=True)
        else:
            for group, count in enumerate(batch.num_slots):
                if count:
                    self.slot_mappings[group, :count].copy_(batch.of_group(group)[1], non_blocking=True)
        if self.sharded is not None and batch.sharded is not None:
            self.sharded.copy_from(batch.sharded)
        if self.states is not None and states is not None:
            self.states.copy_from(states)
        for each in STEP_INPUTS:
            into, given = self.inputs.get(each.name), getattr(common, each.name)
            if into is None or given is None:
                continue
            rows = each.count(reqs, common.num_actual_tokens)
            if isinstance(into, Selection):
                into.copy_from(given[:rows])
            else:
                into[:rows].copy_(given[:rows], non_blocking=True)
        self._pad(reqs, common.num_actual_tokens)

    def _pad(self, reqs: int, tokens: int) -> None:
        if reqs < self.batch_size or tokens < self.num_tokens:
            self._fill(reqs, tokens)
        if self.sharded is not None:
            self.sharded.pad(reqs, self.block_tables)

    def _fill(self, reqs: int, tokens: int) -> None:
        q = self.query_len
        if reqs < self.batch_size:
            starts = self.query_start_loc[reqs + 1 :]
            torch.arange(tokens + q, tokens + q * starts.shape[0] + 1, q, out=starts)
        if reqs == 0:
            self.query_start_loc[:1].fill_(0)
        self.seq_lens[reqs:].fill_(1)
        self.block_tables[:, reqs:].fill_(0)
        self.slot_mappings[:, tokens:].fill_(PAD_SLOT_ID)
        for each in STEP_INPUTS:
            if each.name in self.inputs:
                rest = self.inputs[each.name][each.count(reqs, tokens) :]
                # Queries of padding requests see no key until an indexer inside the graph picks some.
                rest.clear(0) if isinstance(rest, Selection) else rest.fill_(each.padding)
