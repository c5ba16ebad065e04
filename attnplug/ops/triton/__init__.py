"""The operations of `attnplug.ops` as Triton kernels: one launch each, and the host never waits."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from attnplug.core._lazy import lazy_exports

if TYPE_CHECKING:
    from attnplug.ops.triton.kv_write import write_kv_cache as write_kv_cache
    from attnplug.ops.triton.merging import merge_attn_states as merge_attn_states
    from attnplug.ops.triton.pages import compute_slot_mapping as compute_slot_mapping

__getattr__, __dir__, _ = lazy_exports(
    __name__, {"kv_write": "write_kv_cache", "merging": "merge_attn_states", "pages": "compute_slot_mapping"}
)


@functools.cache
def triton_ops(module: str) -> Any:
    """`attnplug.ops.triton.<module>`, or None if triton is not installed."""
    try:
        importlib.import_module("triton")
    except ImportError:
        return None
    # Outside of the `try`: an import error in attnplug's own module is a fault, and must not look like a missing triton.
    return importlib.import_module(f"{__name__}.{module}")
