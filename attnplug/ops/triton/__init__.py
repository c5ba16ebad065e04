"""The same operations as Triton kernels: one launch each, and the host never waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.core._lazy import lazy_exports

if TYPE_CHECKING:
    from attnplug.ops.triton.kv_write import write_kv_cache as write_kv_cache
    from attnplug.ops.triton.merging import merge_attn_states as merge_attn_states
    from attnplug.ops.triton.slots import compute_slot_mapping as compute_slot_mapping

__all__ = ["compute_slot_mapping", "merge_attn_states", "write_kv_cache"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {"compute_slot_mapping": "slots", "merge_attn_states": "merging", "write_kv_cache": "kv_write"},
)
