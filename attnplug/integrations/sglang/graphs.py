"""Steps inside CUDA graphs: tensors that stay where they are, and metadata for each captured shape."""

from __future__ import annotations

from typing import Any

import torch

from attnplug.core.errors import BatchError
from attnplug.core.metadata import PAD_SLOT_ID, AttentionCGSupport, CommonAttentionMetadata
from attnplug.integrations.sglang.batches import Lengths, lengths_of
from attnplug.integrations.sglang.steps import FULL, WINDOW, Rows

OFF = "pass --disable-cuda-graph"


class GraphBuffers:
    """The tensors that graphs read, for batches of at most `max_reqs` requests and `max_tokens` tokens.

    Args:
        rows: SGLang's slots of all requests.
        max_reqs: requests of the largest graph.
        max_tokens: tokens of the largest graph.
        windowed: whether layers with windows have pages of their own.
    """

    def __init__(self, rows: Rows, max_reqs: int, max_tokens: int, *, windowed: bool) -> None:
        self.rows, self.max_reqs, self.max_tokens = rows, max_reqs, max_tokens
        device, pages = rows.table.device, -(-rows.table.shape[1] // rows.page_size)
        places = (FULL, WINDOW) if windowed else (FULL,)
        self.tables = {
            place: torch.zeros(max_reqs, pages, dtype=torch.int32, device=device) for place in places
        }
        self.slots = {
            place: torch.full((max_tokens,), PAD_SLOT_ID, dtype=torch.int64, device=device)
            for place in places
        }
        self.lens = torch.ones(max_reqs, dtype=torch.int32, device=device)
        self._starts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def starts(self, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where requests of so many queries start, on the host and on the device."""
        if queries not in self._starts:
            host = torch.arange(self.max_reqs + 1, dtype=torch.int32) * queries
            self._starts[queries] = host, host.to(self.lens.device)
        return self._starts[queries]


class GraphStep:
    """A batch in the tensors that a graph reads; errors as `lengths_of`.

    Args:
        batch: a ForwardBatch, or SGLang's view of one, with requests of one number of queries. Its slots may be
            fewer than its tokens: padding writes no slot.
        buffers: for at least as large a batch.
        captures: whether a graph is captured with it.
    """

    encoder_lens = None

    def __init__(
        self, batch: Any, buffers: GraphBuffers, *, captures: bool, lengths: Lengths | None = None
    ) -> None:
        if batch.encoder_lens is not None:
            limit = "is not served in CUDA graphs: models with an encoder run without"
            raise BatchError("encoder_lens", "a tensor", limit, OFF)
        mode = batch.forward_mode
        if not (mode.is_decode() or mode.is_target_verify() or mode.is_draft_extend_v2()):
            limit = "is not served inside of CUDA graphs, and prompts run between them"
            raise BatchError("forward_mode", mode.name, limit, "choose another cuda_graph_config for prefill")
        self.lengths = lengths = lengths_of(batch) if lengths is None else lengths
        if not lengths.is_uniform:
            limit = "must be equal for all requests of a graph"
            raise BatchError("extend_seq_lens", lengths.queries.tolist(), limit, OFF)
        self.buffers = buffers
        self.reqs = reqs = batch.batch_size
        self.queries = int(lengths.queries[0])
        self.tokens = tokens = reqs * self.queries
        if reqs > buffers.max_reqs or tokens > buffers.max_tokens:
            limit = f"must be at most {buffers.max_reqs} requests and {buffers.max_tokens} tokens"
            raise BatchError("batch_size", f"{reqs} of {self.queries} tokens", limit)
        rows = buffers.rows
        host = lengths.keys_host
        longest = rows.table.shape[1] if captures or host is None else int(host.max())
        requests, slots = batch.req_pool_indices[:reqs], batch.out_cache_loc[:tokens]
        for place, table in buffers.tables.items():
            windowed = place == WINDOW
            pages = rows.pages(requests, longest, windowed=windowed)
            table[:reqs, : pages.shape[1]].copy_(pages)
            buffers.slots[place][: len(slots)].copy_(rows.slots(slots, windowed=windowed))
            buffers.slots[place][len(slots) : tokens].fill_(PAD_SLOT_ID)
        buffers.lens[:reqs].copy_(lengths.keys)
        starts, on_device = buffers.starts(self.queries)
        full = CommonAttentionMetadata(
            query_start_loc=on_device[: reqs + 1],
            query_start_loc_cpu=starts[: reqs + 1],
            seq_lens=buffers.lens[:reqs],
            num_reqs=reqs,
            num_actual_tokens=tokens,
            max_query_len=self.queries,
            max_seq_len=longest,
            block_table_tensor=buffers.tables[FULL][:reqs],
            slot_mapping=buffers.slots[FULL][:tokens],
            seq_lens_host=host,
            seq_lens_host_exact=True,
        )
        self._common = {FULL: full}
        if WINDOW in buffers.tables:
            table, written = buffers.tables[WINDOW][:reqs], buffers.slots[WINDOW][:tokens]
            self._common[WINDOW] = full.changed(block_table_tensor=table, slot_mapping=written)
        self.made: dict[Any, Any] = {}

    def common(self, place: str) -> CommonAttentionMetadata:
        """The batch for layers whose keys are in a place; BatchError for an encoder's, and for cross attention."""
        if place not in self._common:
            raise BatchError("attn_type", place, "is not served in CUDA graphs", OFF)
        return self._common[place]


def check_support(support: AttentionCGSupport, backend: str, queries: int) -> None:
    """BatchError if a backend's steps of so many queries for each request cannot be captured."""
    needed = (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if queries == 1 else AttentionCGSupport.UNIFORM_BATCH
    )
    if support < needed:
        what = "decodes" if queries == 1 else f"steps of {queries} tokens a request"
        raise BatchError("cuda_graph", backend, f"does not run {what} in CUDA graphs", OFF)
