"""Requests without any key, and what FlashAttention 2 is given in their place.

Over pages its `varlen_fwd` must not meet one (2.7 to 2.8.3, `compute_attn_1rowblock_splitkv`): for queries that see
nothing it writes +inf where the LSE would be if all requests had as many queries, which is the LSE of others, or
memory that is not its own.
"""

from __future__ import annotations

import dataclasses
from typing import cast

import torch

from attnplug.backends.flash_attn.call import Requests

__all__ = ["WithKeys"]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class WithKeys:
    """Requests with at least one key: the first row of the null block stands in where there is none.

    Args:
        seq_lens: int32 `[R]`.
        block_table: int32 `[R, max_blocks]`. An idle request's row may hold anything.
        empty: bool `[rows]`, the queries that in truth see nothing; None where the host knows of none.
    """

    seq_lens: torch.Tensor
    block_table: torch.Tensor
    empty: torch.Tensor | None

    @classmethod
    def of(cls, requests: Requests) -> WithKeys:
        """Of `requests`; the host does not wait, and layers of a step share what is made on the device."""
        if not requests.keyless:
            return cls(requests.seq_lens, requests.block_table, None)
        if requests.captured:
            # What an earlier call made would not be made again when a graph of this one is replayed.
            return cls._made(requests)
        found = requests.kept.get("with_keys")
        if found is None:
            found = requests.kept["with_keys"] = cls._made(requests)
        return cast(WithKeys, found)

    @classmethod
    def _made(cls, requests: Requests) -> WithKeys:
        lens, ends = requests.seq_lens, requests.query_start_loc[1:]
        none = lens == 0
        rows = torch.arange(requests.first_token, requests.end_token, dtype=ends.dtype, device=ends.device)
        # Rows past the last request are padding, whose outputs nobody reads.
        owners = torch.bucketize(rows, ends, right=True).clamp_(max=lens.shape[0] - 1)
        return cls(lens.clamp(min=1), requests.block_table.masked_fill(none[:, None], 0), none[owners])

    def blank(self, output: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Make outputs `[rows, H, Dv]` 0 and LSEs `[H, rows]` -inf where nothing is seen."""
        if self.empty is None:
            return
        output.masked_fill_(self.empty[:, None, None], 0.0)
        if lse is not None:
            lse.masked_fill_(self.empty, -torch.inf)
