"""How many keys FlashAttention's kernels load at once, where that decides which pages they read safely.

A page that is one whole tile of keys is loaded by the tensor memory accelerator, rows past the sequence's
end included; their weight is 0, but 0 times NaN is NaN, and pages are reused. The sizes are those of
`_tile_size_fwd_sm90` and `_get_fwd_config` in `flash_attn/cute/interface.py` (flash-attn-4 4.0.0b26 to
b36).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnplug.core.device import Device
    from attnplug.core.spec import LayerSpec

__all__ = ["key_tiles"]

_TILE_BLACKWELL = 128


def key_tiles(spec: LayerSpec, device: Device | None) -> tuple[int, ...]:
    """The key tiles of FlashAttention 4 that a layer may run with, ascending.

    A layer that is not causal may be run causally, so there can be two. Without a capability they are
    those of all GPUs.
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


def _tile_hopper(spec: LayerSpec, local: bool, *, causal: bool) -> int:
    if spec.head_size <= 64:
        return 128
    if spec.head_size <= 96:
        return 128 if causal or local else 144
    if spec.head_size <= 128:
        return 128
    if spec.head_size <= 192:
        return 96 if local else 128 if spec.head_size_v <= 128 else 112
    return 64 if local else 80
