"""Allocates the tensors of a KVCacheConfig, and views them as the caches of layers."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, MutableSequence
from typing import Any

import torch

from attnplug.core.arguments import at_least, checked, instance, mapping_of, one_of, subclass_of, torch_device
from attnplug.core.backend import AttentionBackend
from attnplug.core.errors import LayoutError
from attnplug.core.interface.answers import answer
from attnplug.core.kv_cache_spec import KVCacheConfig, KVCacheSpec
from attnplug.core.spec import LayerSpec
from attnplug.ops.storage import STORAGE_DTYPES


def _device(field: str, value: object) -> torch.device:
    return torch_device(field, value, LayoutError)


def _layouts(field: str, value: object) -> object:
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping) or not all(
        each is None or isinstance(each, str) for each in value.values()
    ):
        raise LayoutError(field, value, "must be NHD, HND, or a mapping of layers to them")
    return value


@checked(config=one_of(KVCacheConfig, error=LayoutError), device=_device)
def allocate_kv_cache(config: KVCacheConfig, device: torch.device | str) -> dict[str, torch.Tensor]:
    """Zero-filled raw bytes (uint8, 1-D) for each layer; layers that share a tensor get the same object.

    Raises:
        LayoutError: groups and tensors do not name the same layers, each once; a tensor's bytes are not a whole
            number of pages, or are fewer pages than the configuration has blocks.
    """
    _check_names(config)
    pages = {n: g.kv_cache_spec.page_size_bytes for g in config.kv_cache_groups for n in g.layer_names}
    raw: dict[str, torch.Tensor] = {}
    for tensor in config.kv_cache_tensors:
        for name in tensor.shared_by:
            if tensor.size % pages[name]:
                limit = f"is not a whole number of pages of {pages[name]} bytes (layer {name})"
                raise LayoutError("kv_cache_tensors.size", tensor.size, limit)
            if tensor.size < config.num_blocks * pages[name]:
                limit = (
                    f"must hold num_blocks={config.num_blocks} pages of {pages[name]} bytes (layer {name})"
                )
                raise LayoutError("kv_cache_tensors.size", tensor.size, limit)
        # Raw bytes, because layers of other kinds share the tensor and view it in their own shapes.
        data = torch.zeros(tensor.size, dtype=torch.uint8, device=device)
        raw.update(dict.fromkeys(tensor.shared_by, data))
    return raw


@checked(
    config=one_of(KVCacheConfig, error=LayoutError),
    raw=mapping_of(torch.Tensor),
    specs=mapping_of(LayerSpec),
    backends=mapping_of(subclass_of(AttentionBackend, LayoutError)),
    layouts=_layouts,
)
def reshape_kv_cache(
    config: KVCacheConfig,
    raw: Mapping[str, torch.Tensor],
    specs: Mapping[str, LayerSpec],
    backends: Mapping[str, type[AttentionBackend]],
    layouts: Mapping[str, str] | str | None = None,
) -> dict[str, torch.Tensor]:
    """Each layer's cache in its backend's logical shape, with strides of its physical layout.

    Args:
        config: the groups.
        raw: the bytes from `allocate_kv_cache`.
        specs: the spec of each layer.
        backends: the backend of each layer.
        layouts: "NHD" or "HND", for all layers or by layer; None takes each backend's first.

    Raises:
        LayoutError: a layer is missing from one of these, or is in no group. Bytes are not a whole number of
            pages. A group has two layouts, or one that its backend cannot read. An order mixes the pages of
            groups that share bytes.
    """
    names = _check_names(config)
    _check_same("raw", names, Counter(list(raw)))
    chosen: Mapping[str, str | None] = (
        layouts if isinstance(layouts, Mapping) else dict.fromkeys(names, layouts)
    )
    for field, given in (("specs", specs), ("backends", backends), ("layouts", chosen)):
        if missing := sorted(names - set(given)):
            raise LayoutError(field, missing, "are missing: every layer of a group needs one")
    caches = {}
    for group in config.kv_cache_groups:
        resolved = {
            n: chosen[n] or answer(backends[n], "supported_kv_cache_layouts")[0] for n in group.layer_names
        }
        if len(set(resolved.values())) > 1:
            first: dict[str, str] = {}
            for name, layout in resolved.items():
                first.setdefault(layout, f"{layout} for layer {name} ({backends[name].get_name()})")
            limit = f"must be one for the layers of a group: {', '.join(first.values())}"
            raise LayoutError("kv_cache_layout", sorted(first), limit)
        for name, layout in resolved.items():
            caches[name] = view_kv_cache(raw[name], group.kv_cache_spec, specs[name], backends[name], layout)
    _check_shared_pages(config, caches)
    return caches


@checked(
    raw=one_of(torch.Tensor, error=LayoutError),
    cache=one_of(KVCacheSpec, error=LayoutError),
    spec=one_of(LayerSpec, error=LayoutError),
    backend=subclass_of(AttentionBackend, LayoutError),
    layout=one_of(str, error=LayoutError),
    num_layers=at_least(1, LayoutError),
)
def view_kv_cache(
    raw: torch.Tensor,
    cache: KVCacheSpec,
    spec: LayerSpec,
    backend: type[AttentionBackend],
    layout: str | None = None,
    num_layers: int | None = None,
) -> torch.Tensor:
    """Raw bytes as one cache, in logical order with physical strides; nothing is copied.

    Args:
        raw: uint8, 1-D, contiguous.
        cache: the contents of a page.
        spec: the layer.
        backend: defines shape and stride order.
        layout: "NHD" or "HND"; None takes the backend's first.
        num_layers: if given, `raw` has that many layers, with all layers of a block together, and the view
            has them as its first dimension.

    Raises:
        LayoutError: `raw` is not raw bytes or not a whole number of pages; the backend cannot read the layout; its
            shape is not that of the pages.
    """
    if raw.dtype != torch.uint8 or raw.ndim != 1 or not raw.is_contiguous():
        limit = "must be contiguous bytes: torch.uint8, 1-D"
        raise LayoutError("raw", f"{raw.dtype} {tuple(raw.shape)}", limit)
    page = cache.page_size_bytes * (num_layers or 1)
    num_blocks, rest = divmod(raw.numel(), page)
    if rest or num_blocks == 0:
        raise LayoutError("raw", raw.numel(), f"bytes are not a whole number of pages of {page} bytes")
    shape, order = cache_form(cache, num_blocks, spec, backend, layout, num_layers)
    elements = raw.view(STORAGE_DTYPES[cache.dtype])
    if not cache.padding:
        physical = elements.view([shape[dim] for dim in order])
        return physical.permute([order.index(dim) for dim in range(len(shape))])
    if num_layers is not None:
        raise LayoutError("num_layers", num_layers, "cannot be given with pages that have padding")
    if shape[order[0]] != num_blocks:
        limit = f"needs the block outermost in memory, which {backend.get_name()} does not have"
        raise LayoutError("padding", cache.padding, limit)
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim], step = step, step * shape[dim]
    strides[order[0]] = page // elements.element_size()
    return elements.as_strided(shape, strides)


def cache_form(
    cache: KVCacheSpec,
    num_blocks: int,
    spec: LayerSpec,
    backend: type[AttentionBackend],
    layout: str | None = None,
    num_layers: int | None = None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The logical shape of a cache, and its dimensions in physical order, outermost first.

    Raises:
        LayoutError: the dtype is not one of torch's, the backend cannot read the layout, or its shape is not that
            of the pages.
    """
    if cache.dtype not in STORAGE_DTYPES:
        raise LayoutError("dtype", cache.dtype, f"must be one of {', '.join(STORAGE_DTYPES)}")
    sizes = num_blocks, cache.block_size, cache.num_kv_heads, cache.head_size
    shape = answer(backend, "get_kv_cache_shape", *sizes, spec.kv_cache_dtype, cache.head_size_v)
    if any(size < 0 for size in shape):
        raise LayoutError("kv_cache_shape", shape, f"of {backend.get_name()} has a size below 0")
    if num_layers is not None:
        shape = (num_layers, *shape)
    order = answer(backend, "get_kv_cache_stride_order", num_layers is not None, layout=layout, spec=spec)
    if sorted(order) != list(range(len(shape))):
        raise LayoutError("stride_order", order, f"is not an order of the {len(shape)} dimensions of {shape}")
    page = (cache.page_size_bytes - cache.padding) * (num_layers or 1)
    if math.prod(shape) * STORAGE_DTYPES[cache.dtype].itemsize != num_blocks * page:
        limit = f"of {backend.get_name()} is not that of {num_blocks} pages of {page} bytes ({cache})"
        raise LayoutError("kv_cache_shape", shape, limit)
    return shape, order


