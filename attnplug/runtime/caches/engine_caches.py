"""KV caches in memory that the engine owns: checked, and viewed as each layer's backend needs them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch

from attnplug._system.text import shown
from attnplug.core.backend import AttentionBackend
from attnplug.core.errors import LayoutError
from attnplug.core.interface.answers import HookError, answer
from attnplug.core.interface.guarded import class_title
from attnplug.core.kv_cache_spec import KVCacheConfig, KVCacheSpec
from attnplug.core.kv_format import kv_format
from attnplug.core.spec import LayerSpec
from attnplug.ops.storage import STORAGE_DTYPES
from attnplug.runtime.caches.allocation import cache_form, view_kv_cache
from attnplug.runtime.caches.memory_overlap import Blocks, check_overlaps

Allocator: TypeAlias = Callable[[int, torch.device], torch.Tensor]
"""Gives a 1-D uint8 or int8 tensor of a number of bytes on a device."""

ALIGNMENT = 16
"""Bytes. Kernels load and store vectors of this size, and the TMA of Hopper needs it of addresses and strides."""


def check_kv_caches(
    config: KVCacheConfig,
    given: Mapping[str, torch.Tensor],
    specs: Mapping[str, LayerSpec],
    backends: Mapping[str, type[AttentionBackend]],
    device: torch.device,
    layouts: Mapping[str, str],
    kv_sharing: Mapping[str, str],
) -> dict[str, torch.Tensor]:
    """Each layer's cache as a view of the given memory, which is not written.

    Args:
        config: the groups and the number of blocks.
        given: by layer, its raw bytes or its cache; see `AttentionRuntime`.
        specs: the spec of each layer.
        backends: the backend of each layer.
        device: of the caches.
        layouts: "NHD" or "HND" by layer.
        kv_sharing: layers that read another layer's pages, to that layer.

    Raises:
        LayoutError: a layer is missing or unknown, or a tensor does not fit its layer; the error names both.
    """
    pages = {name: group.kv_cache_spec for group in config.kv_cache_groups for name in group.layer_names}
    if missing := sorted(set(pages) - set(given)):
        limit = f"has no memory for {', '.join(missing)}: every layer with pages needs some"
        raise LayoutError("kv_caches", len(given), limit)
    if unknown := sorted(set(given) - set(pages), key=str):
        raise LayoutError("kv_caches", unknown, f"are not among the plan's {len(pages)} layers with pages")
    caches: dict[str, torch.Tensor] = {}
    blocks: dict[str, Blocks] = {}
    for name, page in pages.items():
        field = f"kv_caches[{name!r}]"
        layer = _Layer(field, page, config.num_blocks, specs[name], backends[name], layouts[name])
        caches[name] = layer.view(_plain(field, given[name], device))
        blocks[name] = layer.blocks(caches[name])
    check_overlaps(config, blocks, kv_sharing)
    return caches


def engine_memory(
    config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor] | None,
    allocator: Allocator | None,
    device: torch.device,
) -> Mapping[str, torch.Tensor]:
    """The tensor of each layer: those given, or bytes from one call of the allocator per tensor of `config`.

    Raises:
        LayoutError: both are given, or the allocator gave no bytes of the size asked for.
    """
    if kv_caches is not None and not isinstance(kv_caches, Mapping):
        raise LayoutError("kv_caches", type(kv_caches).__name__, "must be a mapping of layers to tensors")
    if allocator is None:
        return kv_caches or {}
    if kv_caches is not None:
        raise LayoutError("allocator", allocator, "must be None if kv_caches is given")
    if not callable(allocator):
        raise LayoutError("allocator", allocator, "must be a function of a number of bytes and a device")
    raw: dict[str, torch.Tensor] = {}
    for tensor in config.kv_cache_tensors:
        made = allocator(tensor.size, device)
        is_plain = isinstance(made, torch.Tensor) and not made.is_nested
        found = (made.dtype, *made.shape) if is_plain else made
        if not is_plain or found not in ((torch.uint8, tensor.size), (torch.int8, tensor.size)):
            limit = (
                f"must be {tensor.size} bytes, 1-D uint8 or int8, for layers {', '.join(tensor.shared_by)}"
            )
            raise LayoutError("allocator(...)", found, limit)
        raw.update(dict.fromkeys(tensor.shared_by, made))
    return raw


def check_halves(
    caches: Mapping[str, torch.Tensor],
    config: KVCacheConfig,
    specs: Mapping[str, LayerSpec],
    backends: Mapping[str, type[AttentionBackend]],
) -> None:
    """Check once that `split_kv` of each backend gives K and V of all tokens, as views of the cache that do not repeat.

    Raises:
        HookError: it does not; the error names the backend and the layer.
    """
    pages = {name: group.kv_cache_spec for group in config.kv_cache_groups for name in group.layer_names}
    for name, cache in caches.items():
        spec, page, backend = specs[name], pages[name], backends[name]
        num_blocks = cache.numel() * cache.element_size() // (page.page_size_bytes - page.padding)
        for kind, half, size in zip(
            "KV", _split(backend, cache, spec), (spec.head_size, spec.head_size_v), strict=True
        ):
            width = kv_format(page.dtype).width(size)
            expected = (num_blocks, page.block_size, spec.num_kv_heads, width)
            if tuple(half.shape) != expected or half.dtype != cache.dtype:
                found = f"{kind} of shape {tuple(half.shape)} and {half.dtype}"
                limit = f"must be {expected} and {cache.dtype} for layer {name}"
                raise HookError(f"{class_title(backend)} returned {found} from split_kv, which {limit}")
            if half.untyped_storage().data_ptr() != cache.untyped_storage().data_ptr():
                found = f"{class_title(backend)} returned a copy of {kind} from split_kv"
                raise HookError(
                    f"{found}; it must be a view of the cache of layer {name}, or writes are lost"
                )
            if any(step == 0 and length > 1 for step, length in zip(half.stride(), half.shape, strict=True)):
                found = f"{class_title(backend)} returned {kind} with strides {half.stride()} from split_kv"
                raise HookError(f"{found}; elements of layer {name} must not share memory")


def _split(
    backend: type[AttentionBackend], cache: torch.Tensor, spec: LayerSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as a backend views a cache; HookError if they are no two tensors, or both are the same memory."""
    first, second = answer(backend, "split_kv", cache, spec)
    for half in (first, second):
        if not isinstance(half, torch.Tensor):
            limit = "must be the tensors of K and V"
            raise HookError(
                f"{class_title(backend)} returned {shown(half, 200)} from split_kv, which {limit}"
            )
    if spec.mla is None and first.data_ptr() == second.data_ptr():
        raise HookError(f"{class_title(backend)} returned the same memory for K and V from split_kv")
    return first, second


