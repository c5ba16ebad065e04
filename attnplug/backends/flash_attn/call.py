"""One call of a FlashAttention kernel in attnplug's terms; each generation translates it."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Protocol

import torch

from attnplug.backends.flash_attn.metadata import Requests
from attnplug.core.spec import LayerSpec


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Call:
    """The inputs of one call.

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
