"""The float64 oracle over the pages that a batch's own table names."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from batch_strategies import common_of

from attnplug.core import CommonAttentionMetadata, LayerSpec
from attnplug.testing import attention_oracle


@dataclasses.dataclass
class PagedKeys:
    """Queries of a batch, and K and V of its requests in shuffled pages."""

    common: CommonAttentionMetadata
    query: torch.Tensor
    key_pages: torch.Tensor
    value_pages: torch.Tensor

    @classmethod
    def of(
        cls, query_lens: Sequence[int], seq_lens: Sequence[int], block_size: int, **changes: Any
    ) -> PagedKeys:
        generator = torch.Generator().manual_seed(len(query_lens) + sum(seq_lens))
        width = -(-max(seq_lens) // block_size) + 1
        num_blocks = len(query_lens) * width
        table = torch.randperm(num_blocks, generator=generator).int().view(-1, width)
        pages = torch.randn(2, num_blocks, block_size, 1, 4, generator=generator, dtype=torch.float64)
        query = torch.randn(sum(query_lens), 2, 4, generator=generator, dtype=torch.float64)
        common = common_of(query_lens, seq_lens, block_table_tensor=table, **changes)
        return cls(common, query, pages[0], pages[1])

    def attend(
        self, common: CommonAttentionMetadata | None = None, query: torch.Tensor | None = None, **spec: Any
    ) -> torch.Tensor:
        """Output `[T, H, D]` of a batch over these pages: what its lengths, starts and table say, no more."""
        common = self.common if common is None else common
        query = self.query if query is None else query
        bounds, lengths = common.query_start_loc_cpu.tolist(), common.seq_lens.tolist()
        layer = LayerSpec(num_heads=2, num_kv_heads=1, head_size=4, **spec)
        rows = common.block_table_tensor.long()
        result = attention_oracle(
            layer,
            [query[start:stop] for start, stop in itertools.pairwise(bounds)],
            [self.key_pages[row].flatten(0, 1)[:n] for row, n in zip(rows, lengths, strict=True)],
            [self.value_pages[row].flatten(0, 1)[:n] for row, n in zip(rows, lengths, strict=True)],
            lengths,
        )
        return result.output
