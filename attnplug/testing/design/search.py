"""Searches for rows that a backend serves: for each two values the plainest row that has them.

Packs pairs of values, and triples of few values, into few rows.

Sizes to try with a backend that allows every multiple of one.

Chooses what to try of a backend that compiles a kernel for each compile key.
"""

from __future__ import annotations

import abc
import itertools
import random
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from attnplug.core.blocks import MultipleOf
from attnplug.registry.plugins.waiting import guarded_call

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.core.spec import LayerSpec


Axes: TypeAlias = Mapping[str, Sequence[Any]]
"""The values of each axis, the plainest first."""
Row: TypeAlias = dict[str, Any]
"""One value of each axis."""
Pair: TypeAlias = tuple[tuple[str, Any], tuple[str, Any]]
"""Two axes, each with a value."""

# Values of an axis that are changed together with those of another: the product of long axes takes seconds.
_JOINED = 16


class Search(abc.ABC):
    """Asks one backend about rows, each row once.

    Args:
        axes: the values to pair. The search changes the first axis last.
    """

    order: Sequence[str]
    """The axes in the order of the search's changes."""
    joined: Sequence[str] = ()
    """Axes that the search also changes two at a time if no single change helps."""

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self._answers: dict[tuple[Any, ...], Sequence[Any]] = {}
        self._useful = axes
        self.base: Row
        """The plainest served row; if none is served, the row with the fewest reasons against it."""
        self.start_from({axis: values[0] for axis, values in axes.items()})
        first = next(iter(axes))
        for kept in ({first: self.base[first]}, {}):
            while self.reasons(self.base) and not self.is_hopeless({}, self.base):
                found = min(self._change({}, kept), key=lambda row: len(self.reasons(row)))
                if len(self.reasons(found)) >= len(self.reasons(self.base)):
                    break
                self.start_from(found)

    @abc.abstractmethod
    def ask(self, row: Row) -> Sequence[Any]:
        """The reasons against a row; empty if the backend serves it."""

    def start_from(self, base: Row) -> None:
        """Make `base` the row that others differ from."""
        self.base = base

    def complete(self, fixed: Mapping[str, Any]) -> Row | None:
        """The base with the `fixed` values; None if no row with them has a meaning."""
        return {**self.base, **fixed}

    def is_hopeless(self, fixed: Mapping[str, Any], row: Row) -> bool:
        """Whether a reason against `row` refuses a fixed value in every row, so that a search is in vain."""
        return False

    def reasons(self, row: Row) -> Sequence[Any]:
        """As `ask`, from memory for a row that was asked before."""
        key = tuple(row.values())
        found = self._answers.get(key)
        if found is None:
            found = self._answers[key] = self.ask(row)
        return found

    def plainest(self, fixed: Mapping[str, Any]) -> Row | None:
        """The first served row with the `fixed` values that the search finds; None if it finds none."""
        return self._find_served(fixed, [fixed], twice=True)

    def pairs(self) -> Iterator[tuple[Pair, Row]]:
        """Each two values of two axes that have a meaning together, with the plainest row that has them.

        The row is refused only if the search finds no served one.
        """
        changes = self._changes()
        for one, other in itertools.combinations(self.axes, 2):
            for first, second in itertools.product(self.axes[one], self.axes[other]):
                fixed = {one: first, other: second}
                row = self.complete(fixed)
                left, right = changes[one, first], changes[other, second]
                if row is not None and left is not None and right is not None and self.reasons(row):
                    starts = [fixed, {**left, **fixed}, {**right, **fixed}, {**left, **right, **fixed}]
                    row = self._find_served(fixed, starts) or row
                if row is not None:
                    yield ((one, first), (other, second)), row

    def _changes(self) -> dict[tuple[str, Any], Row | None]:
        """The changes of the base with which each value of an axis is served; None if there are none."""
        plainest = {
            (axis, value): self.complete({axis: value})
            for axis, values in self.axes.items()
            for value in values
        }
        changes: dict[tuple[str, Any], Row | None] = {
            key: {} for key, row in plainest.items() if row is not None and not self.reasons(row)
        }
        doubtful = {
            (axis, value): row
            for (axis, value), row in plainest.items()
            if (axis, value) not in changes and row is not None and not self.is_hopeless({axis: value}, row)
        }
        # A value that is never served cannot help another one.
        self._useful = self._only(changes.keys() | doubtful.keys())
        for (axis, value), row in doubtful.items():
            found = self._find_served({axis: value}, [{axis: value}], twice=True)
            if found is not None:
                changes[axis, value] = {name: new for name, new in found.items() if new != row[name]}
        self._useful = self._only(changes.keys())
        return {key: changes.get(key) for key in plainest}

    def _only(self, keys: Set[tuple[str, Any]]) -> Axes:
        return {
            axis: [value for value in values if (axis, value) in keys] for axis, values in self.axes.items()
        }

    def _find_served(
        self, fixed: Mapping[str, Any], starts: Sequence[Mapping[str, Any]], *, twice: bool = False
    ) -> Row | None:
        """The first served row of the starts, or of those with one more change, or with two."""
        rows: dict[tuple[Any, ...], tuple[Row, Mapping[str, Any]]] = {}
        for start in starts:
            if (row := self.complete(start)) is not None:
                rows.setdefault(tuple(row.values()), (row, start))
        for row, _ in rows.values():
            if not self.reasons(row):
                return row
        for row, start in rows.values():
            if not self.is_hopeless(fixed, row):
                for changed in self._change(start, fixed, twice=twice):
                    if not self.reasons(changed):
                        return changed
        return None

    def _change(
        self, start: Mapping[str, Any], fixed: Mapping[str, Any], *, twice: bool = False
    ) -> Iterator[Row]:
        """The rows that differ from a start in one value that is not fixed, then, with `twice`, in two."""
        free: list[tuple[str, ...]] = [(axis,) for axis in self.order if axis not in fixed]
        if twice:
            free += itertools.combinations((axis for axis in self.joined if axis not in fixed), 2)
        for axes in free:
            most = _JOINED if len(axes) > 1 else None
            for values in itertools.product(*(self._useful[axis][:most] for axis in axes)):
                row = self.complete({**start, **dict(zip(axes, values, strict=True))})
                if row is not None:
                    yield row


