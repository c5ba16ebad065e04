"""Device buffers that a builder's steps share: split plans and partial results, allocated once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from attnplug._system.one_commit import NotCopied
from attnplug.backends.triton.kernels.splits import FIELDS, plan_splits_kernel
from attnplug.backends.triton.launch import limit_switches
from attnplug.backends.triton.layout import tile_side
from attnplug.backends.triton.metadata import TritonMetadata
from attnplug.backends.triton.shares import Shares
from attnplug.ops.reach import Reach
from attnplug.ops.triton.launch import BoundKernel, on_device_of, power_of_two

_PLAN_SPLITS: Any = plan_splits_kernel


class SplitPlan(NamedTuple):
    """A split of decodes into about `target` items of at least `min_keys` keys, in whole tiles."""

    left: int
    right: int
    chunk: int
    target: int
    tile: int
    min_keys: int
    has_spans: bool = False


class _Splits:
    """The buffers of one plan, and the kernel that fills them."""

    __slots__ = ("has_spans", "items", "plan", "spans", "step")

    def __init__(self, plan: SplitPlan, reqs: int, device: torch.device) -> None:
        self.items = torch.zeros(reqs + plan.target, int(FIELDS), dtype=torch.int32, device=device)
        self.spans = torch.zeros(reqs, 2, dtype=torch.int32, device=device)
        self.step = -1
        self.has_spans = plan.has_spans
        # One width for all batches, so that the kernel compiles once.
        reach = Reach(plan.left, plan.right, plan.chunk, plan.has_spans)
        sizes = {"REQS": tile_side(reqs + 1), "TILE": plan.tile}
        self.plan = BoundKernel(_PLAN_SPLITS, 6, {**plan._asdict(), **limit_switches(reach), **sizes})


class Workspace(NotCopied):
    """The buffers of one builder, for `max_num_seqs` requests; they grow with larger batches."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.shares = Shares(max_num_seqs, device)
        self._reqs = max_num_seqs
        self._device = device
        self._steps = 0
        # One plan serves all layers of a step with the same limits and launch.
        self._splits: dict[tuple[SplitPlan, int], _Splits] = {}
        self._asked: dict[tuple[int, int], list[_Splits]] = {}
        self._partials = torch.empty(0, dtype=torch.float32, device=device)
        self._partial_lses = torch.empty(0, dtype=torch.float32, device=device)
        self._arrived = torch.empty(0, dtype=torch.int32, device=device)
        self._buffers: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._opened = torch.empty(0, dtype=torch.uint8, device=device)
        self._opened_table = torch.empty(0, dtype=torch.int32, device=device)
        # Kept alive: graphs captured before the batches grew still write there.
        self._outgrown: list[torch.Tensor] = []

    def begin_step(self, metadata: TritonMetadata) -> None:
        """Number the step, and make the plans that layers used in steps of equally many and long decodes."""
        # A captured graph always has such a step, so its plans are made here, outside of the graph.
        self._steps += 1
        metadata.step = metadata.decode_shares.number = metadata.other_shares.number = self._steps
        self.shares.begin_step(metadata.decode_shares)
        self.shares.begin_step(metadata.other_shares)
        for splits in self._asked.get((metadata.num_decodes, metadata.max_decode_len), ()):
            # Layers with mm_prefix refuse a step without spans, so it needs no plans for them.
            if metadata.spans is not None or not splits.has_spans:
                self._make(splits, metadata)

    def items(self, plan: SplitPlan, metadata: TritonMetadata) -> tuple[torch.Tensor, torch.Tensor]:
        """The items of the step's decodes, int32 `[most, FIELDS]` with idle ones marked, and the spans.

        Spans are int32 `[reqs, 2]`: each request's first item and their number. Steps of as many decodes get
        the same memory.
        """
        decodes = metadata.num_decodes
        # Batches past max_num_seqs have buffers of their own, because graphs may read the others.
        reqs = self._reqs if decodes <= self._reqs else power_of_two(decodes)
        splits = self._splits.get((plan, reqs))
        if splits is None:
            splits = self._splits[plan, reqs] = _Splits(plan, reqs, self._device)
        if splits.step != metadata.step:
            asked = self._asked.setdefault((decodes, metadata.max_decode_len), [])
            if splits not in asked:
                asked.append(splits)
            self._make(splits, metadata)
        return splits.items, splits.spans

    def _make(self, splits: _Splits, metadata: TritonMetadata) -> None:
        starts, lens, decodes = metadata.query_start_loc, metadata.seq_lens, metadata.num_decodes
        mm_spans = metadata.spans if splits.has_spans and metadata.spans is not None else lens
        with on_device_of(lens):
            splits.plan((decodes + 1,), starts, lens, splits.items, splits.spans, mm_spans, decodes)
        splits.step = metadata.step

    def partials(
        self, target: int, reqs: int, kv_heads: int, rows: int, row_blocks: int, head_size_v: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Flat buffers for partial outputs and LSEs (float32), and counters that are 0 between launches.

        They have room for max_num_seqs requests and `target` more items.
        """
        sizes = target, reqs, kv_heads, rows, row_blocks, head_size_v
        buffers = self._buffers.get(sizes)
        if buffers is None:
            reqs = max(self._reqs, reqs)
            lses = (reqs + target) * kv_heads * rows
            self._grow(lses * head_size_v, lses, reqs * kv_heads * row_blocks)
            buffers = self._buffers[sizes] = self._partials, self._partial_lses, self._arrived
        return buffers

    def opened(self, elements: int, entries: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Flat buffers for the opened keys and values of a layer, so many elements of each, and for their block tables.

        Layers run one after another, so each writes over what the last one opened.
        """
        size = 2 * elements * dtype.itemsize
        if self._opened.numel() < size:
            self._opened = torch.empty(size, dtype=torch.uint8, device=self._device)
        if self._opened_table.numel() < entries:
            self._opened_table = torch.zeros(entries, dtype=torch.int32, device=self._device)
        return self._opened[:size].view(dtype), self._opened_table[:entries]

    @property
    def most_reqs(self) -> int:
        """The requests that buffers were made for."""
        return self._reqs

    def _grow(self, *least: int) -> None:
        """Grow the buffers for partial results to these sizes."""
        held = self._partials, self._partial_lses, self._arrived
        # The counters must start at 0, so new buffers are filled with zeros.
        made = [
            old if old.numel() >= size else torch.zeros(size, dtype=old.dtype, device=self._device)
            for old, size in zip(held, least, strict=True)
        ]
        if any(new is not old for new, old in zip(made, held, strict=True)):
            self._outgrown += held
            self._buffers.clear()
        self._partials, self._partial_lses, self._arrived = made
