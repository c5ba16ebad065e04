"""Steps of SGLang as attnplug's: pages from the rows of requests, for each of the pools that layers have."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from attnplug.core.errors import BatchError
from attnplug.core.metadata import CommonAttentionMetadata
from attnplug.integrations.binding import starts_of
from attnplug.integrations.engine_layers import with_direct_keys
from attnplug.integrations.sglang.batches import Lengths, lengths_of
from attnplug.runtime.steps.attention_groups import cross_metadata

FULL, WINDOW, CROSS, DIRECT = "full", "window", "cross", "direct"
"""Where a layer's keys are: in the pages of all tokens, in those of layers with windows, in an encoder's part of the
row, or in the call."""


class Rows:
    """SGLang's slots of all requests, in tokens.

    Args:
        table: int32 `[requests, tokens]` on the device; entries past a request's length are leftovers.
        page_size: tokens in a page.
        pool: SGLang's KV pool.
    """

    def __init__(self, table: torch.Tensor, page_size: int, pool: Any) -> None:
        self.table, self.page_size, self.pool = table, page_size, pool
        self._first = torch.arange(0, table.shape[1], page_size, device=table.device)

    def pages(
        self,
        requests: torch.Tensor,
        longest: int,
        *,
        windowed: bool = False,
        start: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The pages of requests, int32 `[R, pages]`: the slots of each page's first token.

        Args:
            requests: rows of `table`.
            longest: tokens that pages must cover.
            windowed: pages of layers with windows, which have numbers of their own.
            start: the first token of each request; needs pages of one token.
        """
        longest = max(1, min(longest, self.table.shape[1]))
        where = self._first[None, : -(-longest // self.page_size)]
        if start is not None:
            # Past the end of a short request there is no column to read.
            where = (where + start.long()[:, None]).clamp(max=self.table.shape[1] - 1)
        slots = self.table[requests.long()[:, None], where]
        if windowed:
            # Tokens that a window has left behind have no slot.
            slots = self.pool.translate_loc_from_full_to_swa(slots.long()).clamp(min=0)
        return (slots // self.page_size if self.page_size > 1 else slots).int()

    def slots(self, slots: torch.Tensor, *, windowed: bool = False) -> torch.Tensor:
        """The slots of new tokens, int64 `[T]`."""
        slots = slots.long()
        return self.pool.translate_loc_from_full_to_swa(slots).long() if windowed else slots


class Step:
    """A batch as attnplug's builders read it, once for each place of keys."""

    def __init__(self, batch: Any, rows: Rows, lengths: Lengths | None = None) -> None:
        self.batch, self.rows = batch, rows
        self.lengths = lengths = lengths_of(batch) if lengths is None else lengths
        self.made: dict[Any, Any] = {}
        """Metadata by kind of layer."""
        reqs = batch.batch_size
        starts = starts_of(lengths.queries)
        self.tokens = int(starts[-1])
        longest = rows.table.shape[1] if lengths.keys_host is None else int(lengths.keys_host.max(initial=0))
        encoders = batch.encoder_lens
        self.encoder_lens = None if encoders is None else encoders[:reqs]
        self.requests = batch.req_pool_indices[:reqs]
        device = rows.table.device
        self._full = CommonAttentionMetadata(
            query_start_loc=starts.to(device, non_blocking=True),
            query_start_loc_cpu=starts,
            seq_lens=lengths.keys,
            num_reqs=reqs,
            num_actual_tokens=self.tokens,
            max_query_len=int(lengths.queries.max(initial=0)),
            max_seq_len=longest,
            block_table_tensor=rows.pages(self.requests, longest, start=self.encoder_lens),
            slot_mapping=rows.slots(batch.out_cache_loc[: self.tokens]),
            seq_lens_host=lengths.keys_host,
            seq_lens_host_exact=True,
        )
        self._common = {FULL: self._full}

    def common(self, place: str) -> CommonAttentionMetadata:
        """The batch for layers whose keys are in a place.

        BatchError: keys of the call for requests that have computed tokens.
        """
        found = self._common.get(place)
        if found is None:
            make = {WINDOW: self._windowed, CROSS: self._crossed, DIRECT: self._direct}[place]
            found = self._common[place] = make()
        return found

    def _windowed(self) -> CommonAttentionMetadata:
        full = self._full
        pages = self.rows.pages(self.requests, full.max_seq_len, windowed=True, start=self.encoder_lens)
        return full.changed(
            block_table_tensor=pages,
            slot_mapping=self.rows.slots(self.batch.out_cache_loc[: self.tokens], windowed=True),
        )

    def _crossed(self) -> CommonAttentionMetadata:
        if self.encoder_lens is None:
            raise BatchError("encoder_lens", None, "is required by cross attention")
        given = getattr(self.batch, "encoder_lens_cpu", None)
        # SGLang gives its graphs no list, and its batches have one.
        listed = self.encoder_lens.tolist() if given is None else given[: self._full.num_reqs]
        host = np.asarray(listed, dtype=np.int32)
        slots = self.batch.encoder_out_cache_loc
        written = self._full.slot_mapping[:0] if slots is None else self.rows.slots(slots)
        full = self._full.changed(encoder_seq_lens=self.encoder_lens.int(), encoder_seq_lens_cpu=host)
        return cross_metadata(full, self.rows.pages(self.requests, int(host.max(initial=0))), written)

    def _direct(self) -> CommonAttentionMetadata:
        host = self.lengths.keys_host
        if host is None or not np.array_equal(host, self.lengths.queries):
            limit = "must be 0: an encoder's layer has the keys of its call alone"
            raise BatchError(
                "extend_prefix_lens", "more", limit, "pass --disable-radix-cache --chunked-prefill-size -1"
            )
        return with_direct_keys(self._full)