_ATTEMPTS = 6
"""Rows made for each one kept, which is the one that covers most pairs."""

_Value: TypeAlias = tuple[str, Any]


def served_pairs(search: Search) -> dict[Pair, Row]:
    """Each two values that the backend serves together, with the plainest row that has them."""
    return {pair: row for pair, row in search.pairs() if not search.reasons(row)}


def packed_rows(search: Search, served: Mapping[Pair, Row], *, seed: int = 0) -> list[Row]:
    """Few served rows that have all pairs of `served`; equal for equal seeds."""
    # Greedy: each row starts from the plainest row of a pair not yet covered. Then
    # each axis, in random order, takes the value that covers most other pairs and with
    # which the row is still served. Libraries of pairwise testing do not fit: they ask
    # about unfinished rows, and a LayerSpec is accepted or refused as a whole.
    chance = random.Random(seed)  # noqa: S311 - a design, not a secret
    missing: dict[_Value, set[_Value]] = defaultdict(set)
    for one, other in served:
        missing[one].add(other)
        missing[other].add(one)
    rows: list[Row] = []
    for (one, other), plainest in served.items():
        if other not in missing[one]:
            continue
        found = [_fill(search, (one, other), plainest, missing, chance) for _ in range(_ATTEMPTS)]
        best = max(found, key=lambda row: sum(len(missing[item] & row.items()) for item in row.items()))
        for item in best.items():
            missing[item] -= best.items()
        rows.append(best)
    return rows


def _fill(
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


HEAD_SIZES: tuple[int, ...] = (128, 64, 16, 32, 72, 20, 80, 96, 112, 192, 256, 320)
"""The head sizes of models, the least and the largest of most kernels, and sizes that fill no tile."""
BLOCK_SIZES: tuple[int, ...] = (16, 32, 64, 128, 256, 8, 1, 24, 48)
"""Tokens per page."""


def sizes_to_try(allowed: Sequence[int | MultipleOf], samples: Sequence[int]) -> list[int]:
    """The allowed samples, the sizes listed, and the least of the multiples that allow no sample.

    Entries that are neither a positive int nor a MultipleOf are left out.
    """
    listed = [size for size in allowed if type(size) is int and size > 0]
    multiples = [item for item in allowed if isinstance(item, MultipleOf)]
    sampled = [size for size in samples if MultipleOf.allows([*listed, *multiples], size)]
    least = [item.from_on(1) for item in multiples if not any(size in item for size in samples)]
    return list(dict.fromkeys([*sampled, *listed, *least]))


def spread(values: Sequence[int], count: int) -> list[int]:
    """At most `count` values: the first, the extremes, two that are no powers of 2, then others."""
    ordered = sorted(values)
    middle = [value for value in values if value & (value - 1)]
    return list(dict.fromkeys([values[0], ordered[0], ordered[-1], *middle[:2], *values]))[:count]


_Key = TypeVar("_Key", bound=Hashable)


def compile_key(backend: type[AttentionBackend], spec: LayerSpec) -> Hashable | None:
    """The backend's `compile_key` of a layer; None also if that raises or cannot be hashed."""

    def hashed() -> Hashable | None:
        key = backend.compile_key(spec)
        hash(key)
        return key

    key: Hashable | None = guarded_call(hashed)[0]
    return key


def most_adding(
    sets: Mapping[_Key, Set[Any]], had: Iterable[Any] = (), most: int | None = None
) -> list[_Key]:
    """The keys in greedy order: each adds most elements to `had` and the sets before; the first of equals wins.

    Only the first `most` are looked for; None is all.
    """
    seen, rest, order = set(had), dict(sets), list[_Key]()
    while rest and len(order) != most:
        best = max(rest, key=lambda key: len(rest[key] - seen))
        seen |= rest.pop(best)
        order.append(best)
    return order
