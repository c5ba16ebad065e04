"""The torch dtypes that the names of KV cache dtypes stand for."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

__all__ = ["STORAGE_DTYPES"]

STORAGE_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "float32": torch.float32,
        "fp8": torch.float8_e4m3fn,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
        "fp8_e5m2": torch.float8_e5m2,
        "fp8_e5m2fnuz": torch.float8_e5m2fnuz,
        "int8": torch.int8,
        "uint8": torch.uint8,
    }
)
"""By resolved name; see `LayerSpec.resolved_kv_cache_dtype`."""
