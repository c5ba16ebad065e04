"""The KV caches of a runtime's layers: in memory of their own or of the engine, and checked once all are views."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from attnplug.core.kv_cache_spec import KVCacheConfig
from attnplug.registry.selection.decision import Decision
from attnplug.runtime.caches.allocation import init_kv_cache
from attnplug.runtime.caches.engine_caches import (
    Allocator,
    check_halves,
    check_kv_caches,
    check_shared_views,
    clear_null_blocks,
    engine_memory,
)


def layer_caches(
    config: KVCacheConfig,
    decisions: Mapping[str, Decision],
    kv_sharing: Mapping[str, str],
    device: torch.device,
    kv_caches: Mapping[str, torch.Tensor] | None = None,
    allocator: Allocator | None = None,
) -> dict[str, torch.Tensor]:
    """The cache of each layer with pages, as its backend views it; null blocks hold zeros.

    Args:
        config: the KV groups and the number of blocks.
        decisions: of all layers, by name.
        kv_sharing: layers that read another layer's pages, to that layer.
        device: of the caches.
        kv_caches: the engine's memory; None, like `allocator`, for an own allocation.
        allocator: gives that memory as raw bytes.

    Raises:
        LayoutError: memory of the engine does not fit its layer; layers that share pages read them differently.
    """
    specs = {name: decision.spec for name, decision in decisions.items()}
    paged = {name: decision for name, decision in decisions.items() if decision.spec.has_pages}
    backends = {name: decision.get_backend_cls() for name, decision in paged.items()}
    form = specs, backends, device, {name: str(each.kv_cache_layout) for name, each in paged.items()}
    is_own = kv_caches is None and allocator is None
    if is_own:
        caches = init_kv_cache(config, *form)
    else:
        given = engine_memory(config, kv_caches, allocator, device)
        caches = check_kv_caches(config, given, *form, kv_sharing)
    check_halves(caches, config, specs, backends)
    # Two backends may view the same bytes differently, and only views of real caches show it.
    check_shared_views(caches, kv_sharing, specs, backends)
    if not is_own:
        # After all checks, because memory that is refused is not written.
        clear_null_blocks(caches, specs, backends)
    return caches
