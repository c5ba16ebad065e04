"""Backends that write or read the KV cache wrongly: variants of TORCH, each with one mistake."""

from __future__ import annotations

from typing import Any

import torch

from attnplug.backends.impl import Pages
from attnplug.backends.torch_native.backend import TorchBackend
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core.errors import LayoutError
from attnplug.ops.kv_write import write_kv_cache
from attnplug.ops.storage import typed_view
from mutants.parts import Around
from mutants.table import Table

table = Table("caches")
call = table.on(Around)
impl_rows = table.on(TorchImpl)


def k_and_v(impl: TorchImpl, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    pages = impl._pages_of(kv_cache)
    return pages.k, pages.v


class Writer(TorchImpl):
    """Runs a hook after it writes the cache."""

    def update_kv_cache(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        super().update_kv_cache(layer, key, value, kv_cache, slot_mapping)
        self.and_then(*k_and_v(self, kv_cache), slot_mapping)

    def and_then(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        raise NotImplementedError


writer = table.on(Writer)

# fmt: off
# Writes to the null block.
writer.and_then("cache/only-slots-written", "K of row 0 of block 0, the null block", writes_null=lambda self, k, v, slots: k[0, 0].fill_(0.25))
# Writes slot -1 in front of the first row.
writer.and_then("cache/negative-slots", "wrote to memory in front of the cache",
    writes_minus_one=lambda self, k, v, slots: (slots < 0).any() and k.as_strided((1,), (1,), k.storage_offset() - 1).fill_(0.5))
# Counts slot -1 from the end.
writer.and_then("cache/negative-slots", "wrote V of row 15", writes_last_for_minus_one=lambda self, k, v, slots: (slots < 0).any() and v[-1, -1].fill_(0.5))
# fmt: on


@writer.and_then("cache/only-slots-written-decode", "no slot names it")
def clears_rows(self, k, v, slots):
    """Clears the row behind the last that it wrote."""
    size = k.shape[1]
    last = int(slots.max())
    if (last + 1) % size:
        k[last // size, last % size + 1] = 0


@writer.and_then("cache/clamped-fp8", "stored as nan, not as the largest finite")
def overflows(self, k, v, slots):
    """Lets values that are too large become NaN."""
    for pages in (k, v) if k.dtype.itemsize == 1 else ():
        large = pages.float().abs() == torch.finfo(pages.dtype).max
        pages.view(torch.uint8)[large] = 0x7F


class StoresOtherwise(TorchImpl):
    """Stores with other scales than the layer's."""

    def update_kv_cache(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        scales = self.used(*self._scales(layer, kv_cache.dtype))
        write_kv_cache(key, value, *k_and_v(self, kv_cache), slot_mapping, *scales)

    def used(self, k_scale: float, v_scale: float) -> tuple[float, float]:
        raise NotImplementedError


stores_otherwise = table.on(StoresOtherwise)

# fmt: off
# Stores as if the scales were 1.
stores_otherwise.used("cache/stored-fp8", "mistake: the scale left out", no_scale=lambda self, k_scale, v_scale: (1.0, 1.0))
# Stores values with the keys' scale.
stores_otherwise.used("cache/stored-fp8", "mistake: the other's scale", one_scale=lambda self, k_scale, v_scale: (k_scale, k_scale))
# Multiplies where it should divide.
stores_otherwise.used("cache/stored-fp8", "mistake: multiplied by the scale", times_scale=lambda self, k_scale, v_scale: (1 / k_scale, 1 / v_scale))
# fmt: on


@table.part("cache/stored-auto", "gives back")
class TwoPercentOff(StoresOtherwise):
    """Stores values a little smaller than they are."""

    def update_kv_cache(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        super().update_kv_cache(layer, key, value * 0.98, kv_cache, slot_mapping)

    def used(self, k_scale: float, v_scale: float) -> tuple[float, float]:
        return k_scale, v_scale


# fmt: off
# Writes once more when it attends.
call.before("cache/attend-only-reads", "attend wrote V of row",
    attend_writes=lambda self, call: (call.kv_cache is None or k_and_v(self, call.kv_cache)[1][-1, -1].fill_(0.5)))
# fmt: on


@impl_rows.forward("cache/sharing-writes-none", "of a layer with kv_sharing_target")
def sharer_writes(right, self, layer, query, *args, **more):
    """Writes the cache of the layer whose cache it shares."""
    key, value, kv_cache, metadata, *_ = args
    if kv_cache is not None and key is not None:
        self.update_kv_cache(layer, key, value, kv_cache, metadata.slot_mapping)
    return right(layer, query, *args, **more)


@call.after("cache/unused-rows", "with NaN in the rows of pages")
def reads_whole_pages(self, call):
    """Multiplies the values of unused rows by weight 0 and adds them."""
    if call.kv_cache is None:
        return
    _, v = k_and_v(self, call.kv_cache)
    for request, length in enumerate(call.metadata.seq_lens.tolist()):
        start, stop = call.metadata.query_starts[request : request + 2]
        pages = v[call.metadata.block_table[request, : -(-length // v.shape[1])].long()]
        call.output[start:stop] += (0 * pages.float()).sum().to(call.output.dtype)


@call.after("cache/table-tails-decode", "table entries past a request's pages")
def follows_tails(self, call):
    """Gathers a page for each table column and multiplies the surplus by 0."""
    if call.kv_cache is not None:
        k, _ = k_and_v(self, call.kv_cache)
        tails = call.metadata.block_table[0, -2:].long() % len(k)
        call.rows.add_((0 * k[tails].float()).sum())


@call.before("cache/table-tails-huge", "IndexError")
def trusts_tails(self, call):
    """Fetches the page of every entry of the table ahead of time."""
    if call.kv_cache is not None:
        k_and_v(self, call.kv_cache)[0][call.metadata.block_table[:, -1].long()]


@impl_rows._bind("cache/null-block", "in the null block")
def attends_null(right, self, spec, *args, **more):
    """Attends keys before the window, in freed pages."""
    windowed = spec.causal and spec.window[0] >= 0
    right(spec.replace(window=(spec.window[0] + 4, 0)) if windowed else spec, *args, **more)


@impl_rows._pages_of("cache/layout-HND", "with the layout NHD it is right")
def misreads_hnd(self, kv_cache):
    """Assumes one order of heads and tokens and ignores the strides."""
    if kv_cache.ndim == 5 and kv_cache.stride(0) == kv_cache[0].numel():
        dense = torch.empty(kv_cache.shape, device="meta").stride()
        kv_cache = kv_cache.as_strided(kv_cache.shape, dense)
    k, v = TorchBackend.split_kv(typed_view(kv_cache, self.spec), self.spec)
    return Pages(kv_cache, k, v, lambda _: None)


@impl_rows._pages_of("cache/strided-NHD", "whose pages of a block lie together")
def misreads_layers(right, self, kv_cache):
    """Assumes that pages are contiguous."""
    strides = (kv_cache[0].numel(), *kv_cache.stride()[1:])
    return right(kv_cache.as_strided(kv_cache.shape, strides))


@writer.and_then("cache/strided-NHD", "another layer's pages were written")
def writes_neighbours(self, k, v, slots):
    """Writes to the memory between two pages."""
    behind = 2 * v[0].numel()
    if v.stride(0) > behind:
        v.as_strided((1,), (1,), v.storage_offset() - v[0].numel() + behind).fill_(0.5)


@impl_rows._pages_of("cache/block-size-32", "with pages of 32 tokens: raised LayoutError")
def pages_16(right, self, kv_cache):
    """Reads pages of 16 tokens only."""
    if kv_cache.shape[2] != 16:
        raise LayoutError("block_size", kv_cache.shape[2], "must be 16")
    return right(kv_cache)


@call.before("cache/written-then-attended", "without key and value")
def attends_given(self, call):
    """Fails without keys in the call, though the pages have them."""
    if call.kv_cache is not None and call.key is None:
        raise TypeError("'NoneType' object is not subscriptable")


@impl_rows.forward("cache/written-then-attended", "leaves other V in the cache")
def forward_writes_more(right, self, layer, query, key, value, kv_cache, *args, **more):
    """Writes more to the cache than update_kv_cache."""
    found = right(layer, query, key, value, kv_cache, *args, **more)
    if kv_cache is not None:
        k_and_v(self, kv_cache)[1][args[0].slot_mapping[0] // kv_cache.shape[2], -1] = 0
    return found


@impl_rows.forward("cache/block-size-16", "K of the new tokens is not where")
def moves_later(right, self, *args, **more):
    """Gives the right answer, then changes the keys that it wrote."""
    found = right(*args, **more)
    if args[4] is not None:
        k, _ = k_and_v(self, args[4])
        slot = args[5].slot_mapping[0]
        k[slot // k.shape[1], slot % k.shape[1]] *= 0.5
    return found


@impl_rows.forward("cache/only-slots-written-cross", "no slot names it")
def writes_queries_too(right, self, *args, **more):
    """Writes to the null block for a cross layer."""
    found = right(*args, **more)
    if args[4] is not None and not self.spec.causal:
        k_and_v(self, args[4])[0][0, args[5].query_starts[-1]] = 0.5
    return found


# Wrong in every layout.
call.after("cache/layout-HND", "with the layout HND: output", never_right=lambda self, call: call.rows.mul_(1.5))  # fmt: skip
