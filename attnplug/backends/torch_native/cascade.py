"""Cascade attention: the keys that all requests share, attended once by every query, and merged with the rest."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from attnplug.backends.torch_native.dense import attend_request
from attnplug.backends.torch_native.metadata import TorchMetadata
from attnplug.backends.torch_native.softmax import Scoring
from attnplug.backends.torch_native.source import KeySource, PagedKeys
from attnplug.ops.reach import Reach


def shared_prefix_len(metadata: TorchMetadata, source: KeySource, reach: Reach) -> int:
    """The step's shared prefix if the layer can attend it once: keys in pages that all its queries see; else 0.

    It depends on the step, the kind of source and `reach` only, as the gather plans in `metadata.plans` need.
    """
    shared = metadata.common_prefix_len
    if not shared or not isinstance(source, PagedKeys):
        return 0
    has_queries = metadata.query_lens > 0
    ends = metadata.seq_lens[has_queries]
    # A request's last query sees the fewest of the first keys.
    low, _ = reach.bounds(ends - 1, np.zeros_like(ends), ends)
    return 0 if low.any() else shared


def attend_shared(
    query: torch.Tensor,
    source: PagedKeys,
    metadata: TorchMetadata,
    scoring: Scoring,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend the shared prefix by all packed queries at once: one product of all queries and its keys.

    Args:
        query: `[T, H, D]`.
        source: the pages; the first request with queries has the prefix, like all others.
        metadata: the step, with `common_prefix_len` P > 0.
        scoring: without sinks, which belong to the rest.
        dtype: of the keys to compute with.

    Returns:
        Float32 `[T, H, Dv]` and LSE `[T, H]`; rows before the first query are unspecified.
    """
    shared, starts = metadata.common_prefix_len, metadata.query_starts
    first, stop = int(starts[0]), int(starts[-1])
    lens = metadata.query_lens
    key, value = source.of_request(int(lens.argmax()), 0, shared)
    positions = np.arange(first, stop) + np.repeat(metadata.seq_lens - starts[1:], lens)
    everything = np.zeros(stop - first, dtype=np.int64), np.full(stop - first, shared)
    output = query.new_empty((stop, query.shape[1], value.shape[-1]), dtype=torch.float32)
    lse = output.new_empty(output.shape[:2])
    attend_request(
        query[first:stop],
        key.to(dtype),
        value.to(dtype),
        everything,
        positions,
        dataclasses.replace(scoring, sinks=None),
        output[first:],
        lse[first:],
    )
    return output, lse
