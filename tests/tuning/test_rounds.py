"""Times of rounds that take turns, on a clock that a test moves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from attnplug.tuning.rounds import MORE_ROUNDS, ROUNDS, DeviceState, measure_in_turns, timing_of


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


def watched(*us: float, others: dict[int, int] | None = None) -> Callable[[], DeviceState]:
    """A device whose fixed work takes these times in order, the last one for ever."""
    number = itertools.count()
    values = itertools.chain(us, itertools.repeat(us[-1]))
    return lambda: DeviceState(next(values), (others or {}).get(next(number), 0))


def test_rounds_beside_a_change_of_the_clock_are_repeated() -> None:
    """The clock halves for the third round, and the times of both with it."""
    a, b = [0.0, 10.0, 10.1, 20.0, 10.0, 10.1], [0.0, 10.3, 10.2, 20.6, 10.3, 10.2]
    runs, calls = scripted({"A": a, "B": b})
    found = measure_in_turns(runs, "A", watch=watched(100.0, 101.0, 99.0, 200.0, 100.0))
    # The round before the change counts no more than the one after it.
    assert calls.count("A") == 1 + ROUNDS + 2
    assert (found["A"].us, found["A"].rounds, found["A"].noisy) == (10.1, ROUNDS, "")
    assert found["A"].spread < 0.011
    still, calls = scripted({"A": a, "B": b})
    assert measure_in_turns(still, "A", watch=watched(100.0, 103.0, 97.0))["A"].rounds == ROUNDS
    assert calls.count("A") == 1 + ROUNDS


def test_a_clock_that_never_rests_makes_the_times_noisy() -> None:
    runs, calls = scripted({"A": [10.0], "B": [9.0]})
    found = measure_in_turns(runs, "A", watch=watched(*[100.0, 140.0] * 9))
    assert calls.count("A") == 1 + ROUNDS + MORE_ROUNDS
    assert found["A"].noisy == "noisy: the speed of the device changed by 40 % between rounds"
    # A gain of a tenth is within the noise of such a device.
    assert found["B"].spread > 0.05


def test_another_process_on_the_device_repeats_rounds() -> None:
    runs, calls = scripted({"A": [10.0], "B": [10.3]})
    visit = {3: 4 << 30, 4: 4 << 30}
    assert measure_in_turns(runs, "A", watch=watched(100.0, others=visit))["A"].noisy == ""
    assert calls.count("A") == 1 + ROUNDS + 3
    always = dict.fromkeys(range(0, 20, 2), 4 << 30)
    noisy = measure_in_turns(runs, "A", watch=watched(100.0, others=always))["A"].noisy
    assert noisy == "noisy: another process took 4096 MiB of the device meanwhile"


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
