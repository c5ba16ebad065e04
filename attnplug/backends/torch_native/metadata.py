"""One step's metadata for TORCH."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.metadata import AttentionMetadata
from attnplug.core.selection import Selection

_Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(eq=False)
class TorchMetadata(AttentionMetadata):
    """One step for TORCH: R requests in any order, of any query lengths.

    Args:
        slot_mapping: int64, where the new K and V go.
        block_table: int32 `[R, max_blocks]` on the device.
        num_actual_tokens: query rows of the batch.
        query_starts: host int64 `[R + 1]`.
        seq_lens: host int64 `[R]`.
        key_starts: host int64 `[R + 1]`, if direct K and V are not packed like the queries.
        causal: of the batch; None is as each layer's spec says.
        common_prefix_len: tokens that all requests with queries share, to be attended once; 0 without.
        spans: host int64 `[at least T, 2]`, the multimodal span of each query; None if the batch has none.
        selection: the keys that an indexer picks, for sparse layers.
        plans: gather plans for short queries, which the layers of the step share.
    """

    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    num_actual_tokens: int
    query_starts: _Ints
    seq_lens: _Ints
    key_starts: _Ints | None
    causal: bool | None
    common_prefix_len: int = 0
    spans: _Ints | None = None
    selection: Selection | None = None
    plans: dict[Hashable, Any] = dataclasses.field(default_factory=dict)

    @property
    def query_lens(self) -> _Ints:
        """New tokens of each request, int64 `[R]`."""
        return np.diff(self.query_starts)

    def alone(self) -> list[tuple[slice, slice, TorchMetadata]]:
        """Each request with queries as a step of its own, which says nothing of the others; made once for all layers.

        With its rows, and its rows of keys that come with the call.
        """
        if "alone" not in self.plans:
            starts = self.query_starts.tolist()
            keys = starts if self.key_starts is None else self.key_starts.tolist()
            found = []
            for request in np.flatnonzero(self.query_lens).tolist():
                rows = slice(starts[request], starts[request + 1])
                own = slice(keys[request], keys[request + 1])
                count, given = rows.stop - rows.start, own.stop - own.start
                step = dataclasses.replace(
                    self,
                    block_table=self.block_table[request : request + 1].clone(),
                    num_actual_tokens=count,
                    query_starts=np.array([0, count]),
                    seq_lens=self.seq_lens[request : request + 1].copy(),
                    key_starts=None if self.key_starts is None else np.array([0, given]),
                    common_prefix_len=0,
                    spans=None if self.spans is None else self.spans[rows],
                    selection=None if self.selection is None else self.selection[rows],
                    plans={},
                )
                found.append((rows, own, step))
            self.plans["alone"] = found
        return cast(list[tuple[slice, slice, TorchMetadata]], self.plans["alone"])

    def rows(self) -> tuple[_Ints, _Ints]:
        """The request and the position of each query, int64 `[T]`; padding requests have negative positions."""
        lens = self.query_lens
        requests = np.repeat(np.arange(lens.size), lens)
        shift = self.seq_lens - self.query_starts[1:]
        return requests, np.arange(*self.query_starts[[0, -1]]) + shift[requests]
