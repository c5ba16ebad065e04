"""Times of rounds that take turns, on a clock that a test moves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from attnplug.tuning.rounds import ROUNDS, measure_in_turns, timing_of


def scripted(times: dict[str, list[float]]) -> tuple[dict[str, Callable[[], float]], list[str]]:
    """Runs that give these times in order, the last one for ever; and the order of their calls."""
    calls: list[str] = []

    def run(name: str, each: Iterator[float]) -> Callable[[], float]:
        def once() -> float:
            calls.append(name)
            return next(each)

        return once

    def endless(values: list[float]) -> Iterator[float]:
        return itertools.chain(values, itertools.repeat(values[-1]))

    return {name: run(name, endless(values)) for name, values in times.items()}, calls


def test_the_first_round_warms_up_and_the_turns_rotate() -> None:
    runs, calls = scripted({"A": [900.0, 10.0, 11.0, 10.0], "B": [5.0, 10.5, 10.0, 10.4], "C": [1.0, 10.2]})
    found = measure_in_turns(runs, "A", rounds=3)
    assert calls == [*"ABC", *"ABC", *"BCA", *"CAB"]
    assert (found["A"].us, found["A"].rounds) == (10.0, 3)


def test_a_flaky_round_moves_neither_the_median_nor_the_choice() -> None:
    runs, _ = scripted({"A": [0.0, 10.0, 10.1, 95.0, 10.0, 10.1], "B": [0.0, 10.3, 10.2, 10.3, 10.3, 10.2]})
    found = measure_in_turns(runs, "A")
    assert found["A"].us == 10.1
    assert found["A"].spread < 0.02
    assert found["A"].us < found["B"].us


def test_a_slow_moment_slows_all_alike() -> None:
    """Every round is slower than the one before, as on a GPU whose clock drops."""
    drift = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    runs, _ = scripted({"A": [10.0 * each for each in drift], "B": [10.5 * each for each in drift]})
    found = measure_in_turns(runs, "A")
    assert found["B"].us / found["A"].us == pytest.approx(1.05)


def test_who_is_far_behind_is_left_out_after_two_rounds_but_never_the_default() -> None:
    runs, calls = scripted(
        {"DEFAULT": [99.0], "FAST": [10.0, 10.0, 10.2, 9.9, 10.1, 10.0], "NEAR": [10.1], "SLOW": [40.0]}
    )
    found = measure_in_turns(runs, "DEFAULT")
    assert found["SLOW"].rounds == 2
    assert found["DEFAULT"].rounds == found["FAST"].rounds == found["NEAR"].rounds == ROUNDS
    assert calls.count("SLOW") == 3


def test_a_wide_gap_ends_the_rounds_early() -> None:
    runs, _ = scripted({"A": [10.0], "B": [13.0]})
    assert measure_in_turns(runs, "A")["A"].rounds == 3
    near, _ = scripted({"A": [10.0], "B": [10.5]})
    assert measure_in_turns(near, "A")["A"].rounds == ROUNDS


def test_nobody_takes_no_time() -> None:
    assert measure_in_turns({}, None) == {}


@pytest.mark.parametrize(
    ("times", "us", "spread"), [([10.0], 10.0, 0.0), ([8.0, 10.0, 14.0], 10.0, 0.2), ([0.0], 0.0, 0.0)]
)
def test_the_spread_is_the_median_deviation(times: list[float], us: float, spread: float) -> None:
    found = timing_of(times)
    assert (found.us, found.spread, found.rounds) == (us, spread, len(times))


def test_the_host_timer_reads_the_clock_around_a_round() -> None:
    from attnplug.tuning.timers import HostTimer

    now = [0.0]
    indexes: list[int] = []

    def call(index: int) -> None:
        indexes.append(index)
        now[0] += 0.002

    run = HostTimer(clock=lambda: now[0]).prepare(call, 1, graph=True)
    assert run() == pytest.approx(2000.0)
    # One call warms up and one estimates; a round then lasts 10 ms.
    assert len(indexes) == 2 + 6
    assert indexes[-6:] == list(range(6))
