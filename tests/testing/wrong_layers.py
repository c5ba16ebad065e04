"""Impls that keep what they must not keep: state of other layers, calls, caches or threads."""

from __future__ import annotations

import threading
import time
from typing import Any, ClassVar

import torch
from catching import wrong
from wrong_structure import Around, Call

from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core import LayerTensors

__all__ = ["WRONG_LAYERS"]


class FirstTensors(TorchImpl):
    """All layers of the process have the sinks and slopes of the first with as many heads."""

    kept: ClassVar[dict[Any, torch.Tensor]] = {}

    def _bind(self, spec: Any, layer_name: str, tensors: LayerTensors, *rest: Any) -> None:
        if tensors.sinks is not None:
            sinks = self.kept.setdefault(spec.num_heads, tensors.sinks)
            tensors = LayerTensors(sinks, tensors.alibi_slopes, tensors.k_scale, tensors.v_scale)
        super()._bind(spec, layer_name, tensors, *rest)


class TensorsByName(FirstTensors):
    """Keeps tensors by the name of the layer, for the whole process."""

    kept: ClassVar[dict[Any, torch.Tensor]] = {}

    def _bind(self, spec: Any, layer_name: str, tensors: LayerTensors, *rest: Any) -> None:
        if tensors.alibi_slopes is not None:
            slopes = self.kept.setdefault(layer_name, tensors.alibi_slopes)
            same = slopes.shape == tensors.alibi_slopes.shape
            slopes = slopes if same else tensors.alibi_slopes
            tensors = LayerTensors(tensors.sinks, slopes, tensors.k_scale, tensors.v_scale)
        TorchImpl._bind(self, spec, layer_name, tensors, *rest)


class SinksOfStep(TorchImpl):
    """Keeps the sinks with the step's metadata, by the layer's spec: the second such layer has the first's."""

    def attend(self, *given: Any, **asked: Any) -> torch.Tensor:
        if self.tensors.sinks is None:
            return super().attend(*given, **asked)
        own = self.tensors
        sinks = given[5].plans.setdefault(("sinks", self.spec), own.sinks)
        self.tensors = LayerTensors(sinks, own.alibi_slopes, own.k_scale, own.v_scale)
        try:
            return super().attend(*given, **asked)
        finally:
            self.tensors = own


class GathersOnce(TorchImpl):
    """Reads the cache of the step's first layer with as many elements, for all layers."""

    def attend(self, *given: Any, **asked: Any) -> torch.Tensor:
        cache = given[4]
        if cache is None:
            return super().attend(*given, **asked)
        first = given[5].plans.setdefault(("cache", cache.shape, cache.dtype), cache)
        return super().attend(*given[:4], first, *given[5:], **asked)


class FirstCache(TorchImpl):
    """Keeps the pages of the first cache that it saw: an engine may give it another."""

    def _pages_of(self, kv_cache: torch.Tensor) -> Any:
        if self._last_pages is None:
            self._kept = kv_cache
            return super()._pages_of(kv_cache)
        return self._last_pages


