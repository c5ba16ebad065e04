"""The parts of transformers' paged cache, in both of its forms (seen in 5.17 and 5.23): pages, rings and their tables."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import transformers
from packaging.version import Version

from attnplug.core.errors import BatchError
from attnplug.integrations.flash_attn.pages import Pages


@dataclasses.dataclass(frozen=True, eq=False)
class LayerCache:
    """One layer's part of a cache, whose block tables and slots are those of `group`.

    `window` is the number of tokens of the ring that the layer keeps; None if it keeps all tokens. `kind` is
    transformers' name for it.
    """

    cache: Any
    layer: int
    group: int
    kind: str
    window: int | None

    @functools.cached_property
    def step(self) -> int:
        """Pages from one block's keys to those of the next, by which transformers numbers them.

        The later form of caches has the values and the other layers of a block between them.
        """
        if not _has_allocators(self.cache):
            return 1
        allocator = self.cache.layer_to_allocator[self.layer]
        return int(allocator.block_physical_stride // allocator.tokens_per_page)

    def pages(self) -> Pages:
        """The pages of keys and values, which backends read as one view; without a table yet.

        BatchError: keys and values cannot be viewed as one.
        """
        cache = self.cache
        if _has_allocators(cache):
            views = cache.layer_to_allocator[self.layer].get_cache_for_block_table(self.layer)
            # The views have the pages of other layers too, so those of keys and of values overlap.
            keys, values = (pages[:: self.step] for pages in views)
        else:
            index = cache.layer_index_to_group_indices[self.layer][1]
            keys, values = cache.key_cache[index], cache.value_cache[index]
            shape = (-1, cache.block_size, *keys.shape[1:])
            keys, values = keys.view(shape), values.view(shape)
        pages = Pages(keys, values, torch.empty(0, 0, dtype=torch.int32, device=keys.device))
        if pages.as_one() is None:
            limit = "are not in one allocation: the cache was made before attnplug was registered"
            raise BatchError(
                "cache", "keys and values", limit, "make a new manager, or a new call of generate_batch"
            )
        return pages

    def update(
        self, key: torch.Tensor, value: torch.Tensor, arguments: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys `[1, Hkv, T, D]` and values; all that the step reads, packed `[S, Hkv, D]`."""
        if _has_allocators(self.cache):
            # It puts this layer's lengths into the dictionary.
            found = self.cache.update(key, value, self.layer, dict(arguments))
            keys, values = (tensor.squeeze(0).transpose(0, 1) for tensor in found)
        else:
            indices = arguments["read_index"], arguments["write_index"]
            keys, values = self.cache.update(key, value, self.layer, *indices)
        return keys, values


def layer_cache(cache: Any, layer: int) -> LayerCache:
    """The part of `cache`, a PagedAttentionCache, for the layer of that index.

    BatchError: the cache has no such layer, or a kind of layer that is not known.
    """
    if _has_allocators(cache):
        allocator = cache.layer_to_allocator.get(layer)
        if allocator is not None:
            kind = allocator.layer_type
            if kind not in (_FULL, _SLIDING):
                limit = f"must be {_FULL} or {_SLIDING}, the kinds of caches that are served"
                raise BatchError("cache", kind, limit)
            window = allocator.sliding_window if kind == _SLIDING else None
            return LayerCache(cache, layer, allocator.index, kind, window)
    elif layer in cache.layer_index_to_group_indices:
        group = cache.layer_index_to_group_indices[layer][0]
        window = cache.sliding_windows[layer]
        if window == 1:  # transformers' value for no window
            return LayerCache(cache, layer, group, _FULL, None)
        if Version(transformers.__version__) < _RIGHT_RINGS:
            limit = f"before {_RIGHT_RINGS} reads a token that has left the window, and not the latest one"
            remedy = f"pip install 'transformers>={_RIGHT_RINGS}'"
            raise BatchError("transformers", transformers.__version__, limit, remedy)
        return LayerCache(cache, layer, group, _SLIDING, window)
    raise BatchError("cache", f"layer {layer}", "has no part in the paged cache")


_RIGHT_RINGS = Version("5.16")
_FULL, _SLIDING = "full_attention", "sliding_attention"


def _has_allocators(cache: Any) -> bool:
    """Whether the cache is of the later form, with one allocator for each kind of layer."""
    return hasattr(cache, "layer_to_allocator")


def join_keys_and_values(cache: Any) -> None:
    """Put the keys and values of a new cache into one allocation for each layer, which backends read as one cache."""
    # Caches of the later form have one allocation. Others must be joined before transformers keeps views of them.
    if _has_allocators(cache):
        return
    for index, (keys, values) in enumerate(zip(cache.key_cache, cache.value_cache, strict=True)):
        joined = torch.stack((keys, values)).unbind(0)
        for part in joined:
            torch._dynamo.mark_static_address(part)
        cache.key_cache[index], cache.value_cache[index] = joined
