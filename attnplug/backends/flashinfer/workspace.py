"""How much scratch memory FlashInfer's split attention needs at most."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from attnplug.backends.flashinfer.groups import PlanGroup
from attnplug.core.errors import PolicyError

__all__ = ["num_multiprocessors", "workspace_bytes"]

_LEAST = 128 << 20
_BLOCKS_EACH = 2
"""Thread blocks that a multiprocessor runs at once, as FlashInfer's scheduler counts them."""


def workspace_bytes(groups: Iterable[PlanGroup], multiprocessors: int) -> int:
    """The size of the float workspace for these layers: what was asked, or what they need and 128 MiB at least.

    A split request leaves float32 outputs and LSEs of its parts: at most as many tiles as run at once, of up
    to 128 rows (64 for head sizes from 256).

    Raises:
        PolicyError: less was asked than is needed.
    """
    needed, asked = 0, []
    for group in groups:
        rows = 64 if group.head_size >= 256 else 128
        tiles = max(_BLOCKS_EACH * multiprocessors // group.num_kv_heads, 1)
        each = 4 * group.num_heads * tiles * rows * (group.head_size + 1)
        needed = max(needed, each + (1 << 20))
        if group.options.workspace_bytes is not None:
            asked.append(group.options.workspace_bytes)
    if not asked:
        return max(needed, _LEAST)
    given = max(asked)
    if given < needed:
        limit = f"is less than the {needed} bytes that split attention of these layers needs"
        raise PolicyError("options['workspace_bytes']", given, limit, "leave it None, and the size is chosen")
    return given


def num_multiprocessors(device: torch.device) -> int:
    """Of a GPU; 1 on a CPU, where there is no FlashInfer but that of tests."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
