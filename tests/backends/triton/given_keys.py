"""Prompts whose keys and values come with the call."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from attnplug.core import LayerSpec
from attnplug.testing import Batch, paged_batch


def new_prompts(spec: LayerSpec, lens: list[int], apart: int = 0, **facts: Any) -> Batch:
    """Prompts whose keys and values are parts of rows with `apart` elements more; those of the second request are NaN."""
    batch = paged_batch(spec, lens, lens, padding=2, **facts)
    starts = batch.common.query_start_loc_cpu.tolist()
    moved = {}
    for name in ("key", "value"):
        given: torch.Tensor = getattr(batch, name)
        rows = torch.full(
            (len(given), given[0].numel() + apart), torch.nan, dtype=given.dtype, device=given.device
        )
        moved[name] = rows[:, : given[0].numel()].view(given.shape).copy_(given)
        moved[name][starts[1] : starts[2]] = torch.nan
    return dataclasses.replace(batch, strange=frozenset({1}), **moved)
