"""Backends that write or read the KV cache wrongly: variants of TORCH, each with one mistake."""

from __future__ import annotations

from typing import Any

import torch
from catching import wrong
from wrong_structure import Around, Call

from attnplug.backends.impl import Pages
from attnplug.backends.torch_native.backend import TorchBackend
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core.errors import LayoutError
from attnplug.ops.kv_write import write_kv_cache
from attnplug.ops.storage import typed_view

__all__ = ["WRONG_CACHES"]


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


class WritesNull(Writer):
    """Writes to the null block."""

    def and_then(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        k[0, 0] = 0.25


class WritesMinusOne(Writer):
    """Writes slot -1 in front of the first row."""

    def and_then(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        if bool((slots < 0).any()):
            k.as_strided((1,), (1,), k.storage_offset() - 1).fill_(0.5)


class WritesLastForMinusOne(Writer):
    """Counts slot -1 from the end."""

    def and_then(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        if bool((slots < 0).any()):
            v[-1, -1] = 0.5


class ClearsRows(Writer):
    """Clears the row behind the last that it wrote."""

    def and_then(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        size = k.shape[1]
        last = int(slots.max())
        if (last + 1) % size:
            k[last // size, last % size + 1] = 0


class Overflows(Writer):
    """Lets values that are too large become NaN."""

    def and_then(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
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


class NoScale(StoresOtherwise):
    """Stores as if the scales were 1."""

    def used(self, k_scale: float, v_scale: float) -> tuple[float, float]:
        return 1.0, 1.0


class OneScale(StoresOtherwise):
    """Stores values with the keys' scale."""

    def used(self, k_scale: float, v_scale: float) -> tuple[float, float]:
        return k_scale, k_scale


class TimesScale(StoresOtherwise):
    """Multiplies where it should divide."""

    def used(self, k_scale: float, v_scale: float) -> tuple[float, float]:
        return 1 / k_scale, 1 / v_scale


class TwoPercentOff(StoresOtherwise):
    """Stores values a little smaller than they are."""

    def update_kv_cache(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        super().update_kv_cache(layer, key, value * 0.98, kv_cache, slot_mapping)

    def used(self, k_scale: float, v_scale: float) -> tuple[float, float]:
        return k_scale, v_scale


class AttendWrites(Around):
    """Writes once more when it attends."""

    def before(self, call: Call) -> None:
        if call.kv_cache is not None:
            k_and_v(self, call.kv_cache)[1][-1, -1] = 0.5


class SharerWrites(TorchImpl):
    """Writes the cache of the layer whose cache it shares."""

    def forward(self, layer: Any, query: Any, *args: Any, **more: Any) -> torch.Tensor:
        key, value, kv_cache, metadata, *_ = args
        if kv_cache is not None and key is not None:
            self.update_kv_cache(layer, key, value, kv_cache, metadata.slot_mapping)
        return super().forward(layer, query, *args, **more)


class ReadsWholePages(Around):
    """Multiplies the values of unused rows by weight 0 and adds them."""

    def after(self, call: Call) -> None:
        if call.kv_cache is None:
            return
        _, v = k_and_v(self, call.kv_cache)
        for request, length in enumerate(call.metadata.seq_lens.tolist()):
            start, stop = call.metadata.query_starts[request : request + 2]
            pages = v[call.metadata.block_table[request, : -(-length // v.shape[1])].long()]
            call.output[start:stop] += (0 * pages.float()).sum().to(call.output.dtype)


class FollowsTails(Around):
    """Gathers a page for each table column and multiplies the surplus by 0."""

    def after(self, call: Call) -> None:
        if call.kv_cache is not None:
            k, _ = k_and_v(self, call.kv_cache)
            tails = call.metadata.block_table[0, -2:].long() % len(k)
            call.rows.add_((0 * k[tails].float()).sum())


class TrustsTails(Around):
    """Fetches the page of every entry of the table ahead of time."""

    def before(self, call: Call) -> None:
        if call.kv_cache is not None:
            k_and_v(self, call.kv_cache)[0][call.metadata.block_table[:, -1].long()]


class AttendsNull(TorchImpl):
    """Attends keys before the window, in freed pages."""

    def _bind(self, spec: Any, *args: Any, **more: Any) -> None:
        windowed = spec.causal and spec.window[0] >= 0
        super()._bind(spec.replace(window=(spec.window[0] + 4, 0)) if windowed else spec, *args, **more)


class MisreadsHnd(TorchImpl):
    """Assumes one order of heads and tokens and ignores the strides."""

    def _pages_of(self, kv_cache: torch.Tensor) -> Pages:
        if kv_cache.ndim == 5 and kv_cache.stride(0) == kv_cache[0].numel():
            dense = torch.empty(kv_cache.shape, device="meta").stride()
            kv_cache = kv_cache.as_strided(kv_cache.shape, dense)
        k, v = TorchBackend.split_kv(typed_view(kv_cache, self.spec), self.spec)
        return Pages(kv_cache, k, v, lambda _: None)


class MisreadsLayers(TorchImpl):
    """Assumes that pages are contiguous."""

    def _pages_of(self, kv_cache: torch.Tensor) -> Pages:
        strides = (kv_cache[0].numel(), *kv_cache.stride()[1:])
        return super()._pages_of(kv_cache.as_strided(kv_cache.shape, strides))


class WritesNeighbours(Writer):
    """Writes to the memory between two pages."""

    def and_then(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        behind = 2 * v[0].numel()
        if v.stride(0) > behind:
            v.as_strided((1,), (1,), v.storage_offset() - v[0].numel() + behind).fill_(0.5)


class Pages16(TorchImpl):
    """Reads pages of 16 tokens only."""

    def _pages_of(self, kv_cache: torch.Tensor) -> Pages:
        if kv_cache.shape[2] != 16:
            raise LayoutError("block_size", kv_cache.shape[2], "must be 16")
        return super()._pages_of(kv_cache)


class AttendsGiven(Around):
    """Fails without keys in the call, though the pages have them."""

    def before(self, call: Call) -> None:
        if call.kv_cache is not None and call.key is None:
            raise TypeError("'NoneType' object is not subscriptable")


class ForwardWritesMore(TorchImpl):
    """Writes more to the cache than update_kv_cache."""

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, *args: Any, **more: Any
    ) -> Any:
        found = super().forward(layer, query, key, value, kv_cache, *args, **more)
        if kv_cache is not None:
            k_and_v(self, kv_cache)[1][args[0].slot_mapping[0] // kv_cache.shape[2], -1] = 0
        return found


class MovesLater(TorchImpl):
    """Gives the right answer, then changes the keys that it wrote."""

    def forward(self, *args: Any, **more: Any) -> torch.Tensor:
        found = super().forward(*args, **more)
        if args[4] is not None:
            k, _ = k_and_v(self, args[4])
            slot = args[5].slot_mapping[0]
            k[slot // k.shape[1], slot % k.shape[1]] *= 0.5
        return found


class WritesQueriesToo(TorchImpl):
    """Writes to the null block for a cross layer."""

    def forward(self, *args: Any, **more: Any) -> torch.Tensor:
        found = super().forward(*args, **more)
        if args[4] is not None and not self.spec.causal:
            k_and_v(self, args[4])[0][0, args[5].query_starts[-1]] = 0.5
        return found


class NeverRight(Around):
    """Wrong in every layout."""

    def after(self, call: Call) -> None:
        call.rows.mul_(1.5)


WRONG_CACHES = [
    wrong(
        "writes_null", "cache/only-slots-written", "K of row 0 of block 0, the null block", impl=WritesNull
    ),
    wrong(
        "writes_minus_one",
        "cache/negative-slots",
        "wrote to memory in front of the cache",
        impl=WritesMinusOne,
    ),
    wrong("clears_rows", "cache/only-slots-written-decode", "no slot names it", impl=ClearsRows),
    wrong("no_scale", "cache/stored-fp8", "mistake: the scale left out", impl=NoScale),
    wrong("one_scale", "cache/stored-fp8", "mistake: the other's scale", impl=OneScale),
    wrong("times_scale", "cache/stored-fp8", "mistake: multiplied by the scale", impl=TimesScale),
    wrong("overflows", "cache/clamped-fp8", "stored as nan, not as the largest finite", impl=Overflows),
    wrong("attend_writes", "cache/attend-only-reads", "attend wrote V of row", impl=AttendWrites),
    wrong(
        "sharer_writes", "cache/sharing-writes-none", "of a layer with kv_sharing_target", impl=SharerWrites
    ),
    wrong("reads_whole_pages", "cache/unused-rows", "with NaN in the rows of pages", impl=ReadsWholePages),
    wrong(
        "follows_tails", "cache/table-tails-decode", "table entries past a request's pages", impl=FollowsTails
    ),
    wrong("trusts_tails", "cache/table-tails-huge", "IndexError", impl=TrustsTails),
    wrong("attends_null", "cache/null-block", "in the null block", impl=AttendsNull),
    wrong("misreads_hnd", "cache/layout-HND", "with the layout NHD it is right", impl=MisreadsHnd),
    wrong("misreads_layers", "cache/strided-NHD", "whose pages of a block lie together", impl=MisreadsLayers),
    wrong("pages_16", "cache/block-size-32", "with pages of 32 tokens: raised LayoutError", impl=Pages16),
    wrong("attends_given", "cache/written-then-attended", "without key and value", impl=AttendsGiven),
    wrong(
        "writes_last_for_minus_one", "cache/negative-slots", "wrote V of row 15", impl=WritesLastForMinusOne
    ),
    wrong("two_percent_off", "cache/stored-auto", "gives back", impl=TwoPercentOff),
    wrong(
        "writes_neighbours", "cache/strided-NHD", "another layer's pages were written", impl=WritesNeighbours
    ),
    wrong(
        "forward_writes_more",
        "cache/written-then-attended",
        "leaves other V in the cache",
        impl=ForwardWritesMore,
    ),
    wrong("moves_later", "cache/block-size-16", "K of the new tokens is not where", impl=MovesLater),
    wrong("never_right", "cache/layout-HND", "with the layout HND: output", impl=NeverRight),
    wrong("writes_queries_too", "cache/only-slots-written-cross", "no slot names it", impl=WritesQueriesToo),
]