def bind_kv_cache(
    kv_caches: Mapping[str, torch.Tensor],
    layers: Mapping[str, Any],
    runner_kv_caches: MutableSequence[torch.Tensor],
) -> None:
    """Set `kv_cache` of each layer object, and append all caches to the runner's list in layer order.

    The numbers in a name give its place. Layers of one number, such as self and cross attention, keep the
    order of `kv_caches`.

    Raises:
        LayoutError: the list is not empty, or names differ; the error lists missing and extra names.
    """
    for field, given, kind in (
        ("kv_caches", kv_caches, Mapping),
        ("layers", layers, Mapping),
        ("runner_kv_caches", runner_kv_caches, MutableSequence),
    ):
        instance(field, given, kind, LayoutError)
    for name, cache in kv_caches.items():
        instance(f"kv_caches[{name!r}]", cache, torch.Tensor, LayoutError)
    for name, layer in layers.items():
        # A tensor or a plain value would take the attribute, or refuse it by an error of its own.
        if isinstance(layer, (torch.Tensor, type)) or not (
            hasattr(layer, "kv_cache") or hasattr(layer, "__dict__")
        ):
            raise LayoutError(f"layers[{name!r}]", layer, "must be a layer, which has kv_cache")
    if runner_kv_caches:
        raise LayoutError("runner_kv_caches", len(runner_kv_caches), "must be empty")
    _check_same("kv_caches", set(layers), Counter(list(kv_caches)))
    for name in sorted(kv_caches, key=lambda name: [int(n) for n in re.findall(r"\d+", name)]):
        layers[name].kv_cache = kv_caches[name]
        runner_kv_caches.append(kv_caches[name])


