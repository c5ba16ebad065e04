"""The base of the built-in impls, which finds and writes pages, and the slots that their builders keep."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch

from attnplug.core.batch.host import IntArray
from attnplug.core.errors import BatchError, LayoutError
from attnplug.core.impl import AttentionImpl, AttentionLayer, host_scale
from attnplug.core.kv_cache_spec import CrossAttentionSpec, KVCacheSpec
from attnplug.core.kv_format import kv_format
from attnplug.core.metadata import AttentionMetadata
from attnplug.core.spec import AttentionType
from attnplug.ops.buffers import times_written
from attnplug.ops.checks import check_keys, check_kv_write, check_room, head_scales, kv_scales, pages_of
from attnplug.ops.kv_codec import bound_codec_write
from attnplug.ops.kv_write import bound_kv_write
from attnplug.ops.storage import compute_dtype

_M = TypeVar("_M", bound=AttentionMetadata)


def own_slots(kv_cache_spec: KVCacheSpec, slot_mapping: torch.Tensor, tokens: int) -> torch.Tensor:
    """The first `tokens` slots; for cross layers all, because theirs are the slots of the encoder's tokens."""
    # A slice costs the host as much as a kernel launch, so a slice of everything is left out.
    if slot_mapping.shape[0] == tokens or isinstance(kv_cache_spec, CrossAttentionSpec):
        return slot_mapping
    if slot_mapping.shape[0] < tokens:
        limit = f"must have a slot for each of {tokens} tokens, or their keys are lost"
        raise BatchError(
            "slot_mapping", tuple(slot_mapping.shape), limit, "give -1 for tokens that are not written"
        )
    return slot_mapping[:tokens]


def check_prefix(prefix: int, lengths: IntArray | None, query_lens: IntArray) -> None:
    """BatchError unless every request with queries has computed `prefix` tokens, as far as `lengths` tells."""
    if not prefix:
        return
    computed = max(prefix, 0)
    if lengths is not None:
        before = lengths - query_lens
        computed = int(before[query_lens > 0].min(initial=before.max(initial=0)))
    if not 0 <= prefix <= computed:
        limit = f"must be in 0 .. {max(computed, 0)}, the tokens that every request has computed"
        raise BatchError("common_prefix_len", prefix, limit)


class Pages:
    """The pages of one cache, as its backend splits them.

    They keep the cache's memory alive. So their owner must drop them when `forget` is called, and may keep only
    their `form`.

    Args:
        kv_cache: the cache.
        k: `[num_blocks, block_size, Hkv, D]`.
        v: `[num_blocks, block_size, Hkv, Dv]`.
        forget: called when `kv_cache` is deleted.
    """

    __slots__ = ("_cache", "form", "k", "v")

    def __init__(
        self, kv_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, forget: Callable[[object], None]
    ) -> None:
        # A view would keep `kv_cache` alive, and `forget` would never be called.
        self.k, self.v = k.detach(), v.detach()
        # A strong reference would keep a cache in memory that the engine has dropped.
        self._cache = weakref.ref(kv_cache, forget)
        self.form = _form(kv_cache)
        """The cache's address, shape, strides and dtype."""

    def are_of(self, kv_cache: torch.Tensor) -> bool:
        """Whether `kv_cache` is that cache, with the same memory, shape and dtype."""
        return self._cache() is kv_cache and self.form == _form(kv_cache)


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    # Cached bindings fix strides and dtypes, so a cache of another form must not use them.
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


