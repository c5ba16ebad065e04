"""A FlashInfer wrapper with its plan, which is made again only if the inputs of the plan have changed.

Upper bounds of the scratch memory that FlashInfer's split attention needs.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from attnplug._system.one_commit import NotCopied
from attnplug.backends.flashinfer.groups import PlanGroup
from attnplug.backends.flashinfer.modules import Module
from attnplug.backends.flashinfer.native_plan import NativePlan, native_plan_of
from attnplug.backends.flashinfer.step import Part
from attnplug.core.errors import PolicyError
from attnplug.ops.buffers import StagingRing

_FIELDS = ("qo_indptr", "kv_indptr", "last_page_len", "seq_lens")
_LONGEST = "longest"
_KEPT_VIEWS = 64
"""Batch sizes whose slices a staging buffer keeps."""


@dataclasses.dataclass(slots=True)
class PlanCost:
    """Host time that the plans of one group and phase took.

    Args:
        plans: steps that were planned, by `plan()` or by a `NativePlan`.
        skipped: steps that needed no plan.
        seconds: of planning, without the one comparison of `native_plan_of`.
    """

    plans: int = 0
    skipped: int = 0
    seconds: float = 0.0


class _Slot:
    """Host buffers that a plan copies to the device; they may not change until the copies are done.

    FlashInfer writes its work list to `schedule` (pinned uint8), taken from the first wrapper.
    """

    schedule: torch.Tensor

    def __init__(self, count: int, pinned: bool) -> None:
        self._pinned = pinned
        self._views: dict[int, dict[str, torch.Tensor]] = {}
        self._make(count)

    def filled(self, part: Part) -> dict[str, torch.Tensor]:
        """The arrays of `part` by name, int32 in pinned memory; "longest" is its longest length."""
        count = len(part.seq_lens)
        if self._host[0].shape[1] <= count:
            self._make(2 * count)
        tensor, rows = self._host
        qo_indptr, kv_indptr, last_page_len, seq_lens, longest = rows
        qo_indptr[: count + 1] = part.qo_indptr
        kv_indptr[: count + 1] = part.kv_indptr
        last_page_len[:count] = part.last_page_len
        seq_lens[:count] = part.seq_lens
        longest[0] = part.max_seq_len
        views = self._views.get(count)
        if views is None:
            # Slicing tensors takes longer than filling them, and batch sizes repeat.
            if len(self._views) >= _KEPT_VIEWS:
                self._views.clear()
            ends = (count + 1, count + 1, count, count)
            views = {field: row[:end] for field, row, end in zip(_FIELDS, tensor, ends, strict=False)}
            views[_LONGEST] = tensor[-1, :1]
            self._views[count] = views
        return views

    def _make(self, count: int) -> None:
        self._views.clear()
        tensor = torch.zeros(
            len(_FIELDS) + 1, count + 1, dtype=torch.int32, device="cpu", pin_memory=self._pinned
        )
        self._host = tensor, tuple(tensor.numpy())


class PlanSpace(NotCopied):
    """Memory for the plans of one group and phase: a work list on the device, and two guarded ones on the host.

    Wrappers for the batch sizes of CUDA graphs share it; one of them is planned at a time.

    Args:
        device: where the plans are used.
        max_num_seqs: requests that the host buffers have room for at first.
        schedule_bytes: least size of a work list; a wrapper's own may be longer.
    """

    def __init__(self, device: torch.device, max_num_seqs: int, schedule_bytes: int = 0) -> None:
        self.device = device
        self.cost = PlanCost()
        self.owner: PlannedWrapper | None = None
        """The wrapper whose plan it has."""
        self.part: Part | None = None
        """The part that was planned."""
        self.schedule: torch.Tensor | None = None
        self._schedule_bytes = schedule_bytes
        self._pinned = device.type == "cuda"
        # Two slots: the host fills one while the copies from the other are in progress.
        self._slots = [_Slot(max_num_seqs, self._pinned) for _ in range(2)]
        self.ring = StagingRing(self._slots, device)
        """Gives a `_Slot` whose last copies are done; `release` marks the copies from it as issued."""

    def adopt(self, wrapper: Any) -> None:
        """Replace a new wrapper's buffer for plans by the one here: a private attribute in 0.5 to 0.7."""
        if self.schedule is None:
            there, here = wrapper._int_workspace_buffer, wrapper._pin_memory_int_workspace_buffer
            size = max(there.numel(), self._schedule_bytes)
            if size > there.numel():
                there = there.new_empty(size)
                here = torch.empty(size, dtype=here.dtype, device="cpu", pin_memory=self._pinned)
            self.schedule, self._slots[0].schedule = there, here
            self._slots[1].schedule = torch.empty_like(here, pin_memory=self._pinned)
        wrapper._int_workspace_buffer = self.schedule


