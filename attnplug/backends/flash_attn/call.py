"""One call of a FlashAttention kernel, in attnplug's terms; a generation's module turns it into its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar, Protocol

import torch

from attnplug.core.spec import LayerSpec

__all__ = ["Call", "Kernels", "Requests"]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """Consecutive requests of a step that one call serves.

    Args:
        query_start_loc: int32 `[R + 1]`, rows of the whole batch.
        seq_lens: int32 `[R]`.
        block_table: int32 `[R, max_blocks]`.
        key_start_loc: int32 `[R + 1]`, where K and V come with the call.
        first_token: the first of their queries.
        end_token: past the last of their queries; the last call's is the end of the batch.
        max_query_len: queries of the longest, which is at least 1.
        max_seq_len: keys of the longest, or an upper bound.
        single: whether each has exactly one query, and the rows are no more than the requests.
        captured: whether the call will stand in a CUDA graph.
        keyless: whether one with queries may have no key at all, as far as the host knows.
        unseen: queries of a request before its first key, at most, as far as the host knows.
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
    keyless: bool
    unseen: int
    schedules: dict[object, torch.Tensor] = dataclasses.field(default_factory=dict)
    """What FlashAttention 3 planned for them, by what it depends on: made once per step."""
    kept: dict[str, object] = dataclasses.field(default_factory=dict, init=False)
    """What else was made of them in this step. It holds for their own table: another one begins empty."""

    def schedule(self, key: object, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What was planned under `key` in this step, made by the first layer that asks."""
        found = self.schedules.get(key)
        if found is None:
            found = self.schedules[key] = make()
        return found


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Call:
    """What one call computes.

    Args:
        spec: the layer.
        requests: whose queries.
        query: `[T, H, D]`, the rows of the whole batch.
        key: pages `[num_blocks, block_size, Hkv, D]`, or keys `[Tk, Hkv, D]` packed by `key_start_loc`.
        value: as `key`, of the value head size.
        output: `[T, H, Dv]`, aligned to 16 bytes.
        paged: whether key and value are pages.
        causal: whether a query sees no key after its position.
        window: keys before and after the position, -1 for no limit; (-1, 0) where it is causal.
        sinks: float32 `[H]`, where they enter.
        alibi_slopes: float32 `[H]`, where there are any.
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
        """Keys that a row of the block table can name: a bound that holds for every replay of a graph."""
        return self.requests.block_table.shape[1] * self.key.shape[1]


class Kernels(Protocol):
    """A generation's kernels."""

    decodes_apart: ClassVar[bool]
    """Whether decodes beside longer queries are worth a call of their own."""

    def __call__(self, call: Call) -> torch.Tensor | None:
        """Attend and write the rows of `call.requests`.

        Returns:
            The LSE `[H, rows]` of those rows where it is wanted, natural logarithm, as the library has it.
        """