class BuiltinImpl(AttentionImpl[_M]):
    """Writes and finds the pages of a layer; subclasses attend."""

    _last_pages: Pages | None = None

    _bind_write: ClassVar[Callable[..., Callable[..., None]]] = staticmethod(bound_kv_write)
    """Makes the function that writes pages, as `attnplug.ops.kv_write.bound_kv_write`."""
    _bind_codec: ClassVar[Callable[..., Callable[..., None]]] = staticmethod(bound_codec_write)
    """Makes the function that writes pages with planes, as `attnplug.ops.kv_codec.bound_codec_write`."""
    _reads_adjacent: ClassVar[bool] = False
    """Whether the kernels read the elements of a head as neighbours."""
    _write_form: object = None
    _read_scales: tuple[Any, Any, tuple[int, int], tuple[Any, Any]] | None = None
    _bound_write: Callable[..., None]

    def update_kv_cache(
        self,
        layer: AttentionLayer | None,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """As AttentionImpl.update_kv_cache."""
        pages = self._pages_of(kv_cache)
        scales = self._scales(layer, pages.k.dtype)
        rows, keys, values = slot_mapping.shape[0], key.shape, value.shape
        form: tuple[object, ...] = (pages.form, scales, slot_mapping.stride(), slot_mapping.dtype)
        form += (keys[1:], key.stride(), key.dtype, values[1:], value.stride(), value.dtype)
        # Tensors of the last call's form need no second check.
        if form != self._write_form or keys[0] < rows or values[0] < rows:
            check_keys(key, value, rows, self.spec)
            row = kv_format(self.spec.resolved_kv_cache_dtype)
            check_kv_write(key, value, pages.k, pages.v, slot_mapping, row if row.codec else None)
            given = key, value, pages.k, pages.v, slot_mapping
            if row.codec:
                self._bound_write = self._bind_codec(self.spec, *given, scales)
            else:
                self._bound_write = self._bind_write(*given, self._on_device(scales, key.device))
            self._write_form = form
        self._bound_write(key, value, pages.k, pages.v, slot_mapping)

    @functools.cached_property
    def _dtype(self) -> torch.dtype:
        return compute_dtype(self.spec)

    def _pages_of(self, kv_cache: torch.Tensor) -> Pages:
        """K and V of the cache, the same object until another cache comes; LayoutError unless it is the layer's."""
        pages = self._last_pages
        if pages is None or not pages.are_of(kv_cache):
            pages = Pages(kv_cache, *pages_of(self.backend, kv_cache, self.spec), self._forget_pages)
            if (
                self._reads_adjacent
                and pages.k.shape[-1] > 1
                and (pages.k.stride(-1), pages.v.stride(-1)) != (1, 1)
            ):
                limit = "must end in 1: kernels read adjacent elements of a head"
                raise LayoutError("kv_cache.stride()", kv_cache.stride(), limit, "make the cache contiguous")
            self._last_pages = pages
        return pages

    def _pages_with_room(self, kv_cache: torch.Tensor, table: torch.Tensor, longest: int) -> Pages:
        """`_pages_of`; BatchError if an encoder's table is too narrow: its builder does not know of its cache."""
        pages = self._pages_of(kv_cache)
        if self.spec.is_encoder:
            check_room(longest, table.shape[1], pages.k.shape[1])
        return pages

    def _forget_pages(self, _: object) -> None:
        self._last_pages = None

    @property
    def _attends_own_keys(self) -> bool:
        """Whether the keys of a call are written to the pages that the layer reads."""
        cross = self.spec.attn_type is AttentionType.ENCODER_DECODER
        return not cross and self.kv_sharing_target_layer_name is None

    def _scales(self, layer: AttentionLayer | None, stored: torch.dtype) -> tuple[Any, Any]:
        """Scales of keys and values, from the engine's layer or the layer's tensors; 1 for 16 bits and more.

        Floats, and with `head_scales` tuples of one for each KV head.
        """
        if stored.itemsize > 1:
            return 1.0, 1.0
        if self.spec.head_scales:
            given, known = head_scales(layer, self.tensors, self.spec), self._read_scales
            writes = times_written(given[0]), times_written(given[1])
            # Reading tensors makes the host wait, so those of the last call are not read again unless an engine wrote to them.
            if known is None or known[0] is not given[0] or known[1] is not given[1] or known[2] != writes:
                numbers = host_scale(given[0], self.spec), host_scale(given[1], self.spec)
                known = self._read_scales = (*given, writes, numbers)
            return known[3]
        return self._own_scales if layer is None else kv_scales(layer, self.tensors)

    def _on_device(self, scales: tuple[Any, Any], device: torch.device) -> tuple[Any, Any]:
        """`_scales`, those of heads as float32 `[Hkv]` on a device: the same tensors as long as the impl lives."""
        if not isinstance(scales[0], tuple):
            return scales
        for each in scales:
            # Captured graphs read the tensors, so none is ever replaced.
            if (each, device) not in self._scale_tensors:
                held = torch.tensor(each, dtype=torch.float32, device=device)
                self._scale_tensors[each, device] = held
        return self._scale_tensors[scales[0], device], self._scale_tensors[scales[1], device]

    @functools.cached_property
    def _scale_tensors(self) -> dict[tuple[tuple[float, ...], torch.device], torch.Tensor]:
        return {}

    @functools.cached_property
    def _own_scales(self) -> tuple[float, float]:
        return kv_scales(None, self.tensors)
