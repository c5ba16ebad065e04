"""The paged cache of transformers' continuous batching, in both of its forms (seen in 5.17 and 5.23).

transformers' continuous batching with attnplug: models keep their implementation, and get block tables.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers.generation.continuous_batching import PagedAttentionCache, continuous_api, initialization

from attnplug.core.errors import BatchError
from attnplug.integrations.attention.model_hooks import NAME
from attnplug.integrations.flash_attn.pages import Pages


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
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

    def pages(self) -> Pages:
        """The pages of keys and values, which backends read as one view; without a table yet.

        Raises:
            BatchError: keys and values cannot be viewed as one.
        """
        keys, values = _pages(self.cache, self.layer)
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
            return keys, values
        indices = arguments["read_index"], arguments["write_index"]
        keys, values = self.cache.update(key, value, self.layer, *indices)
        return keys, values


def layer_cache(cache: Any, layer: int) -> LayerCache:
    """The part of `cache`, a PagedAttentionCache, for the layer of that index.

    Raises:
        BatchError: the cache has no such layer, or a kind of layer that is not known.
    """
    if _has_allocators(cache):
        allocator = cache.layer_to_allocator.get(layer)
        if allocator is not None:
            kind = allocator.layer_type
            window = allocator.sliding_window if kind == _SLIDING else None
            return LayerCache(cache, layer, allocator.index, _checked(kind), window)
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


def _checked(kind: str) -> str:
    if kind not in (_FULL, _SLIDING):
        raise BatchError("cache", kind, f"must be {_FULL} or {_SLIDING}, the kinds of caches that are served")
    return kind


def _has_allocators(cache: Any) -> bool:
    """Whether the cache is of the later form, with one allocator for each kind of layer."""
    return hasattr(cache, "layer_to_allocator")


def _pages(cache: Any, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages of keys `[N, page, Hkv, D]`, and of values, in one allocation."""
    if _has_allocators(cache):
        keys, values = cache.layer_to_allocator[layer].get_cache_for_block_table(layer)
        return keys, values
    index = cache.layer_index_to_group_indices[layer][1]
    keys, values = cache.key_cache[index], cache.value_cache[index]
    shape = (-1, cache.block_size, *keys.shape[1:])
    return keys.view(shape), values.view(shape)


def join_keys_and_values(cache: Any) -> None:
    """Put the keys and values of a new cache into one allocation for each layer, which backends read as one cache.

    Caches of the later form have one allocation. Others must be joined before transformers keeps views of them.
    """
    if _has_allocators(cache):
        return
    for index, (keys, values) in enumerate(zip(cache.key_cache, cache.value_cache, strict=True)):
        joined = torch.stack((keys, values)).unbind(0)
        for part in joined:
            torch._dynamo.mark_static_address(part)
        cache.key_cache[index], cache.value_cache[index] = joined


_ORIGINAL = "_attnplug_original"


def serve_continuous_batching() -> None:
    """Let `generate_batch` run models with `attn_implementation="attnplug"`; may be called again.

    Up to 5.18 transformers would look for "paged|attnplug", and later it accepts a fixed list of names. Both are
    decided in one method, which has nothing to do for attnplug: its function serves ordinary calls and paged ones.
    """
    _wrap(continuous_api.ContinuousBatchingManager, "switch_to_cb_friendly_attn", _keep)
    _wrap(continuous_api.ContinuousBatchingManager, "start", _start)
    _wrap(PagedAttentionCache, "__init__", _make_cache)
    # A private function, seen in 5.17 and 5.23; without it decodes have no block tables, only an index for each token.
    if hasattr(initialization, "ensure_decode_fast_path_is_available"):
        _wrap(initialization, "ensure_decode_fast_path_is_available", _allow_block_tables)


def _wrap(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    if hasattr(original, _ORIGINAL):
        return

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(call, _ORIGINAL, original)
    setattr(owner, name, call)


def _keep(original: Callable[..., Any], manager: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """In place of a switch to another implementation, also where attnplug serves the text part alone."""
    if NAME not in (model.config._attn_implementation, model.config.get_text_config()._attn_implementation):
        original(manager, model, *args, **kwargs)


def _start(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> None:
    """Start the thread of a manager in a copy of the caller's context, with what `attnplug.use` has set there."""
    loop = type(manager)._run_generation_loop.__get__(manager)
    manager._run_generation_loop = functools.partial(contextvars.copy_context().run, loop)
    original(manager, *args, **kwargs)


def _make_cache(original: Callable[..., Any], cache: Any, *args: Any, **kwargs: Any) -> None:
    """Make the cache, with keys and values that backends can read as one."""
    original(cache, *args, **kwargs)
    if cache.config._attn_implementation == NAME:
        join_keys_and_values(cache)


def _allow_block_tables(
    original: Callable[..., Any], config: Any, cb_config: Any, *args: Any, **kw: Any
) -> None:
    """Leave block tables on for attnplug, but for models with windows: their rings have none."""
    if config._attn_implementation != NAME:
        original(config, cb_config, *args, **kw)
        return
    kinds = getattr(config, "layer_types", None) or ()
    if any(kind != "full_attention" for kind in kinds) or (
        not kinds and getattr(config, "sliding_window", None) is not None
    ):
        cb_config.max_blocks_per_request = 0