class PlannedWrapper(NotCopied):
    """A wrapper and what it was planned for.

    Args:
        wrapper: of FlashInfer.
        built: the module that it runs.
        group: its layers.
        phase: "decode" or "prefill".
        page_size: tokens of a page.
        space: memory for its plans.
        names_longest_query: `Library.names_longest_query`.
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
        """Whether a `NativePlan` may plan a step of as many decodes as the one before."""
        self._native_plan: NativePlan | None = None
        self._planned_for = 0
        """The number of decodes in the last plan."""
        self._sizes = group.num_heads, group.num_kv_heads, group.head_size, page_size
        self._space = space
        self._names_longest_query = names_longest_query
        # FlashInfer's fa3 planner balances by keys, the other two by pages.
        self._counts_pages = built.template != "fa3"
        asked = group.parameters
        self._fixed: dict[str, Any] = {
            "window_left": asked.window_left,
            "logits_soft_cap": asked.logits_soft_cap,
            "sm_scale": asked.sm_scale,
            "q_data_type": group.dtype,
            "kv_data_type": group.kv_dtype,
            # The host must not wait for the copies; `StagingRing` guards their source.
            "non_blocking": True,
        }
        self._causal = False
        self._pointed: tuple[Part, torch.Tensor] | None = None
        """The part and the indices that the wrapper reads."""
        space.adopt(wrapper)

    def ensure(self, part: Part, indices: torch.Tensor, causal: bool) -> None:
        """Plan for `part` of a step, unless the wrapper has that plan.

        Args:
            part: the requests.
            indices: int32, pages of the whole step.
            causal: whether the batch is causal.
        """
        space, mine = self._space, self._space.owner is self and self._causal == causal
        if mine and space.part is part:
            self._point(part, indices)
            return
        held = space.part if mine else None
        same = held is not None and held.same_pages(part)
        if held is not None and same and np.array_equal(held.last_page_len, part.last_page_len):
            space.part = part
        elif same and self._counts_pages and self._writable():
            lengths = space.ring.acquire().filled(part)["last_page_len"]
            # Forget the old lengths first: an interrupt may come after the copy.
            space.part = None
            self._wrapper._paged_kv_last_page_len_buf.copy_(lengths, non_blocking=True)
            space.ring.release()
            space.part = part
        else:
            self._plan(part, indices, causal)
            return
        space.cost.skipped += 1
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
            query: rows of the planned part.
            pages: K and V `[num_blocks, page_size, Hkv, D]`, of any strides.
            output: written.
            lse: float32, written.
            scales: of fp8 keys and values; None without fp8.
            sinks: float32 `[H]`; None without.
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
        # Forget the old plan first: planning may raise halfway.
        space.owner = space.part = self._pointed = None
        slot: _Slot = space.ring.acquire()
        arrays = slot.filled(part)
        self._wrapper._pin_memory_int_workspace_buffer = slot.schedule
        # Before 0.7 `plan()` reads the lengths one by one, 2 us each, for their maximum alone. Planners that count
        # pages use nothing else of them, so these get the maximum only.
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
            # With one page per request every call of the planner gives the same plan, which proves nothing.
            if known is None and part.num_pages > count:
                told = self._is_prefill_wrapper and causal, self._fixed["window_left"]
                known = native_plan_of(
                    self._wrapper, self._sizes, *told, count, slot.schedule, arrays, lengths
                )
                self._may_plan_natively = known is not None
                if known is None:
                    self._plan_whole(part, indices, causal, arrays, lengths)
            self._native_plan = known
        space.ring.release()
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
        own = indices[part.first_page : part.first_page + part.num_pages]
        table: tuple[torch.Tensor, ...] = arrays["kv_indptr"], own, arrays["last_page_len"]
        keywords = {"seq_lens": lengths, **self._fixed}
        if self._is_prefill_wrapper:
            table = arrays["qo_indptr"], *table
            longest = part.max_query_len if self._names_longest_query else None
            keywords |= {"causal": causal, "max_token_per_sequence": longest}
        self._wrapper.plan(*table, *self._sizes, **keywords)

    def _writable(self) -> bool:
        """Whether the wrapper's arrays may be written here: arrays made in inference mode only there."""
        return (
            torch.is_inference_mode_enabled() or not self._wrapper._paged_kv_last_page_len_buf.is_inference()
        )

    def _point(self, part: Part, indices: torch.Tensor) -> None:
        """Let the wrapper read `indices`."""
        # Since the plan the pages may have moved to another buffer.
        pointed = self._pointed
        if pointed is not None and pointed[0] is part and pointed[1] is indices:
            return
        # A private attribute (0.5 to 0.7), because only `plan()` sets it. Indices past the part's pages are not read.
        self._wrapper._paged_kv_indices_buf = indices[part.first_page :] if part.first_page else indices
        self._pointed = part, indices


