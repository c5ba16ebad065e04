"""Memory as engines have it for the caches of a plan, filled with NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attnplug.runtime import ModelPlan, init_kv_cache

Pool = Callable[[ModelPlan], dict[str, Any]]
"""The arguments of a runtime that hand it the engine's memory."""


def poisoned(size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Bytes that are NaN in each float type."""
    return torch.full((size,), 255, dtype=torch.uint8).view(dtype)


def own(plan: ModelPlan) -> dict[str, torch.Tensor]:
    """What a runtime would allocate."""
    paged = {name: d for name, d in plan.decisions.items() if not d.spec.direct_kv}
    backends = {name: d.get_backend_cls() for name, d in paged.items()}
    layouts = {name: str(d.kv_cache_layout) for name, d in paged.items()}
    return init_kv_cache(plan.kv_cache_config, plan.specs, backends, "cpu", layouts)


def like(cache: torch.Tensor) -> torch.Tensor:
    """NaN in the shape, strides and dtype of a cache, in memory of its own."""
    size = cache.numel() * cache.element_size()
    return poisoned(size).view(cache.dtype).as_strided(cache.shape, cache.stride())


def separate(plan: ModelPlan) -> dict[str, Any]:
    """A cache for each layer, each in its own memory, but for layers that read another's."""
    caches = {name: like(cache) for name, cache in own(plan).items()}
    return {"kv_caches": caches | {name: caches[target] for name, target in plan.kv_sharing.items()}}


def shared(plan: ModelPlan) -> dict[str, Any]:
    """Layers of other groups share memory, as in the plan."""
    made: dict[int, torch.Tensor] = {}
    caches = {}
    for name, cache in own(plan).items():
        raw = made.setdefault(cache.data_ptr(), poisoned(cache.numel() * cache.element_size()))
        caches[name] = raw.view(cache.dtype).as_strided(cache.shape, cache.stride())
    return {"kv_caches": caches}


def raw_bytes(plan: ModelPlan) -> dict[str, Any]:
    """One flat pool of int8 for all tensors, with a header in front."""
    tensors = plan.kv_cache_config.kv_cache_tensors
    pool, start, caches = poisoned(64 + sum(t.size for t in tensors), torch.int8), 64, {}
    for tensor in tensors:
        caches.update(dict.fromkeys(tensor.shared_by, pool[start : start + tensor.size]))
        start += tensor.size
    return {"kv_caches": caches}


def interleaved(plan: ModelPlan) -> dict[str, Any]:
    """One pool in which all layers of a block are together, and 32 bytes of the engine's own."""
    config = plan.kv_cache_config
    page = config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    step = page * len(config.kv_cache_tensors) + 32
    pool, caches = poisoned(config.num_blocks * step), {}
    for index, tensor in enumerate(config.kv_cache_tensors):
        for name in tensor.shared_by:
            cache = own(plan)[name]
            elements, each = pool.view(cache.dtype), cache.element_size()
            strides = step // each, *cache.stride()[1:]
            caches[name] = elements.as_strided(cache.shape, strides, (32 + index * page) // each)
    return {"kv_caches": caches}


def float8_as_bytes(plan: ModelPlan) -> dict[str, Any]:
    """Caches of uint8, of a torch without float8."""
    return {
        "kv_caches": {name: cache.view(torch.uint8) for name, cache in separate(plan)["kv_caches"].items()}
    }


def allocated(plan: ModelPlan) -> dict[str, Any]:
    """By the engine's allocator."""
    return {"allocator": lambda size, device: poisoned(size).to(device)}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the storage behind a tensor."""
    storage = tensor.untyped_storage()
    return torch.tensor([], dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),))


POOLS: dict[str, Pool] = {
    each.__name__: each for each in (separate, shared, raw_bytes, interleaved, allocated)
}
