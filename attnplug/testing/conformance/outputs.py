"""forward overwrites the output, returns it, gives the same bits each time, and refuses what it cannot write."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from attnplug.core.errors import AttnplugError
from attnplug.core.features import Feature
from attnplug.registry.plugins.waiting import describe, guarded_call
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.check import (
    Check,
    CheckSkipped,
    CheckTable,
    ConformanceError,
    SkipKind,
    checks_from,
    error_context,
)
from attnplug.testing.conformance.expectations import expect_correct
from attnplug.testing.conformance.harness import Answer, Harness, blank_answer, raw_bytes
from attnplug.testing.conformance.steps import (
    BatchFactory,
    of_each_storage,
    plain_scenario,
    scenario_factory,
    scenarios,
    step_factory,
)
from attnplug.testing.conformance.target import Target

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
        into = blank_answer(batch, fill)
        if what == "another answer":
            # A plausible answer in the wrong rows finds a kernel that skips some rows.
            into.output[: len(stale)] = stale.flip(0)
        found = Harness.of(target, batch).forward(batch, into)
        expect_correct(batch, found, f"into an output that held {what}, which forward must overwrite")


def _check_empty_rows(target: Target, make: Callable[..., Batch], **fields: bool) -> None:
    # NaN finds rows that were not written or multiplied by 0; 3.0 finds rows kept as they were.
    for fill in (torch.nan, 3.0):
        batch = make(target, **fields)
        found = Harness.of(target, batch).forward(batch, blank_answer(batch, fill))
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
    into = blank_answer(batch)
    returned = _forward(Harness.of(target, batch), batch, into.output, into.lse)
    if not _is_same(returned, into.output):
        raise ConformanceError(f"forward returned {_words(returned)}, not the output that it was given")
    batch = make()
    tokens = batch.common.num_actual_tokens
    made = _forward(Harness.of(target, batch), batch, None, blank_answer(batch).lse)
    expected = blank_answer(batch).output
    if (
        not isinstance(made, torch.Tensor)
        or (made.dtype, made.device, made.shape[1:]) != (expected.dtype, expected.device, expected.shape[1:])
        or made.shape[0] not in (tokens, expected.shape[0])
    ):
        raise ConformanceError(f"forward without output returned {_words(made)}, not {_words(expected)}")
    expect_correct(batch, Answer(made, None), "without an output to write to")


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
    output = blank_answer(batch).output
    lse = torch.full(output.shape[:2], torch.nan, device=batch.query.device)
    _, error = guarded_call(_forward, Harness.of(target, batch), batch, output, lse)
    expect_refusal(error, "output_lse, given to a layer with needs_lse=False,")


def _check_output_scale(target: Target) -> None:
    batch = scenario_factory(target, plain_scenario(target))()
    harness = Harness.of(target, batch)
    with error_context("fused_output_quant_supported(None)"):
        if harness.impl.fused_output_quant_supported(None):
            raise CheckSkipped("fused_output_quant_supported(None) is True: scales may be given")
    metadata, output = harness.build(batch), blank_answer(batch).output
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
    found = blank_answer(batch)
    _forward(Harness.of(target, batch), batch, found.output, None)
    expect_correct(batch, Answer(found.output, None), "with needs_lse=True and no output_lse given")


def _check_rows(target: Target, scenario: str) -> None:
    batch = scenario_factory(target, scenario)()
    plain = blank_answer(batch)
    wide = [each.new_full((each.shape[0] + 9, *each.shape[1:]), 3.0) for each in plain if each is not None]
    output, *lses = (each[4:-5] for each in wide)
    what = "with an output that is some rows of a longer tensor"
    found = Harness.of(target, batch).forward(batch, Answer(output, lses[0] if lses else None), what)
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
