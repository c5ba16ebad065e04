"""The cells of a backend: for each two values the plainest that it serves, or one that it refuses."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Any

from attnplug.matrix.axes import axes_of
from attnplug.matrix.model import Cell
from attnplug.matrix.search import CellSearch

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.core.device import Device
    from attnplug.core.reasons import Reason

MOST_CELLS = 1500
"""Of one backend. For a backend that lists too many values for this, only some of them are tried."""
_MOST_VALUES = 150
"""Of one axis: each needs at least ten cells, one for each feature."""


def design(backend: type[AttentionBackend], device: Device) -> list[Cell]:
    """The cells of `answers`."""
    return list(answers(backend, device))


def answers(backend: type[AttentionBackend], device: Device) -> dict[Cell, tuple[Reason, ...]]:
    """The cells of a backend on a device, at most 1,500, each with the reasons against it; none if it is served.

    Every two values of two axes that go together are in a cell. Its other values are the backend's plainest.
    If that cell is refused, other values are changed in a fixed order until one is served. If none is, the
    plainest cell remains, refused for the two values alone. So a cell depends only on the backend's answers
    for layers with its two values and for the plainest layer, and keeps its id when other features are added.

    Args:
        backend: the class.
        device: that its layers are validated for; it may be absent.
    """

    def found(most_own: int | None) -> dict[Cell, tuple[Reason, ...]]:
        search = CellSearch(backend, device, axes_of(backend, most_own))
        return {Cell(**row): tuple(search.reasons(row)) for _, row in search.pairs()}

    axes = axes_of(backend)
    most = max(map(len, axes.values()))
    cells = found(None) if most <= _MOST_VALUES else {}
    if not 0 < len(cells) <= MOST_CELLS:
        fewer = range(min(most, _MOST_VALUES) + 1)
        cells = found(bisect.bisect(fewer, MOST_CELLS, key=lambda own: len(found(own))) - 1)
    # Sizes ascending, other values in the order of the axes.
    places: dict[str, dict[Any, int]] = {
        axis: {value: value if isinstance(value, int) else place for place, value in enumerate(values)}
        for axis, values in axes.items()
    }
    order = sorted(
        cells, key=lambda cell: tuple(known.get(getattr(cell, axis), -1) for axis, known in places.items())
    )
    return {cell: cells[cell] for cell in order}
