"""One step's metadata for FLASH_ATTN, and the calls of kernels that serve its requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar, Protocol

import torch

from attnplug.core.metadata import AttentionMetadata
from attnplug.core.spec import LayerSpec


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """Consecutive requests of a step that one call serves.

    Args:
        query_start_loc: int32 `[R + 1]`, rows of the whole batch.
        seq_lens: int32 `[R]`.
        block_table: int32 `[R, max_blocks]`.
        key_start_loc: int32 `[R + 1]`, for K and V that come with the call.
        first_token: the first of their queries.
        end_token: past the last of their queries; the last call's is the end of the batch.
        max_query_len: queries of the longest, which is at least 1.
        max_seq_len: keys of the longest, or an upper bound.
        single: whether each has exactly one query, and there are no more rows than requests.
        captured: whether the call will be part of a CUDA graph.
        may_lack_keys: whether a request with queries may have no key, as far as the host knows.
        queries_before_keys: upper bound of a request's queries before its first key, as far as the host knows.
        num_keys: keys of all requests; 0 if the host does not know, or no request is longer than a decode.
        mean_queries: queries of a key's request, over all these keys.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    key_start_loc: torch.Tensor
    first_token: int
    end_token: int
    max_query_len: int
    max_seq_len: int
    single: bool
    captured: bool
    may_lack_keys: bool
    queries_before_keys: int
    num_keys: int = 0
    mean_queries: float = 0.0
    schedules: dict[object, torch.Tensor] = dataclasses.field(default_factory=dict)
    """FlashAttention 3's schedules, by the values that they depend on; made once per step."""
    kept: dict[str, object] = dataclasses.field(default_factory=dict, init=False)
    """Other results that layers of this step share. They depend on the table, so a new table begins empty."""


@dataclasses.dataclass(eq=False, slots=True)
class FlashAttnMetadata(AttentionMetadata):
    """One step: all requests, and the same split into calls.

    Args:
        slot_mapping: int64, where the new K and V go.
        num_actual_tokens: query rows of the batch.
        key_tokens: rows of key and value that come with the call.
        all_requests: all requests as one call; None if none has queries.
        calls: one call for the decodes in front, and one for the others.
        all_new: whether no request has computed tokens, as far as the host knows.
        causal: of the batch; None is as each layer's spec says.
        chunk: positions of a chunk; 0 without chunks.
        virtual_table: with chunks, maps another table of the batch to the virtual requests.
    """

    slot_mapping: torch.Tensor
    num_actual_tokens: int
    key_tokens: int
    all_requests: Requests | None
    calls: tuple[Requests, ...]
    all_new: bool
    causal: bool | None
    chunk: int = 0
    virtual_table: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Call:
    """The inputs of one call in attnplug's terms; each generation translates it.

    Args:
        spec: the layer.
        requests: the requests that it serves.
        query: `[T, H, D]`, the rows of the whole batch.
        key: pages `[num_blocks, block_size, Hkv, D]`, or keys `[Tk, Hkv, D]` packed by `key_start_loc`.
        value: as `key`, of the value head size.
        output: `[T, H, Dv]`, aligned to 16 bytes.
        paged: whether key and value are pages.
        causal: whether a query sees no key after its position.
        window: keys before and after the position, -1 for no limit; (-1, 0) if causal.
        sinks: float32 `[H]`; None without.
        alibi_slopes: float32 `[H]`; None without.
        wants_lse: whether the LSE is used.
    """

    spec: LayerSpec
    requests: Requests
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    paged: bool
    causal: bool
    window: tuple[int, int]
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    wants_lse: bool

    @property
    def table_keys(self) -> int:
        """Keys that a row of the block table can name: an upper bound in every replay of a graph."""
        return self.requests.block_table.shape[1] * self.key.shape[1]


class Kernels(Protocol):
    """A generation's kernels."""

    separate_decodes: ClassVar[bool]
    """Whether decodes beside longer queries get a call of their own."""

    def __call__(self, call: Call) -> torch.Tensor | None:
        """Attend and write the rows of `call.requests`.

        Returns:
            The library's LSE `[H, rows]` of those rows, natural logarithm; None if not wanted.
        """
