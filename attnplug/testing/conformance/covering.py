"""Rows that hold every value, or every pair of values, of several axes: few of them, always the same."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

__all__ = ["Row", "covering_rows"]

Row: TypeAlias = dict[str, Any]
_Cell: TypeAlias = tuple[str, int]

_ATTEMPTS = 24
"""Rows drawn for each one kept: of those that are possible, the one that covers most wins."""
_LAST_ATTEMPTS = 96
"""Rows drawn at random where none of those was possible: values of most use may be those that exclude each other."""


def covering_rows(
    axes: Mapping[str, Sequence[Any]],
    possible: Callable[[Row], bool],
    *,
    strength: int = 2,
    seed: int = 0,
) -> list[Row]:
    """Rows such that every combination of `strength` values that occurs in a possible row occurs in one.

    Greedy: each row starts from a combination not yet covered and takes, axis by axis, the value that
    covers most of the others. (A row must be judged whole, as a LayerSpec is, which the known libraries of
    pairwise testing do not offer: they ask about rows half made.)

    Args:
        axes: values of each axis; the first is the plainest, and is preferred where nothing else decides.
        possible: whether a row may stand; asked of whole rows only.
        strength: 1 covers values, 2 pairs.
        seed: of the order in which ties are broken.
    """
    chance = random.Random(seed)  # noqa: S311 - a design, not a secret
    wanted = {
        frozenset(zip(names, places, strict=True))
        for names in itertools.combinations(axes, strength)
        for places in itertools.product(*(range(len(axes[name])) for name in names))
    }
    rows: list[Row] = []
    # Sorted: sets of strings are not in the same order in two processes.
    for start in sorted(wanted, key=sorted):
        if start not in wanted:
            continue
        best: dict[str, int] | None = None
        gain = 0
        for attempt in range(_ATTEMPTS):
            places = _complete(axes, dict(start), wanted, strength, chance, plain=attempt % 2 == 1)
            if not possible({name: axes[name][place] for name, place in places.items()}):
                continue
            covered = len(_covered(places, wanted, strength))
            if covered > gain:
                best, gain = places, covered
        if best is None:
            best = _any_possible(axes, dict(start), possible, chance)
        if best is None:
            wanted.discard(start)  # no possible row was found that holds it
            continue
        wanted -= _covered(best, wanted, strength)
        rows.append({name: axes[name][best[name]] for name in axes})
    return rows


def _complete(
    axes: Mapping[str, Sequence[Any]],
    places: dict[str, int],
    wanted: set[frozenset[_Cell]],
    strength: int,
    chance: random.Random,
    *,
    plain: bool,
) -> dict[str, int]:
    """Give every axis a value: the plainest, or the one of most use with those chosen so far."""
    rest = [name for name in axes if name not in places]
    chance.shuffle(rest)
    # Of plain rows some axes are still varied, so that what only goes with plain values is covered too.
    varied = set(rest[: len(rest) // 3]) if plain else set(rest)
    for name in rest:
        if name not in varied:
            places[name] = 0
            continue
        use = [
            sum(
                frozenset([(name, place), *others]) in wanted
                for others in itertools.combinations(places.items(), strength - 1)
            )
            for place in range(len(axes[name]))
        ]
        most = max(use)
        places[name] = chance.choice([place for place, each in enumerate(use) if each == most])
    return places


def _any_possible(
    axes: Mapping[str, Sequence[Any]],
    start: dict[str, int],
    possible: Callable[[Row], bool],
    chance: random.Random,
) -> dict[str, int] | None:
    """A possible row that holds `start`, with ever fewer values that are not the plainest."""
    for attempt in range(_LAST_ATTEMPTS):
        varied = 1 - attempt / (_LAST_ATTEMPTS - 1)
        places = {
            name: chance.randrange(len(values)) if chance.random() < varied else 0
            for name, values in axes.items()
        } | start
        if possible({name: axes[name][place] for name, place in places.items()}):
            return places
    return None


def _covered(
    places: Mapping[str, int], wanted: set[frozenset[_Cell]], strength: int
) -> set[frozenset[_Cell]]:
    return {
        cells
        for names in itertools.combinations(places, strength)
        if (cells := frozenset((name, places[name]) for name in names)) in wanted
    }
