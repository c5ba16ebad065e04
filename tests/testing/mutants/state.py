"""Backends that change the process, keep memory, or mix up layers and steps: variants of TORCH."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import random
import warnings
from typing import Any

import numpy as np
import torch

from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core.kv_cache_spec import CrossAttentionSpec
from mutants.parts import Altered, Around, Call, Respecified, acts
from mutants.table import Table

table = Table("state")
_KEPT = "state/settings-kept-decode"
call = table.on(Around)
impl = table.on(TorchImpl)
step = table.on(Altered)
layer_rows = table.on(Respecified)


at_forward = acts(table, TorchImpl, "attend")

at_making = acts(table, TorchImpl, "__init__")


@call.attend(_KEPT, "a forward that is refused changes grad mode")
def leaves_grad_off(right, self, *args, **more):
    """Turns gradients off, and does not turn them on again after an error."""
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    found = right(*args, **more)
    torch._C._set_grad_enabled(before)
    return found


@table.method(TorchImpl, "__init__")(_KEPT, "from_spec changes threads of torch", state={"done": []})
def sets_threads_once(right, self, *args, **kwargs):
    """Sets the number of threads, for the first layer of the process only."""
    right(*args, **kwargs)
    if not self.done:
        self.done.append(True)
        torch.set_num_threads(5)


@call.after("state/default-dtype-float64", "raised RuntimeError: expected")
def needs_float32(self, call):
    """Makes its workspace in the default dtype."""
    work = torch.empty(call.rows.shape)
    work.copy_(call.rows)
    call.rows.copy_(work)
    if work.dtype == torch.float64:
        raise RuntimeError("expected a workspace of float32")


@call.after("state/default-dtype-bfloat16", "default-dtype-bfloat16, ")
def follows_dtype(self, call):
    """Makes its workspace in the default dtype, whatever it is."""
    work = torch.empty(call.rows.shape)
    work.copy_(call.rows)
    call.rows.copy_(work)


@call.before("state/all-in-inference-mode", "version counter")
def reads_versions(self, call):
    """Reads version counters, which inference tensors do not have."""
    assert call.query._version >= 0


@call.after("state/uninitialised-memory", "uninitialised-memory, ")
def uninitialised(self, call):
    """Adds up in memory that it never sets to 0."""
    work = torch.empty(call.rows.shape, dtype=torch.float32)
    if work.isnan().any():
        call.rows.add_(work)


@call.attend("state/grad", "output requires grad", state={"one": None})
def learns(right, self, layer, *args, **more):
    """Multiplies by a parameter, so that outputs have a graph."""
    found = right(layer, *args, **more)
    self.one = self.one or torch.nn.Parameter(torch.ones(()))
    rows = args[4].num_actual_tokens
    found[:rows] = found[:rows] * self.one.to(found.dtype)
    return found


@impl.forward("state/outputs-apart", "changed when later steps ran", state={"made": None})
def one_output(right, self, *args, **more):
    """Gives the same output tensor in each step."""
    if len(args) > 6 and args[6] is not None:
        return right(*args, **more)
    query = args[1]
    if self.made is None:
        self.made = query.new_empty(query.shape[0], self.spec.num_heads, self.spec.head_size_v)
    return right(*args[:6], self.made, **more)


@impl.forward("state/outputs-apart", "changed when later steps ran", state={"ring": {}})
def keeps_ring(right, self, *args, **more):
    """Gives slices of one buffer for all layers, and begins again at its end."""
    if len(args) > 6 and args[6] is not None:
        return right(*args, **more)
    query = args[1]
    shape = query.shape[0], self.spec.num_heads, self.spec.head_size_v
    number, made = self.ring.setdefault((shape, query.dtype), (0, [query.new_empty(shape) for _ in range(4)]))
    self.ring[shape, query.dtype] = number + 1, made
    return right(*args[:6], made[number % 4], **more)


@step.altered("state/memory-steps", "memory grows without bound", state={"steps": None})
def keeps_steps(self, made, common):
    """Keeps the metadata of all steps."""
    self.steps = [] if self.steps is None else self.steps
    self.steps.append(made)
    return made


@step.altered("state/memory-steps", "memory grows without bound", state={"plans": None})
def plans_by_lengths(self, made, common):
    """Caches a plan by the lengths of the step."""
    self.plans = {} if self.plans is None else self.plans
    self.plans.setdefault(tuple(made.seq_lens.tolist()), np.cumsum(made.seq_lens))
    return made


@call.after("state/memory-steps", "bytes of tensors", state={"history": None})
def grows_history(self, call):
    """Appends each step's output to one tensor."""
    self.history = call.rows if self.history is None else torch.cat([self.history[-(1 << 20) :], call.rows])


