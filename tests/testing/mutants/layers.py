"""Impls that keep what they must not keep: state of other layers, calls, caches or threads."""

from __future__ import annotations

import threading
import time
from typing import Any, ClassVar

import torch

from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core import LayerTensors
from mutants.parts import Around, Respecified
from mutants.table import Table

table = Table("layers")
impl = table.on(TorchImpl)
call = table.on(Around)
layer_rows = table.on(Respecified)


@table.part("layers/own-sinks", "the layer with another of the same spec")
class FirstTensors(TorchImpl):
    """All layers of the process have the sinks and slopes of the first with as many heads."""

    kept: ClassVar[dict[Any, torch.Tensor]] = {}

    def _bind(self, spec: Any, layer_name: str, tensors: LayerTensors, *rest: Any) -> None:
        if tensors.sinks is not None:
            sinks = self.kept.setdefault(spec.num_heads, tensors.sinks)
            tensors = LayerTensors(sinks, tensors.alibi_slopes, tensors.k_scale, tensors.v_scale)
        super()._bind(spec, layer_name, tensors, *rest)


first_tensors = table.on(FirstTensors)


@first_tensors._bind("layers/own-alibi_slopes", "the layer with another of the same spec", state={"kept": {}})
def tensors_by_name(self, spec, layer_name, tensors, *rest):
    """Keeps tensors by the name of the layer, for the whole process."""
    if tensors.alibi_slopes is not None:
        slopes = self.kept.setdefault(layer_name, tensors.alibi_slopes)
        same = slopes.shape == tensors.alibi_slopes.shape
        slopes = slopes if same else tensors.alibi_slopes
        tensors = LayerTensors(tensors.sinks, slopes, tensors.k_scale, tensors.v_scale)
    TorchImpl._bind(self, spec, layer_name, tensors, *rest)


@impl.attend("builder/several-layers-full", "the layer with other sinks")
def sinks_of_step(right, self, *given, **asked):
    """Keeps the sinks with the step's metadata, by the layer's spec: the second such layer has the first's."""
    if self.tensors.sinks is None:
        return right(*given, **asked)
    own = self.tensors
    sinks = given[5].plans.setdefault(("sinks", self.spec), own.sinks)
    self.tensors = LayerTensors(sinks, own.alibi_slopes, own.k_scale, own.v_scale)
    try:
        return right(*given, **asked)
    finally:
        self.tensors = own


@impl.attend("builder/several-layers-full", "the layer with other keys")
def gathers_once(right, self, *given, **asked):
    """Reads the cache of the step's first layer with as many elements, for all layers."""
    cache = given[4]
    if cache is None:
        return right(*given, **asked)
    first = given[5].plans.setdefault(("cache", cache.shape, cache.dtype), cache)
    return right(*given[:4], first, *given[5:], **asked)


@impl._pages_of("builder/build-full", "step 2 of one builder")
def first_cache(right, self, kv_cache):
    """Keeps the pages of the first cache that it saw: an engine may give it another."""
    if self._last_pages is None:
        self._kept = kv_cache
        return right(kv_cache)
    return self._last_pages


@impl.update_kv_cache("batch/no-state-decode", "in step 2 of one impl and builder", state={"first": None})
def writes_first_cache(right, self, layer, key, value, kv_cache, slot_mapping):
    """Writes to the memory of the first cache, and reads the one it is given."""
    if self.first is None:
        self.first = kv_cache
    right(layer, key, value, self.first, slot_mapping)


@impl.update_kv_cache("batch/no-state-mixed", "in step 4 of one impl and builder", state={"slots": None})
def first_slots(right, self, layer, key, value, kv_cache, slot_mapping):
    """Writes to the slots of the first step with as many tokens."""
    if self.slots is None or self.slots.shape != slot_mapping.shape:
        self.slots = slot_mapping.clone()
    right(layer, key, value, kv_cache, self.slots)


@call.after("batch/no-state-decode", "in step 2 of one impl and builder", state={"rows": None})
def first_rows(self, call):
    """Has a scratch of as many rows as its first call, and answers no more rows than that."""
    if self.rows is None:
        self.rows = call.query.shape[0]
    call.rows[self.rows :] = 0


@layer_rows.fields(
    "tensors/deterministic-decode",
    "the same inputs with the same impl gave another output",
    state={"calls": 0},
)
def layer_by_calls(self, *given):
    """Doubles the scale in each second call, which it takes for the second layer's."""
    self.calls += 1
    return {"scale": self.spec.scale * (2 - self.calls % 2)}