class WritesFirstCache(TorchImpl):
    """Writes to the memory of the first cache, and reads the one it is given."""

    first: Any = None

    def update_kv_cache(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        if self.first is None:
            self.first = kv_cache
        super().update_kv_cache(layer, key, value, self.first, slot_mapping)


class FirstSlots(TorchImpl):
    """Writes to the slots of the first step with as many tokens."""

    slots: Any = None

    def update_kv_cache(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        if self.slots is None or self.slots.shape != slot_mapping.shape:
            self.slots = slot_mapping.clone()
        super().update_kv_cache(layer, key, value, kv_cache, self.slots)


class FirstRows(Around):
    """Has a scratch of as many rows as its first call, and answers no more rows than that."""

    rows: Any = None

    def after(self, call: Call) -> None:
        if self.rows is None:
            self.rows = call.query.shape[0]
        call.rows[self.rows :] = 0


class LayerByCalls(TorchImpl):
    """Doubles the scale in each second call, which it takes for the second layer's."""

    calls = 0

    def attend(self, *given: Any, **asked: Any) -> torch.Tensor:
        own, self.spec = self.spec, self.spec.replace(scale=self.spec.scale * (1 + self.calls % 2))
        self.calls += 1
        try:
            return super().attend(*given, **asked)
        finally:
            self.spec = own


class ByAddress(Around):
    """Gives the last answer again if the query has the address and the shape of the last call."""

    kept: Any = None

    def after(self, call: Call) -> None:
        at = call.query.data_ptr(), call.query.shape, call.metadata.query_lens.tobytes()
        if self.kept is not None and self.kept[0] == at:
            call.rows.copy_(self.kept[1])
        # The query is kept, so that no other tensor has its address.
        self.kept = at, call.rows.clone(), call.query


class KeysByAddress(TorchImpl):
    """Writes the keys of the last call again if they have the same address."""

    kept: Any = None

    def update_kv_cache(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        at = key.data_ptr(), key.shape, key.stride()
        if self.kept is None or self.kept[0] != at:
            self.kept = at, key.clone(), key
        super().update_kv_cache(layer, self.kept[1], value, kv_cache, slot_mapping)


class OwnBuffer(TorchImpl):
    """Returns the same buffer at each call without an output."""

    buffer: Any = None

    def forward(self, *given: Any, **asked: Any) -> torch.Tensor:
        if len(given) > 6 and given[6] is not None:
            return super().forward(*given, **asked)
        made = super().forward(*given[:6], **asked)
        if self.buffer is None or self.buffer.shape != made.shape:
            self.buffer = made
        return self.buffer.copy_(made)


class Tired(Around):
    """Wrong from its 25th call on: its staging buffer is not advanced."""

    calls = 0

    def after(self, call: Call) -> None:
        self.calls += 1
        if self.calls >= 25:
            call.rows.mul_(1.5)


class Seldom(Around):
    """Wrong in every 29th call of an impl."""

    calls = 0

    def after(self, call: Call) -> None:
        self.calls += 1
        if self.calls % 29 == 0:
            call.rows.zero_()


class OwnThread(TorchImpl):
    """Works only in the thread that made it."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._local = threading.local()
        self._local.scratch = True

    def attend(self, *given: Any, **asked: Any) -> torch.Tensor:
        assert self._local.scratch
        return super().attend(*given, **asked)


class OneScratch(Around):
    """All threads share one scratch for the query."""

    scratch: ClassVar[list[torch.Tensor]] = []

    def before(self, call: Call) -> None:
        self.scratch[:] = [call.query]
        time.sleep(0.002)
        (found,) = self.scratch
        if found.shape == call.query.shape:
            call.query = found


class EatsMetadata(Around):
    """Counts the lengths down when it is done with them."""

    def after(self, call: Call) -> None:
        call.metadata.seq_lens -= call.metadata.query_lens > 0


class DropsSlots(TorchImpl):
    """Drops the slots from the metadata once it has written."""

    def forward(self, *given: Any, **asked: Any) -> torch.Tensor:
        found = super().forward(*given, **asked)
        if given[4] is not None:
            given[5].slot_mapping = given[5].slot_mapping[:0]
        return found


class FoldsSinks(TorchImpl):
    """Converts its sinks to base 2 in place at load, and back in a copy."""

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        own = self.tensors
        if own.sinks is not None:
            own.sinks.mul_(1.4426950408889634)
            self.tensors = LayerTensors(
                own.sinks / 1.4426950408889634, own.alibi_slopes, own.k_scale, own.v_scale
            )


class NeedsLoading(TorchImpl):
    """Takes the dtype of the first layer that was loaded for the dtype of all."""

    dtype: ClassVar[Any] = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        NeedsLoading.dtype = NeedsLoading.dtype or act_dtype

    def attend(self, layer: Any, query: torch.Tensor, *given: Any, **asked: Any) -> torch.Tensor:
        return super().attend(layer, query.to(self.dtype).to(query.dtype), *given, **asked)


class WritesLater(TorchImpl):
    """Writes a step's keys when the next one is attended."""

    pending: Any = None

    def update_kv_cache(self, *given: Any) -> None:
        self.pending = given

    def attend(self, *given: Any, **asked: Any) -> torch.Tensor:
        if self.pending is not None:
            super().update_kv_cache(*self.pending)
            self.pending = None
        return super().attend(*given, **asked)


class DropsTarget(TorchImpl):
    """Ignores that it shares another layer's cache."""

    def _bind(self, spec: Any, name: str, tensors: Any, target: Any = None, options: Any = None) -> None:
        super()._bind(spec, name, tensors, None, options)


class OwnScales(TorchImpl):
    """Reads the scales of its tensors, never those of the engine's layer."""

    def _scales(self, layer: Any, stored: torch.dtype) -> tuple[float, float]:
        return super()._scales(None, stored)


class FirstScales(TorchImpl):
    """All layers have the scales of the first one."""

    kept: ClassVar[list[tuple[float, float]]] = []

    def _scales(self, layer: Any, stored: torch.dtype) -> tuple[float, float]:
        if stored.itemsize > 1:
            return 1.0, 1.0
        if not self.kept:
            self.kept.append(super()._scales(layer, stored))
        return self.kept[0]


WRONG_LAYERS = [
    wrong("first_tensors", "layers/own-sinks", "the layer with another of the same spec", impl=FirstTensors),
    wrong(
        "tensors_by_name",
        "layers/own-alibi_slopes",
        "the layer with another of the same spec",
        impl=TensorsByName,
    ),
    wrong("sinks_of_step", "builder/several-layers-full", "the layer with other sinks", impl=SinksOfStep),
    wrong("gathers_once", "builder/several-layers-full", "the layer with another scale", impl=GathersOnce),
    wrong("first_cache", "builder/build-full", "step 2 of one builder", impl=FirstCache),
    wrong(
        "writes_first_cache",
        "batch/no-state-decode",
        "in step 2 of one impl and builder",
        impl=WritesFirstCache,
    ),
    wrong("first_slots", "batch/no-state-mixed", "in step 4 of one impl and builder", impl=FirstSlots),
    wrong("first_rows", "batch/no-state-decode", "in step 2 of one impl and builder", impl=FirstRows),
    wrong(
        "layer_by_calls",
        "tensors/deterministic-decode",
        "the same inputs with the same impl gave another output",
        impl=LayerByCalls,
    ),
    wrong("by_address", "tensors/refilled-*", "kept by the addresses of its tensors", impl=ByAddress),
    wrong(
        "keys_by_address",
        "tensors/refilled-decode",
        "kept by the addresses of its tensors",
        impl=KeysByAddress,
    ),
    wrong("own_buffer", "state/outputs-apart-decode", "changed when later steps ran", impl=OwnBuffer),
    wrong("tired", "tensors/same-each-call", "call 25 of one impl with the same inputs", impl=Tired),
    wrong("seldom", "tensors/same-each-call", "call 29 of one impl with the same inputs", impl=Seldom),
    wrong("own_thread", "runtime/other-thread", "raised AttributeError", impl=OwnThread),
    wrong("one_scratch", "runtime/threads", "state shared between two runtimes", impl=OneScratch),
    wrong(
        "eats_metadata", "builder/several-layers-full", "one metadata for several layers", impl=EatsMetadata
    ),
    wrong("drops_slots", "builder/several-layers-full", "one metadata for several layers", impl=DropsSlots),
    wrong("folds_sinks", "tensors/sinks-kept", "modified sinks", impl=FoldsSinks),
    wrong(
        "needs_loading",
        "layers/unlike",
        "among layers with dtype=bfloat16, dtype=float16",
        impl=NeedsLoading,
    ),
    wrong("writes_later", "cache/stored-auto", "gives back nan for", impl=WritesLater),
    wrong(
        "drops_target",
        "cache/sharing-writes-none",
        "of a layer with kv_sharing_target_layer_name",
        impl=DropsTarget,
    ),
    wrong(
        "own_scales",
        "cache/scales-of-layer-fp8",
        "which differ from those given to from_spec",
        impl=OwnScales,
    ),
    wrong("first_scales", "layers/unlike", "the layer with kv_cache_dtype=fp8", impl=FirstScales),
]
