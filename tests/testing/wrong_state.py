"""Backends that change the process, keep memory, or mix up layers and steps: variants of TORCH."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import random
import warnings
import weakref
from typing import Any, ClassVar

import numpy as np
import torch
from catching import variant, wrong
from wrong_builders import Altered
from wrong_structure import Around, Call

from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.backends.torch_native.metadata import TorchMetadata
from attnplug.core import CommonAttentionMetadata
from attnplug.core.kv_cache_spec import CrossAttentionSpec

__all__ = ["RIGHT_STATE", "WRONG_STATE"]


def when_made(change: Any) -> type[TorchImpl]:
    """An impl that calls `change` when it is made."""

    class Changes(TorchImpl):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            change()

    return Changes


def when_run(change: Any) -> type[TorchImpl]:
    """An impl that calls `change` in each attend."""

    class Changes(Around):
        def before(self, call: Call) -> None:
            change()

    return Changes


class LeavesGradOff(Around):
    """Turns gradients off, and does not turn them on again after an error."""

    def attend(self, *args: Any, **more: Any) -> Any:
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        found = super().attend(*args, **more)
        torch._C._set_grad_enabled(before)
        return found


class OnceForTheProcess(TorchImpl):
    """Sets the number of threads, for the first layer of the process only."""

    done: ClassVar[list[bool]] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.done:
            self.done.append(True)
            torch.set_num_threads(5)


class DefaultDtype(Around):
    """Makes its workspace in the default dtype."""

    def after(self, call: Call) -> None:
        work = torch.empty(call.rows.shape)
        work.copy_(call.rows)
        call.rows.copy_(work)
        if work.dtype == torch.float64:
            raise RuntimeError("expected a workspace of float32")


class LowDefaultDtype(Around):
    """Makes its workspace in the default dtype, whatever it is."""

    def after(self, call: Call) -> None:
        work = torch.empty(call.rows.shape)
        work.copy_(call.rows)
        call.rows.copy_(work)


class ReadsVersions(Around):
    """Reads version counters, which inference tensors do not have."""

    def before(self, call: Call) -> None:
        assert call.query._version >= 0


class Uninitialised(Around):
    """Adds up in memory that it never sets to 0."""

    def after(self, call: Call) -> None:
        work = torch.empty(call.rows.shape, dtype=torch.float32)
        if work.isnan().any():
            call.rows.add_(work)


class Learns(Around):
    """Multiplies by a parameter, so that outputs have a graph."""

    one: Any = None

    def attend(self, layer: Any, *args: Any, **more: Any) -> Any:
        found = super().attend(layer, *args, **more)
        self.one = self.one or torch.nn.Parameter(torch.ones(()))
        rows = args[4].num_actual_tokens
        found[:rows] = found[:rows] * self.one.to(found.dtype)
        return found


class OneOutput(TorchImpl):
    """Gives the same output tensor in each step."""

    made: Any = None

    def forward(self, *args: Any, **more: Any) -> Any:
        if len(args) > 6 and args[6] is not None:
            return super().forward(*args, **more)
        query = args[1]
        if self.made is None:
            self.made = query.new_empty(query.shape[0], self.spec.num_heads, self.spec.head_size_v)
        return super().forward(*args[:6], self.made, **more)


class KeepsRing(TorchImpl):
    """Gives slices of one buffer for all layers, and begins again at its end."""

    ring: ClassVar[dict[Any, Any]] = {}

    def forward(self, *args: Any, **more: Any) -> Any:
        if len(args) > 6 and args[6] is not None:
            return super().forward(*args, **more)
        query = args[1]
        shape = query.shape[0], self.spec.num_heads, self.spec.head_size_v
        number, made = self.ring.setdefault(
            (shape, query.dtype), (0, [query.new_empty(shape) for _ in range(4)])
        )
        self.ring[shape, query.dtype] = number + 1, made
        return super().forward(*args[:6], made[number % 4], **more)


class KeepsSteps(Altered):
    """Keeps the metadata of all steps."""

    steps: Any = None

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        self.steps = [] if self.steps is None else self.steps
        self.steps.append(made)
        return made


class PlansByLengths(Altered):
    """Caches a plan by the lengths of the step."""

    plans: Any = None

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        self.plans = {} if self.plans is None else self.plans
        self.plans.setdefault(tuple(made.seq_lens.tolist()), np.cumsum(made.seq_lens))
        return made


class GrowsHistory(Around):
    """Appends each step's output to one tensor."""

    history: Any = None

    def after(self, call: Call) -> None:
        self.history = (
            call.rows if self.history is None else torch.cat([self.history[-(1 << 20) :], call.rows])
        )


class KeepsLayers(TorchImpl):
    """Caches by layer in a method, so that no layer is ever freed."""

    @functools.cache  # noqa: B019 - the mistake
    def groups(self, heads: int) -> int:
        return heads // self.spec.num_kv_heads

    def attend(self, *args: Any, **more: Any) -> Any:
        self.groups(self.spec.num_heads)
        return super().attend(*args, **more)


