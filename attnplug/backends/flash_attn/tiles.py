"""Key tiles of FlashAttention 4's kernels, which decide the page sizes that they read safely.

The tensor memory accelerator loads a page that is one whole tile, with its rows past the sequence's end. Their weight
is 0, but 0 times NaN is NaN, and reused pages may have NaN there. The sizes come from `_tile_size_fwd_sm90` and
`_get_fwd_config` in `flash_attn/cute/interface.py` (flash-attn-4 4.0.0b26 to b36). `flash_attn/cute/paged_kv.py`
reads all other pages.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attnplug.core.spec import AttentionType

if TYPE_CHECKING:
    from attnplug.core.device import Device
    from attnplug.core.spec import LayerSpec

_TILE_BLACKWELL = 128
_PAGE_READERS = 128
"""Threads that read pages of other sizes than a tile."""


def key_tiles(spec: LayerSpec, device: Device | None) -> tuple[int, ...]:
    """The key tiles of FlashAttention 4 that a layer may run with, ascending.

    A batch may run a layer causally that is not, so there can be two. Without a capability they are those of all GPUs.
    """
    major = None if device is None or device.capability is None else device.capability[0]
    tiles: set[int] = set()
    if major != 9:
        tiles.add(_TILE_BLACKWELL)
    if major in (9, None):
        left, right = spec.window
        tiles.add(_tile_hopper(spec, left >= 0, causal=True))
        if not spec.causal:
            tiles.add(_tile_hopper(spec, left >= 0 or right >= 0, causal=False))
    return tuple(sorted(tiles))


def why_not_over_pages(spec: LayerSpec, device: Device | None) -> str | None:
    """Why FlashAttention 4 cannot read a layer's keys from pages; None if it can, or there are no pages."""
    if spec.direct_kv or spec.attn_type not in (AttentionType.DECODER, AttentionType.ENCODER_DECODER):
        return None
    asked = f"head_size={spec.head_size} over pages"
    # The loader reads heads in steps of 16 without a test for their end.
    if spec.head_size % 16:
        return f"{asked}: there it is a multiple of 16"
    if spec.head_size_v % 8:
        return f"head_size_v={spec.head_size_v} over pages: there it is a multiple of 8"
    row = math.gcd(spec.head_size, spec.head_size_v, 64) // 8
    rows = _PAGE_READERS // row
    for tile in key_tiles(spec, device):
        # Tiles are read in rounds of as many rows as the threads reach at once. A partial last round
        # overwrites the tile after it.
        if tile % rows:
            mask = ("causal" if spec.causal else "not causal") + (
                " with a window" if spec.is_windowed else ""
            )
            return f"{asked}, {mask}: its tile of {tile} keys is read in rounds of {rows}, which do not fit"
    return None


def _tile_hopper(spec: LayerSpec, local: bool, *, causal: bool) -> int:
    # As `_tile_size_fwd_sm90` chooses them.
    if spec.head_size <= 64:
        return 128
    if spec.head_size <= 96:
        return 128 if causal or local else 144
    if spec.head_size <= 128:
        return 128
    if spec.head_size <= 192:
        return 96 if local else 128 if spec.head_size_v <= 128 else 112
    return 64 if local else 80
