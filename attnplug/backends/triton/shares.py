"""Plans of equal shares and the buffers for what shares cut, allocated once for all steps of a builder."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch

from attnplug._system.one_commit import NotCopied
from attnplug.backends.triton.kernels.shares import plan_shares_kernel
from attnplug.backends.triton.launch import limit_switches
from attnplug.ops.reach import Reach
from attnplug.ops.triton.launch import BoundKernel, on_device_of, power_of_two

_PLAN: Any = plan_shares_kernel
ALL = 1 << 30
# In a sparse layer each query is a request, and a plan of 8192 at once took
# most of a minute to compile. Tiles of 131072 are more than Triton compiles.
_AT_ONCE = 1024
"""Requests that a plan numbers at once."""


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class SharesStep:
    """The requests of a step whose keys are divided.

    Args:
        query_start_loc: int32 `[R + 1]` on the device.
        seq_lens: int32 `[R]` on the device.
        num_reqs: the number of requests R.
        max_query_len: queries of the longest.
        number: of the step.
        prefix: keys that all requests share, and that are attended once for all of them; 0 without.
        spans: int32 `[T, 2]`, the multimodal spans of the batch's tokens; None if it has none.
        part: tells apart several groups of requests of one step.
        bounds: int32 `[R]`, keys that no layer exceeds, where each layer writes `seq_lens`; None for other steps.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    max_query_len: int
    number: int = 0
    prefix: int = 0
    spans: torch.Tensor | None = None
    part: int = 0
    bounds: torch.Tensor | None = None


class SharesPlan(NamedTuple):
    """A division of keys in whole tiles over `programs`, at least `least` tiles each.

    The beginning of a stream counts as `ahead` tiles. Each `block_m` rows of a request, its queries times `group`,
    attend its keys; by default all rows at once. No request has more than `most` keys.
    """

    tile: int
    programs: int
    least: int
    ahead: int = 0
    group: int = 1
    block_m: int = ALL
    left: int = -1
    right: int = -1
    chunk: int = 0
    has_spans: bool = False
    most: int = ALL


class Shares(NotCopied):
    """The plans of one builder's steps, and the buffers for parts of requests; they grow with larger batches."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._reqs = max_num_seqs
        self._device = device
        self._plans: dict[tuple[SharesPlan, int, int], _Plan] = {}
        self._asked: dict[tuple[int, int, int], list[_Plan]] = {}
        self._partials = torch.empty(0, dtype=torch.float32, device=device)
        self._lses = torch.empty(0, dtype=torch.float32, device=device)
        # Kept alive: graphs captured before the batches grew still write there.
        self._outgrown: list[torch.Tensor] = []

    def begin_step(self, step: SharesStep) -> None:
        """Make the plans that layers used in steps of equally many and long requests."""
        # A captured graph always has such a step, so its plans are made here, outside of the graph.
        for plan in self._asked.get((step.num_reqs, step.max_query_len, step.part), ()):
            # Layers with mm_prefix refuse a step without spans, so it needs no plans for them.
            if step.spans is not None or not plan.has_spans:
                plan.make(step)

    def tiles(self, step: SharesStep, plan: SharesPlan) -> torch.Tensor:
        """The tiles of requests and shares, int32; see plan_shares_kernel.

        A plan is made once per step, for all layers that ask for it. Steps of as many requests get the same memory.
        """
        # Batches past max_num_seqs have buffers of their own, because graphs may read the others.
        reqs = self._reqs if step.num_reqs <= self._reqs else power_of_two(step.num_reqs)
        key = plan, reqs, step.part
        made = self._plans.get(key)
        if made is None:
            made = self._plans[key] = _Plan(plan, reqs, self._device)
        if made.step != step.number:
            asked = self._asked.setdefault((step.num_reqs, step.max_query_len, step.part), [])
            if made not in asked:
                asked.append(made)
            made.make(step)
        return made.tiles

    def partials(self, rows: int, size: int, sums: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Flat float32 buffers for at least `rows` rows of `size` elements, and for their LSEs, or `sums` numbers each."""
        if self._lses.numel() < rows * sums or self._partials.numel() < rows * size:
            self._outgrown += (self._partials, self._lses)
            self._partials = self._partials.new_empty(max(rows * size, self._partials.numel()))
            self._lses = self._lses.new_empty(max(rows * sums, self._lses.numel()))
        return self._partials, self._lses


def merge_grid(reqs: int, max_rows: int, programs: int, block_rows: int) -> tuple[tuple[int, int], int]:
    """The first two axes of merge_shares_kernel's grid, and its `by_share`: the smaller grid of both.

    Args:
        reqs: the number of requests.
        max_rows: rows of the longest request.
        programs: the number of shares.
        block_rows: rows of a stream.
    """
    cuts = programs - 1, min(max_rows, block_rows)
    by_share = 0 < cuts[0] * cuts[1] < reqs * max_rows
    return (cuts, 1) if by_share else ((reqs, max_rows), 0)


class _Plan:
    """The tiles of a step's requests, and the kernel that numbers them."""

    __slots__ = ("_kernel", "has_spans", "step", "tiles")

    def __init__(self, plan: SharesPlan, reqs: int, device: torch.device) -> None:
        self.tiles = torch.zeros(reqs + 3 + plan.programs, dtype=torch.int32, device=device)
        self.step = -1
        self.has_spans = plan.has_spans
        # One width for all batches, so that the kernel compiles once.
        width = power_of_two(reqs)
        sizes = {"REQS": min(width, _AT_ONCE), "MANY": width > _AT_ONCE}
        sizes |= {"TILE": plan.tile, "GROUP": plan.group, "BLOCK_M": plan.block_m}
        switches = limit_switches(Reach(plan.left, plan.right, plan.chunk, plan.has_spans))
        self._kernel = BoundKernel(_PLAN, 6, {**plan._asdict(), **sizes, **switches})

    def make(self, step: SharesStep) -> None:
        """Fill `tiles` for a step."""
        lens = step.seq_lens if step.bounds is None else step.bounds
        spans = step.spans if self.has_spans and step.spans is not None else lens
        with on_device_of(lens):
            self._kernel((1,), step.query_start_loc, lens, self.tiles, spans, step.num_reqs, step.prefix)
        self.step = step.number
