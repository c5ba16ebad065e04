"""What a plan and the configuration allow a runtime: its device, its longest sequence, and its fast layers."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import TYPE_CHECKING

from attnplug.core.arguments import integer, torch_device
from attnplug.core.errors import BatchError, LayoutError
from attnplug.runtime.plan.sharding import checked_place

if TYPE_CHECKING:
    import torch

    from attnplug.core.config import BuilderConfig
    from attnplug.core.context_parallel import ContextParallel
    from attnplug.runtime.plan.model_plan import ModelPlan


def check_sharing(plan: ModelPlan, place: ContextParallel | None, fast_prefill: Collection[str]) -> None:
    """LayoutError for a place without a plan for it, or with layers that compute only some tokens of a step."""
    if plan.context_parallel is None and checked_place(place) is not None:
        remedy = "plan with context_parallel, or leave it out"
        raise LayoutError("context_parallel", place, "is not what the plan was made for", remedy)
    if plan.context_parallel is not None and fast_prefill:
        limit = f"is not served under context parallelism, where layer {next(iter(fast_prefill))} needs all tokens"
        raise LayoutError("kv_sharing_fast_prefill", True, limit, "leave it False")


def context_chunk_rows(plan: ModelPlan, config: BuilderConfig) -> int:
    """The rows of the prefill workspace; LayoutError for more than the plan's memory counts."""
    rows = config.context_chunk_rows
    if rows is None:
        return plan.context_chunk_rows
    if plan.memory is not None and rows > plan.context_chunk_rows:
        limit = f"must be at most {plan.context_chunk_rows}, which the plan's memory counts"
        remedy = f"plan with context_chunk_rows={rows}"
        raise LayoutError("config.context_chunk_rows", rows, limit, remedy)
    return rows


def last_readers(plan: ModelPlan) -> tuple[str, ...]:
    """The longest run of layers at the end that read the pages of others: no layer after them needs all tokens."""
    names = list(plan.decisions)
    last = list(itertools.takewhile(plan.kv_sharing.__contains__, reversed(names)))
    if not last:
        found = names[-1] if names else None
        limit = "needs last layers that read the pages of others: the last layer has its own"
        raise LayoutError("kv_sharing_fast_prefill", found, limit, "leave it False")
    sparse = next((name for name in last if plan.specs[name].sparse is not None), None)
    if sparse is not None:
        limit = "is sparse: a step's selection has a row for every token, not for the wanted ones"
        raise LayoutError("kv_sharing_fast_prefill", sparse, limit, "leave it False")
    return tuple(reversed(last))


def longest_sequence(config: BuilderConfig, max_model_len: int | None) -> int:
    """`max_model_len`, by default the configuration's.

    Raises:
        BatchError: both are None, or the length is above the configuration's.
    """
    limit = config.max_model_len
    if max_model_len is not None:
        max_model_len = integer("max_model_len", max_model_len)
    if max_model_len is None:
        if limit is None:
            raise BatchError("max_model_len", None, "is required: config.max_model_len is None too")
        return limit
    if limit is not None and max_model_len > limit:
        raise BatchError("max_model_len", max_model_len, f"must be at most config.max_model_len={limit}")
    return max_model_len


def device_of(plan: ModelPlan, device: torch.device | str | None) -> torch.device:
    """The device of a runtime: `device`, by default that of the plan; LayoutError for another type."""
    # torch names ROCm devices "cuda".
    planned = {"rocm": "cuda"}.get(plan.device.type, plan.device.type)
    where = torch_device("device", planned if device is None else device, LayoutError)
    if where.type != planned:
        raise LayoutError(
            "device", str(where), f"is not the device of the plan: {plan.device}", "plan for it"
        )
    return where
