"""A step of continuous batching as metadata: lengths on the host, block tables and slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from attnplug.core.errors import BatchError
from attnplug.core.metadata import CommonAttentionMetadata
from attnplug.integrations.attention.paged_cache import LayerCache
from attnplug.integrations.direct_step import direct_step
from attnplug.integrations.flash_attn.pages import Pages
from attnplug.integrations.flash_attn.steps import Ints, Lengths, lengths_of, paged_step


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PagedStep:
    """The requests of a step for one kind of layer, without those that only pad a batch.

    `query_lens` are their new tokens, `key_lens` all tokens that the layer reads, the new ones too.
    """

    arguments: Mapping[str, Any]
    query_lens: Ints
    key_lens: Ints

    @classmethod
    def read(cls, arguments: Mapping[str, Any], kind: str, rows: int) -> PagedStep:
        """The step of these keywords; the host copies the lengths, which waits for a GPU.

        Raises:
            BatchError: lengths that do not fit the `rows` tokens of the call.
        """
        starts = arguments["cu_seq_lens_k"]
        starts = starts[kind] if isinstance(starts, Mapping) else starts
        query_lens = lengths_of("cu_seq_lens_q", arguments["cu_seq_lens_q"].int(), rows)
        key_lens = lengths_of("cu_seq_lens_k", starts.int(), None)
        if query_lens.size != key_lens.size or (key_lens < query_lens).any():
            raise BatchError("cu_seq_lens_k", key_lens.tolist(), f"must be at least {query_lens.tolist()}")
        # Requests without tokens at the end fill a batch of a fixed size. Others wait to be forked, and their keys count.
        real = int(np.flatnonzero(query_lens).max(initial=-1)) + 1
        return cls(arguments, query_lens[:real], key_lens[:real])

    @property
    def tokens(self) -> int:
        """The new tokens of all requests."""
        return int(self.query_lens.sum())

    def gathered(self, device: torch.device) -> CommonAttentionMetadata:
        """The step of a layer whose keys the cache gathers into one packed tensor."""
        return direct_step(self.query_lens, self.key_lens, self.key_lens, True, device)

    def paged(self, part: LayerCache, pages: Pages, needs: str) -> CommonAttentionMetadata:
        """The step of a layer that reads pages; `needs` is what the builder needs of the lengths on the host."""
        device = pages.keys.device
        table = self._table(part.group, pages.block_size)
        lengths = Lengths.of(self.key_lens, device)
        given = self.arguments["block_table"]
        if given is None:
            slots = self.arguments["write_index"][part.group][: self.tokens]
        else:
            last = (lengths.tensor - 1).long()
            block = table.long().gather(1, (last // pages.block_size)[:, None])[:, 0]
            slots = block * pages.block_size + last % pages.block_size
        common = paged_step(
            self.query_lens, lengths, dataclasses.replace(pages, table=table), causal=True, needs=needs
        )
        return dataclasses.replace(common, slot_mapping=slots)

    def _table(self, group: int, block_size: int) -> torch.Tensor:
        """The pages of each request, int32 `[R, max_blocks]`."""
        given = self.arguments["block_table"]
        if given is not None:
            if (self.query_lens > 1).any():
                limit = "new tokens in a request: block tables are for steps of one token each"
                raise BatchError("block_table", int(self.query_lens.max()), limit)
            rows: torch.Tensor = given[group][: self.query_lens.size].contiguous()
            return rows
        # Indices name the place of each token. Where all tokens are new, transformers gives those to write only.
        indices: torch.Tensor = self.arguments["read_index"][group]
        if not indices.numel():
            indices = self.arguments["write_index"][group]
        ends = np.cumsum(self.key_lens)
        most = -(-int(self.key_lens.max()) // block_size)
        first = (ends - self.key_lens)[:, None] + np.arange(most) * block_size
        # Entries past a request's pages are never followed, and must only be in the tensor.
        first = np.minimum(first, ends[:, None] - 1)
        places = torch.from_numpy(first).to(indices.device)
        return (indices[places] // block_size).int()
