"""Tensor operations that backends and the runtime share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.core._lazy import lazy_exports

if TYPE_CHECKING:
    from attnplug.ops.merge import merge as merge
    from attnplug.ops.merge import merge_attn_states as merge_attn_states

__all__ = ["merge", "merge_attn_states"]

__getattr__, __dir__ = lazy_exports(__name__, {"merge": "", "merge_attn_states": "merge"})
