"""A model of several layers and KV groups, served step by step, alone and together with another."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from attnplug.core.errors import BatchError
from attnplug.core.spec import LayerSpec
from attnplug.testing.comparison import assert_close
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
from attnplug.testing.conformance.harness import layer_words, make_impl
from attnplug.testing.conformance.layer_names import layer_names
from attnplug.testing.conformance.serving.serving import LayerCall, ServedModel
from attnplug.testing.conformance.target import Target
from attnplug.testing.drawn_values import layer_tensors

_BETWEEN = "state shared between two runtimes"


def checks(target: Target) -> Iterator[Check]:
    """The checks of whole runtimes."""
    yield from checks_from(_CHECKS, "runtime", target)
    if target.phase is None:
        summary = "a runtime that one thread made gives right answers in another"
        yield Check.of("runtime/other-thread", summary, _check_other_thread, target)


def model_of(target: Target) -> tuple[dict[str, LayerSpec], dict[str, str]]:
    """Layers of the kinds that the backend serves, and for a layer that shares pages, the layer that owns them.

    Raises:
        CheckSkipped: the backend serves no plain layer, or only one phase.
    """
    if target.phase is not None:
        why = "the steps of a model have both; check it as a half of PREFILL+DECODE"
        raise CheckSkipped(f"{target.name} serves {target.phase} only: {why}", SkipKind.PHASE)
    full = target.spec(attn_type="decoder", direct_kv=False, causal=True)
    if not _is_made(target, full):
        raise CheckSkipped(f"{target.name} refuses a plain layer with {target.own_options}", SkipKind.OPTIONS)
    if full.sparse is not None:
        raise CheckSkipped("the kit's models have no indexer, which sparse layers need")
    fields_of: Mapping[str, Mapping[str, object]] = {
        "scaled": {"scale": full.scale / 2},
        "window": {"window": (19, 0)},
        "capped": {"logits_soft_cap": 3.0},
        "window-sinks": {"window": (19, 0), "has_sinks": True},
        "slopes": {"has_alibi": True},
        "two-sided": {"causal": False},
        "two-sided-window": {"causal": False, "window": (19, 5)},
        "spans": {"mm_prefix": True},
        "window-spans": {"window": (19, 0), "mm_prefix": True},
    }
    specs = {"full": full}
    for name, fields in fields_of.items():
        # The plainest layer that is served may have something else in its place.
        with contextlib.suppress(CheckSkipped):
            spec = target.changed(full, **fields)
            if _is_made(target, spec):
                specs[name] = spec
    # A layer may read the pages of a layer that scores otherwise, if both keep the same keys.
    readers: dict[str, LayerSpec] = {"reader": full}
    readers |= {"scaled-reader": specs["scaled"]} if "scaled" in specs else {}
    shared = dict.fromkeys(readers, "full")
    if "window" in specs:
        readers["window-reader"], shared["window-reader"] = specs["window"], "window"
    specs |= readers
    name_of = dict(zip(specs, layer_names(len(specs), full), strict=True))
    named = {name_of[label]: spec for label, spec in specs.items()}
    return named, {name_of[reader]: name_of[label] for reader, label in shared.items()}


def _is_made(target: Target, spec: LayerSpec) -> bool:
    """Whether from_spec takes the options of the run for a layer."""
    if target.own_options is None:
        return True
    try:
        make_impl(
            target.backend, spec, layer_tensors(spec, device=target.torch_device), options=target.own_options
        )
    except CheckSkipped:
        return False
    return True


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """New tokens by request, the requests added before the step and those removed after it."""

    tokens: dict[str, int]
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


def _script(size: int, seed: int) -> list[_Step]:
    """Prefill, decode, mixed and extend steps over pages of `size`; another seed gives other lengths."""
    # One request has more than a hundred tokens, where backends may switch kernels.
    return [
        _Step({"a": size + 3 + seed, "b": 2 * size + 111 - seed}, added=("a", "b")),
        _Step({"a": 1, "b": 1}),
        _Step({"a": 1, "c": 7, "b": 1}, added=("c",)),
        _Step({"c": 9, "b": 1, "a": size}, removed=("b",)),
        _Step({"d": 5, "c": 1, "a": 1}, added=("d",)),
        _Step({"a": 1, "c": 1, "d": size + 2}),
        _Step({"a": 1, "c": 1, "d": 1}),
    ]


def wrong_layers(served: ServedModel, calls: Mapping[str, LayerCall], what: str) -> str | None:
    """Run all layers of the current step; the errors of wrong layers, or None."""
    wrong: dict[str, str] = {}
    group_of = {name: index for index, group in enumerate(served.groups) for name in group.layer_names}
    for layer, call in calls.items():
        try:
            found = served.run(layer, call)
            assert_close(found, call.expected, served.bound(layer))
        except AssertionError as problem:
            words = layer_words(served.plan.specs[layer])
            if layer in served.plan.kv_sharing:
                words += f", with the pages of {served.plan.kv_sharing[layer]}"
            wrong[layer] = f"layer {layer} ({words}) of KV group {group_of[layer]}: {problem}"
    right = [layer for layer in calls if layer not in wrong]
    others = f"; right: {', '.join(right)}" if right else ""
    return f"{what}: {'; '.join(wrong.values())}{others}" if wrong else None


def _serve(served: Sequence[ServedModel], barrier: Callable[[], object], who: str) -> None:
    """Run the script of each model; in each step all models begin before the layers of any run."""
    scripts = [_script(each.block_size, each.seed) for each in served]
    for number, steps in enumerate(zip(*scripts, strict=True), 1):
        calls = []
        for each, step in zip(served, steps, strict=True):
            for name in step.added:
                each.add(name, step.tokens[name])
            with error_context(f"{who}begin of step {number}"):
                each.begin(**step.tokens)
            calls.append({layer: each.call(layer) for layer in each.plan.specs})
        barrier()
        for each, step, drawn in zip(served, steps, calls, strict=True):
            what = f"{who}step {number} with new tokens {step.tokens}"
            with error_context(what):
                wrong = wrong_layers(each, drawn, what)
            if wrong:
                raise ConformanceError(wrong)
            each.finish()
            for name in step.removed:
                each.remove(name)
        barrier()


def _no_barrier() -> None:
    """A model on its own waits for no other."""


def _make_model(target: Target, seed: int) -> ServedModel:
    return ServedModel(target, *model_of(target), seed=seed)


def _check_steps(target: Target) -> None:
    _serve([_make_model(target, 0)], _no_barrier, "")


def _check_drafts(target: Target) -> None:
    served = ServedModel(target, *model_of(target), seed=0, num_speculative_tokens=2)
    size = served.block_size
    script: list[tuple[dict[str, int], dict[str, int]]] = [
        ({"a": max(size - 2, 1), "b": size + 9}, {}),
        ({"a": 2, "b": 2}, {"a": 1, "b": 2}),
        ({"a": 2, "b": 2}, {"a": 2, "b": 1}),
        ({"a": 3, "b": 3}, {"a": 1, "b": 2}),
        ({"a": 3, "b": 3, "c": size + 1}, {"a": 3, "b": 1}),
        ({"a": 2, "b": 1, "c": 2}, {"a": 1, "c": 1}),
        ({"a": 2, "b": 2, "c": 2}, {"b": 1}),
        ({"a": 1, "b": 1, "c": 1}, {}),
    ]
    added: set[str] = set()
    for number, (tokens, accepted) in enumerate(script, 1):
        for name in tokens.keys() - added:
            served.add(name, tokens[name])
            added.add(name)
        what = f"step {number} with new tokens {tokens}, after steps whose drafts were rejected in part"
        _run_step(served, tokens, what, **accepted)


def _check_causality(target: Target) -> None:
    served = _make_model(target, 0)
    if all(spec.causal for spec in served.plan.specs.values()):
        raise CheckSkipped(f"{target.name} serves causal layers only", SkipKind.LAYER)
    size, added = served.block_size, set[str]()
    script: tuple[tuple[bool | None, dict[str, int]], ...] = (
        (True, {"a": size + 3, "b": 9}),
        (None, {"a": 1, "b": 1, "c": 7}),
        (True, {"a": 3, "c": 1, "b": size}),
        (None, {"a": 3, "b": 2}),
        (True, {"c": 4, "a": 1}),
    )
    for number, (causal, tokens) in enumerate(script, 1):
        served.causal = causal
        for name in sorted(tokens.keys() - added):
            served.add(name, tokens[name])
            added.add(name)
        _run_step(served, tokens, f"step {number} with new tokens {tokens} and causal={causal}")


def _check_out_of_date(target: Target) -> None:
    served = _make_model(target, 0)
    for name, count in (("a", served.block_size + 3), ("b", 7), ("c", 12)):
        served.add(name, count)
    _run_step(served, {"a": served.block_size + 3, "b": 7, "c": 12}, "the first step")
    changes: dict[str, Callable[[], object]] = {
        "swap_states": lambda: served.batches.swap_states(0, 1),
        "step": lambda: served.batches.step(served.num_scheduled_tokens),
        "remove_request": lambda: served.remove("c"),
    }
    for number, (call, change) in enumerate(changes.items(), 1):
        tokens = {"a": 1, "b": 2}
        served.begin(**tokens)
        change()
        for layer, spec in served.plan.specs.items():
            with error_context(
                f"a layer of a step that is out of date, since {call} was called after its build"
            ):
                _expect_refused(served, layer, spec)
        what = f"step {number + 1} with new tokens {tokens}, after a build that {call} put out of date"
        _run_step(served, tokens, what)


def _expect_refused(served: ServedModel, layer: str, spec: LayerSpec) -> None:
    count, device = sum(served.num_scheduled_tokens.values()), served.runtime.device
    made: dict[str, Any] = {"dtype": getattr(torch, spec.dtype), "device": device}
    query = torch.zeros(count, spec.num_heads, spec.query_size, **made)
    own = layer not in served.plan.kv_sharing
    key, value = (
        torch.zeros(count, spec.num_kv_heads, each, **made) if own else None
        for each in (spec.head_size, spec.head_size_v)
    )
    expected = torch.zeros(count, spec.num_heads, spec.output_size, dtype=torch.float64)
    try:
        served.run(layer, LayerCall(query, key, value, expected))
    except BatchError as problem:
        if "out of date" in str(problem):
            return
        raise
    raise ConformanceError(f"{layer} ran with metadata of requests that have moved since")


def _run_step(served: ServedModel, tokens: dict[str, int], what: str, **accepted: int) -> None:
    """Run all layers in one step; ConformanceError, which begins with `what`, if one is wrong."""
    with error_context(what):
        served.begin(**tokens)
        calls = {layer: served.call(layer) for layer in served.plan.specs}
        wrong = wrong_layers(served, calls, what)
    if wrong:
        raise ConformanceError(wrong)
    served.finish(**accepted)


def _check_two(target: Target) -> None:
    try:
        _serve([_make_model(target, 1), _make_model(target, 2)], _no_barrier, "two runtimes at once, ")
    except ConformanceError as problem:
        raise _compare_alone(target, problem) from None


def _compare_alone(target: Target, problem: BaseException) -> ConformanceError:
    """The error of two runtimes, with a note whether each of them alone is right."""
    try:
        for seed in (1, 2):
            _serve([_make_model(target, seed)], _no_barrier, "")
    except ConformanceError:
        return ConformanceError(f"{problem}; alone they are wrong too")
    return ConformanceError(f"{problem}; alone each is right: {_BETWEEN}", _BETWEEN)


def _check_threads(target: Target) -> None:
    for number in range(4 if target.level is Level.SMOKE else 12):
        barrier = threading.Barrier(2)
        # In turns, both begin before the layers of either run, or each runs at its own pace.
        wait = barrier.wait if number % 2 == 0 else _no_barrier
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            works = [pool.submit(_in_thread, target, seed, wait, barrier) for seed in (1, 2)]
            problems = [problem for work in works if (problem := work.exception()) is not None]
        # If one thread fails, the barrier breaks in the other, so its error comes last.
        first = sorted(problems, key=lambda each: isinstance(each, threading.BrokenBarrierError))[:1]
        for problem in first:
            raise _compare_alone(target, problem) from problem


def _check_other_thread(target: Target) -> None:
    served = _make_model(target, 1)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(_serve, [served], _no_barrier, "made in one thread and run in another, ").result()


def _in_thread(target: Target, seed: int, wait: Callable[[], object], barrier: threading.Barrier) -> None:
    try:
        _serve([_make_model(target, seed)], wait, "two threads, ")
    except BaseException:
        barrier.abort()
        raise


_CHECKS: CheckTable = {
    "steps": (_check_steps, "several layers and KV groups give right answers in several steps"),
    "drafts": (_check_drafts, "several tokens a request are verified, and those rejected are written again"),
    "causality": (
        _check_causality,
        "a step narrows the layers that are not causal, and the next one does not",
    ),
    "out-of-date": (
        _check_out_of_date,
        "a step that requests left is refused, and the next one is right",
    ),
    "two-runtimes": (_check_two, "a runtime gives right answers though another begins its step first"),
    "threads": (_check_threads, "two runtimes in two threads give the answers that each gives alone"),
}
