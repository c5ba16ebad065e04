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
        decode_split: how decodes are divided over the GPU. With "shares", every program takes an equal share of all
            keys, across the borders of requests. Up to 16 queries per request are decodes then, longer extends take
            shares where their tiles are few, and a prefix that requests share is read once. With "requests", the keys
            of each request are cut into about equal items; small batches of equal lengths are up to 6 % faster.

    Raises:
        PolicyError: another value.
    """

    decode_split: Literal["requests", "shares"] = "shares"

    def __post_init__(self) -> None:
        if self.decode_split not in _SPLITS:
            limit = f"must be one of {', '.join(_SPLITS)}"
            raise PolicyError("options['decode_split']", self.decode_split, limit)