@checked(config=one_of(KVCacheConfig, error=LayoutError), device=_device)
def init_kv_cache(
    config: KVCacheConfig,
    specs: Mapping[str, LayerSpec],
    backends: Mapping[str, type[AttentionBackend]],
    device: torch.device | str,
    layouts: Mapping[str, str] | str | None = None,
) -> dict[str, torch.Tensor]:
    """Allocate and reshape in one step: every layer's cache, zero-filled."""
    return reshape_kv_cache(config, allocate_kv_cache(config, device), specs, backends, layouts)


def _check_names(config: KVCacheConfig) -> set[str]:
    """The layers of all groups, each in one group and one tensor."""
    grouped = Counter(name for group in config.kv_cache_groups for name in group.layer_names)
    twice = sorted(name for name, count in grouped.items() if count > 1)
    if twice:
        raise LayoutError("kv_cache_groups", twice, "must name each layer in one group only")
    stored = Counter(name for tensor in config.kv_cache_tensors for name in tensor.shared_by)
    _check_same("kv_cache_tensors", set(grouped), stored)
    return set(grouped)


def _check_shared_pages(config: KVCacheConfig, caches: Mapping[str, torch.Tensor]) -> None:
    # The groups of a tensor use a block in turns, so it must cover the same bytes in all of them.
    home = {name: g for g, group in enumerate(config.kv_cache_groups) for name in group.layer_names}
    for tensor in config.kv_cache_tensors:
        if len({home[name] for name in tensor.shared_by}) < 2:
            continue
        for name in tensor.shared_by:
            cache, page = caches[name], config.kv_cache_groups[home[name]].kv_cache_spec.page_size_bytes
            # With another order, a block of one group would overlap other blocks of a second group.
            if cache.stride(0) * cache.element_size() != page:
                limit = f"of layer {name} spreads a page over bytes that layers of other groups share"
                remedy = "use an order with the block first, or a tensor of its own"
                raise LayoutError("strides", cache.stride(), limit, remedy)


def _check_same(field: str, expected: set[str], found: Counter[str]) -> None:
    missing, extra = sorted(expected - set(found)), sorted(set(found) - expected)
    twice = sorted(name for name, count in found.items() if count > 1)
    if missing or extra or twice:
        limit = f"must name every layer exactly once: missing {missing}, extra {extra}, twice {twice}"
        raise LayoutError(field, len(found), limit)
