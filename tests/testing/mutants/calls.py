"""Impls that treat one call wrongly: tensors in place, strides, modes, outputs and errors."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch

from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.backends.torch_native.source import PackedKeys
from mutants.parts import Around, Call
from mutants.table import Table

table = Table("calls")
call = table.on(Around)
impl = table.on(TorchImpl)


_HALVES = (torch.float16, torch.bfloat16)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor read as if its elements lay side by side."""
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride())


# fmt: off
# Scales a query of half precision in place and back, which leaves rounding errors.
call.before("tensors/inputs-kept-decode", "modified query, an input of the shape",
    scales_half=lambda self, call: (call.query.dtype in _HALVES and call.query[: call.metadata.num_actual_tokens].mul_(0.3).div_(0.3)))
# fmt: on


@impl.update_kv_cache("tensors/inputs-kept-decode", "modified key, an input of the shape")
def rounds_keys(right, self, layer, key, value, kv_cache, slot_mapping):
    """Rounds keys in place to what the cache will hold."""
    key.copy_(key.half())
    right(layer, key, value, kv_cache, slot_mapping)


# fmt: off
# Modifies a query in place only if it is a view.
call.after("tensors/strided-inputs-*", "modified query, an input of the shape",
    clears_strided=lambda self, call: call.query.is_contiguous() or call.query[: call.metadata.num_actual_tokens].neg_())
# Rewrites the step's spans.
call.after("builder/several-layers-spans", "one metadata for several layers",
    sorts_spans=lambda self, call: call.metadata.spans is None or call.metadata.spans.fill(0))
# fmt: on


@call.attend("tensors/scales-kept", "modified _k_scale of the engine's layer")
def scales_k(right, self, layer, *args, **more):
    """Folds the scale of keys into the engine's tensor."""
    found = right(layer, *args, **more)
    if layer is not None:
        layer._k_scale.mul_(1.5)
    return found


@table.part("*", "")
class DenseOutput(Around):
    """Writes a strided output as if its elements lay side by side."""

    given: Any = None

    def before(self, call: Call) -> None:
        self.given = call.output
        call.output = dense(call.output)

    def returned(self, call: Call) -> Any:
        return self.given


@call.after("merge/2-parts", "lse")
def dense_lse(self, call):
    """Writes the LSE as `[H, T]`."""
    call.lse.view(-1)[:] = call.lse.T.contiguous().view(-1)


# Rounds the LSE to half precision.
call.after("merge/2-parts", "lse", half_lse=lambda self, call: call.lse.copy_(call.lse.bfloat16()))


@impl.attend("tensors/strided-table-*", "a part of a wider one")
def dense_table(right, self, *given, **asked):
    """Reads the block table as if its rows lay side by side."""
    meta = given[5]
    meta.block_table = dense(meta.block_table)
    return right(*given, **asked)


@call.before("state/all-in-inference-mode", "Inference tensors do not track version counter")
def needs_version(self, call):
    """Reads the version counter, which tensors of inference mode lack."""
    _ = call.output._version


# fmt: off
# Asks for the gradient of its output, which inference mode refuses.
call.after("state/no-grad", "raised RuntimeError", needs_grad=lambda self, call: torch.ones(1, requires_grad=True).sum().backward())
# fmt: on


@impl._source("tensors/output-returned-direct", "output[")
def keys_like_queries(right, self, key, value, kv_cache, metadata):
    """Takes direct keys for packed like the queries."""
    if kv_cache is None and metadata.key_starts is not None:
        return PackedKeys(key, value, metadata.query_starts, metadata.seq_lens)
    return right(key, value, kv_cache, metadata)


@impl.forward("tensors/lse-undeclared", "must be refused with a BatchError, not ignored")
def swallows(right, self, *given, **asked):
    """Answers 0 after any error."""
    try:
        return right(*given, **asked)
    except Exception:
        return given[6].zero_()


@call.before("refused/never-after-acceptance", "raised AssertionError: sinks with a cap")
def asserts(self, call):
    """Refuses what it accepted, by an assertion."""
    assert not (self.spec.has_sinks and self.spec.logits_soft_cap), "sinks with a cap"


@call.before("tensors/inputs-kept-mixed", "raised NotImplementedError: queries of more than 16")
def refuses_late(self, call):
    """Refuses long requests when they run."""
    if call.metadata.query_lens.max(initial=0) > 16:
        raise NotImplementedError("queries of more than 16 tokens")


@impl.forward("tensors/padding-rows-decode", "NaN or infinite")
def never_writes(right, self, *given, **asked):
    """Writes no keys in a step of decodes."""
    if given[4] is not None and (given[5].query_lens <= 1).all():
        return self.attend(*given, **asked)
    return right(*given, **asked)


@table.part("cache/attend-only-reads-decode", "attend wrote K of row")
class WritesInAttend(TorchImpl):
    """Writes in attend what update_kv_cache should write."""

    def update_kv_cache(self, *given: Any) -> None:
        """Does nothing."""

    def attend(self, layer, query, key, value, cache, *given, **asked):
        if cache is not None and key is not None and self._attends_own_keys:
            super().update_kv_cache(layer, key, value, cache, given[0].slot_mapping)
        return super().attend(layer, query, key, value, cache, *given, **asked)


@call.before("cache/written-then-attended-decode", "attend without key and value")
def clears_without_keys(self, call):
    """Clears the new tokens' slots if the call has no keys."""
    if call.kv_cache is not None and call.key is None:
        pages = self._pages_of(call.kv_cache)
        slots = call.metadata.slot_mapping
        slots = slots[slots >= 0]
        pages.k[slots // pages.k.shape[1], slots % pages.k.shape[1]] = 0


@impl.attend("correct/mixed-*", "has no attribute '_k_scale_float'")
def needs_layer(right, self, layer, *given, **asked):
    """Reads the engine's layer, which need not be given."""
    assert layer._k_scale_float > 0
    return right(layer, *given, **asked)


@call.after("tensors/deterministic-decode", "gave another output")
def noisy(self, call):
    """Adds noise of one part in a million."""
    call.rows.mul_(1 + 1e-6 * torch.rand(call.rows.shape, generator=torch.Generator().manual_seed(0)))
    call.rows.mul_(1 + 1e-8 * (time.perf_counter_ns() % 1009))


# fmt: off
# Depends on the address of its metadata.
call.after("tensors/deterministic-decode", "gave another output", state={"numbers": itertools.count()},
    by_identity=lambda self, call: call.rows.mul_(1 + 1e-6 * (hash(str(next(self.numbers))) % 5)))
# fmt: on


@call.after("correct/decode-*", "output[6, ")
def stops_at_one(self, call):
    """Answers the first request of a step twice, also for the last of as many tokens."""
    lens = call.metadata.query_lens
    if lens.size > 6 and lens[0] == lens[6]:
        call.rows[6] = call.rows[0]


# Says True to each name of a quantised output.
impl.fused_output_quant_supported(
    "tensors/quantised-output-others",
    "the kit has no numeric case for it",
    any_quant=lambda self, quant_key: True,
)


@call.after("tensors/quantised-output-fp8_e5m2", "output_scale for an output of torch.float8_e5m2")
def other_quant(self, call):
    """Writes e4m3 bytes to an output of e5m2."""
    if call.output.dtype == torch.float8_e5m2 and call.more.get("output_scale") is not None:
        call.rows.view(torch.uint8).copy_(
            call.rows.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        )


# fmt: off
# Accepts output scales and ignores them.
call.before("tensors/output-scale", "output_scale, given where",
    ignores_output_scales=lambda self, call: call.more.update(output_scale=None, output_block_scale=None))
# fmt: on