def clear_null_blocks(
    caches: Mapping[str, torch.Tensor],
    specs: Mapping[str, LayerSpec],
    backends: Mapping[str, type[AttentionBackend]],
) -> None:
    """Write zeros to block 0 of each cache: kernels may load a null block and weigh it by 0, and 0 * NaN is NaN."""
    for name, cache in caches.items():
        for half in _split(backends[name], cache, specs[name]):
            null = half[0]
            # As bytes where it can be, because not every torch build fills each float8 type on each device.
            (null.view(torch.uint8) if null.element_size() == 1 else null).zero_()


def groups_share_memory(config: KVCacheConfig, caches: Mapping[str, torch.Tensor]) -> bool:
    """Whether layers of different KV groups have one cache, so that a block number is the same memory in both."""
    group_of = {name: g for g, group in enumerate(config.kv_cache_groups) for name in group.layer_names}
    for tensor in config.kv_cache_tensors:
        # An engine may give each of these layers memory of its own.
        starts = {(group_of[name], caches[name].data_ptr()) for name in tensor.shared_by if name in caches}
        if len({start for _, start in starts}) < len(starts):
            return True
    return False


def check_shared_views(
    caches: Mapping[str, torch.Tensor],
    kv_sharing: Mapping[str, str],
    specs: Mapping[str, LayerSpec],
    backends: Mapping[str, type[AttentionBackend]],
) -> None:
    """Refuse layers that share pages if their backends view the same bytes differently.

    Raises:
        LayoutError: names the layer and both backends.
    """
    for name, target in kv_sharing.items():
        views = []
        for layer in (name, target):
            both = _split(backends[layer], caches[layer], specs[layer])
            views.append([(view.data_ptr(), view.shape, view.stride()) for view in both])
        if views[0] != views[1]:
            reader, writer = backends[name].get_name(), backends[target].get_name()
            limit = f"on {reader} would read the pages of {target} differently from how {writer} writes them"
            raise LayoutError("kv_sharing", name, limit, "choose one backend for both")


