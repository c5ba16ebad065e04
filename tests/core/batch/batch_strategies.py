"""Batches to draw, and proof that a call leaves its input as it was."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from attnplug.core import CommonAttentionMetadata

Lengths = tuple[list[int], list[int]]
"""Query lengths and sequence lengths."""


def starts_of(lengths: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32))


def common_of(
    query_lens: Sequence[int], seq_lens: Sequence[int] | None = None, /, **changes: Any
) -> CommonAttentionMetadata:
    """A batch on the CPU; rows of its table hold distinct blocks."""
    lengths = list(query_lens if seq_lens is None else seq_lens)
    rows, width = len(query_lens), max(lengths, default=0) + 1
    common = CommonAttentionMetadata(
        query_start_loc=starts_of(query_lens),
        query_start_loc_cpu=starts_of(query_lens),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=rows,
        num_actual_tokens=sum(query_lens),
        max_query_len=max(query_lens, default=0),
        max_seq_len=max(lengths, default=0),
        block_table_tensor=torch.arange(rows * width, dtype=torch.int32).view(rows, width),
        slot_mapping=torch.arange(sum(query_lens)),
    )
    return dataclasses.replace(common, **changes)


def on_meta(common: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """The batch with device tensors that have no values: whoever waits for one fails."""
    device_fields = (
        "query_start_loc",
        "seq_lens",
        "block_table_tensor",
        "slot_mapping",
        "logits_indices_padded",
    )
    moved = {
        name: None if (value := getattr(common, name)) is None else value.to("meta") for name in device_fields
    }
    return dataclasses.replace(common, **moved, seq_lens_host=common.seq_lens.numpy().copy())


@contextlib.contextmanager
def unmodified(*inputs: Any) -> Iterator[None]:
    """AssertionError if a tensor or array in `inputs` has other values afterwards."""
    held = [
        (item, item.clone() if isinstance(item, torch.Tensor) else item.copy()) for item in _arrays(inputs)
    ]
    yield
    for item, before in held:
        assert (item == before).all()


def _arrays(inputs: Sequence[Any]) -> Iterator[Any]:
    for item in inputs:
        if isinstance(item, (torch.Tensor, np.ndarray)):
            yield item
        elif dataclasses.is_dataclass(item):
            yield from _arrays([getattr(item, field.name) for field in dataclasses.fields(item)])


@st.composite
def lengths(
    draw: st.DrawFn,
    *,
    least_query: int = 0,
    most_query: int = 9,
    most_context: int = 24,
    most_requests: int = 6,
) -> Lengths:
    """Query and sequence lengths of 1 to `most_requests` requests, in any order."""
    request = st.tuples(st.integers(least_query, most_query), st.integers(0, most_context))
    drawn = draw(st.lists(request, min_size=1, max_size=most_requests))
    return [query for query, _ in drawn], [query + context for query, context in drawn]


@st.composite
def ordered_lengths(draw: st.DrawFn, threshold: int) -> Lengths:
    """Decodes of at most `threshold` tokens, then extends, then prefills; one request or more."""
    decode = st.tuples(st.integers(0, threshold), st.integers(1, 20))
    extend = st.tuples(st.integers(threshold + 1, threshold + 9), st.integers(1, 20))
    prefill = st.tuples(st.integers(threshold + 1, threshold + 9), st.just(0))
    drawn = [
        request for kind in (decode, extend, prefill) for request in draw(st.lists(kind, max_size=4))
    ] or [(1, 3)]
    return [query for query, _ in drawn], [query + context for query, context in drawn]
