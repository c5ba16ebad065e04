"""One step's metadata for TORCH."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

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

    def rows(self) -> tuple[_Ints, _Ints]:
        """The request and the position of each query, int64 `[T]`; padding requests have negative positions."""
        lens = self.query_lens
        requests = np.repeat(np.arange(lens.size), lens)
        shift = self.seq_lens - self.query_starts[1:]
        return requests, np.arange(*self.query_starts[[0, -1]]) + shift[requests]
