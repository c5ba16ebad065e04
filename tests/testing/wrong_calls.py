"""Impls that treat one call wrongly: tensors in place, strides, modes, outputs and errors."""

from __future__ import annotations

import itertools
import time
from typing import Any, ClassVar

import torch
from catching import wrong
from wrong_structure import Around, Call

from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.backends.torch_native.source import PackedKeys

__all__ = ["WRONG_CALLS"]

_HALVES = (torch.float16, torch.bfloat16)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor read as if its elements lay side by side."""
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride())


class ScalesHalf(Around):
    """Scales a query of half precision in place and back, which leaves rounding errors."""

    def before(self, call: Call) -> None:
        if call.query.dtype in _HALVES:
            call.query[: call.metadata.num_actual_tokens].mul_(0.3).div_(0.3)


class RoundsKeys(TorchImpl):
    """Rounds keys in place to what the cache will hold."""

    def update_kv_cache(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        key.copy_(key.half())
        super().update_kv_cache(layer, key, value, kv_cache, slot_mapping)


class ClearsStrided(Around):
    """Modifies a query in place only if it is a view."""

    def after(self, call: Call) -> None:
        if not call.query.is_contiguous():
            call.query[: call.metadata.num_actual_tokens].neg_()


class SortsSpans(Around):
    """Rewrites the step's spans."""

    def after(self, call: Call) -> None:
        if call.metadata.spans is not None:
            call.metadata.spans[:] = 0


class ScalesK(Around):
    """Folds the scale of keys into the engine's tensor."""

    def attend(self, layer: Any, *args: Any, **more: Any) -> Any:
        found = super().attend(layer, *args, **more)
        if layer is not None:
            layer._k_scale.mul_(1.5)
        return found


class DenseOutput(Around):
    """Writes a strided output as if its elements lay side by side."""

    given: Any = None

    def before(self, call: Call) -> None:
        self.given = call.output
        call.output = dense(call.output)

    def returned(self, call: Call) -> Any:
        return self.given


class DenseLse(Around):
    """Writes the LSE as `[H, T]`."""

    def after(self, call: Call) -> None:
        lse = call.more.get("output_lse")
        if lse is not None:
            lse.view(-1)[:] = lse.T.contiguous().view(-1)


class HalfLse(Around):
    """Rounds the LSE to half precision."""

    def after(self, call: Call) -> None:
        lse = call.more.get("output_lse")
        if lse is not None:
            lse.copy_(lse.bfloat16())


class DenseTable(TorchImpl):
    """Reads the block table as if its rows lay side by side."""

    def attend(self, *given: Any, **asked: Any) -> torch.Tensor:
        meta = given[5]
        meta.block_table = dense(meta.block_table)
        return super().attend(*given, **asked)


class NeedsVersion(Around):
    """Reads the version counter, which tensors of inference mode lack."""

    def before(self, call: Call) -> None:
        _ = call.output._version


class NeedsGrad(Around):
    """Asks for the gradient of its output, which inference mode refuses."""

    def after(self, call: Call) -> None:
        torch.ones(1, requires_grad=True).sum().backward()


class KeysLikeQueries(TorchImpl):
    """Takes direct keys for packed like the queries."""

    def _source(self, key: Any, value: Any, kv_cache: Any, metadata: Any) -> Any:
        if kv_cache is None and metadata.key_starts is not None:
            return PackedKeys(key, value, metadata.query_starts, metadata.seq_lens)
        return super()._source(key, value, kv_cache, metadata)


class Swallows(TorchImpl):
    """Answers 0 after any error."""

    def forward(self, *given: Any, **asked: Any) -> torch.Tensor:
        try:
            return super().forward(*given, **asked)
        except Exception:
            return given[6].zero_()


class Asserts(Around):
    """Refuses what it accepted, by an assertion."""

    def before(self, call: Call) -> None:
        assert not (self.spec.has_sinks and self.spec.logits_soft_cap), "sinks with a cap"


class RefusesLate(Around):
    """Refuses long requests when they run."""

    def before(self, call: Call) -> None:
        if call.metadata.query_lens.max(initial=0) > 16:
            raise NotImplementedError("queries of more than 16 tokens")


class NeverWrites(TorchImpl):
    """Writes no keys in a step of decodes."""

    def forward(self, *given: Any, **asked: Any) -> torch.Tensor:
        if given[4] is not None and (given[5].query_lens <= 1).all():
            return self.attend(*given, **asked)
        return super().forward(*given, **asked)


class WritesInAttend(TorchImpl):
    """Writes in attend what update_kv_cache should write."""

    def update_kv_cache(self, *given: Any) -> None:
        """Does nothing."""

    def attend(
        self, layer: Any, query: Any, key: Any, value: Any, cache: Any, *given: Any, **asked: Any
    ) -> Any:
        if cache is not None and key is not None and self._attends_own_keys:
            super().update_kv_cache(layer, key, value, cache, given[0].slot_mapping)
        return super().attend(layer, query, key, value, cache, *given, **asked)


