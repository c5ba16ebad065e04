"""Backends that modify inputs or leave outputs wrong: variants of TORCH, each with one mistake."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from catching import wrong

from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.backends.torch_native.metadata import TorchMetadata

__all__ = ["WRONG_STRUCTURE", "Around", "Call"]


@dataclasses.dataclass
class Call:
    """The arguments of `attend`, except the layer."""

    query: torch.Tensor
    key: Any
    value: Any
    kv_cache: Any
    metadata: TorchMetadata
    output: torch.Tensor
    more: dict[str, Any]

    @property
    def rows(self) -> torch.Tensor:
        """The output of the batch's own tokens."""
        return self.output[: self.metadata.num_actual_tokens]


class Around(TorchImpl):
    """Runs hooks before and after TORCH's attend."""

    def attend(self, layer: Any, *args: Any, **more: Any) -> Any:
        call = Call(*args, more=more)
        self.before(call)
        given = (call.query, call.key, call.value, call.kv_cache, call.metadata, call.output)
        super().attend(layer, *given, **call.more)
        self.after(call)
        return self.returned(call)

    def before(self, call: Call) -> None:
        """Does nothing."""

    def after(self, call: Call) -> None:
        """Does nothing."""

    def returned(self, call: Call) -> Any:
        return call.output


class ScalesQuery(Around):
    """Scales the query in place and back, which leaves rounding errors."""

    def after(self, call: Call) -> None:
        call.query[: call.metadata.num_actual_tokens].mul_(0.3).div_(0.3)


class ClearsTable(Around):
    """Uses the block table as scratch."""

    def after(self, call: Call) -> None:
        call.metadata.block_table.fill_(0)


class NegatesSlopes(Around):
    """Negates its slopes in place."""

    def after(self, call: Call) -> None:
        if self.tensors.alibi_slopes is not None:
            self.tensors.alibi_slopes.neg_()


class AddsSinks(Around):
    """Adds its sinks up."""

    def after(self, call: Call) -> None:
        if self.tensors.sinks is not None:
            self.tensors.sinks.cumsum_(0)


class AssumesContiguous(Around):
    """Reads a view as if its elements lay side by side."""

    def before(self, call: Call) -> None:
        dense = torch.empty(call.query.shape, device="meta").stride()
        call.query = call.query.as_strided(call.query.shape, dense)


class WritesPadding(Around):
    """Writes a row more than there are."""

    def after(self, call: Call) -> None:
        call.output[call.metadata.num_actual_tokens :][:1] = 0


class ReadsPadding(Around):
    """Looks at all rows of the query."""

    def after(self, call: Call) -> None:
        call.rows.add_(0 * call.query.sum())


class NeedsNoSinks(TorchImpl):
    """Ignores missing sinks."""

    @classmethod
    def from_spec(cls, spec: Any, *, tensors: Any = None, **more: Any) -> Any:
        here = tensors is not None and (tensors.sinks is not None or not spec.has_sinks)
        return super().from_spec(spec if here else spec.replace(has_sinks=False), tensors=tensors, **more)


class KeyErrorForSlopes(TorchImpl):
    """Raises a KeyError for missing slopes."""

    @classmethod
    def from_spec(cls, spec: Any, *, tensors: Any = None, **more: Any) -> Any:
        if spec.has_alibi and tensors.alibi_slopes is None:
            raise KeyError("alibi_slopes")
        return super().from_spec(spec, tensors=tensors, **more)


class Accumulates(Around):
    """Adds to the values in the output."""

    held: Any = None

    def before(self, call: Call) -> None:
        self.held = call.output.nan_to_num(0.0, 0.0, 0.0)

    def after(self, call: Call) -> None:
        call.output.add_(self.held)


class LeavesRows(Around):
    """Does not write empty rows."""

    held: Any = None

    def before(self, call: Call) -> None:
        self.held = call.output.clone()

    def after(self, call: Call) -> None:
        empty = (call.output == 0).all(-1).all(-1)
        call.output[empty] = self.held[empty]


class InfiniteLse(Around):
    """Writes an LSE of +inf for empty rows, like some kernels."""

    def after(self, call: Call) -> None:
        lse = call.more.get("output_lse")
        if lse is not None:
            lse.masked_fill_(lse == -torch.inf, torch.inf)


class ForgetsSinkOfNothing(Around):
    """Writes -inf for empty rows with a sink."""

    def after(self, call: Call) -> None:
        lse = call.more.get("output_lse")
        if lse is not None:
            lse[(call.output == 0).all(-1)] = -torch.inf


class ReturnsCopy(Around):
    """Returns another tensor than it was given."""

    def returned(self, call: Call) -> Any:
        return call.output.clone()


class ReturnsNothing(TorchImpl):
    """Returns no output where it makes one."""

    def forward(self, *args: Any, **more: Any) -> Any:
        found = super().forward(*args, **more)
        return found if len(args) > 6 and args[6] is not None else None


