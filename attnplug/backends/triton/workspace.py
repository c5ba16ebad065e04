"""What a builder's steps share on the device: split plans and partial results, allocated once."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from attnplug.backends.triton.kernels.splits import FIELDS, plan_splits_kernel
from attnplug.backends.triton.launch import tile_side
from attnplug.backends.triton.reach import switches
from attnplug.ops.reach import Reach
from attnplug.ops.triton.launch import on_device_of

_PLAN_SPLITS: Any = plan_splits_kernel

__all__ = ["SplitPlan", "Workspace", "num_multiprocessors"]


@dataclasses.dataclass(frozen=True, slots=True)
class SplitPlan:
    """How decodes are split: into about `target` items of at least `min_keys` keys, whole tiles of `tile`."""

    reach: Reach
    target: int
    tile: int
    min_keys: int


class Workspace:
    """Buffers of one builder, sized for `max_num_seqs` requests; larger batches make them grow."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._reqs = max_num_seqs
        self._device = device
        self._items: dict[SplitPlan, tuple[torch.Tensor, torch.Tensor]] = {}
        self._planned: set[SplitPlan] = set()
        self._partials = torch.empty(0, device=device)
        self._partial_lses = torch.empty(0, device=device)
        self._arrived = torch.empty(0, dtype=torch.int32, device=device)

    def plan_again(self, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, num_decodes: int) -> None:
        """Begin a step: every plan that its layers asked for before is made for it."""
        self._planned.clear()
        if num_decodes:
            for plan in self._items:
                self.items(plan, query_start_loc, seq_lens, num_decodes)

    def items(
        self, plan: SplitPlan, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, num_decodes: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The items of the step, int32 `[most, FIELDS]`, idle ones marked, and those of each request.

        The latter are int32 `[reqs, 2]`, the first and how many. Both are always the same memory.
        """
        reqs = max(self._reqs, num_decodes)
        kept = self._items.get(plan)
        if kept is None or kept[1].shape[0] < reqs:
            kept = (
                torch.zeros(reqs + plan.target, int(FIELDS), dtype=torch.int32, device=self._device),
                torch.zeros(reqs, 2, dtype=torch.int32, device=self._device),
            )
            self._items[plan] = kept
            self._planned.discard(plan)
        if plan not in self._planned:
            reach = plan.reach
            with on_device_of(seq_lens):
                _PLAN_SPLITS[(num_decodes + 1,)](
                    query_start_loc,
                    seq_lens,
                    *kept,
                    num_decodes,
                    reach.left,
                    reach.right,
                    reach.chunk,
                    plan.target,
                    plan.min_keys,
                    num_decodes + plan.target,
                    REQS=tile_side(num_decodes + 1),
                    TILE=plan.tile,
                    **switches(reach),
                )
            self._planned.add(plan)
        return kept

    def partials(
        self, items: int, reqs: int, kv_heads: int, rows: int, row_blocks: int, head_size_v: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Flat buffers for partial outputs and LSEs (float32), and counters that are 0 between launches."""
        lses = items * kv_heads * rows
        if self._partials.numel() < lses * head_size_v:
            self._partials = torch.empty(lses * head_size_v, device=self._device)
        if self._partial_lses.numel() < lses:
            self._partial_lses = torch.empty(lses, device=self._device)
        counters = max(self._reqs, reqs) * kv_heads * row_blocks
        if self._arrived.numel() < counters:
            self._arrived = torch.zeros(counters, dtype=torch.int32, device=self._device)
        return self._partials, self._partial_lses, self._arrived


@functools.lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """Of a GPU; 4 on a CPU, where kernels are interpreted."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
