"""Outputs are written whole, where they were asked for, and the same each time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from attnplug.core.errors import AttnplugError
from attnplug.core.features import Feature
from attnplug.registry.plugin_calls import describe, guarded_call
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.check import Check, CheckSkipped, ConformanceError
from attnplug.testing.conformance.driving import Answer
from attnplug.testing.conformance.single_layer import SingleLayer, blank, matches_oracle, raw_bytes
from attnplug.testing.conformance.situations import situations, step
from attnplug.testing.conformance.target import Target
from attnplug.testing.conformance.verdicts import during

__all__ = ["checks"]

_REFUSALS = (AttnplugError, TypeError, ValueError, NotImplementedError)


def checks(target: Target) -> Iterator[Check]:
    """The checks of outputs, in each situation; of features, where they are declared."""
    features = target.backend.features
    for situation in situations(target):
        for name, (run, summary) in _CHECKS.items():
            yield Check(f"tensors/{name}-{situation}", functools.partial(run, target, situation), summary)
        if Feature.LSE in features:
            run_left = functools.partial(_check_lse_left_out, target, situation)
            yield Check(
                f"tensors/lse-left-out-{situation}", run_left, "a layer with needs_lse may be asked for none"
            )
    for name, (run, summary) in _ONCE.items():
        yield Check(f"tensors/{name}", functools.partial(run, target, "mixed"), summary)
    for name, needed, make in (
        ("cross", Feature.CROSS | Feature.NON_CAUSAL, _without_encoder_tokens),
        ("direct", Feature.DIRECT_KV, _with_fewer_keys),
    ):
        if needed in features:
            for kind, asked, fields in (
                ("", Feature(0), {}),
                ("-lse", Feature.LSE, {"needs_lse": True}),
                ("-lse-sinks", Feature.LSE | Feature.SINKS, {"needs_lse": True, "has_sinks": True}),
            ):
                if asked in features:
                    run_unseeing = functools.partial(_check_unseeing, target, make, **fields)
                    summary = "a query that sees no key gives 0, and LSE -inf or its sink's logit"
                    yield Check(f"tensors/sees-nothing-{name}{kind}", run_unseeing, summary)


def _check_overwritten(target: Target, situation: str) -> None:
    make = step(target, situation)
    other = make()
    stale = SingleLayer.of(target, other).forward(other).output[: other.common.num_actual_tokens]
    for what in ("NaN", "infinity", "the largest finite value", "another answer"):
        batch = make()
        tokens = batch.common.num_actual_tokens
        fills = {"NaN": torch.nan, "infinity": torch.inf, "the largest finite value": _largest(batch)}
        into = blank(batch, fills.get(what, 0.0))
        if what == "another answer":
            into.output[:tokens] = stale.flip(0)
        found = SingleLayer.of(target, batch).forward(batch, into)
        matches_oracle(batch, found, f"into an output that held {what}, all of which is to be overwritten")


def _largest(batch: Batch) -> float:
    return torch.finfo(batch.query.dtype).max


def _check_unseeing(target: Target, make: Callable[..., Batch], **fields: bool) -> None:
    for fill in (torch.nan, 3.0):
        batch = make(target, **fields)
        found = SingleLayer.of(target, batch).forward(batch, blank(batch, fill))
        empty = batch.oracle().output.abs().sum((1, 2)) == 0
        rows = found.output[: batch.common.num_actual_tokens].cpu()[empty]
        wrong = rows[rows != 0]
        if wrong.numel():
            held = f"hold {wrong[0].item():g}, where {fill:g} stood before"
            raise ConformanceError(f"rows that see no key {held}; they must hold 0")
        matches_oracle(batch, found, "with rows that see no key")


def _without_encoder_tokens(target: Target, **fields: bool) -> Batch:
    spec = target.spec(attn_type="encoder_decoder", **fields)
    size = target.block_size(spec)
    return target.batch(spec, [1, 1, 1, 5, 5], [size + 3, 0, 7, 0, size])


def _with_fewer_keys(target: Target, **fields: bool) -> Batch:
    """Causal, and the first queries of two requests stand before all their keys."""
    spec = target.spec(direct_kv=True, **fields)
    return target.batch(spec, [1, 6, 40], [9, 6, 50], key_lens=[9, 2, 33])


def _check_returned(target: Target, situation: str) -> None:
    make = step(target, situation)
    batch = make()
    parts, into = SingleLayer.of(target, batch), blank(batch)
    returned = _forward(parts, batch, into.output, into.lse)
    if not _is_same(returned, into.output):
        raise ConformanceError(f"forward returned {_words(returned)}, not the output that it was given")
    batch = make()
    tokens = batch.common.num_actual_tokens
    made = _forward(SingleLayer.of(target, batch), batch, None, blank(batch).lse)
    expected = blank(batch).output
    if not isinstance(made, torch.Tensor) or (made.dtype, made.device) != (expected.dtype, expected.device):
        raise ConformanceError(f"forward without output returned {_words(made)}, not {_words(expected)}")
    if made.shape[1:] != expected.shape[1:] or made.shape[0] not in (tokens, expected.shape[0]):
        raise ConformanceError(f"forward without output returned {_words(made)}, not {_words(expected)}")
    matches_oracle(batch, Answer(made, None), "without an output to write to")


def _forward(
    parts: SingleLayer, batch: Batch, output: torch.Tensor | None, lse: torch.Tensor | None
) -> object:
    metadata = parts.build(batch)
    given = (batch.query, batch.key, batch.value, batch.kv_cache, metadata, output)
    with during("forward" if output is not None else "forward without output"):
        found: object = parts.impl.forward(parts.layer, *given, output_lse=lse)
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


def _check_deterministic(target: Target, situation: str) -> None:
    make = step(target, situation)
    batch = make()
    parts = SingleLayer.of(target, batch)
    first = parts.forward(batch)
    for what in ("with the same impl", "with a fresh impl and builder"):
        again = make()
        used = parts if what == "with the same impl" else SingleLayer.of(target, again)
        found = used.forward(again)
        if not torch.equal(raw_bytes(found.output), raw_bytes(first.output)):
            differ = int((found.output != first.output)[: again.common.num_actual_tokens].sum())
            raise ConformanceError(f"the same inputs {what} gave another output: {differ} elements differ")


def _check_lse_undeclared(target: Target, situation: str) -> None:
    batch = step(target, situation)()
    lse = torch.full(blank(batch).output.shape[:2], torch.nan, device=batch.query.device)
    parts = SingleLayer.of(target, batch)
    _, error = guarded_call(_forward, parts, batch, blank(batch).output, lse)
    _expect_refusal(error, "output_lse, given to a layer with needs_lse=False,")


def _check_output_scale(target: Target, situation: str) -> None:
    batch = step(target, situation)()
    parts = SingleLayer.of(target, batch)
    with during("fused_output_quant_supported(None)"):
        if parts.impl.fused_output_quant_supported(None):
            raise CheckSkipped("fused_output_quant_supported(None) is True: scales may be given")
    metadata, output = parts.build(batch), blank(batch).output
    given = (batch.query, batch.key, batch.value, batch.kv_cache, metadata, output)
    scale = torch.tensor(0.5, device=batch.query.device)
    for name in ("output_scale", "output_block_scale"):
        _, error = guarded_call(parts.impl.forward, parts.layer, *given, **{name: scale})
        _expect_refusal(error, f"{name}, given where fused_output_quant_supported says False,")


def _expect_refusal(error: BaseException | None, what: str) -> None:
    cause = error.__cause__ if isinstance(error, ConformanceError) else error
    if cause is None:
        raise ConformanceError(f"{what} was taken; it must be refused with a BatchError, not ignored")
    if not isinstance(cause, _REFUSALS):
        raise ConformanceError(
            f"{what} raised {describe(cause)}; it must be refused with a BatchError"
        ) from cause


def _check_lse_left_out(target: Target, situation: str) -> None:
    batch = step(target, situation, needs_lse=True)()
    found = blank(batch)
    _forward(SingleLayer.of(target, batch), batch, found.output, None)
    matches_oracle(batch, Answer(found.output, None), "with needs_lse=True and no output_lse given")


_CHECKS: dict[str, tuple[Callable[[Target, str], None], str]] = {
    "output-overwritten": (_check_overwritten, "nothing of what stood in the output is left"),
    "output-returned": (_check_returned, "forward returns the output given, and makes one where none is"),
    "deterministic": (_check_deterministic, "the same inputs give the same bits"),
}
_ONCE: dict[str, tuple[Callable[[Target, str], None], str]] = {
    "lse-undeclared": (_check_lse_undeclared, "an LSE that the layer did not declare is refused"),
    "output-scale": (_check_output_scale, "output scales are refused where they cannot be applied"),
}
