"""One step's metadata for TRITON."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING

import torch

from attnplug.backends.triton.shares import SharesStep
from attnplug.core.batch.host import IntArray
from attnplug.core.metadata import AttentionMetadata

if TYPE_CHECKING:
    from attnplug.backends.triton.workspace import Workspace


@dataclasses.dataclass(eq=False, slots=True)
class TritonMetadata(AttentionMetadata):
    """One step for TRITON: `num_decodes` requests of few queries in front, then any others.

    Args:
        slot_mapping: int64, where the new K and V go.
        block_table: int32 `[R, max_blocks]`.
        query_start_loc: int32 `[R + 1]` on the device.
        seq_lens: int32 `[R]` on the device.
        key_start_loc: int32 `[R + 1]` on the device, with direct KV.
        num_reqs: the number of requests R.
        num_actual_tokens: query rows of the batch.
        num_decodes: requests of few queries, which come first.
        num_decode_tokens: their queries.
        max_decode_len: queries of the longest decode.
        max_query_len: queries of the longest other request.
        all_new: whether no other request has computed tokens, as far as the host knows.
        causal: of the batch; None is as each layer's spec says.
        workspace: buffers and plans, shared by the builder's steps.
        spans: int32 `[at least T, 2]`, the multimodal span of each query; None if the batch has none.
        key_rows: rows of keys that a call must give, with direct KV; 0 if only the device knows them.
        prefix_len: computed keys that all decodes share, to be attended once for all of them; 0 without.
        key_bounds: keys of each request after the decodes, or upper bounds, on the host.
        step: the step's number in the workspace.
        others: query starts, lengths, pages and key starts of the requests after the decodes.
        decode_shares: the decodes, for kernels that divide all keys in equal shares.
        other_shares: the same of the others.
    """

    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    key_start_loc: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    max_decode_len: int
    max_query_len: int
    all_new: bool
    causal: bool | None
    workspace: Workspace
    key_bounds: IntArray
    spans: torch.Tensor | None = None
    prefix_len: int = 0
    key_rows: int = 0
    step: int = 0
    others: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] = dataclasses.field(init=False)
    decode_shares: SharesStep = dataclasses.field(init=False)
    other_shares: SharesStep = dataclasses.field(init=False)

    @property
    def _first_other(self) -> int:
        return self.num_decodes if self.num_decodes < self.num_reqs else 0

    def __post_init__(self) -> None:
        first = self._first_other
        starts, lens, pages, keys = self.query_start_loc, self.seq_lens, self.block_table, self.key_start_loc
        # Sliced once for all layers.
        self.others = (
            (starts[first:], lens[first:], pages[first:], keys[first:])
            if first
            else (starts, lens, pages, keys)
        )
        self.decode_shares = SharesStep(
            query_start_loc=starts,
            seq_lens=lens,
            num_reqs=self.num_decodes,
            max_query_len=self.max_decode_len,
            number=self.step,
            prefix=self.prefix_len,
            spans=self.spans,
        )
        self.other_shares = SharesStep(
            query_start_loc=self.others[0],
            seq_lens=self.others[1],
            num_reqs=self.num_reqs - self.num_decodes,
            max_query_len=self.max_query_len,
            number=self.step,
            spans=self.spans,
            part=1,
        )

    def with_pages(self, block_table: torch.Tensor, slot_mapping: torch.Tensor) -> TritonMetadata:
        """The same step for another KV group, whose keys are divided by the same plans; not for a shared prefix."""
        if type(self) is TritonMetadata:
            made = object.__new__(TritonMetadata)
            for name in _FIELDS:  # a third of the time of copy.copy
                setattr(made, name, getattr(self, name))
        else:
            made = copy.copy(self)  # with what a subclass adds
        made.block_table, made.slot_mapping = block_table, slot_mapping
        starts, lens, _, keys = self.others
        first = self._first_other
        made.others = starts, lens, block_table[first:] if first else block_table, keys
        return made


_FIELDS = tuple(field.name for field in dataclasses.fields(TritonMetadata))
