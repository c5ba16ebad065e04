"""Rounds of measurements that take turns, so that a slow moment of the device slows all candidates."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

ROUNDS = 5
MORE_ROUNDS = 3
"""At most this many rounds repeat disturbed ones."""
# After this round, candidates slower than the best by this factor are left out of the others.
_DROP_AFTER, _DROP_ABOVE = 2, 1.5
# A gap of more than this many spreads will not close in further rounds.
_CERTAIN = 6.0
_UNSTEADY = 0.08
"""A round is disturbed if a fixed piece of work takes longer or shorter beside it by this share."""
_MORE_MEMORY = 256 << 20
"""A round is disturbed if other processes hold this much more memory of the device than in another round."""

_K = TypeVar("_K", bound=Hashable)


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceState:
    """The state of a device between rounds.

    Args:
        us: microseconds of a fixed piece of work, which changes with the clock and with other processes.
        others: bytes of device memory that other processes hold; 0 where this is not known.
    """

    us: float
    others: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """The time of one candidate.

    Args:
        us: microseconds of a call: the median of the rounds.
        spread: median absolute deviation of the rounds, relative to `us`; if they are noisy, at least the
            mean change of the device's speed.
        rounds: number of rounds.
        noisy: why the rounds are uncertain: the device was disturbed in most of them; else "".
    """

    us: float
    spread: float
    rounds: int
    noisy: str = ""


def timing_of(times: Sequence[float]) -> Timing:
    """The time of the rounds `times`, in microseconds."""
    us = statistics.median(times)
    spread = statistics.median(abs(each - us) for each in times) / us if us else 0.0
    return Timing(us, spread, len(times))


def measure_in_turns(
    runs: Mapping[_K, Callable[[], float]],
    default: _K | None,
    rounds: int = ROUNDS,
    watch: Callable[[], DeviceState] | None = None,
) -> dict[_K, Timing]:
    """The time of each of `runs`, whose calls give microseconds.

    The first round only warms up. Each round begins with another candidate. After two rounds, those far behind the best
    are left out, but never the default, with which every other is compared. Disturbed rounds are repeated.

    Args:
        runs: measures one round of each candidate.
        default: the candidate that is measured in every round.
        rounds: number of rounds that count.
        watch: gives the state of the device; None if it is not watched.
    """
    if not runs:
        return {}
    times: dict[_K, dict[int, float]] = {name: {} for name in runs}
    order = list(runs)
    for name in order:
        runs[name]()
    moments: list[DeviceState] = [] if watch is None else [watch()]
    number, steady = 0, list[int]()
    for number in range(rounds if watch is None else rounds + MORE_ROUNDS):
        turn = number % len(order)
        for name in (*order[turn:], *order[:turn]):
            times[name][number] = runs[name]()
        if watch is not None:
            moments.append(watch())
        steady = _steady(moments, number + 1)
        if len(steady) >= rounds:
            break
        if len(steady) == _DROP_AFTER:
            middle = {name: statistics.median(_chosen(times[name], steady)) for name in order}
            limit = _DROP_ABOVE * min(middle.values())
            order = [name for name in order if name == default or middle[name] <= limit]
        elif len(steady) > _DROP_AFTER and _is_decided([_chosen(times[name], steady) for name in order]):
            break
    noisy = ""
    if len(steady) <= _DROP_AFTER:
        noisy, steady = _why(moments), list(range(number + 1))
    least = 0.0
    if noisy:
        # The mean change of the device's speed, because the median of two speeds in turn has no deviation.
        middle_us = statistics.median(moment.us for moment in moments)
        least = statistics.fmean(abs(moment.us / middle_us - 1) for moment in moments)
    found = {name: timing_of(_chosen(each, steady)) for name, each in times.items()}
    return {
        name: dataclasses.replace(each, spread=max(each.spread, least), noisy=noisy)
        for name, each in found.items()
    }


def _chosen(times: Mapping[int, float], rounds: Sequence[int]) -> list[float]:
    """The times in some rounds; all of a candidate that was left out before any of them."""
    return [times[number] for number in rounds if number in times] or list(times.values())


def _steady(moments: Sequence[DeviceState], rounds: int) -> list[int]:
    """The rounds before and after which the device was as in most others."""
    if not moments:
        return list(range(rounds))
    middle = statistics.median(moment.us for moment in moments)
    least = min(moment.others for moment in moments)
    fine = [
        abs(moment.us / middle - 1) <= _UNSTEADY and moment.others - least <= _MORE_MEMORY
        for moment in moments
    ]
    return [number for number in range(rounds) if fine[number] and fine[number + 1]]


def _why(moments: Sequence[DeviceState]) -> str:
    others = [moment.others for moment in moments]
    if max(others) - min(others) > _MORE_MEMORY:
        more = (max(others) - min(others)) >> 20
        return f"noisy: another process took {more} MiB of the device meanwhile"
    us = [moment.us for moment in moments]
    return f"noisy: the speed of the device changed by {100 * (max(us) / min(us) - 1):.0f} % between rounds"


def _is_decided(times: Sequence[Sequence[float]]) -> bool:
    """Whether the best is so far ahead that more rounds would change nothing."""
    found = sorted((timing_of(each) for each in times), key=lambda each: each.us)
    if len(found) < 2:
        return True
    spread = max(each.spread * each.us for each in found)
    return found[1].us - found[0].us > max(_CERTAIN * spread, 0.1 * found[0].us)
