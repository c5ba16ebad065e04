"""A step in the tensors of another one, as engines fill their buffers anew for each step."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from attnplug.testing.batches import Batch

_INPUTS = ("query", "key", "value", "kv_cache")


def refill(batch: Batch, fresh: Batch) -> Batch:
    """The step `fresh` in the tensors and arrays of `batch`; those of other shapes stay its own."""
    names = [field.name for field in dataclasses.fields(fresh.common) if not field.name.startswith("_")]
    common = {name: _filled(getattr(batch.common, name), getattr(fresh.common, name)) for name in names}
    inputs = {name: _filled(getattr(batch, name), getattr(fresh, name)) for name in _INPUTS}
    return dataclasses.replace(fresh, common=dataclasses.replace(fresh.common, **common), **inputs)


def _filled(buffer: Any, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and isinstance(buffer, torch.Tensor) and buffer.shape == value.shape:
        return buffer.copy_(value)
    if isinstance(value, np.ndarray) and isinstance(buffer, np.ndarray) and buffer.shape == value.shape:
        np.copyto(buffer, value)
        return buffer
    return value
