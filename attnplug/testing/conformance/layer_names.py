"""Names of layers as models have them: their numbers, prefixes and last parts are those of other layers too."""

from __future__ import annotations

import zlib

# Neighbours share a number, a prefix or a last part, so that a state that is kept by one of these is
# another layer's. Some have no number, two numbers, or one at the end.
_NAMES = (
    "model.layers.3.self_attn.attn",
    "language_model.model.layers.3.self_attn.attn",
    "model.layers.3.cross_attn.attn",
    "model.layers.17.self_attn.attn",
    "model.layers.1.self_attn.attn",
    "draft.layers.1",
    "draft.layers.0",
    "model.decoder.layers.0.encoder_attn",
    "model.decoder.layers.0.self_attn",
    "model.decoder.layers.11.encoder_attn",
    "model.layers.11.mixer.1.attn",
    "vision_tower.attn",
    "model.vision_tower.attn",
)


def layer_names(count: int, drawn_for: object) -> list[str]:
    """Names of `count` layers; they begin at another place of the list for each `drawn_for`, in all processes alike."""
    start = zlib.crc32(str(drawn_for).encode())
    names = [_NAMES[(start + place) % len(_NAMES)] for place in range(min(count, len(_NAMES)))]
    # Models have many layers, and the numbers go on.
    return names + [f"model.layers.{place + 20}.self_attn.attn" for place in range(count - len(names))]


def unlike_names(count: int) -> list[str]:
    """Names that share no part, number or length. All numbers are even, as for models whose layers alternate."""
    return [f"{chr(ord('a') + place) * (place + 1)}{2 * place + 100}" for place in range(count)]
