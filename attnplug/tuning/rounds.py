"""Rounds of measurements that take turns, so that a slow moment of the device slows all candidates alike."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

ROUNDS = 5
_DROP_AFTER, _DROP_ABOVE = 2, 1.5
"""After this round, candidates slower than the best by this factor are left out of the others."""
_CERTAIN = 6.0
"""A gap of more than this many spreads will not close in further rounds."""

_K = TypeVar("_K", bound=Hashable)


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """The time of one candidate.

    Args:
        us: microseconds of a call: the median of the rounds.
        spread: median absolute deviation of the rounds, relative to `us`.
        rounds: number of rounds.
    """

    us: float
    spread: float
    rounds: int


def timing_of(times: Sequence[float]) -> Timing:
    """The time of the rounds `times`, in microseconds."""
    us = statistics.median(times)
    spread = statistics.median(abs(each - us) for each in times) / us if us else 0.0
    return Timing(us, spread, len(times))


def measure_in_turns(
    runs: Mapping[_K, Callable[[], float]], default: _K | None, rounds: int = ROUNDS
) -> dict[_K, Timing]:
    """The time of each of `runs`, whose calls give microseconds.

    The first round only warms up. Each round begins with another candidate. After two rounds, those far behind the best
    are left out, but never the default, with which every other is compared.

    Args:
        runs: measures one round of each candidate.
        default: the candidate that is measured in every round.
        rounds: number of rounds that count.
    """
    if not runs:
        return {}
    times: dict[_K, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for name in order:
        runs[name]()
    for number in range(rounds):
        turn = number % len(order)
        for name in (*order[turn:], *order[:turn]):
            times[name].append(runs[name]())
        if number + 1 == _DROP_AFTER:
            best = min(statistics.median(times[name]) for name in order)
            limit = _DROP_ABOVE * best
            order = [name for name in order if name == default or statistics.median(times[name]) <= limit]
        elif number + 1 > _DROP_AFTER and _is_decided([times[name] for name in order]):
            break
    return {name: timing_of(each) for name, each in times.items()}


def _is_decided(times: Sequence[Sequence[float]]) -> bool:
    """Whether the best is so far ahead that more rounds would change nothing."""
    found = sorted((timing_of(each) for each in times), key=lambda each: each.us)
    if len(found) < 2:
        return True
    spread = max(each.spread * each.us for each in found)
    return found[1].us - found[0].us > max(_CERTAIN * spread, 0.1 * found[0].us)
