"""Backends that modify inputs or leave outputs wrong: variants of TORCH, each with one mistake."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from attnplug.backends.torch_native.impl import TorchImpl
from mutants.parts import Around, Call
from mutants.table import Table

table = Table("structure")
call = table.on(Around)
impl = table.on(TorchImpl)


# fmt: off
# Scales the query in place and back, which leaves rounding errors.
call.after("tensors/inputs-kept", "modified query", scales_query=lambda self, call: call.query[: call.metadata.num_actual_tokens].mul_(0.3).div_(0.3))
# Uses the block table as scratch.
call.after("tensors/inputs-kept-mixed", "modified common.block_table_tensor", clears_table=lambda self, call: call.metadata.block_table.fill_(0))
# Negates its slopes in place.
call.after("tensors/alibi_slopes-kept", "modified alibi_slopes",
    negates_slopes=lambda self, call: self.tensors.alibi_slopes is None or self.tensors.alibi_slopes.neg_())
# Adds its sinks up.
call.after("tensors/sinks-kept", "modified sinks", adds_sinks=lambda self, call: self.tensors.sinks is None or self.tensors.sinks.cumsum_(0))
# fmt: on


@call.before("tensors/strided-inputs", "with query, key and value as views of")
def assumes_contiguous(self, call):
    """Reads a view as if its elements lay side by side."""
    dense = torch.empty(call.query.shape, device="meta").stride()
    call.query = call.query.as_strided(call.query.shape, dense)


# fmt: off
# Writes a row more than there are.
call.after("tensors/padding-rows", "output rows past num_actual_tokens",
    writes_padding=lambda self, call: call.output[call.metadata.num_actual_tokens :][:1].zero_())
# Looks at all rows of the query.
call.after("tensors/padding-rows", "which forward must not read: output", reads_padding=lambda self, call: call.rows.add_(0 * call.query.sum()))
# fmt: on


@table.part("tensors/sinks-required", "accepts has_sinks=True without sinks")
class NeedsNoSinks(TorchImpl):
    """Ignores missing sinks."""

    @classmethod
    def from_spec(cls, spec: Any, *, tensors: Any = None, **more: Any) -> Any:
        here = tensors is not None and (tensors.sinks is not None or not spec.has_sinks)
        return super().from_spec(spec if here else spec.replace(has_sinks=False), tensors=tensors, **more)


@table.part("tensors/alibi_slopes-required", "raised KeyError", name="key_error")
class KeyErrorForSlopes(TorchImpl):
    """Raises a KeyError for missing slopes."""

    @classmethod
    def from_spec(cls, spec: Any, *, tensors: Any = None, **more: Any) -> Any:
        if spec.has_alibi and tensors.alibi_slopes is None:
            raise KeyError("alibi_slopes")
        return super().from_spec(spec, tensors=tensors, **more)


@table.part("tensors/output-overwritten", "that held")
class Accumulates(Around):
    """Adds to the values in the output."""

    held: Any = None

    def before(self, call: Call) -> None:
        self.held = call.output.nan_to_num(0.0, 0.0, 0.0)

    def after(self, call: Call) -> None:
        call.output.add_(self.held)


@table.part("tensors/sees-nothing", "rows that see no key hold nan")
class LeavesRows(Around):
    """Does not write empty rows."""

    held: Any = None

    def before(self, call: Call) -> None:
        self.held = call.output.clone()

    def after(self, call: Call) -> None:
        empty = (call.output == 0).all(-1).all(-1)
        call.output[empty] = self.held[empty]


# fmt: off
# Writes an LSE of +inf for empty rows, like some kernels.
call.after("tensors/sees-nothing-cross-lse", "lse: ", infinite_lse=lambda self, call: call.lse.masked_fill_(call.lse == -torch.inf, torch.inf))
# fmt: on


@call.after("tensors/sees-nothing-direct-lse-sinks", "rows have -inf, though they see keys or a sink")
def forgets_sink_of_nothing(self, call):
    """Writes -inf for empty rows with a sink."""
    call.lse[(call.output == 0).all(-1)] = -torch.inf


# fmt: off
# Returns another tensor than it was given.
call.returned("tensors/output-returned", "not the output that it was given", returns_copy=lambda self, call: call.output.clone())
# fmt: on


@impl.forward("tensors/output-returned", "without output returned None")
def returns_nothing(right, self, *args, **more):
    """Returns no output where it makes one."""
    found = right(*args, **more)
    return found if len(args) > 6 and args[6] is not None else None


@impl.forward("tensors/output-returned", "not a torch.float32")
def returns_heads_only(right, self, *args, **more):
    """Returns an output with flattened heads."""
    found = right(*args, **more)
    return found if len(args) > 6 and args[6] is not None else found.flatten(1)


@call.before("tensors/lse-undeclared", "raised RuntimeError: no kernel")
def raises_for_lse(self, call):
    """Raises an unhelpful error for an undeclared LSE."""
    if call.more.get("output_lse") is not None and not self.spec.needs_lse:
        raise RuntimeError("no kernel image")


@table.part("tensors/deterministic", "gave another output")
class Undecided(Around):
    """Gives other bits at each call."""

    count: ClassVar[int] = 0

    def after(self, call: Call) -> None:
        Undecided.count += 1
        call.output.mul_(1 + 2e-7 * (Undecided.count % 7))


# fmt: off
# Accepts an undeclared LSE and does not write it.
call.before("tensors/lse-undeclared", "output_lse, given to a layer",
    ignores_lse=lambda self, call: self.spec.needs_lse or call.more.update(output_lse=None))
# fmt: on


@call.before("tensors/quantised-output", "elements are wrong")
def quantises_without_scale(self, call):
    """Writes fp8 outputs as if their scale were 1."""
    if call.more.get("output_scale") is not None:
        call.more["output_scale"] = torch.ones_like(call.more["output_scale"])


@call.after("tensors/quantised-output", "rows past the step's tokens were written")
def writes_quantised_padding(self, call):
    """Converts the whole output to fp8, padding too."""
    if call.more.get("output_scale") is not None:
        call.output[call.metadata.num_actual_tokens :] = 0.0


# fmt: off
# Accepts scales for fp8 outputs that it does not declare.
call.fused_output_quant_supported("tensors/quantised-output", "was accepted; it must be refused", declares_no_quant=lambda self, quant_key: False)
# Fails without the LSE of a layer with needs_lse.
call.before("tensors/lse-left-out", "raised AttributeError", needs_lse=lambda self, call: self.spec.needs_lse and call.more["output_lse"].zero_())
# fmt: on
