"""Plans decodes by FlashInfer's native planner alone, past its public `plan()`.

Around the planner `plan()` checks its arguments, sends arrays to new memory and finds its module: 55 of 83 us on
0.7.2. For as many decodes as in the last plan none of that changes, except pages and lengths. The planner's arguments
are private and differ between versions (0.5 to 0.7 are known). So a call of it is used only after it gave the same
answer and the same work list as `plan()` for a real step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

# The planner's arguments after the window, by version, the latest first. They are: no fixed split size,
# splitting allowed, no programs beside them, and since 0.7 no promise that all queries are equally long.
_TAILS: tuple[tuple[int | bool, ...], ...] = ((-1, False, 0, 0), (-1, False, 0))

_WRITTEN = ("_paged_kv_indptr_buf", "_paged_kv_last_page_len_buf", "_plan_info")
_COMPARED = 1 << 16
"""Bytes of a work list that are compared."""


class NativePlan:
    """The native planner of a wrapper's module, with the arguments that stay from step to step.

    Args:
        wrapper: of FlashInfer; `plan()` was called on it.
        sizes: query heads, KV heads, head size, page size.
        causal: the argument of `plan()`.
        window_left: the argument of `plan()`.
        tail: one of `_TAILS`.
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
        """Plan for `count` decodes, the number in the last plan.

        Args:
            count: requests.
            schedule: pinned uint8, written with the work list.
            arrays: pinned int32, by the names of `Part`.
            lengths: pinned int32, the `seq_lens` of `plan()`.
        """
        wrapper = self._wrapper
        # `plan()` sends these two arrays itself; the native planner sends its work list only.
        wrapper._paged_kv_indptr_buf.copy_(arrays["kv_indptr"], non_blocking=True)
        wrapper._paged_kv_last_page_len_buf.copy_(arrays["last_page_len"], non_blocking=True)
        wrapper._plan_info = self.answer(count, schedule, arrays, lengths)

    def answer(
        self, count: int, schedule: torch.Tensor, arrays: Mapping[str, torch.Tensor], lengths: torch.Tensor
    ) -> Sequence[int]:
        """The planner's answer; it also writes the work list and sends it to the device."""
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
    """A NativePlan that repeats the plan just made by `plan()`; arguments as for `NativePlan`.

    None if no known call does, such as in an unknown version. The caller must then call `plan()` again, because
    another work list may have been sent.
    """
    if not all(hasattr(wrapper, name) for name in _WRITTEN):
        return None
    # The planner overwrites the work list, so the list of `plan()` is copied before the trial.
    planned = list(wrapper._plan_info), schedule[:_COMPARED].clone()
    for tail in _TAILS:
        try:
            found = NativePlan(wrapper, sizes, causal, window_left, tail)
            answer = list(found.answer(count, schedule, arrays, lengths))
        except (AttributeError, RuntimeError, TypeError):
            # This version has another name or other arguments.
            continue
        if answer == planned[0] and torch.equal(schedule[:_COMPARED], planned[1]):
            return found
    return None
