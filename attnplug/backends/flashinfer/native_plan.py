"""As many decodes as before, planned by FlashInfer's planner alone, without what its `plan()` does around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["NativePlan", "native_plan_of"]

_TAILS: tuple[tuple[int | bool, ...], ...] = ((-1, False, 0, 0), (-1, False, 0))
"""What planners are told behind the window, the latest first: no fixed size of splits, splitting allowed, no programs
beside them, and since 0.7 no promise that all queries are equally long."""


_WRITTEN = ("_paged_kv_indptr_buf", "_paged_kv_last_page_len_buf", "_plan_info")
_COMPARED = 1 << 16
"""Bytes of a work list that are looked at."""


class NativePlan:
    """The planner of a wrapper's module, with what stays from step to step.

    `plan()` looks at every argument, sends every array to new memory and finds its module: two thirds of its time.
    For as many decodes as it was last called for none of that changes, but pages and lengths.

    Args:
        wrapper: FlashInfer's, which was planned.
        sizes: query heads, KV heads, head size, page size.
        causal: what `plan()` was told.
        window_left: the same.
        tail: of `_TAILS`.
    """

    def __init__(
        self,
        wrapper: Any,
        sizes: tuple[int, int, int, int],
        causal: bool,
        window_left: int,
        tail: tuple[int | bool, ...],
    ) -> None:
        heads, kv_heads, head_size, page_size = sizes
        self._wrapper = wrapper
        self._planner = wrapper._cached_module.plan
        graph = bool(wrapper.is_cuda_graph_enabled)
        self._fixed = (heads, kv_heads, page_size, graph, head_size, head_size, causal, window_left, *tail)

    def plan(
        self, count: int, schedule: torch.Tensor, arrays: Mapping[str, torch.Tensor], lengths: torch.Tensor
    ) -> None:
        """Plan for `count` decodes, as many as the wrapper was planned for.

        Args:
            count: requests.
            schedule: pinned uint8, where the work list is written.
            arrays: pinned int32, by the names of `Part`.
            lengths: pinned int32, as `plan()` takes them.
        """
        wrapper = self._wrapper
        wrapper._paged_kv_indptr_buf.copy_(arrays["kv_indptr"], non_blocking=True)
        wrapper._paged_kv_last_page_len_buf.copy_(arrays["last_page_len"], non_blocking=True)
        wrapper._plan_info = self.answer(count, schedule, arrays, lengths)

    def answer(
        self, count: int, schedule: torch.Tensor, arrays: Mapping[str, torch.Tensor], lengths: torch.Tensor
    ) -> Sequence[int]:
        """What the planner answers; the work list is written and sent."""
        wrapper = self._wrapper
        answer: Sequence[int] = self._planner(
            wrapper._float_workspace_buffer,
            wrapper._int_workspace_buffer,
            schedule,
            arrays["qo_indptr"],
            arrays["kv_indptr"],
            lengths,
            count,
            count,
            *self._fixed,
        )
        return answer


def native_plan_of(
    wrapper: Any,
    sizes: tuple[int, int, int, int],
    causal: bool,
    window_left: int,
    count: int,
    schedule: torch.Tensor,
    arrays: Mapping[str, torch.Tensor],
    lengths: torch.Tensor,
) -> NativePlan | None:
    """One that plans what `plan()` did a moment ago, told the same; arguments as for `NativePlan`.

    None where no known call of the planner does, as in an unknown version. The wrapper is then to be planned once
    more: another work list may have been sent meanwhile.
    """
    if not all(hasattr(wrapper, name) for name in _WRITTEN):
        return None
    planned = list(wrapper._plan_info), schedule[:_COMPARED].clone()
    for tail in _TAILS:
        try:
            found = NativePlan(wrapper, sizes, causal, window_left, tail)
            answer = list(found.answer(count, schedule, arrays, lengths))
        except (AttributeError, RuntimeError, TypeError):
            # A name that moved, or other arguments.
            continue
        if answer == planned[0] and torch.equal(schedule[:_COMPARED], planned[1]):
            return found
    return None