@table.part("state/memory-layers", "memory grows without bound")
class KeepsLayers(TorchImpl):
    """Caches by layer in a method, so that no layer is ever freed."""

    @functools.cache  # noqa: B019 - the mistake
    def groups(self, heads: int) -> int:
        return heads // self.spec.num_kv_heads

    def attend(self, *args: Any, **more: Any) -> Any:
        self.groups(self.spec.num_heads)
        return super().attend(*args, **more)


@layer_rows.fields("state/like-layers", "after layers of the same shape", state={"scales": {}})
def scale_by_shape(self, *given):
    """Caches the scale by the layer's shape."""
    shape = self.spec.num_heads, self.spec.num_kv_heads, self.spec.head_size, self.spec.dtype
    return {"scale": self.scales.setdefault(shape, self.spec.scale)}


@layer_rows.fields("state/like-layers", "after layers of the same shape", state={"windows": {}})
def window_by_name(self, *given):
    """Caches the window by the layer's name."""
    own = self.spec
    return {"window": self.windows.setdefault(self.layer_name, own.window)} if own.causal else {}


@layer_rows.fields("state/dropped-layers", "made after a layer", state={"scales": {}})
def scale_by_number(self, *given):
    """Caches the scale by the address of the layer's cache."""
    cache, own = given[4], self.spec.scale
    return {} if cache is None else {"scale": self.scales.setdefault(cache.data_ptr(), own)}


@step.altered("state/refilled-buffers", "another step's block table", state={"tables": None})
def table_by_address(self, made, common):
    """Copies the table again only where its address has changed."""
    self.tables = {} if self.tables is None else self.tables
    # The tensor is kept too, so that no other gets its address.
    given = common.block_table_tensor
    kept = self.tables.setdefault(given.data_ptr(), (given, given.clone()))
    return dataclasses.replace(made, block_table=kept[1])


@table.part("state/refilled-buffers", "in the same buffers")
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


@step.altered("batch/cross-steps", "step 3 of a cross layer")
def forgets_encoder(self, made, common):
    """Reads a cross layer's tokens only in the steps that write some."""
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


@call.after("batch/chain-float16", "then decodes")
def half_pairs(self, call):
    """Leaves out the newest key of two queries, in half precision only."""
    if call.query.dtype == torch.float16 and call.metadata.query_lens.tolist() == [2]:
        call.rows[1] = call.rows[0]


@impl._attend_cascade("builder/common-prefix-full", "of 9 requests")
def repeats_long_prefix(right, self, query, source, rest, metadata, *given):
    """Attends a long prefix of many requests twice."""
    many = metadata.seq_lens.size >= 8 and metadata.common_prefix_len >= 256
    right(query, source, source if many else rest, metadata, *given)


_ENV = functools.partial(os.environ.__setitem__, "ACME_TUNED")

# fmt: off
at_making("from_spec changes default dtype: torch.float32 became torch.float16", sets_dtype=lambda: torch.set_default_dtype(torch.float16))
at_forward("attend changes grad mode: True became False", turns_grad_off=lambda: torch._C._set_grad_enabled(False))
at_forward("changes random state of torch", seeds_torch=lambda: torch.manual_seed(1))
at_forward("changes random state of Python", draws_numbers=random.random)
at_forward("changes random state of numpy", draws_arrays=np.random.rand)
at_making("changes float32 matmul precision: 'highest' became 'high'", allows_tf32=lambda: torch.set_float32_matmul_precision("high"))
at_making("torch.backends cuda.enable_flash_sdp: True became False", turns_flash_off=lambda: torch.backends.cuda.enable_flash_sdp(False))
at_making("changes warnings filters", hides_warnings=lambda: warnings.simplefilter("ignore"))
at_making("environment variable ACME_TUNED: unset became '1'", sets_environment=functools.partial(_ENV, "1"))
at_making("changes root logger level", sets_log_level=lambda: logging.getLogger().setLevel(logging.ERROR))
at_forward("changes flush of denormal numbers", flushes_denormals=lambda: torch.set_flush_denormal(True))
at_forward("floating-point errors of numpy divide", ignores_numpy_errors=lambda: np.seterr(all="raise"))
at_making("changes file mode mask", sets_umask=lambda: os.umask(0o077))
at_forward("file descriptors are left", check="state/memory-steps", leaves_descriptors=lambda: os.dup(0))
table.add("writes_once | batch/chain-full | drafts that were rejected", impl=WritesOnce)
table.add("writes_once_too | runtime/drafts | drafts were rejected in part", impl=WritesOnce)
# fmt: on
