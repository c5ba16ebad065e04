"""Builds a step's metadata for state layers on TRITON: the step's own tensors, so that graphs can hold it."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from attnplug.core.errors import BatchError
from attnplug.core.metadata import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from attnplug.ops.checks import check_indices
from attnplug.ops.triton.launch import prepare


@dataclasses.dataclass(eq=False, slots=True)
class TritonStateMetadata(AttentionMetadata):
    """One step of state layers.

    Args:
        slot_mapping: int64 `[T]`, the page that gets the state after each token, or -1.
        state_pages: int32 `[R]`, the page that each request starts from, or -1.
        query_start_loc: int32 `[R + 1]`.
        num_reqs: R.
        is_single: whether each request has one token at most.
    """

    slot_mapping: torch.Tensor
    state_pages: torch.Tensor
    query_start_loc: torch.Tensor
    num_reqs: int
    is_single: bool


class TritonStateBuilder(AttentionMetadataBuilder[TritonStateMetadata]):
    """Builds TritonStateMetadata; it takes batches in any order, and reads nothing back from the device."""

    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        prepare(self.device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TritonStateMetadata:
        """The metadata of one step.

        Raises:
            BatchError: the step has no state pages, or a tensor has too few rows, another dtype, or gaps.
        """
        common = common_attn_metadata
        reqs, tokens = common.num_reqs, int(common.query_start_loc_cpu[common.num_reqs])
        pages, slots = common.state_pages, common.slot_mapping
        if pages is None:
            raise BatchError("state_pages", None, "is required: the step of a layer that keeps a state")
        for name, tensor, rows in (
            ("state_pages", pages, reqs),
            ("query_start_loc", common.query_start_loc, reqs + 1),
            ("slot_mapping", slots, tokens),
        ):
            if tensor.ndim != 1 or tensor.shape[0] < rows:
                raise BatchError(name, tuple(tensor.shape), f"must be of the shape (at least {rows},)")
            if name != "slot_mapping":
                check_indices(name, tensor)
        if slots.dtype != torch.int64 or (tokens > 1 and slots.stride(0) != 1):
            found = f"{slots.dtype} with stride {slots.stride()}"
            raise BatchError("slot_mapping", found, "must be torch.int64 without gaps: kernels read it so")
        return TritonStateMetadata(slots, pages, common.query_start_loc, reqs, common.max_query_len <= 1)