@call.after("tensors/refilled-*", "kept by the addresses of its tensors", state={"kept": None})
def by_address(self, call):
    """Gives the last answer again if the query has the address and the shape of the last call."""
    at = call.query.data_ptr(), call.query.shape, call.metadata.query_lens.tobytes()
    if self.kept is not None and self.kept[0] == at:
        call.rows.copy_(self.kept[1])
    # The query is kept, so that no other tensor has its address.
    self.kept = at, call.rows.clone(), call.query


@impl.update_kv_cache("tensors/refilled-decode", "kept by the addresses of its tensors", state={"kept": None})
def keys_by_address(right, self, layer, key, value, kv_cache, slot_mapping):
    """Writes the keys of the last call again if they have the same address."""
    at = key.data_ptr(), key.shape, key.stride()
    if self.kept is None or self.kept[0] != at:
        self.kept = at, key.clone(), key
    right(layer, self.kept[1], value, kv_cache, slot_mapping)


@impl.forward("state/outputs-apart-decode", "changed when later steps ran", state={"buffer": None})
def own_buffer(right, self, *given, **asked):
    """Returns the same buffer at each call without an output."""
    if len(given) > 6 and given[6] is not None:
        return right(*given, **asked)
    made = right(*given[:6], **asked)
    if self.buffer is None or self.buffer.shape != made.shape:
        self.buffer = made
    return self.buffer.copy_(made)


@call.after("tensors/same-each-call", "call 25 of one impl with the same inputs", state={"calls": 0})
def tired(self, call):
    """Wrong from its 25th call on: its staging buffer is not advanced."""
    self.calls += 1
    if self.calls >= 25:
        call.rows.mul_(1.5)


@call.after("tensors/same-each-call", "call 29 of one impl with the same inputs", state={"calls": 0})
def seldom(self, call):
    """Wrong in every 29th call of an impl."""
    self.calls += 1
    if self.calls % 29 == 0:
        call.rows.zero_()


@table.part("runtime/other-thread", "raised AttributeError")
class OwnThread(TorchImpl):
    """Works only in the thread that made it."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._local = threading.local()
        self._local.scratch = True

    def attend(self, *given: Any, **asked: Any) -> torch.Tensor:
        assert self._local.scratch
        return super().attend(*given, **asked)


@call.before("runtime/threads", "state shared between two runtimes", state={"scratch": []})
def one_scratch(self, call):
    """All threads share one scratch for the query."""
    self.scratch[:] = [call.query]
    time.sleep(0.002)
    (found,) = self.scratch
    if found.shape == call.query.shape:
        call.query = found


@call.after("builder/several-layers-full", "one metadata for several layers")
def eats_metadata(self, call):
    """Counts the lengths down when it is done with them."""
    call.metadata.seq_lens -= call.metadata.query_lens > 0


@impl.forward("builder/several-layers-full", "one metadata for several layers")
def drops_slots(right, self, *given, **asked):
    """Drops the slots from the metadata once it has written."""
    found = right(*given, **asked)
    if given[4] is not None:
        given[5].slot_mapping = given[5].slot_mapping[:0]
    return found


@impl.process_weights_after_loading("tensors/sinks-kept", "modified sinks")
def folds_sinks(self, act_dtype):
    """Converts its sinks to base 2 in place at load, and back in a copy."""
    own = self.tensors
    if own.sinks is not None:
        own.sinks.mul_(1.4426950408889634)
        self.tensors = LayerTensors(
            own.sinks / 1.4426950408889634, own.alibi_slopes, own.k_scale, own.v_scale
        )


@table.part("layers/unlike", "among layers with dtype=bfloat16, dtype=float16")
class NeedsLoading(TorchImpl):
    """Takes the dtype of the first layer that was loaded for the dtype of all."""

    dtype: ClassVar[Any] = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        NeedsLoading.dtype = NeedsLoading.dtype or act_dtype

    def attend(self, layer: Any, query: torch.Tensor, *given: Any, **asked: Any) -> torch.Tensor:
        return super().attend(layer, query.to(self.dtype).to(query.dtype), *given, **asked)


@table.part("cache/stored-auto", "gives back nan for")
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


# fmt: off
# Ignores that it shares another layer's cache.
impl._bind("cache/sharing-writes-none", "of a layer with kv_sharing_target_layer_name",
    drops_target=lambda right, self, spec, name, tensors, target=None, options=None: right(spec, name, tensors, None, options))
# Reads the scales of its tensors, never those of the engine's layer.
impl._scales("cache/scales-of-layer-fp8", "which differ from those given to from_spec", own_scales=lambda right, self, layer, stored: right(None, stored))
# fmt: on


@impl._scales("layers/unlike", "the layer with kv_cache_dtype=fp8", state={"kept": []})
def first_scales(right, self, layer, stored):
    """All layers have the scales of the first one."""
    if stored.itemsize > 1:
        return 1.0, 1.0
    if not self.kept:
        self.kept.append(right(layer, stored))
    return self.kept[0]
