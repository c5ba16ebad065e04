"""Where Triton kernels take over from plain torch."""

from __future__ import annotations

import functools
import importlib
from typing import Any

__all__ = ["triton_ops"]


@functools.cache
def triton_ops(module: str) -> Any:
    """`attnplug.ops.triton.<module>`, or None where triton is not installed."""
    try:
        importlib.import_module("triton")
    except ImportError:
        return None
    return importlib.import_module(f"attnplug.ops.triton.{module}")
