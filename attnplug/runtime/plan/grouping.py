"""Groups layers that share a block table, and layers that share memory.

Pages that they can share: equal bytes in hybrid models, and the physical layout, which a user can set for all.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias, TypeGuard

from attnplug.core.arguments import at_least, checked, mapping_of, one_of
from attnplug.core.errors import LayoutError, SpecError
from attnplug.core.interface.answers import answer
from attnplug.core.kv_cache_spec import (
    CrossAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    kv_cache_spec_for,
)
from attnplug.core.spec import LayerSpec
from attnplug.core.validation import reads_blocks
from attnplug.registry.plugins.project import setting
from attnplug.registry.selection.decision import Decision

# Latents of 576 elements beside ordinary heads need 9 of their pages: blocks of 144 tokens for 16, still small.
_MOST_GROWTH = 16
# Of a page, where formats of unlike bytes have no small common multiple.
_MOST_PADDING = 0.02
_ALIGNMENT = 16


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
    """The same caches with pages of equal bytes: smaller ones get more tokens per page.

    The bytes are the least common multiple. Where that is more than 16 times the largest page, each page ends with
    up to 2 % of padding.

    Raises:
        LayoutError: equal pages would be more than 16 times as large as the largest page, and with padding too.
    """
    bare = {name: dataclasses.replace(spec, padding=0) for name, spec in specs.items()}
    pages = {name: spec.page_size_bytes for name, spec in bare.items()}
    largest, common = max(pages.values(), default=0), math.lcm(*pages.values())
    if pages and common > _MOST_GROWTH * largest:
        padded = _padded_page(pages.values(), largest)
        if padded is None:
            name = next(name for name, page in pages.items() if largest % page)
            limit = f"bytes of layer {name} do not divide the largest page of {largest} bytes"
            limit += f", and equal pages would have {common}"
            remedy = "choose block sizes with equal pages"
            raise LayoutError("page_size_bytes", pages[name], limit, remedy)
        common = padded
    unified = {}
    for name, spec in bare.items():
        times, padding = divmod(common, pages[name])
        unified[name] = dataclasses.replace(spec, block_size=spec.block_size * times, padding=padding)
    return unified


def _padded_page(pages: Iterable[int], largest: int) -> int | None:
    """The least bytes that whole pages of each kind fill but for 2 %; None up to 16 times the largest page."""
    kinds = {*pages}
    for size in (largest * times for times in range(1, _MOST_GROWTH + 1)):
        # Kernels load vectors, so each page begins at a multiple of their size.
        if size % _ALIGNMENT == 0 and all(size % page <= _MOST_PADDING * size for page in kinds):
            return size
    return None


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


KVCacheLayoutType: TypeAlias = Literal["NHD", "HND"]
"""The order inside a page: token, head, element; or head, token, element."""

_VARIABLE = "ATTNPLUG_KV_CACHE_LAYOUT"
_override: KVCacheLayoutType | None = None
_LOCK = threading.Lock()


def is_valid_kv_cache_layout(value: object) -> TypeGuard[KVCacheLayoutType]:
    """Whether `value` names a layout."""
    return isinstance(value, str) and value in ("NHD", "HND")


def set_kv_cache_layout(layout: KVCacheLayoutType | None) -> KVCacheLayoutType | None:
    """Set the layout for all threads and tasks of this process, as the environment variable does; None clears it.

    The last call wins. It changes the plans made afterwards, and no plan or runtime that exists.

    Returns:
        The layout set before, to restore it in a `finally`; None if none was set.

    Raises:
        LayoutError: `layout` is not NHD or HND; the one set before stays.
    """
    global _override
    checked = None if layout is None else check_kv_cache_layout("layout", layout)
    # A swap, so that of two threads each gets the value that its own call replaced.
    with _LOCK:
        former, _override = _override, checked
    return former


def requested_kv_cache_layout() -> KVCacheLayoutType | None:
    """The first of: the layout set here, ATTNPLUG_KV_CACHE_LAYOUT, None.

    Raises:
        LayoutError: the variable is not NHD or HND.
    """
    # Read once, because another thread may clear it after the test.
    override = _override
    if override is not None:
        return override
    environment, source = setting(_VARIABLE)
    return check_kv_cache_layout(source, environment) if environment else None


def get_kv_cache_layout(required: str | None = None) -> KVCacheLayoutType:
    """The first of: the layout set here, ATTNPLUG_KV_CACHE_LAYOUT, `required`, NHD.

    Args:
        required: the layout that the chosen backends require, if any.

    Raises:
        LayoutError: a value is not NHD or HND; the error names its source.
    """
    requested = requested_kv_cache_layout()
    if requested is not None:
        return requested
    return "NHD" if required is None else check_kv_cache_layout("required", required)


def check_kv_cache_layout(source: str, value: object) -> KVCacheLayoutType:
    """`value`, if it names a layout; LayoutError with its source if not."""
    if not is_valid_kv_cache_layout(value):
        raise LayoutError(source, value, "must be NHD or HND")
    return value


def planned_caches(decisions: Mapping[str, Decision]) -> dict[str, KVCacheSpec]:
    """The cache of each layer that has one, with the block size decided for it, and the padding of equal pages."""
    found = ((name, kv_cache_spec_for(d.spec, d.block_size or 1)) for name, d in decisions.items())
    caches = {name: cache for name, cache in found if cache is not None}
    pages = {cache.page_size_bytes for cache in caches.values()}
    largest = max(pages, default=0)
    if all(largest - page <= _MOST_PADDING * largest for page in pages):
        # Pages as different as that come from `unify_page_sizes` alone: others have a common multiple.
        pad = {name: largest - cache.page_size_bytes for name, cache in caches.items()}
        return {
            name: dataclasses.replace(each, padding=pad[name]) if pad[name] else each
            for name, each in caches.items()
        }
    return caches


def with_equal_pages(decisions: Mapping[str, Decision]) -> dict[str, Decision]:
    """The decisions with larger blocks where the kinds of a hybrid model have pages of different bytes.

    Raises:
        LayoutError: only far larger blocks have equal bytes, or a backend does not read these; it names layer and
            backend.
    """
    planned = dict(decisions)
    caches = planned_caches(decisions)
    if len({cache.page_size_bytes for cache in caches.values()}) <= 1:
        return planned
    for name, cache in _unified(caches, decisions).items():
        decision, size = decisions[name], cache.block_size
        if size == decision.block_size:
            continue
        backend = decision.get_backend_cls()
        allowed = answer(backend, "get_supported_kernel_block_sizes", decision.spec, decision.device)
        given = decision.spec.block_size
        # A block size that the spec fixes is never changed, even if the backend reads the larger one.
        if given is not None or not reads_blocks(backend, size, decision.spec, decision.device):
            taken = f"its spec fixes {given}" if given else f"which reads {', '.join(map(str, allowed))}"
            limit = f"is what pages of equal bytes ask of layer {name} on {decision.backend}, {taken}"
            remedy = "give the layers block sizes with equal page bytes"
            raise LayoutError("block_size", size, limit, remedy)
        planned[name] = dataclasses.replace(decision, block_size=size)
    return planned


def _unified(caches: Mapping[str, KVCacheSpec], decisions: Mapping[str, Decision]) -> dict[str, KVCacheSpec]:
    try:
        return unify_page_sizes(caches)
    except LayoutError as error:
        kinds: dict[int, str] = {}
        for name, cache in caches.items():
            page, decision = cache.page_size_bytes, decisions[name]
            whose = f"layer {name} ({decision.backend}, block_size={decision.block_size})"
            kinds.setdefault(page, f"{page} of {whose}")
        limit = f"{error.limit}; found {', '.join(kinds.values())}"
        raise LayoutError(error.field, error.value, limit, error.remedy) from None


def with_layout(decisions: Mapping[str, Decision]) -> dict[str, Decision]:
    """The decisions with the KV layout that the user set, or else each with its own.

    Raises:
        LayoutError: the backend of a layer cannot read the layout; it names both.
    """
    planned = dict(decisions)
    # Read once, because another thread may set another layout before the last layer is planned.
    requested = requested_kv_cache_layout()
    for name, decision in decisions.items():
        if decision.kv_cache_layout is None:
            continue
        layout = requested or check_kv_cache_layout("required", decision.kv_cache_layout)
        readable = answer(decision.get_backend_cls(), "supported_kv_cache_layouts")
        if layout not in readable:
            limit = f"cannot be read by {decision.backend} (layer {name}), which takes {', '.join(readable)}"
            remedy = "clear ATTNPLUG_KV_CACHE_LAYOUT and set_kv_cache_layout, or ask for another backend"
            raise LayoutError("kv_cache_layout", layout, limit, remedy)
        planned[name] = dataclasses.replace(decision, kv_cache_layout=layout)
    return planned


def other_pages(chosen: Mapping[str, Decision], planned: Mapping[str, Decision]) -> tuple[str, ...]:
    """A note for each backend that was chosen by times with other pages than those that the plan gives it."""
    notes: dict[tuple[str | None, str, str], str] = {}
    for name, decision in planned.items():
        before = chosen.get(name)
        if decision.measured is None or before is None or before.backend != decision.backend:
            continue
        old, new = (f"{each.block_size} tokens in {each.kv_cache_layout}" for each in (before, decision))
        if old != new:
            text = f"{decision.backend} was measured with pages of {old}; the plan gives layer {name} pages of {new}"
            remedy = f"attnplug tune --block-size {decision.block_size} measures these"
            notes.setdefault((decision.backend, old, new), f"{text}; {remedy}")
    return tuple(notes.values())
