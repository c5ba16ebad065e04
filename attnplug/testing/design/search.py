"""Searches for rows that a backend serves: for each two values the plainest row that has them."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, TypeAlias

Axes: TypeAlias = Mapping[str, Sequence[Any]]
"""The values of each axis, the plainest first."""
Row: TypeAlias = dict[str, Any]
"""One value of each axis."""
Pair: TypeAlias = tuple[tuple[str, Any], tuple[str, Any]]
"""Two axes, each with a value."""

_JOINED = 16
"""Values of an axis that are changed together with those of another: the product of long axes takes seconds."""


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
                found = min(self._changed({}, kept), key=lambda row: len(self.reasons(row)))
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
        return self._served(fixed, [fixed], twice=True)

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
                    row = self._served(fixed, starts) or row
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
            found = self._served({axis: value}, [{axis: value}], twice=True)
            if found is not None:
                changes[axis, value] = {name: new for name, new in found.items() if new != row[name]}
        self._useful = self._only(changes.keys())
        return {key: changes.get(key) for key in plainest}

    def _only(self, keys: Set[tuple[str, Any]]) -> Axes:
        return {
            axis: [value for value in values if (axis, value) in keys] for axis, values in self.axes.items()
        }

    def _served(
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
                for changed in self._changed(start, fixed, twice=twice):
                    if not self.reasons(changed):
                        return changed
        return None

    def _changed(
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
