"""The options of TRITON; torch-free."""

from __future__ import annotations

import dataclasses
from typing import Literal

from attnplug.core.errors import PolicyError

_SPLITS = ("requests", "shares")


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """Options of TRITON.

    Args:
        decode_split: how decodes are divided over the GPU. With "requests", the keys of each request are cut into
            about equal items. With "shares", every program takes an equal share of all keys, across the borders of
            requests, which suits requests of unlike lengths. Up to 16 queries per request are then decodes too,
            longer extends take shares where their tiles are few, and a prefix that requests share is read once.

    Raises:
        PolicyError: another value.
    """

    decode_split: Literal["requests", "shares"] = "requests"

    def __post_init__(self) -> None:
        if self.decode_split not in _SPLITS:
            limit = f"must be one of {', '.join(_SPLITS)}"
            raise PolicyError("options['decode_split']", self.decode_split, limit)
