"""transformers' continuous batching with attnplug: models keep their implementation, and get block tables."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from typing import Any

from transformers.generation.continuous_batching import PagedAttentionCache, continuous_api, initialization

from attnplug.integrations.attention.model_hooks import NAME
from attnplug.integrations.attention.paged_cache import join_keys_and_values

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
