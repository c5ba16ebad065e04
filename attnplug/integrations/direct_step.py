"""The metadata of packed requests whose keys and values come with the call."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.metadata import PAD_SLOT_ID, CommonAttentionMetadata

Ints: TypeAlias = npt.NDArray[np.signedinteger[Any]]


def starts_of(lengths: Ints) -> torch.Tensor:
    """Where requests of these lengths start in packed rows, int32 `[R + 1]` on the host."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    return torch.from_numpy(starts)


def direct_step(
    query_lens: Ints,
    seq_lens: Ints,
    key_lens: Ints,
    causal: bool,
    device: torch.device,
    spans: npt.NDArray[np.int64] | None = None,
) -> CommonAttentionMetadata:
    """A step that writes no slot: each request has the last `key_lens` keys of its sequence of `seq_lens` tokens.

    Its queries are the last tokens of the sequence. `spans` are int64 `[T, 2]`, or any shape with as many numbers.
    """
    query_starts, key_starts = starts_of(query_lens), starts_of(key_lens)
    tokens, lens = int(query_starts[-1]), seq_lens.astype(np.int32)
    rows = None if spans is None else torch.from_numpy(spans.reshape(-1, 2).astype(np.int32))
    return CommonAttentionMetadata(
        query_start_loc=query_starts.to(device),
        query_start_loc_cpu=query_starts,
        seq_lens=torch.from_numpy(lens.copy()).to(device),
        num_reqs=len(query_lens),
        num_actual_tokens=tokens,
        max_query_len=int(query_lens.max(initial=0)),
        max_seq_len=int(lens.max(initial=0)),
        block_table_tensor=torch.zeros(len(query_lens), 0, dtype=torch.int32, device=device),
        slot_mapping=torch.full((tokens,), PAD_SLOT_ID, dtype=torch.int64, device=device),
        causal=causal,
        key_start_loc=key_starts.to(device),
        key_start_loc_cpu=key_starts,
        seq_lens_host=lens,
        mm_prefix_spans=None if rows is None else rows.to(device),
        mm_prefix_spans_cpu=rows,
    )
