"""One FlashInfer wrapper that is planned when what its plan depends on has changed, and only then."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from attnplug.backends.flashinfer.groups import PlanGroup
from attnplug.backends.flashinfer.library import Module
from attnplug.backends.flashinfer.native_plan import NativePlan, native_plan_of
from attnplug.backends.flashinfer.step import Part
from attnplug.ops.buffers import StagingRing

__all__ = ["PlanCost", "PlanSpace", "PlannedWrapper", "one_request"]

_FIELDS = ("qo_indptr", "kv_indptr", "last_page_len", "seq_lens")
_LONGEST = "longest"
_KEPT_VIEWS = 64
"""Batch sizes of which a staging buffer remembers the slices."""


@dataclasses.dataclass(slots=True)
class PlanCost:
    """What the plans of one group and phase have cost the host.

    Args:
        plans: steps that were planned, by `plan()` or by the planner in it.
        skipped: steps that needed none.
        seconds: of planning, without the proof, made once, that the planner alone does the same.
    """

    plans: int = 0
    skipped: int = 0
    seconds: float = 0.0


class _Slot:
    """What a plan's copies to the device read: it must stay until they are done.

    `schedule` (pinned uint8) is where FlashInfer writes its work list: that of a wrapper, once there is one.
    """

    schedule: torch.Tensor

    def __init__(self, count: int, pinned: bool) -> None:
        self._pinned = pinned
        self._views: dict[int, dict[str, torch.Tensor]] = {}
        self._make(count)

    def filled(self, part: Part) -> dict[str, torch.Tensor]:
        """The arrays of `part`, int32 in pinned memory, by name; and "longest", the longest of its lengths."""
        count = len(part.seq_lens)
        if self._tensor.shape[1] <= count:
            self._make(2 * count)
        qo_indptr, kv_indptr, last_page_len, seq_lens, longest = self._rows
        qo_indptr[: count + 1] = part.qo_indptr
        kv_indptr[: count + 1] = part.kv_indptr
        last_page_len[:count] = part.last_page_len
        seq_lens[:count] = part.seq_lens
        longest[0] = part.max_seq_len
        views = self._views.get(count)
        if views is None:
            # Slicing tensors takes longer than filling them, and batch sizes come again.
            if len(self._views) >= _KEPT_VIEWS:
                self._views.clear()
            ends = (count + 1, count + 1, count, count)
            views = {field: row[:end] for field, row, end in zip(_FIELDS, self._tensor, ends, strict=False)}
            views[_LONGEST] = self._tensor[-1, :1]
            self._views[count] = views
        return views

    def _make(self, count: int) -> None:
        self._views.clear()
        self._tensor = torch.zeros(len(_FIELDS) + 1, count + 1, dtype=torch.int32, pin_memory=self._pinned)
        self._rows = tuple(self._tensor.numpy())


class PlanSpace:
    """Where plans of one group and phase live: one work list on the device, two guarded ones on the host.

    Wrappers of different batch sizes, as CUDA graphs have them, share it: one of them is planned at a time.

    Args:
        device: where the plans are used.
        max_num_seqs: requests for which host buffers are made; more make them grow.
        schedule_bytes: the least that a work list gets; where a wrapper's own is longer, that is taken.
    """

    def __init__(self, device: torch.device, max_num_seqs: int, schedule_bytes: int = 0) -> None:
        self.device = device
        self.cost = PlanCost()
        self.owner: PlannedWrapper | None = None
        """Whose plan it holds."""
        self.part: Part | None = None
        """What that was made for."""
        self.schedule: torch.Tensor | None = None
        self._schedule_bytes = schedule_bytes
        self._pinned = device.type == "cuda"
        self._slots = [_Slot(max_num_seqs, self._pinned) for _ in range(2)]
        self._ring = StagingRing(self._slots, device)

    def adopt(self, wrapper: Any) -> None:
        """Have a new wrapper plan here."""
        if self.schedule is None:
            there, here = wrapper._int_workspace_buffer, wrapper._pin_memory_int_workspace_buffer
            size = max(there.numel(), self._schedule_bytes)
            if size > there.numel():
                there, here = (
                    there.new_empty(size),
                    torch.empty(size, dtype=here.dtype, pin_memory=self._pinned),
                )
            self.schedule, self._slots[0].schedule = there, here
            self._slots[1].schedule = torch.empty_like(here, pin_memory=self._pinned)
        wrapper._int_workspace_buffer = self.schedule

    def acquire(self, part: Part) -> tuple[_Slot, dict[str, torch.Tensor]]:
        """A slot whose last copies are done, and the arrays of `part` in it."""
        slot: _Slot = self._ring.acquire()
        return slot, slot.filled(part)

    def release(self) -> None:
        """The copies from the slot in hand are issued."""
        self._ring.release()


class PlannedWrapper:
    """A wrapper and what it was planned for.

    Args:
        wrapper: FlashInfer's.
        built: the module that it runs.
        group: the layers that it serves.
        phase: "decode" or "prefill".
        page_size: tokens of a page.
        space: where its plans live.
        names_longest_query: whether a prefill wrapper may be told the longest query.
    """

    def __init__(
        self,
        wrapper: Any,
        built: Module,
        group: PlanGroup,
        phase: str,
        page_size: int,
        space: PlanSpace,
        names_longest_query: bool,
    ) -> None:
        self._wrapper = wrapper
        self._group = group
        self._is_prefill_wrapper = phase == "prefill" or built.sinks
        self._may_plan_natively = phase == "decode" and built.template == "fa2"
        """Whether a step of as many decodes as the one before may be planned by the planner alone."""
        self._native_plan: NativePlan | None = None
        self._planned_for = 0
        """The decodes that `plan()` was last called for."""
        self._sizes = group.num_heads, group.num_kv_heads, group.head_size, page_size
        self._space = space
        self._names_longest_query = names_longest_query
        # The fa3 planner balances by keys, the other two by pages.
        self._counts_pages = built.template != "fa3"
        asked = group.parameters
        self._fixed: dict[str, Any] = {
            "window_left": asked.window_left,
            "logits_soft_cap": asked.logits_soft_cap,
            "sm_scale": asked.sm_scale,
            "q_data_type": group.dtype,
            "kv_data_type": group.kv_dtype,
            "non_blocking": True,
        }
        self._causal = False
        self._pointed: tuple[Part, torch.Tensor] | None = None
        """The part and the indices that the wrapper reads."""
        space.adopt(wrapper)

    def ensure(self, part: Part, indices: torch.Tensor, causal: bool) -> None:
        """Plan for `part` of a step, unless that is what the wrapper is planned for.

        Args:
            part: the requests.
            indices: int32, pages of the whole step.
            causal: whether the batch is.
        """
        space, mine = self._space, self._space.owner is self and self._causal == causal
        if mine and space.part is part:
            self._point(part, indices)
            return
        held = space.part if mine else None
        same = held is not None and held.same_pages(part)
        if held is not None and same and held.same_lengths(part):
            space.part = part
            space.cost.skipped += 1
        elif same and self._counts_pages and self._writable():
            self._send_lengths(part)
            space.cost.skipped += 1
        else:
            self._plan(part, indices, causal)
            return
        self._point(part, indices)

    def run(
        self,
        query: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        output: torch.Tensor,
        lse: torch.Tensor | None,
        scales: tuple[float, float] | None,
        sinks: torch.Tensor | None,
    ) -> None:
        """Attend: `query [n, H, D]` into `output`, both dense, and LSE in base 2 `[n, H]` where given.

        Args:
            query: rows of the part planned for.
            pages: K and V `[num_blocks, page_size, Hkv, D]`, of any strides.
            output: written.
            lse: float32, written.
            scales: of fp8 keys and values; None where the pages hold them as they are.
            sinks: float32 `[H]`, where the layers have any.
        """
        if lse is None and scales is None and sinks is None:
            self._wrapper.run(query, pages, out=output, lse=None, return_lse=False)
            return
        keywords: dict[str, Any] = {"out": output, "lse": lse, "return_lse": lse is not None}
        if scales is not None:
            keywords["k_scale"], keywords["v_scale"] = scales
        if sinks is None:
            self._wrapper.run(query, pages, **keywords)
        else:
            self._wrapper.run(query, pages, sinks, self._group.parameters.sm_scale, **keywords)

    def _plan(self, part: Part, indices: torch.Tensor, causal: bool) -> None:
        space, count = self._space, len(part.seq_lens)
        # Not its own any more, should planning raise.
        space.owner = space.part = self._pointed = None
        slot, arrays = space.acquire(part)
        self._wrapper._pin_memory_int_workspace_buffer = slot.schedule
        # Before 0.7 the library looks for the longest element by element, 2 us each, and the planners that count
        # pages read no more of the lengths than that: one is enough.
        lengths = arrays[_LONGEST if self._counts_pages else "seq_lens"]
        known = self._native_plan if causal == self._causal else None
        again = known if count == self._planned_for and self._writable() else None
        began = time.perf_counter()
        self._planned_for = 0
        if again is None:
            self._plan_whole(part, indices, causal, arrays, lengths)
        else:
            again.plan(count, slot.schedule, arrays, lengths)
        space.cost.seconds += time.perf_counter() - began
        space.cost.plans += 1
        if again is not None:
            self._point(part, indices)
        elif self._may_plan_natively:
            # Requests of a page each are planned alike, whatever a planner is told.
            if known is None and part.num_pages > count:
                told = self._is_prefill_wrapper and causal, self._fixed["window_left"]
                known = native_plan_of(
                    self._wrapper, self._sizes, *told, count, slot.schedule, arrays, lengths
                )
                self._may_plan_natively = known is not None
                if known is None:
                    self._plan_whole(part, indices, causal, arrays, lengths)
            self._native_plan = known
        space.release()
        self._causal, self._planned_for = causal, count
        space.owner, space.part = self, part

    def _plan_whole(
        self,
        part: Part,
        indices: torch.Tensor,
        causal: bool,
        arrays: Mapping[str, torch.Tensor],
        lengths: torch.Tensor,
    ) -> None:
        table = arrays["kv_indptr"], self._of(part, indices), arrays["last_page_len"]
        if self._is_prefill_wrapper:
            self._wrapper.plan(
                arrays["qo_indptr"],
                *table,
                *self._sizes,
                causal=causal,
                max_token_per_sequence=part.max_query_len if self._names_longest_query else None,
                seq_lens=lengths,
                **self._fixed,
            )
        else:
            self._wrapper.plan(*table, *self._sizes, seq_lens=lengths, **self._fixed)

    def _writable(self) -> bool:
        """Whether the wrapper's arrays may be written here: those that `plan()` made in inference mode only there."""
        return (
            torch.is_inference_mode_enabled() or not self._wrapper._paged_kv_last_page_len_buf.is_inference()
        )

    def _send_lengths(self, part: Part) -> None:
        space = self._space
        _, arrays = space.acquire(part)
        self._wrapper._paged_kv_last_page_len_buf.copy_(arrays["last_page_len"], non_blocking=True)
        space.release()
        space.part = part

    def _point(self, part: Part, indices: torch.Tensor) -> None:
        """The pages may be in another buffer than when it was planned: another KV group's, or a larger one."""
        pointed = self._pointed
        if pointed is not None and pointed[0] is part and pointed[1] is indices:
            return
        # The wrapper finds the ends of requests elsewhere: what stands behind its pages does not matter.
        self._wrapper._paged_kv_indices_buf = indices[part.first_page :] if part.first_page else indices
        self._pointed = part, indices

    def _of(self, part: Part, indices: torch.Tensor) -> torch.Tensor:
        return indices[part.first_page : part.first_page + part.num_pages]


def one_request() -> Part:
    """A request of one token, with which a wrapper is planned before there is any step."""
    one = np.array([0, 1], dtype=np.int32)
    return Part(0, 1, 1, 1, 0, one, one, one[1:], one[1:], one.tobytes())