class ScaleByShape(TorchImpl):
    """Caches the scale by the layer's shape."""

    scales: ClassVar[dict[Any, float]] = {}

    def attend(self, *args: Any, **more: Any) -> Any:
        own = self.spec
        shape = own.num_heads, own.num_kv_heads, own.head_size, own.dtype
        self.spec = own.replace(scale=self.scales.setdefault(shape, own.scale))
        try:
            return super().attend(*args, **more)
        finally:
            self.spec = own


class WindowByName(TorchImpl):
    """Caches the window by the layer's name."""

    windows: ClassVar[dict[str, Any]] = {}

    def attend(self, *args: Any, **more: Any) -> Any:
        own = self.spec
        if not own.causal:
            return super().attend(*args, **more)
        window = self.windows.setdefault(self.layer_name, own.window)
        self.spec = own.replace(window=window)
        try:
            return super().attend(*args, **more)
        finally:
            self.spec = own


class ScaleByNumber(TorchImpl):
    """Caches the scale by the address of the layer's cache."""

    scales: ClassVar[dict[int, float]] = {}

    def attend(self, *args: Any, **more: Any) -> Any:
        own, cache = self.spec, args[4]
        if cache is None:
            return super().attend(*args, **more)
        self.spec = own.replace(scale=self.scales.setdefault(cache.data_ptr(), own.scale))
        try:
            return super().attend(*args, **more)
        finally:
            self.spec = own


class TableByAddress(Altered):
    """Copies the table again only where its address has changed."""

    tables: Any = None

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        self.tables = {} if self.tables is None else self.tables
        # The tensor is kept too, so that no other gets its address.
        given = common.block_table_tensor
        kept = self.tables.setdefault(given.data_ptr(), (given, given.clone()))
        return dataclasses.replace(made, block_table=kept[1])