class ClearsWithoutKeys(Around):
    """Clears the new tokens' slots if the call has no keys."""

    def before(self, call: Call) -> None:
        if call.kv_cache is not None and call.key is None:
            pages = self._pages_of(call.kv_cache)
            slots = call.metadata.slot_mapping
            slots = slots[slots >= 0]
            pages.k[slots // pages.k.shape[1], slots % pages.k.shape[1]] = 0


class NeedsLayer(TorchImpl):
    """Reads the engine's layer, which need not be given."""

    def attend(self, layer: Any, *given: Any, **asked: Any) -> torch.Tensor:
        assert layer._k_scale_float > 0
        return super().attend(layer, *given, **asked)


class Noisy(Around):
    """Adds noise of one part in a million."""

    def after(self, call: Call) -> None:
        call.rows.mul_(1 + 1e-6 * torch.rand(call.rows.shape, generator=torch.Generator().manual_seed(0)))
        call.rows.mul_(1 + 1e-8 * (time.perf_counter_ns() % 1009))


class ByIdentity(Around):
    """Depends on the address of its metadata."""

    numbers: ClassVar[Any] = itertools.count()

    def after(self, call: Call) -> None:
        call.rows.mul_(1 + 1e-6 * (hash(str(next(self.numbers))) % 5))


class StopsAtOne(Around):
    """Answers the first request of a step twice, also for the last of as many tokens."""

    def after(self, call: Call) -> None:
        lens = call.metadata.query_lens
        if lens.size > 6 and lens[0] == lens[6]:
            call.rows[6] = call.rows[0]


class AnyQuant(TorchImpl):
    """Says True to each name of a quantised output."""

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return True


class OtherQuant(Around):
    """Writes e4m3 bytes to an output of e5m2."""

    def after(self, call: Call) -> None:
        if call.output.dtype == torch.float8_e5m2 and call.more.get("output_scale") is not None:
            call.rows.view(torch.uint8).copy_(
                call.rows.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
            )


WRONG_CALLS = [
    wrong(
        "scales_half", "tensors/inputs-kept-decode", "modified query, an input of the shape", impl=ScalesHalf
    ),
    wrong(
        "rounds_keys", "tensors/inputs-kept-decode", "modified key, an input of the shape", impl=RoundsKeys
    ),
    wrong(
        "clears_strided",
        "tensors/strided-inputs-*",
        "modified query, an input of the shape",
        impl=ClearsStrided,
    ),
    wrong("sorts_spans", "builder/several-layers-spans", "one metadata for several layers", impl=SortsSpans),
    wrong("scales_k", "tensors/scales-kept", "modified _k_scale of the engine's layer", impl=ScalesK),
    wrong("dense_output", "*", "", impl=DenseOutput),
    wrong("dense_lse", "merge/2-parts", "lse", impl=DenseLse),
    wrong("half_lse", "merge/2-parts", "lse", impl=HalfLse),
    wrong("dense_table", "tensors/strided-table-*", "a part of a wider one", impl=DenseTable),
    wrong(
        "needs_version",
        "state/all-in-inference-mode",
        "Inference tensors do not track version counter",
        impl=NeedsVersion,
    ),
    wrong("needs_grad", "state/no-grad", "raised RuntimeError", impl=NeedsGrad),
    wrong("keys_like_queries", "tensors/output-returned-direct", "output[", impl=KeysLikeQueries),
    wrong(
        "swallows", "tensors/lse-undeclared", "must be refused with a BatchError, not ignored", impl=Swallows
    ),
    wrong(
        "asserts", "refused/never-after-acceptance", "raised AssertionError: sinks with a cap", impl=Asserts
    ),
    wrong(
        "refuses_late",
        "tensors/inputs-kept-mixed",
        "raised NotImplementedError: queries of more than 16",
        impl=RefusesLate,
    ),
    wrong("never_writes", "tensors/padding-rows-decode", "NaN or infinite", impl=NeverWrites),
    wrong("writes_in_attend", "cache/attend-only-reads-decode", "attend wrote K of row", impl=WritesInAttend),
    wrong(
        "clears_without_keys",
        "cache/written-then-attended-decode",
        "attend without key and value",
        impl=ClearsWithoutKeys,
    ),
    wrong(
        "needs_layer",
        "correct/mixed-*",
        "has no attribute '_k_scale_float'",
        impl=NeedsLayer,
    ),
    wrong(
        "noisy",
        "tensors/deterministic-decode",
        "gave another output",
        impl=Noisy,
    ),
    wrong(
        "by_identity",
        "tensors/deterministic-decode",
        "gave another output",
        impl=ByIdentity,
    ),
    wrong("stops_at_one", "correct/decode-*", "output[6, ", impl=StopsAtOne),
    wrong("any_quant", "*", "", impl=AnyQuant),
    wrong(
        "other_quant",
        "tensors/quantised-output-fp8_e5m2",
        "output_scale for an output of torch.float8_e5m2",
        impl=OtherQuant,
    ),
]
