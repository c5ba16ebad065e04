"""One choice of an engine's attention, in a process of its own: progress, figures and decisions.

The process prints lines of JSON after `MARK` on standard output, the last of them with all figures, and on standard
error how far it is. `comparison.py` reads both.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rank_processes import rank

if TYPE_CHECKING:
    # Not before a run needs it, because torch takes seconds to import.
    from lookup import Plan

BEGIN = time.perf_counter()
MARK, SAID = "result of the choice: ", "run, "
READY, ENDED = "ready", "ended"
"""Endings of the files by which choices that start together take turns."""
DECODE_ROUNDS = 4
"""Runs of decodes for each of prefill."""


class Engine(Protocol):
    """An engine with a model whose weights are those of `lookup.fill`."""

    plan: Plan

    def empty_cache(self) -> None:
        """Forget the prompts of earlier runs; RuntimeError if the engine does not."""

    def prefill(self, prompts: Sequence[list[int]]) -> None:
        """Draw one token for each prompt."""

    def decode(self, prompts: Sequence[list[int]], count: int) -> tuple[list[list[int]], float]:
        """The `count` likeliest tokens of each prompt, and the mean seconds of a step in which all decode."""


def split(choice: str) -> str:
    """The engine's name of NAME[=BACKEND][:OPTIONS]; attnplug's settings are in the environment from here on."""
    asked, _, options = choice.partition(":")
    name, _, backend = asked.partition("=")
    for variable, value in (("ATTNPLUG_OPTIONS", options), ("ATTNPLUG_BACKEND", backend)):
        if value:
            os.environ[variable] = value
    return name


def say(what: str, begin: float = BEGIN) -> None:
    """Print what comes now and the seconds since `begin`, for a run that takes too long; on the first rank."""
    if rank() == 0:
        print(f"{SAID}{time.perf_counter() - begin:.0f} s: {what}", file=sys.stderr, flush=True)


def tell(result: Mapping[str, Any]) -> None:
    """Print what is known so far, on the first rank; with `layers` it is the whole result."""
    if rank() == 0:
        print(MARK + json.dumps(result), flush=True)


def wait_for_turn(folder: str, turn: int, choices: int) -> None:
    """Wait until all choices have started, and those before this one have ended.

    Args:
        folder: of files named by a choice's turn, with the endings `READY` and `ENDED`.
        turn: of this choice, from 0.
        choices: how many there are.
    """
    say("is ready, and waits for the others")
    Path(folder, f"{turn}.{READY}").touch()
    while is_waiting(folder, turn, choices):
        time.sleep(0.1)


def is_waiting(folder: str, turn: int, choices: int) -> bool:
    """Whether a choice is ready, and others are not or measure before it; the arguments are those of `wait_for_turn`."""

    def there(number: int, *endings: str) -> bool:
        return any(Path(folder, f"{number}.{ending}").exists() for ending in endings)

    others = (there(each, ENDED, *[READY] * (each >= turn)) for each in range(choices))
    return there(turn, READY) and not all(others)


def report(engine: Engine, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Measure an engine that is ready now, and print the figures after each workload; the result without `layers`."""
    result: dict[str, Any] = {"start_s": time.perf_counter() - BEGIN, "workloads": {}}
    if "turns" in settings:
        wait_for_turn(*settings["turns"])
    asked = settings["workloads"], settings["max_tokens"], settings["rounds"]
    for figures in measure(engine, *asked):
        result["workloads"] = figures
        tell(result)
    return result


def measure(
    engine: Engine, workloads: Mapping[str, Sequence[int]], max_tokens: int, rounds: int
) -> Iterator[dict[str, dict[str, Any]]]:
    """The figures of the workloads so far, after each of each round.

    Speeds are those of the best round, the first and the slowest; a request is right if each round drew its tokens.
    A run of one token is the prefill, from an empty cache. The prompts are in the cache when decoding is measured, so
    all requests decode together from their first step. Each round has all workloads, and several decodes: they are
    short, and wait for the host while it is slow.
    """
    draw = random.Random(0)  # noqa: S311
    prompts = {
        name: [engine.plan.prompt(length, draw) for length in lengths] for name, lengths in workloads.items()
    }
    expected = {
        name: [engine.plan.follow(prompt, max_tokens) for prompt in given] for name, given in prompts.items()
    }
    filling: dict[str, list[float]] = {name: [] for name in workloads}
    steps: dict[str, list[float]] = {name: [] for name in workloads}
    right = {name: [True] * len(given) for name, given in prompts.items()}
    found = {}
    for number in range(rounds):
        for name, given in prompts.items():
            say(f"{name}, round {number + 1}")
            engine.empty_cache()
            begin = time.perf_counter()
            engine.prefill(given)
            filling[name].append(time.perf_counter() - begin)
            say(f"{name}, round {number + 1}: prefill took {filling[name][-1]:.2f} s")
            for _ in range(DECODE_ROUNDS):
                drawn, seconds = engine.decode(given, max_tokens)
                steps[name].append(seconds)
                same = zip(right[name], drawn, expected[name], strict=True)
                right[name] = [before and tokens == wanted for before, tokens, wanted in same]
            found[name] = _figures(workloads[name], filling[name], steps[name], right[name])
            yield found


def _figures(
    lengths: Sequence[int], filling: Sequence[float], steps: Sequence[float], right: Sequence[bool]
) -> dict[str, Any]:
    return {
        "prefill_tokens_per_s": sum(lengths) / min(filling),
        "first_prefill_tokens_per_s": sum(lengths) / filling[0],
        "slowest_prefill_tokens_per_s": sum(lengths) / max(filling),
        "decode_tokens_per_s": len(lengths) / min(steps),
        "first_decode_tokens_per_s": len(lengths) / steps[0],
        "decode_ms_per_step": 1e3 * min(steps),
        "slowest_decode_ms_per_step": 1e3 * max(steps),
        "right": sum(right) / len(right),
    }


def groups(decisions: Iterable[tuple[str, Any]]) -> list[dict[str, Any]]:
    """Layers with one decision of attnplug together, with the reasons against the other backends."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for name, decision in decisions:
        against = tuple((each.name, "; ".join(each.reasons)) for each in decision.refused)
        behind = tuple((each.name, each.priority) for each in decision.candidates if each.accepted)
        kinds = " ".join(decision.spec.kinds)
        key = (decision.backend, kinds, _why(decision), decision.block_size, behind, against)
        found.setdefault(key, []).append(name)
    fields = ("backend", "kinds", "why", "block_size", "accepted", "refused")
    return [{**dict(zip(fields, key, strict=True)), "layers": names} for key, names in found.items()]


def _why(decision: Any) -> tuple[str, ...]:
    """The rule that asked for the backend, or for each phase what put its backend first."""
    import attnplug

    if decision.rule is not None and decision.chosen_by != "plan":
        return (f"asked for by {decision.chosen_by}, {decision.rule}",)
    reasons = []
    for phase, name in decision.members.items():
        alone = attnplug.explain(decision.spec, decision.device, phase)
        first = str(alone.measured) if alone.measured else f"first by {alone.chosen_by}"
        reasons.append(f"{phase} on {name}: {first if alone.backend == name else 'serves both phases'}")
    return (*reasons, *decision.notes)
