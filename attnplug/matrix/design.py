"""Which cells a backend is asked: for every two values the plainest cell that it serves, or one that it refuses."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attnplug.matrix.axes import Axes, axes_of
from attnplug.matrix.layers import spec_of
from attnplug.matrix.model import Cell
from attnplug.matrix.search import CellSearch

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.core.device import Device
    from attnplug.core.reasons import Reason

__all__ = ["MOST_CELLS", "answers", "design", "spec_of"]

MOST_CELLS = 1500
"""Of one backend. Where it lists more values than can be paired in so many, some of them stand for all."""
_MOST_VALUES = 150
"""Of one axis: each is in at least ten cells, with a feature each."""


def design(backend: type[AttentionBackend], device: Device) -> list[Cell]:
    """The cells of a backend on a device, at most 1,500, in the order of the axes.

    Every value of every axis and every two values of two axes that mean something together are in one.
    For two values it is the cell that has them and else the backend's plainest values; where that is refused,
    the first that is served of those with others moved in a fixed order; and where none is, the plainest,
    which is then refused for the two values alone. So which cell stands for two values depends on what the
    backend says of layers with them and of its plainest layer, and of nothing else that it declares.

    Args:
        backend: the class.
        device: what its layers are validated for; it need not be here.
    """
    return list(answers(backend, device))


def answers(backend: type[AttentionBackend], device: Device) -> dict[Cell, tuple[Reason, ...]]:
    """The cells of `design`, each with the reasons against it; no reason where it is served."""

    def found(most_own: int | None) -> dict[Cell, tuple[Reason, ...]]:
        search = CellSearch(backend, device, axes_of(backend, most_own))
        return {Cell(**row): tuple(search.reasons(row)) for _, row in search.pairs()}

    axes = axes_of(backend)
    most = max(map(len, axes.values()))
    cells = found(None) if most <= _MOST_VALUES else {}
    if not 0 < len(cells) <= MOST_CELLS:
        fewer = range(min(most, _MOST_VALUES) + 1)
        cells = found(bisect.bisect(fewer, MOST_CELLS, key=lambda own: len(found(own))) - 1)
    return _in_order(cells, axes)


def _in_order(cells: Mapping[Cell, tuple[Reason, ...]], axes: Axes) -> dict[Cell, tuple[Reason, ...]]:
    """Sizes ascending, other values as the axes have them."""
    places: dict[str, dict[Any, int]] = {
        axis: {value: value if isinstance(value, int) else place for place, value in enumerate(values)}
        for axis, values in axes.items()
    }

    def key(cell: Cell) -> tuple[int, ...]:
        return tuple(order.get(getattr(cell, axis), -1) for axis, order in places.items())

    return {cell: cells[cell] for cell in sorted(cells, key=key)}