def one_request() -> Part:
    """A request of one token, for the first plan of a wrapper, before any step."""
    one = np.array([0, 1], dtype=np.int32)
    return Part(0, 1, 1, 1, 0, one, one, one[1:], one[1:], one.tobytes())


_LEAST = 128 << 20
_SLACK = 1 << 20
"""Room for the alignment of FlashInfer's buffers."""
# The fa3 planner lists at most so many tiles per head; with more, all heads share one list.
_TILES_LISTED = 4096
_BLOCKS_EACH = 2
"""Thread blocks per multiprocessor, as FlashInfer's scheduler counts them."""


def workspace_bytes(
    groups: Iterable[PlanGroup], multiprocessors: int, captured_sizes: Sequence[int] = ()
) -> int:
    """Bytes of the float workspace for these layers: the option's, or their need and at least 128 MiB.

    Args:
        groups: the layers.
        multiprocessors: the number that the GPU has.
        captured_sizes: batch sizes of CUDA graphs.

    Raises:
        PolicyError: the option is less than the layers need.
    """
    # A split request leaves float32 outputs and LSEs of its parts. There are at most as many tiles
    # as run at once, of up to 128 rows (64 for head sizes from 256); a captured step may have more.
    needed, asked = 0, []
    for group in groups:
        tiles = _tiles_at_once(group, multiprocessors)
        needed = max(needed, _partial_bytes(group, tiles, 64 if group.head_size >= 256 else 128))
        for size in captured_sizes:
            needed = max(needed, captured_bytes(group, multiprocessors, size))
        if group.options.workspace_bytes is not None:
            asked.append(group.options.workspace_bytes)
    if not asked:
        return max(needed, _LEAST)
    given = max(asked)
    if given < needed:
        limit = f"is less than the {needed} bytes that split attention of these layers needs"
        raise PolicyError("options['workspace_bytes']", given, limit, "leave it None, and the size is chosen")
    return given


def captured_bytes(group: PlanGroup, multiprocessors: int, batch_size: int) -> int:
    """Bytes for captured decodes of a batch size: a graph has room for parts of every request, split or not."""
    # FlashInfer 0.5 and 0.6 count so; 0.7 needs no more.
    grouped = group.num_heads // group.num_kv_heads
    rows = 128 if grouped > 64 and group.head_size < 256 else 64 if grouped > 16 else 16
    tiles = -(-batch_size * grouped // rows) + batch_size - 1
    return _partial_bytes(group, max(tiles, _tiles_at_once(group, multiprocessors)), rows)


def schedule_bytes(group: PlanGroup, template: str) -> int:
    """The largest work list of a plan, in bytes; FlashInfer's own 8 MiB is too small for fa3 above 73 heads."""
    # The fa3 planner lists up to 4096 tiles for each query head, of seven int32 each; the others list far fewer.
    return 4 * 7 * _TILES_LISTED * group.num_heads + _SLACK if template == "fa3" else 0


def _tiles_at_once(group: PlanGroup, multiprocessors: int) -> int:
    return max(_BLOCKS_EACH * multiprocessors // group.num_kv_heads, 1)


def _partial_bytes(group: PlanGroup, tiles: int, rows: int) -> int:
    return 4 * group.num_heads * tiles * rows * (group.head_size + 1) + _SLACK
