"""Outputs of 8 bits: where an impl declares them they are divided by their scale, clamped and rounded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from attnplug.ops.output_quant import FP8_OUTPUTS
from attnplug.ops.storage import STORAGE_DTYPES
from attnplug.registry.plugins.waiting import guarded_call
from attnplug.testing.batches import Batch
from attnplug.testing.comparison import tolerance
from attnplug.testing.conformance.check import Check, ConformanceError, error_context
from attnplug.testing.conformance.harness import Harness, blank_answer
from attnplug.testing.conformance.outputs import expect_refusal
from attnplug.testing.conformance.single_cases import single_cases
from attnplug.testing.conformance.steps import plain_scenario, scenario_factory, scenarios
from attnplug.testing.conformance.target import Target
from attnplug.testing.drawn_values import Numbers

_OTHERS = ("int8", "nvfp4", *(f"{name}_block" for name in FP8_OUTPUTS), "unheard_of_3bit")
"""Quantisations whose numbers the kit does not know."""


def checks(target: Target) -> Iterator[Check]:
    """One check for each fp8 dtype of outputs, and one for all other quantisations."""
    for key in FP8_OUTPUTS:
        summary = "an output of fp8 is divided by its scale, clamped and rounded, or refused"
        yield Check.of(f"tensors/quantised-output-{key}", summary, _check_quantised, target, key)
    summary = "no quantisation of outputs is declared for which the kit has no numeric case"
    yield Check.of("tensors/quantised-output-others", summary, _check_others, target)


def _declares(harness: Harness, key: str) -> bool:
    with error_context(f"fused_output_quant_supported({key!r})"):
        return bool(harness.impl.fused_output_quant_supported(key))


def _check_others(target: Target) -> None:
    harness = Harness.of(target, scenario_factory(target, plain_scenario(target))())
    for key in _OTHERS:
        if _declares(harness, key):
            raise ConformanceError(
                f"fused_output_quant_supported({key!r}) is True, and the kit has no numeric case for it: nothing "
                "proves that it is honoured"
            )


def _check_quantised(target: Target, key: str) -> None:
    for scenario in (plain_scenario(target), scenarios(target)[0]):
        batch = scenario_factory(target, scenario)()
        harness = Harness.of(target, batch)
        if not _declares(harness, key):
            _expect_refused(batch, harness, key)
            continue
        _expect_served(batch, harness, key, 1.5)
        # This scale makes values beyond half of the largest one leave the range.
        _expect_served(batch, harness, key, 0.5, "after a call with another output_scale: ")
        _expect_served(batch, harness, key, 1.5, "with a scalar tensor: ", ())
    for case in single_cases(target, ("mixed",)):
        if case.numbers is Numbers.STRANGERS:
            continue  # most of their rows have no result
        batch = case.batch(target)
        harness = Harness.of(target, batch)
        if _declares(harness, key):
            with error_context(case.id):
                _expect_served(batch, harness, key, 1.5, f"{case.id}: ")


def _call(
    batch: Batch, harness: Harness, key: str, scale: float, shape: tuple[int, ...] = (1,)
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `forward` for an output that is quantised by `key`; the output is the last positional one."""
    output = blank_answer(batch).output.to(STORAGE_DTYPES[key])
    given = (batch.query, batch.key, batch.value, batch.kv_cache, harness.build(batch), output)
    return given, {"output_scale": torch.full(shape, scale, dtype=torch.float32, device=batch.query.device)}


def _expect_refused(batch: Batch, harness: Harness, key: str) -> None:
    given, scales = _call(batch, harness, key, 1.0)
    _, error = guarded_call(harness.impl.forward, harness.layers[0], *given, **scales)
    what = f"output_scale for an output of {STORAGE_DTYPES[key]}"
    expect_refusal(error, f"{what}, given where fused_output_quant_supported({key!r}) says False,")


def _expect_served(
    batch: Batch, harness: Harness, key: str, reach: float, where: str = "", shape: tuple[int, ...] = (1,)
) -> None:
    dtype = STORAGE_DTYPES[key]
    limit = torch.finfo(dtype).max
    expected, rows = batch.oracle().output, batch.common.num_actual_tokens
    scale = (float(expected.abs().max()) or 1.0) / (limit * reach)
    given, scales = _call(batch, harness, key, scale, shape)
    what = f"{where}output_scale for an output of {dtype}"
    with error_context(what):
        harness.impl.forward(harness.layers[0], *given, **scales)
    output = given[-1]
    found = batch.compared(output[:rows].cpu().double()) * scale
    _expect_quantised(
        found, expected.double().clamp(-limit * scale, limit * scale), batch, dtype, scale, what
    )
    if not bool(output[rows:].float().isnan().all()):
        raise ConformanceError(f"{what}: rows past the step's tokens were written")


def _expect_quantised(
    found: torch.Tensor, expected: torch.Tensor, batch: Batch, dtype: torch.dtype, scale: float, what: str
) -> None:
    size = expected.abs()
    # torch gives the eps of float8_e5m2fnuz as that of a type with three bits of mantissa.
    step = 2.0**-2 if "e5m2" in str(dtype) else 2.0**-3
    bound = tolerance(batch.spec).output * size.amax(-1, keepdim=True)
    # Half a step of the type around a value that has an error of its own.
    least = torch.finfo(dtype).smallest_normal * scale
    allowed = bound + step / 2 * torch.clamp(size + bound, min=least)
    wrong = ~((found - expected).abs() <= allowed)
    if bool(wrong.any()):
        place = tuple(int(index) for index in wrong.nonzero()[0])
        values = f"times the scale is {found[place].item():.6g}, not {expected[place].item():.6g}"
        raise ConformanceError(f"{what}: {int(wrong.sum())} elements are wrong; output{list(place)} {values}")
