"""A model of several layers and KV groups, served step after step, alone and beside another."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from attnplug.core.spec import LayerSpec
from attnplug.testing.comparison import assert_close, tolerance
from attnplug.testing.conformance.check import Check, CheckSkipped, ConformanceError, Level
from attnplug.testing.conformance.serving import Call, Served
from attnplug.testing.conformance.target import Target
from attnplug.testing.conformance.verdicts import during

__all__ = ["checks", "model_of", "wrong_layers"]

_BETWEEN = "state shared between two runtimes"


def checks(target: Target) -> Iterator[Check]:
    """The checks of whole runtimes."""
    run: Callable[[Target], None]
    for name, (run, summary) in {
        "steps": (_check_steps, "several layers and KV groups answer right in each of several steps"),
        "two-runtimes": (_check_two, "a runtime answers right though another begins its step first"),
        "threads": (_check_threads, "two runtimes in two threads answer as alone"),
    }.items():
        yield Check(f"runtime/{name}", functools.partial(run, target), summary)


def model_of(target: Target) -> tuple[dict[str, LayerSpec], dict[str, str]]:
    """Layers of the kinds that the backend serves, of which one reads another's pages, and which that is.

    Raises:
        CheckSkipped: it serves no plain layer, or one phase only.
    """
    if target.phase is not None:
        why = "the steps of a model have both; check it as a half of PREFILL+DECODE"
        raise CheckSkipped(f"{target.name} serves {target.phase} only: {why}")
    full = target.spec()
    wanted: Mapping[str, Mapping[str, object]] = {
        "window": {"window": (19, 0)},
        "capped": {"logits_soft_cap": 3.0},
        "window-sinks": {"window": (19, 0), "has_sinks": True},
        "slopes": {"has_alibi": True},
    }
    specs = {"full": full, "scaled": full.replace(scale=full.scale / 2)}
    for name, fields in wanted.items():
        spec = full.replace(**fields)
        if not target.reasons(spec):
            specs[name] = spec
    return {**specs, "reader": full}, {"reader": "full"}


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """New tokens by request, and who comes before the step and goes after it."""

    tokens: dict[str, int]
    come: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()


def _script(size: int, seed: int) -> list[_Step]:
    """Prefill, decode, mixed and extend steps over pages of `size`; of unlike lengths with another seed.

    One request has more than a hundred tokens, for which kernels may change.
    """
    return [
        _Step({"a": size + 3 + seed, "b": 2 * size + 111 - seed}, come=("a", "b")),
        _Step({"a": 1, "b": 1}),
        _Step({"a": 1, "c": 7, "b": 1}, come=("c",)),
        _Step({"c": 9, "b": 1, "a": size}, gone=("b",)),
        _Step({"d": 5, "c": 1, "a": 1}, come=("d",)),
        _Step({"a": 1, "c": 1, "d": size + 2}),
        _Step({"a": 1, "c": 1, "d": 1}),
    ]


def wrong_layers(served: Served, calls: Mapping[str, Call], what: str) -> str | None:
    """Run all layers of the step that was begun; what is wrong with which, or None."""
    wrong: dict[str, str] = {}
    group_of = {name: index for index, group in enumerate(served.groups) for name in group.layer_names}
    for layer, call in calls.items():
        try:
            found = served.run(layer, call)
            assert_close(found, call.expected, tolerance(served.plan.specs[layer]).output)
        except AssertionError as problem:
            wrong[layer] = f"layer {layer} of KV group {group_of[layer]}: {problem}"
    right = [layer for layer in calls if layer not in wrong]
    others = f"; right: {', '.join(right)}" if right else ""
    return f"{what}: {'; '.join(wrong.values())}{others}" if wrong else None


def _serve(served: Sequence[Served], meet: Callable[[], object], who: str) -> None:
    """Run each one's script: in each step all begin, then the layers of each run."""
    scripts = [_script(each.block_size, each.seed) for each in served]
    for number, steps in enumerate(zip(*scripts, strict=True), 1):
        calls = []
        for each, step in zip(served, steps, strict=True):
            for name in step.come:
                each.add(name)
            with during(f"{who}begin of step {number}"):
                each.begin(**step.tokens)
            calls.append({layer: each.call(layer) for layer in each.plan.specs})
        meet()
        for each, step, drawn in zip(served, steps, calls, strict=True):
            what = f"{who}step {number} with new tokens {step.tokens}"
            with during(what):
                wrong = wrong_layers(each, drawn, what)
            if wrong:
                raise ConformanceError(wrong)
            each.finish()
            for name in step.gone:
                each.remove(name)
        meet()


def _nothing() -> None:
    """Nobody to meet."""


def _served(target: Target, seed: int) -> Served:
    return Served(target, *model_of(target), seed=seed)


def _check_steps(target: Target) -> None:
    _serve([_served(target, 0)], _nothing, "")


def _check_two(target: Target) -> None:
    try:
        _serve([_served(target, 1), _served(target, 2)], _nothing, "two runtimes at once, ")
    except ConformanceError as problem:
        raise _beside(target, problem) from None


def _beside(target: Target, problem: BaseException) -> ConformanceError:
    """The error of two runtimes, which says whether each of them alone is right."""
    try:
        for seed in (1, 2):
            _serve([_served(target, seed)], _nothing, "")
    except ConformanceError:
        return ConformanceError(f"{problem}; alone they are wrong too")
    return ConformanceError(f"{problem}; alone each is right: {_BETWEEN}", _BETWEEN)


def _check_threads(target: Target) -> None:
    for number in range(4 if target.level is Level.SMOKE else 12):
        barrier = threading.Barrier(2)
        # In step, so that both begin before either's layers run, and then each at its own pace.
        meet = barrier.wait if number % 2 == 0 else _nothing
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            works = [pool.submit(_in_thread, target, seed, meet, barrier) for seed in (1, 2)]
            problems = [problem for work in works if (problem := work.exception()) is not None]
        # Where one thread fails, the other waits in vain.
        first = sorted(problems, key=lambda each: isinstance(each, threading.BrokenBarrierError))[:1]
        for problem in first:
            raise _beside(target, problem) from problem


def _in_thread(target: Target, seed: int, meet: Callable[[], object], barrier: threading.Barrier) -> None:
    try:
        _serve([_served(target, seed)], meet, "two threads, ")
    except BaseException:
        barrier.abort()
        raise