class ReturnsHeadsOnly(TorchImpl):
    """Returns an output with flattened heads."""

    def forward(self, *args: Any, **more: Any) -> Any:
        found = super().forward(*args, **more)
        return found if len(args) > 6 and args[6] is not None else found.flatten(1)


class RaisesForLse(Around):
    """Raises an unhelpful error for an undeclared LSE."""

    def before(self, call: Call) -> None:
        if call.more.get("output_lse") is not None and not self.spec.needs_lse:
            raise RuntimeError("no kernel image")


class Undecided(Around):
    """Gives other bits at each call."""

    count: ClassVar[int] = 0

    def after(self, call: Call) -> None:
        Undecided.count += 1
        call.output.mul_(1 + 2e-7 * (Undecided.count % 7))


class IgnoresLse(Around):
    """Accepts an undeclared LSE and does not write it."""

    def before(self, call: Call) -> None:
        if not self.spec.needs_lse:
            call.more["output_lse"] = None


class IgnoresScales(Around):
    """Accepts output scales and ignores them."""

    def before(self, call: Call) -> None:
        call.more |= {"output_scale": None, "output_block_scale": None}


class QuantisesWithoutScale(Around):
    """Writes fp8 outputs as if their scale were 1."""

    def before(self, call: Call) -> None:
        if call.more.get("output_scale") is not None:
            call.more["output_scale"] = torch.ones_like(call.more["output_scale"])


class WritesQuantisedPadding(Around):
    """Converts the whole output to fp8, padding too."""

    def after(self, call: Call) -> None:
        if call.more.get("output_scale") is not None:
            call.output[call.metadata.num_actual_tokens :] = 0.0


class DeclaresNoQuant(Around):
    """Accepts scales for fp8 outputs that it does not declare."""

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False


class NeedsLse(Around):
    """Fails without the LSE of a layer with needs_lse."""

    def before(self, call: Call) -> None:
        if self.spec.needs_lse:
            call.more["output_lse"].zero_()


WRONG_STRUCTURE = [
    wrong("scales_query", "tensors/inputs-kept", "modified query", impl=ScalesQuery),
    wrong(
        "clears_table", "tensors/inputs-kept-mixed", "modified common.block_table_tensor", impl=ClearsTable
    ),
    wrong("negates_slopes", "tensors/alibi_slopes-kept", "modified alibi_slopes", impl=NegatesSlopes),
    wrong("adds_sinks", "tensors/sinks-kept", "modified sinks", impl=AddsSinks),
    wrong(
        "assumes_contiguous",
        "tensors/strided-inputs",
        "with query, key and value as views of",
        impl=AssumesContiguous,
    ),
    wrong("writes_padding", "tensors/padding-rows", "output rows past num_actual_tokens", impl=WritesPadding),
    wrong("reads_padding", "tensors/padding-rows", "which forward must not read: output", impl=ReadsPadding),
    wrong(
        "needs_no_sinks", "tensors/sinks-required", "accepts has_sinks=True without sinks", impl=NeedsNoSinks
    ),
    wrong("key_error", "tensors/alibi_slopes-required", "raised KeyError", impl=KeyErrorForSlopes),
    wrong("accumulates", "tensors/output-overwritten", "that held", impl=Accumulates),
    wrong("leaves_rows", "tensors/sees-nothing", "rows that see no key hold nan", impl=LeavesRows),
    wrong("returns_copy", "tensors/output-returned", "not the output that it was given", impl=ReturnsCopy),
    wrong("returns_nothing", "tensors/output-returned", "without output returned None", impl=ReturnsNothing),
    wrong("undecided", "tensors/deterministic", "gave another output", impl=Undecided),
    wrong("ignores_lse", "tensors/lse-undeclared", "output_lse, given to a layer", impl=IgnoresLse),
    wrong("ignores_output_scales", "tensors/output-scale", "output_scale, given where", impl=IgnoresScales),
    wrong(
        "quantises_without_scale",
        "tensors/quantised-output",
        "elements are wrong",
        impl=QuantisesWithoutScale,
    ),
    wrong(
        "writes_quantised_padding",
        "tensors/quantised-output",
        "rows past the step's tokens were written",
        impl=WritesQuantisedPadding,
    ),
    wrong(
        "declares_no_quant",
        "tensors/quantised-output",
        "was accepted; it must be refused",
        impl=DeclaresNoQuant,
    ),
    wrong("needs_lse", "tensors/lse-left-out", "raised AttributeError", impl=NeedsLse),
    wrong("returns_heads_only", "tensors/output-returned", "not a torch.float32", impl=ReturnsHeadsOnly),
    wrong("raises_for_lse", "tensors/lse-undeclared", "raised RuntimeError: no kernel", impl=RaisesForLse),
    wrong("infinite_lse", "tensors/sees-nothing-cross-lse", "lse: ", impl=InfiniteLse),
    wrong(
        "forgets_sink_of_nothing",
        "tensors/sees-nothing-direct-lse-sinks",
        "rows have -inf, though they see keys or a sink",
        impl=ForgetsSinkOfNothing,
    ),
]
