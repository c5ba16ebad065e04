"""forward overwrites the output, returns it, gives the same bits each time, and refuses what it cannot write.

Outputs of 8 bits: where an impl declares them they are divided by their scale, clamped and rounded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from attnplug.core.errors import AttnplugError
from attnplug.core.features import Feature
from attnplug.ops.storage import FP8_OUTPUTS, STORAGE_DTYPES
from attnplug.registry.plugins.waiting import describe, guarded_call
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.cases.cases import single_cases
from attnplug.testing.conformance.cases.steps import (
    BatchFactory,
    of_each_storage,
    plain_scenario,
    scenario_factory,
    scenarios,
    step_factory,
)
from attnplug.testing.conformance.check import (
    Check,
    CheckSkipped,
    CheckTable,
    ConformanceError,
    Level,
    SkipKind,
    checks_from,
    error_context,
)
from attnplug.testing.conformance.harness import Harness, Output, blank_output, raw_bytes
from attnplug.testing.conformance.mistakes.expectations import expect_correct
from attnplug.testing.conformance.target import Target
from attnplug.testing.drawn_values import Numbers

_REFUSALS = (AttnplugError, TypeError, ValueError, NotImplementedError)
_EMPTY_ROW_LAYERS: tuple[tuple[str, Feature, dict[str, bool]], ...] = (
    ("", Feature(0), {}),
    ("-lse", Feature.LSE, {"needs_lse": True}),
    ("-lse-sinks", Feature.LSE | Feature.SINKS, {"needs_lse": True, "has_sinks": True}),
)


def checks(target: Target) -> Iterator[Check]:
    """The checks of outputs in each scenario, and of declared features."""
    features = target.backend.features
    for scenario in scenarios(target):
        yield from checks_from(_CHECKS, "tensors", target, scenario)
        if Feature.LSE in features:
            summary = "a layer with needs_lse may be run without output_lse"
            yield Check.of(f"tensors/lse-left-out-{scenario}", summary, _check_lse_left_out, target, scenario)
    yield from checks_from(_ONCE, "tensors", target)
    for name, needed, make in (
        ("cross", Feature.CROSS | Feature.NON_CAUSAL, _without_encoder_tokens),
        ("direct", Feature.DIRECT_KV, _with_fewer_keys),
    ):
        if needed in features:
            for kind, feature, fields in _EMPTY_ROW_LAYERS:
                if feature in features:
                    check_id = f"tensors/sees-nothing-{name}{kind}"
                    summary = "a query without visible keys gives 0, and LSE -inf or its sink's logit"
                    yield Check.of(check_id, summary, _check_empty_rows, target, make, **fields)


def _check_overwritten(target: Target, scenario: str) -> None:
    make = scenario_factory(target, scenario)
    other = make()
    stale = Harness.of(target, other).forward(other).output[: other.common.num_actual_tokens]
    fills = {"NaN": torch.nan, "infinity": torch.inf, "another answer": 0.0}
    # A kernel that adds to the output, or scales it by 0, fails with one of these values.
    fills["the largest finite value"] = torch.finfo(other.query.dtype).max
    for what, fill in fills.items():
        batch = make()
        into = blank_output(batch, fill)
        if what == "another answer":
            # A plausible answer in the wrong rows finds a kernel that skips some rows.
            into.output[: len(stale)] = stale.flip(0)
        found = Harness.of(target, batch).forward(batch, into)
        expect_correct(batch, found, f"into an output that held {what}, which forward must overwrite")


def _check_empty_rows(target: Target, make: Callable[..., Batch], **fields: bool) -> None:
    # NaN finds rows that were not written or multiplied by 0; 3.0 finds rows kept as they were.
    for fill in (torch.nan, 3.0):
        batch = make(target, **fields)
        found = Harness.of(target, batch).forward(batch, blank_output(batch, fill))
        empty = batch.oracle().output.abs().sum((1, 2)) == 0
        rows = found.output[: batch.common.num_actual_tokens].cpu()[empty]
        wrong = rows[rows != 0]
        if wrong.numel():
            held = f"hold {wrong[0].item():g} after {fill:g}"
            raise ConformanceError(f"rows that see no key {held}; they must hold 0")
        expect_correct(batch, found, "with rows that see no key")


def _without_encoder_tokens(target: Target, **fields: bool) -> Batch:
    spec = target.spec(attn_type="encoder_decoder", **fields)
    size = target.block_size(spec)
    return target.batch(spec, [1, 1, 1, 5, 5], [size + 3, 0, 7, 0, size])


def _with_fewer_keys(target: Target, **fields: bool) -> Batch:
    """A causal layer with fewer keys than queries: the first queries of two requests come before all keys."""
    spec = target.spec(direct_kv=True, **fields)
    return target.batch(spec, [1, 6, 40], [9, 6, 50], key_lens=[9, 2, 33])


def _check_returned(target: Target, scenario: str) -> None:
    for dtype in target.dtypes:
        with contextlib.suppress(CheckSkipped) if dtype != target.dtypes[0] else contextlib.nullcontext():
            _expect_returned(scenario_factory(target, scenario, dtype=dtype), target)


def _expect_returned(make: BatchFactory, target: Target) -> None:
    batch = make()
    into = blank_output(batch)
    returned = _forward(Harness.of(target, batch), batch, into.output, into.lse)
    if not _is_same(returned, into.output):
        raise ConformanceError(f"forward returned {_words(returned)}, not the output that it was given")
    batch = make()
    tokens = batch.common.num_actual_tokens
    made = _forward(Harness.of(target, batch), batch, None, blank_output(batch).lse)
    expected = blank_output(batch).output
    if (
        not isinstance(made, torch.Tensor)
        or (made.dtype, made.device, made.shape[1:]) != (expected.dtype, expected.device, expected.shape[1:])
        or made.shape[0] not in (tokens, expected.shape[0])
    ):
        raise ConformanceError(f"forward without output returned {_words(made)}, not {_words(expected)}")
    expect_correct(batch, Output(made, None), "without an output to write to")


def _forward(harness: Harness, batch: Batch, output: torch.Tensor | None, lse: torch.Tensor | None) -> object:
    metadata = harness.build(batch)
    given = (batch.query, batch.key, batch.value, batch.kv_cache, metadata, output)
    with error_context("forward" if output is not None else "forward without output"):
        found: object = harness.impl.forward(harness.layers[0], *given, output_lse=lse)
    return found


def _is_same(found: object, given: torch.Tensor) -> bool:
    if not isinstance(found, torch.Tensor):
        return False
    return found is given or (
        found.data_ptr() == given.data_ptr()
        and (found.shape, found.stride(), found.dtype) == (given.shape, given.stride(), given.dtype)
    )


def _words(found: object) -> str:
    if isinstance(found, torch.Tensor):
        return f"a {found.dtype} tensor of the shape {tuple(found.shape)}"
    return repr(found)


def _check_deterministic(target: Target, scenario: str) -> None:
    _expect_deterministic(target, scenario_factory(target, scenario))


def _check_deterministic_long(target: Target) -> None:
    # Kernels that split long contexts may add the parts in any order.
    for fields in of_each_storage(target):
        with contextlib.suppress(CheckSkipped) if fields else contextlib.nullcontext():
            spec = target.paged_spec(**fields)
            _expect_deterministic(target, step_factory(target, spec, ([1, 5], [1100, 600])))


def _expect_deterministic(target: Target, make: BatchFactory) -> None:
    batch = make()
    harness = Harness.of(target, batch)
    first = harness.forward(batch)
    for what in ("with the same impl", "with a fresh impl and builder"):
        again = make()
        used = harness if what == "with the same impl" else Harness.of(target, again)
        found = used.forward(again)
        # Bytes are compared because NaN in padding rows equals nothing, not even itself.
        if not torch.equal(raw_bytes(found.output), raw_bytes(first.output)):
            differ = int((found.output != first.output)[: again.common.num_actual_tokens].sum())
            raise ConformanceError(f"the same inputs {what} gave another output: {differ} elements differ")


def _check_lse_undeclared(target: Target) -> None:
    batch = scenario_factory(target, plain_scenario(target))()
    if batch.spec.needs_lse:
        raise CheckSkipped(f"{target.name} serves no layer without the LSE", SkipKind.LAYER)
    output = blank_output(batch).output
    lse = torch.full(output.shape[:2], torch.nan, device=batch.query.device)
    _, error = guarded_call(_forward, Harness.of(target, batch), batch, output, lse)
    expect_refusal(error, "output_lse, given to a layer with needs_lse=False,")


def _check_output_scale(target: Target) -> None:
    batch = scenario_factory(target, plain_scenario(target))()
    harness = Harness.of(target, batch)
    with error_context("fused_output_quant_supported(None)"):
        if harness.impl.fused_output_quant_supported(None):
            raise CheckSkipped("fused_output_quant_supported(None) is True: scales may be given")
    metadata, output = harness.build(batch), blank_output(batch).output
    given = (batch.query, batch.key, batch.value, batch.kv_cache, metadata, output)
    scale = torch.tensor(0.37, device=batch.query.device)
    for name in ("output_scale", "output_block_scale"):
        _, error = guarded_call(harness.impl.forward, harness.layers[0], *given, **{name: scale})
        expect_refusal(error, f"{name}, given where fused_output_quant_supported says False,")


def expect_refusal(error: BaseException | None, what: str) -> None:
    """ConformanceError unless `error`, or its cause, refuses `what`: an argument that the backend cannot serve."""
    # The harness wraps errors of the backend, whose own error is the cause.
    cause = error.__cause__ if isinstance(error, ConformanceError) else error
    if cause is None:
        raise ConformanceError(f"{what} was accepted; it must be refused with a BatchError, not ignored")
    if not isinstance(cause, _REFUSALS):
        raise ConformanceError(
            f"{what} raised {describe(cause)}; it must be refused with a BatchError"
        ) from cause


def _check_lse_left_out(target: Target, scenario: str) -> None:
    batch = scenario_factory(target, scenario, needs_lse=True)()
    found = blank_output(batch)
    _forward(Harness.of(target, batch), batch, found.output, None)
    expect_correct(batch, Output(found.output, None), "with needs_lse=True and no output_lse given")


def _check_rows(target: Target, scenario: str) -> None:
    batch = scenario_factory(target, scenario)()
    plain = blank_output(batch)
    wide = [each.new_full((each.shape[0] + 9, *each.shape[1:]), 3.0) for each in plain if each is not None]
    output, *lses = (each[4:-5] for each in wide)
    what = "with an output that is some rows of a longer tensor"
    found = Harness.of(target, batch).forward(batch, Output(output, lses[0] if lses else None), what)
    expect_correct(batch, found, what)
    if any(bool((rows != 3.0).any()) for each in wide for rows in (each[:4], each[-5:])):
        raise ConformanceError(f"{what}: forward wrote to other rows of that tensor")


_CHECKS: CheckTable = {
    "output-rows": (
        _check_rows,
        "the output may be some rows of a longer tensor, whose others are not written",
    ),
    "output-overwritten": (_check_overwritten, "forward overwrites the whole output"),
    "output-returned": (_check_returned, "forward returns the given output, or makes one"),
    "deterministic": (_check_deterministic, "the same inputs give the same bits"),
}
_ONCE: CheckTable = {
    "lse-undeclared": (_check_lse_undeclared, "forward refuses an output_lse that the layer did not declare"),
    "deterministic-long": (_check_deterministic_long, "so do the same inputs with long contexts"),
    "output-scale": (_check_output_scale, "forward refuses output scales that it cannot apply"),
}


_OTHERS = ("int8", "nvfp4", *(f"{name}_block" for name in FP8_OUTPUTS), "unheard_of_3bit")
"""Quantisations whose numbers the kit does not know."""


def quantised_output_checks(target: Target) -> Iterator[Check]:
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
    # The first format is tried with every case; each other one, at the smoke level, with a quarter of them.
    every = 4 if target.level is Level.SMOKE and key != next(iter(FP8_OUTPUTS)) else 1
    for case in single_cases(target, ("mixed",))[::every]:
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
    output = blank_output(batch).output.to(STORAGE_DTYPES[key])
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
    bound = batch.bound * size.amax(-1, keepdim=True)
    # Half a step of the type around a value that has an error of its own.
    least = torch.finfo(dtype).smallest_normal * scale
    allowed = bound + step / 2 * torch.clamp(size + bound, min=least)
    wrong = ~((found - expected).abs() <= allowed)
    if bool(wrong.any()):
        place = tuple(int(index) for index in wrong.nonzero()[0])
        values = f"times the scale is {found[place].item():.6g}, not {expected[place].item():.6g}"
        raise ConformanceError(f"{what}: {int(wrong.sum())} elements are wrong; output{list(place)} {values}")
