"""Upper bounds of the scratch memory that FlashInfer's split attention needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attnplug.backends.flashinfer.groups import PlanGroup
from attnplug.core.errors import PolicyError

_LEAST = 128 << 20
_SLACK = 1 << 20
"""Room for the alignment of FlashInfer's buffers."""
_TILES_LISTED = 4096
"""The fa3 planner lists at most so many tiles per head; with more, all heads share one list."""
_BLOCKS_EACH = 2
"""Thread blocks per multiprocessor, as FlashInfer's scheduler counts them."""


def workspace_bytes(
    groups: Iterable[PlanGroup], multiprocessors: int, captured_sizes: Sequence[int] = ()
) -> int:
    """Bytes of the float workspace for these layers: the option's, or their need and at least 128 MiB.

    A split request leaves float32 outputs and LSEs of its parts. There are at most as many tiles as run at once,
    of up to 128 rows (64 for head sizes from 256); a captured step may have more.

    Args:
        groups: the layers.
        multiprocessors: the number that the GPU has.
        captured_sizes: batch sizes of CUDA graphs.

    Raises:
        PolicyError: the option is less than the layers need.
    """
    needed, asked = 0, []
    for group in groups:
        tiles = _tiles_at_once(group, multiprocessors)
        needed = max(needed, _partial_bytes(group, tiles, 64 if group.head_size >= 256 else 128))
        for size in captured_sizes:
            needed = max(needed, captured_bytes(group, multiprocessors, size))
        if group.options.workspace_bytes is not None:
            asked.append(group.options.workspace_bytes)
    if not asked:
        return max(needed, _LEAST)
    given = max(asked)
    if given < needed:
        limit = f"is less than the {needed} bytes that split attention of these layers needs"
        raise PolicyError("options['workspace_bytes']", given, limit, "leave it None, and the size is chosen")
    return given


def captured_bytes(group: PlanGroup, multiprocessors: int, batch_size: int) -> int:
    """Bytes for captured decodes of a batch size: a graph has room for parts of every request, split or not.

    FlashInfer 0.5 and 0.6 count so; 0.7 needs no more.
    """
    grouped = group.num_heads // group.num_kv_heads
    rows = 128 if grouped > 64 and group.head_size < 256 else 64 if grouped > 16 else 16
    tiles = -(-batch_size * grouped // rows) + batch_size - 1
    return _partial_bytes(group, max(tiles, _tiles_at_once(group, multiprocessors)), rows)


def schedule_bytes(group: PlanGroup, template: str) -> int:
    """The largest work list of a plan, in bytes; FlashInfer's own 8 MiB is too small for fa3 above 73 heads.

    The fa3 planner lists up to 4096 tiles for each query head, of seven int32 each; the others list far fewer.
    """
    return 4 * 7 * _TILES_LISTED * group.num_heads + _SLACK if template == "fa3" else 0


def _tiles_at_once(group: PlanGroup, multiprocessors: int) -> int:
    return max(_BLOCKS_EACH * multiprocessors // group.num_kv_heads, 1)


def _partial_bytes(group: PlanGroup, tiles: int, rows: int) -> int:
    return 4 * group.num_heads * tiles * rows * (group.head_size + 1) + _SLACK
