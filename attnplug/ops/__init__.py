"""Tensor operations and checks that backends and the runtime share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.core._lazy import lazy_exports

if TYPE_CHECKING:
    from attnplug.ops.combining import ExchangeBuffers as ExchangeBuffers
    from attnplug.ops.combining import combine as combine
    from attnplug.ops.combining import combine_partials as combine_partials
    from attnplug.ops.gather import gather_keys as gather_keys
    from attnplug.ops.gather import gather_pages as gather_pages
    from attnplug.ops.gather import gather_slots as gather_slots
    from attnplug.ops.kv_write import write_kv_cache as write_kv_cache
    from attnplug.ops.merging import merge as merge
    from attnplug.ops.merging import merge_attn_states as merge_attn_states
    from attnplug.ops.merging import merge_rows as merge_rows
    from attnplug.ops.reach import Reach as Reach
    from attnplug.ops.selection import chosen_keys as chosen_keys
    from attnplug.ops.selection import slots_of_keys as slots_of_keys

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "combining": "ExchangeBuffers combine combine_partials",
        "gather": "gather_keys gather_pages gather_slots",
        "kv_write": "write_kv_cache",
        "merging": "merge merge_attn_states merge_rows",
        "reach": "Reach",
        "selection": "chosen_keys slots_of_keys",
    },
)