@dataclasses.dataclass(frozen=True, slots=True)
class _Layer:
    """The cache that one layer needs. `field` names its tensor in errors."""

    field: str
    page: KVCacheSpec
    num_blocks: int
    spec: LayerSpec
    backend: type[AttentionBackend]
    layout: str

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The cache in the backend's logical shape, with strides of the physical layout."""
        start = tensor.data_ptr()
        if start % ALIGNMENT:
            limit = f"must be a multiple of {ALIGNMENT} bytes, which kernels load at once"
            raise LayoutError(f"{self.field}.data_ptr()", start, limit)
        if tensor.ndim == 1:
            return self._of_bytes(tensor)
        return self._of_elements(tensor)

    def blocks(self, cache: torch.Tensor) -> Blocks:
        """The bytes of a cache that `view` gave."""
        each, start = cache.element_size(), cache.data_ptr()
        size = cache.numel() * each
        dim = self._block_dim()
        if dim is None:
            return Blocks(start, size, size, 1, by_block=False)
        return Blocks(start, cache.stride(dim) * each, size // self.num_blocks, self.num_blocks)

    def _of_bytes(self, raw: torch.Tensor) -> torch.Tensor:
        if raw.dtype not in (torch.uint8, torch.int8):
            remedy = f"or a cache {self._shape()} of {STORAGE_DTYPES[self.page.dtype]}"
            raise LayoutError(
                f"{self.field}.dtype", raw.dtype, "must be bytes, uint8 or int8, if 1-D", remedy
            )
        size = self.num_blocks * self.page.page_size_bytes
        if raw.numel() != size:
            limit = f"bytes must be {size}: {self.num_blocks} blocks of {self.page.page_size_bytes}"
            raise LayoutError(f"{self.field}.numel()", raw.numel(), limit, "plan with the pool's num_blocks")
        if not raw.is_contiguous():
            raise LayoutError(f"{self.field}.stride()", raw.stride(), "must be (1,)")
        return view_kv_cache(raw.view(torch.uint8), self.page, self.spec, self.backend, self.layout)

    def _of_elements(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype, shape = STORAGE_DTYPES[self.page.dtype], self._shape()
        # Engines without float8 types keep such caches as bytes.
        if tensor.dtype == torch.uint8 and self.spec.has_quantized_kv_cache and dtype.itemsize == 1:
            tensor = tensor.view(dtype)
        if tensor.dtype != dtype:
            limit = f"must be {dtype} with kv_cache_dtype={self.spec.kv_cache_dtype!r}"
            raise LayoutError(f"{self.field}.dtype", tensor.dtype, limit)
        if tuple(tensor.shape) != shape:
            limit = f"must be {shape} on {self.backend.get_name()}, {self.num_blocks} blocks"
            remedy = None
            order = self._order(self.layout)
            if tuple(tensor.shape) == tuple(shape[dim] for dim in order):
                back = [order.index(dim) for dim in range(len(order))]
                remedy = f"pass the logical view, tensor.permute({back})"
            raise LayoutError(f"{self.field}.shape", tuple(tensor.shape), limit, remedy)
        needed = self._strides(self.layout)
        dim = self._block_dim()
        if dim is not None and self.num_blocks > 1:
            # Blocks may be apart, as in a pool that keeps all layers of a block together.
            step, size = tensor.stride(dim), needed[dim]
            each = tensor.element_size()
            if step > size and step * each % ALIGNMENT:
                limit = f"of dimension {dim} must be a multiple of {ALIGNMENT} bytes"
                raise LayoutError(f"{self.field}.stride({dim})", step * each, f"bytes {limit}")
            needed = (*needed[:dim], max(step, size), *needed[dim + 1 :])
        if not _same_strides(tensor, needed):
            limit = f"must be {needed} for the layout {self.layout} of {self.backend.get_name()}"
            remedy = "keep each block in one piece"
            for other in answer(self.backend, "supported_kv_cache_layouts"):
                if other != self.layout and _same_strides(tensor, self._strides(other)):
                    remedy = f"call set_kv_cache_layout({other!r}) before the plan is made"
            raise LayoutError(f"{self.field}.stride()", tensor.stride(), limit, remedy)
        # Dimensions of one element may have any stride in torch, and kernels read them.
        return tensor.as_strided(shape, needed)

    def _shape(self) -> tuple[int, ...]:
        return cache_form(self.page, self.num_blocks, self.spec, self.backend, self.layout)[0]

    def _order(self, layout: str) -> tuple[int, ...]:
        return cache_form(self.page, self.num_blocks, self.spec, self.backend, layout)[1]

    def _strides(self, layout: str) -> tuple[int, ...]:
        """The strides of a cache of its own memory."""
        shape, order = cache_form(self.page, self.num_blocks, self.spec, self.backend, layout)
        strides = [0] * len(shape)
        step = 1
        for dim in reversed(order):
            strides[dim] = step
            step *= shape[dim]
        return tuple(strides)

    def _block_dim(self) -> int | None:
        """The dimension of blocks if it is the outermost in memory, so that a block is one piece; or None."""
        # A backend does not say which dimension has the blocks, so the one that grows with their number is it.
        more = cache_form(self.page, self.num_blocks + 1, self.spec, self.backend, self.layout)[0]
        outermost = self._order(self.layout)[0]
        return outermost if more[outermost] != self._shape()[outermost] else None


def _same_strides(tensor: torch.Tensor, needed: tuple[int, ...]) -> bool:
    found = zip(tensor.shape, tensor.stride(), needed, strict=True)
    return all(size == 1 or stride == each for size, stride, each in found)


def _plain(field: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor as memory that kernels can read and write by its address."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        limit = "must be a plain torch.Tensor: kernels use its memory and skip the code of a subclass"
        raise LayoutError(f"type({field})", type(tensor).__name__, limit)
    if tensor.is_nested or tensor.layout != torch.strided:
        found = "nested" if tensor.is_nested else tensor.layout
        raise LayoutError(f"{field}.layout", found, "must be torch.strided")
    # "cuda" means the current GPU, which only a tensor's device tells.
    needed = torch.empty(0, device=device).device
    if tensor.device != needed:
        raise LayoutError(f"{field}.device", str(tensor.device), f"must be {needed}, as the runtime's")
    if tensor.requires_grad:
        raise LayoutError(f"{field}.requires_grad", True, "must be False", "pass tensor.detach()")
    if tensor.is_conj() or tensor.is_neg():
        raise LayoutError(field, "a lazy view", "must be memory as it is", "pass tensor.resolve_neg()")
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        limit = "can only be written under torch.inference_mode()"
        remedy = "make the runtime there, or allocate the memory outside of it"
        raise LayoutError(field, "an inference tensor", limit, remedy)
    steps = ((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + sum(steps) + 1) * tensor.element_size()
    bytes_there = tensor.untyped_storage().nbytes()
    if tensor.numel() and end > bytes_there:
        raise LayoutError(f"{field}.untyped_storage()", bytes_there, f"bytes must be at least {end}")
    return tensor.detach()
