"""Layers to check a backend with that refuses plain ones: each asks for one thing more, for two, or for three."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from attnplug.core.backend import AttentionBackend
from attnplug.core.features import Feature

_MOST_TOGETHER = 3
_OTHER_KINDS: tuple[dict[str, Any], ...] = (
    {"attn_type": "encoder_only", "direct_kv": True},
    {"attn_type": "encoder", "direct_kv": True},
)


def base_layers(backend: type[AttentionBackend], stored: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    """The arguments of a LayerSpec for one declared feature, then for two, then for three.

    Args:
        backend: the class.
        stored: the storage types that it declares.
    """
    size = backend.get_preferred_block_size()
    flags = [flag for flag in Feature if flag in backend.features and flag is not Feature.MLA]
    asks = [flag.fields(64, size) for flag in flags]
    asks += [{"kv_cache_dtype": name} for name in stored]
    others: list[dict[str, Any]] = [{flag.ask.field: value} for flag in flags for value in flag.ask.values]
    yield [*asks, *others, *_OTHER_KINDS]
    for count in range(2, _MOST_TOGETHER + 1):
        yield [
            {field: value for each in several for field, value in each.items()}
            for several in itertools.combinations(asks, count)
            if len(set[str]().union(*several)) == sum(map(len, several))
        ]
