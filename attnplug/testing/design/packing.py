"""Packs pairs of values, and triples of few values, into few rows."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from attnplug.testing.design.search import Pair, Row, Search

_ATTEMPTS = 6
"""Rows made for each one kept, which is the one that covers most pairs."""

_Value: TypeAlias = tuple[str, Any]


def served_pairs(search: Search) -> dict[Pair, Row]:
    """Each two values that the backend serves together, with the plainest row that has them."""
    return {pair: row for pair, row in search.pairs() if not search.reasons(row)}


def packed_rows(search: Search, served: Mapping[Pair, Row], *, seed: int = 0) -> list[Row]:
    """Few served rows that have all pairs of `served`; equal for equal seeds.

    Greedy: each row starts from the plainest row of a pair not yet covered. Then each axis, in random order,
    takes the value that covers most other pairs and with which the row is still served. Libraries of pairwise
    testing do not fit: they ask about unfinished rows, and a LayerSpec is accepted or refused as a whole.
    """
    chance = random.Random(seed)  # noqa: S311 - a design, not a secret
    missing: dict[_Value, set[_Value]] = defaultdict(set)
    for one, other in served:
        missing[one].add(other)
        missing[other].add(one)
    rows: list[Row] = []
    for (one, other), plainest in served.items():
        if other not in missing[one]:
            continue
        found = [_filled(search, (one, other), plainest, missing, chance) for _ in range(_ATTEMPTS)]
        best = max(found, key=lambda row: sum(len(missing[item] & row.items()) for item in row.items()))
        for item in best.items():
            missing[item] -= best.items()
        rows.append(best)
    return rows


def _filled(
    search: Search, pair: Pair, row: Row, missing: Mapping[_Value, set[_Value]], chance: random.Random
) -> Row:
    """A served row with the pair, and of each other axis the value that covers most missing pairs."""
    chosen = set(pair)
    fixed = {axis: value for axis, value in row.items() if value != search.base[axis]} | dict(pair)
    axes = [axis for axis in search.axes if axis not in dict(pair)]
    for axis in chance.sample(axes, len(axes)):
        uses = [(len(missing[axis, value] & chosen), chance.random(), value) for value in search.axes[axis]]
        for _, _, value in sorted(uses, key=lambda use: use[:2], reverse=True):
            changed = search.complete({**fixed, axis: value})
            if changed is not None and not search.reasons(changed):
                row = changed
                fixed[axis] = value
                chosen.add((axis, value))
                break
    return row


def crossed_rows(
    search: Search, axes: Mapping[str, Sequence[Any]], count: int, fixed: Mapping[str, Any] | None = None
) -> list[Row]:
    """Few served rows that have each `count` values of `axes` together; equal in every process.

    Other axes have the `fixed` or the plainest values. Values that are refused with the plainest ones of all other axes are left out.
    Unlike `packed_rows` it takes values that the search does not have.
    """
    chance = random.Random(0)  # noqa: S311 - a design, not a secret
    fixed = fixed or {}
    values = [[(axis, value) for value in axes[axis]] for axis in axes]
    missing = {
        frozenset(wanted): wanted
        for some in itertools.combinations(values, count)
        for wanted in itertools.product(*some)
    }
    rows: list[Row] = []
    for wanted in list(missing.values()):
        start = search.complete({**fixed, **dict(wanted)}) if frozenset(wanted) in missing else None
        if start is None or search.reasons(start):
            continue
        row, chosen = start, list(wanted)
        others = [each for each in values if each[0][0] not in dict(wanted)]
        for of_axis in chance.sample(others, len(others)):
            rest = list(itertools.combinations(chosen, count - 1))
            uses = {item: sum(frozenset((*each, item)) in missing for each in rest) for item in of_axis}
            for item in sorted(of_axis, key=lambda item: (-uses[item], chance.random())):
                changed = search.complete({**fixed, **dict([*chosen, item])})
                if changed is not None and not search.reasons(changed):
                    row = changed
                    chosen.append(item)
                    break
        for found in itertools.combinations(chosen, count):
            missing.pop(frozenset(found), None)
        rows.append(row)
    return rows
