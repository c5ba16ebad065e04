"""The LayerSpec of one rank. Imports no torch."""

from __future__ import annotations

import math
from typing import Any

from attnplug.core.errors import ModelConfigError, SpecError
from attnplug.core.spec import LayerSpec


def make_spec(path: str, *, num_heads: int, num_kv_heads: int, ranks: int, **fields: Any) -> LayerSpec:
    """A spec with the heads divided among `ranks`; fewer KV heads than ranks are replicated."""
    if num_heads % ranks:
        raise ModelConfigError(
            f"{path}: tensor_parallel_size={ranks} does not divide the {num_heads} attention heads; "
            f"use one that does, such as {math.gcd(num_heads, ranks)}",
            argument="tensor_parallel_size",
        )
    few, many = sorted((num_kv_heads, ranks))
    if many % few:
        raise ModelConfigError(
            f"{path}: tensor_parallel_size={ranks} and the {num_kv_heads} KV heads must divide one another",
            argument="tensor_parallel_size",
        )
    try:
        return LayerSpec(num_heads=num_heads // ranks, num_kv_heads=max(1, num_kv_heads // ranks), **fields)
    except SpecError as error:
        raise ModelConfigError(f"{path}: {error}") from error