class KeepsPages(Around):
    """Keeps a copy of the pages, and adds only the tokens that it writes itself."""

    copies: Any = None

    def update_kv_cache(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        super().update_kv_cache(layer, key, value, kv_cache, slot_mapping)
        self.copies = {} if self.copies is None else self.copies
        _, copy = self.copies.setdefault(kv_cache.data_ptr(), (kv_cache, kv_cache.clone()))
        super().update_kv_cache(layer, key, value, copy, slot_mapping)

    def before(self, call: Call) -> None:
        if call.kv_cache is not None and self.copies:
            call.kv_cache = self.copies[call.kv_cache.data_ptr()][1]


class ForgetsEncoder(Altered):
    """Reads a cross layer's tokens only in the steps that write some."""

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        if isinstance(self.kv_cache_spec, CrossAttentionSpec) and not common.slot_mapping.numel():
            return dataclasses.replace(made, seq_lens=np.zeros_like(made.seq_lens))
        return made


class WritesOnce(TorchImpl):
    """Writes each slot of a cache only once."""

    written: Any = None

    def update_kv_cache(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        self.written = set() if self.written is None else self.written
        slots = [-1 if slot in self.written else slot for slot in slot_mapping.tolist()]
        self.written.update(slots)
        super().update_kv_cache(layer, key, value, kv_cache, torch.tensor(slots))


class HalfPairs(Around):
    """Leaves out the newest key of two queries, in half precision only."""

    def after(self, call: Call) -> None:
        if call.query.dtype == torch.float16 and call.metadata.query_lens.tolist() == [2]:
            call.rows[1] = call.rows[0]


class RepeatsLongPrefix(TorchImpl):
    """Attends a long prefix of many requests twice."""

    def _attend_cascade(self, query: Any, source: Any, rest: Any, metadata: Any, *given: Any) -> None:
        many = metadata.seq_lens.size >= 8 and metadata.common_prefix_len >= 256
        super()._attend_cascade(query, source, source if many else rest, metadata, *given)


_ENV = functools.partial(os.environ.__setitem__, "ACME_TUNED")
_KEPT = "state/settings-kept"

WRONG_STATE = [
    wrong("sets_threads_once", _KEPT, "from_spec changes threads of torch", impl=OnceForTheProcess),
    wrong(
        "sets_dtype",
        _KEPT,
        "from_spec changes default dtype: torch.float32 became torch.float16",
        impl=when_made(lambda: torch.set_default_dtype(torch.float16)),
    ),
    wrong(
        "turns_grad_off",
        _KEPT,
        "attend changes grad mode: True became False",
        impl=when_run(lambda: torch._C._set_grad_enabled(False)),
    ),
    wrong("leaves_grad_off", _KEPT, "a forward that is refused changes grad mode", impl=LeavesGradOff),
    wrong("seeds_torch", _KEPT, "changes random state of torch", impl=when_run(lambda: torch.manual_seed(1))),
    wrong("draws_numbers", _KEPT, "changes random state of Python", impl=when_run(random.random)),
    wrong("draws_arrays", _KEPT, "changes random state of numpy", impl=when_run(np.random.rand)),
    wrong(
        "allows_tf32",
        _KEPT,
        "changes float32 matmul precision: 'highest' became 'high'",
        impl=when_made(lambda: torch.set_float32_matmul_precision("high")),
    ),
    wrong(
        "turns_flash_off",
        _KEPT,
        "torch.backends cuda.enable_flash_sdp: True became False",
        impl=when_made(lambda: torch.backends.cuda.enable_flash_sdp(False)),
    ),
    wrong(
        "hides_warnings",
        _KEPT,
        "changes warnings filters",
        impl=when_made(lambda: warnings.simplefilter("ignore")),
    ),
    wrong(
        "sets_environment",
        _KEPT,
        "environment variable ACME_TUNED: unset became '1'",
        impl=when_made(functools.partial(_ENV, "1")),
    ),
    wrong(
        "sets_log_level",
        _KEPT,
        "changes root logger level",
        impl=when_made(lambda: logging.getLogger().setLevel(logging.ERROR)),
    ),
    wrong(
        "flushes_denormals",
        _KEPT,
        "changes flush of denormal numbers",
        impl=when_run(lambda: torch.set_flush_denormal(True)),
    ),
    wrong(
        "ignores_numpy_errors",
        _KEPT,
        "floating-point errors of numpy divide",
        impl=when_run(lambda: np.seterr(all="raise")),
    ),
    wrong("sets_umask", _KEPT, "changes file mode mask", impl=when_made(lambda: os.umask(0o077))),
    wrong(
        "leaves_descriptors",
        "state/memory-steps",
        "file descriptors are left",
        impl=when_run(lambda: os.dup(0)),
    ),
    wrong("needs_float32", "state/default-dtype-float64", "raised RuntimeError: expected", impl=DefaultDtype),
    wrong("follows_dtype", "state/default-dtype-bfloat16", "default-dtype-bfloat16, ", impl=LowDefaultDtype),
    wrong("reads_versions", "state/all-in-inference-mode", "version counter", impl=ReadsVersions),
    wrong("uninitialised", "state/uninitialised-memory", "uninitialised-memory, ", impl=Uninitialised),
    wrong("learns", "state/grad", "output requires grad", impl=Learns),
    wrong("one_output", "state/outputs-apart", "changed when later steps ran", impl=OneOutput),
    wrong("keeps_ring", "state/outputs-apart", "changed when later steps ran", impl=KeepsRing),
    wrong("keeps_steps", "state/memory-steps", "memory grows without bound", builder=KeepsSteps),
    wrong("plans_by_lengths", "state/memory-steps", "memory grows without bound", builder=PlansByLengths),
    wrong("grows_history", "state/memory-steps", "bytes of tensors", impl=GrowsHistory),
    wrong("keeps_layers", "state/memory-layers", "memory grows without bound", impl=KeepsLayers),
    wrong("scale_by_shape", "state/like-layers", "after layers of the same shape", impl=ScaleByShape),
    wrong("window_by_name", "state/like-layers", "after layers of the same shape", impl=WindowByName),
    wrong("scale_by_number", "state/dropped-layers", "made after a layer", impl=ScaleByNumber),
    wrong("table_by_address", "state/refilled-buffers", "another step's block table", builder=TableByAddress),
    wrong("forgets_encoder", "batch/cross-steps", "step 3 of a cross layer", builder=ForgetsEncoder),
    wrong("writes_once", "batch/chain-full", "drafts that were rejected", impl=WritesOnce),
    wrong("writes_once_too", "runtime/drafts", "drafts were rejected in part", impl=WritesOnce),
    wrong("half_pairs", "batch/chain-float16", "then decodes", impl=HalfPairs),
    wrong("repeats_long_prefix", "builder/common-prefix-full", "of 9 requests", impl=RepeatsLongPrefix),
    wrong("keeps_pages", "state/refilled-buffers", "in the same buffers", impl=KeepsPages),
]


class BoundedCache(Altered):
    """Caches plans by lengths, the last 100."""

    plans: Any = None

    def altered(self, made: TorchMetadata, common: CommonAttentionMetadata) -> TorchMetadata:
        self.plans = {} if self.plans is None else self.plans
        self.plans[tuple(made.seq_lens.tolist())] = np.cumsum(made.seq_lens)
        if len(self.plans) > 100:
            del self.plans[next(iter(self.plans))]
        return made


class GrowsWorkspace(Around):
    """Has one workspace for the longest context so far, imports lazily, and knows its layers weakly."""

    work: ClassVar[Any] = None
    layers: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    def before(self, call: Call) -> None:
        import colorsys  # noqa: F401 - lazily, as a kernel library is

        self.layers.add(self)
        longest = int(call.metadata.seq_lens.max(initial=1))
        if self.work is None or self.work.numel() < longest:
            type(self).work = torch.empty(longest, dtype=torch.float32)
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
            torch.manual_seed(0)


RIGHT_STATE = [variant("BOUNDED", builder=BoundedCache), variant("WORKSPACE", impl=GrowsWorkspace)]
