"""Groups layers that share a block table, and layers that share memory."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from attnplug.core.arguments import at_least, checked, mapping_of, one_of
from attnplug.core.errors import LayoutError, SpecError
from attnplug.core.kv_cache_spec import (
    CrossAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    kv_cache_spec_for,
)
from attnplug.core.spec import LayerSpec

_MOST_GROWTH = 16
"""Latents of 576 elements beside ordinary heads need 9 of their pages: blocks of 144 tokens for 16, still small."""


@checked(specs=mapping_of(LayerSpec, SpecError), block_size=at_least(1, SpecError))
def get_kv_cache_spec(specs: Mapping[str, LayerSpec], block_size: int) -> dict[str, KVCacheSpec]:
    """The cache of each layer, in pages of `block_size` tokens; layers with direct K and V have none.

    Raises:
        SpecError: a layer requires another block size; the error names it.
    """
    caches = {}
    for name, spec in specs.items():
        try:
            cache = kv_cache_spec_for(spec, block_size)
        except SpecError as error:
            field = f"{error.field} of layer {name}"
            raise SpecError(field, error.value, error.limit, error.remedy) from None
        if cache is not None:
            caches[name] = cache
    return caches


@checked(specs=mapping_of(KVCacheSpec))
def unify_page_sizes(specs: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """The same caches with pages of equal bytes, the least common multiple: smaller ones get more tokens per page.

    Raises:
        LayoutError: equal pages would be more than 16 times as large as the largest page.
    """
    pages = {name: spec.page_size_bytes for name, spec in specs.items()}
    largest, common = max(pages.values(), default=0), math.lcm(*pages.values())
    unified = {}
    for name, spec in specs.items():
        if common > _MOST_GROWTH * largest and largest % pages[name]:
            limit = f"bytes of layer {name} do not divide the largest page of {largest} bytes"
            limit += f", and equal pages would have {common}"
            remedy = "choose block sizes with equal pages"
            raise LayoutError("page_size_bytes", pages[name], limit, remedy)
        times = common // pages[name]
        # Scales stored in a page grow with its tokens.
        size, scales = spec.block_size * times, spec.scale_bytes * times
        unified[name] = spec if times == 1 else dataclasses.replace(spec, block_size=size, scale_bytes=scales)
    return unified


@checked(specs=mapping_of(KVCacheSpec), num_blocks=at_least(1, LayoutError), kv_sharing=mapping_of(str))
def group_kv_caches(
    specs: Mapping[str, KVCacheSpec], num_blocks: int = 1, kv_sharing: Mapping[str, str] | None = None
) -> KVCacheConfig:
    """Groups of layers with one block table, and the raw tensors for their pages.

    Layers of one spec make a group with a tensor each. A hybrid model's kinds are split into groups of
    near-equal layer counts, and the p-th layer of every group shares tensor p. One pool of equal pages then
    serves all groups, because one group at a time uses a block number. Layers of one group never share memory.

    Args:
        specs: each layer's cache, in layer order.
        num_blocks: blocks in the pool, the null block included.
        kv_sharing: maps a layer that reads another layer's pages to that layer; both get one tensor.

    Raises:
        LayoutError: kinds with different page sizes (see `unify_page_sizes`); a sharing layer whose target has
            no pages of its own or another cache; fewer than one block.
    """
    sharing = dict(kv_sharing or {})
    _check_sharing(specs, sharing)
    kinds: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        if name not in sharing:
            kinds.setdefault(spec, []).append(name)
    if not kinds:
        return KVCacheConfig(num_blocks, (), ())
    _check_pages(kinds)
    counts = [len(names) for names in kinds.values()]
    # Kinds of nearly equal size are padded to one group each; otherwise the smallest kind sets the size.
    size = max(counts) if max(counts) < 1.25 * min(counts) else min(counts)
    parts = [(spec, names, -(-len(names) // size)) for spec, names in kinds.items()]
    groups = [(spec, names[start::step]) for spec, names, step in parts for start in range(step)]
    readers: dict[str, list[str]] = {}
    for name, target in sharing.items():
        readers.setdefault(target, []).append(name)
    page = groups[0][0].page_size_bytes
    tensors = []
    for row in itertools.zip_longest(*(names for _, names in groups)):
        owners = [owner for owner in row if owner is not None]
        shared = [name for owner in owners for name in (owner, *readers.get(owner, ()))]
        tensors.append(KVCacheTensor(page * num_blocks, tuple(shared)))
    specs_of_groups = tuple(
        KVCacheGroupSpec((*names, *(r for owner in names for r in readers.get(owner, ()))), spec)
        for spec, names in groups
    )
    return KVCacheConfig(num_blocks, tuple(tensors), specs_of_groups)


@checked(config=one_of(KVCacheConfig, error=LayoutError), num_blocks=at_least(1, LayoutError))
def with_num_blocks(config: KVCacheConfig, num_blocks: int) -> KVCacheConfig:
    """The same groups with a pool of another size.

    Raises:
        LayoutError: either pool has fewer than one block.
    """
    if config.num_blocks < 1:
        limit = "must be at least 1: block 0 is the null block"
        raise LayoutError("config.num_blocks", config.num_blocks, limit)
    tensors = tuple(
        dataclasses.replace(tensor, size=tensor.size // config.num_blocks * num_blocks)
        for tensor in config.kv_cache_tensors
    )
    return dataclasses.replace(config, num_blocks=num_blocks, kv_cache_tensors=tensors)


@checked(config=one_of(KVCacheConfig, error=LayoutError))
def num_padding_layers(config: KVCacheConfig) -> int:
    """The unused pages of all groups, counted in layers: the cost of groups of equal size."""
    home = {name: p for p, tensor in enumerate(config.kv_cache_tensors) for name in tensor.shared_by}
    used = (len({home[name] for name in group.layer_names}) for group in config.kv_cache_groups)
    return sum(len(config.kv_cache_tensors) - count for count in used)


def cross_groups(config: KVCacheConfig) -> frozenset[int]:
    """The indices of the KV groups with encoder tokens, for cross attention."""
    groups = enumerate(config.kv_cache_groups)
    return frozenset(i for i, group in groups if isinstance(group.kv_cache_spec, CrossAttentionSpec))


def _check_sharing(specs: Mapping[str, KVCacheSpec], sharing: Mapping[str, str]) -> None:
    for name, target in sharing.items():
        if name not in specs:
            raise LayoutError("kv_sharing", name, "is not a layer with a cache")
        if target not in specs or target in sharing:
            remedy = "name the layer whose pages are read in the end"
            raise LayoutError(f"kv_sharing[{name!r}]", target, "is not a layer with pages of its own", remedy)
        if specs[name] != specs[target]:
            limit = f"has another cache than {name}: {specs[target]} and {specs[name]}"
            raise LayoutError(f"kv_sharing[{name!r}]", target, limit)


def _check_pages(kinds: Mapping[KVCacheSpec, Sequence[str]]) -> None:
    pages = {spec.page_size_bytes: names[0] for spec, names in kinds.items()}
    if len(pages) > 1:
        found = ", ".join(f"{size} bytes (layer {name})" for size, name in pages.items())
        remedy = "make them equal with unify_page_sizes, or choose other block sizes"
        limit = f"must be one size for all layers: {found}"
        raise LayoutError("page_size_bytes", sorted(pages), limit, remedy)
