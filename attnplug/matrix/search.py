"""Looks for the plainest cell that a backend serves with given values, or one that is refused for them alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Set
from typing import TYPE_CHECKING, Any

from attnplug.core.blocks import MultipleOf
from attnplug.matrix.asking import reasons_of
from attnplug.matrix.axes import FEATURES, PLAIN, Axes, goes_with, own_latents
from attnplug.matrix.model import Cell
from attnplug.registry.plugin_calls import guarded_call

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.core.device import Device
    from attnplug.core.reasons import Reason

__all__ = ["Search"]

_AT_FAULT = {
    "head_size": "head_size",
    "dtype": "dtype",
    "kv_cache_dtype": "kv_cache_dtype",
    "feature.fp8_kv": "kv_cache_dtype",
    "mla": "feature",
    "sink": "feature",
    "sparse": "feature",
    "mm_prefix": "feature",
    "attn_type": "feature",
    "phase": "phase",
}
"""The axis whose value alone is at fault, by the code of a reason; of other features it is the feature."""
_WHATEVER_THE_LAYER = ("device_type", "compute_capability", "plugin_error")
_MOVED = ("block_size", "head_size", "dtype", "kv_cache_dtype", "phase", "feature", "layout")
"""The order in which what is left open is moved from the base."""
_TOGETHER = ("block_size", "head_size", "dtype", "kv_cache_dtype", "feature")
"""What `supports_combination` sees, so that two of them may have to be moved together."""
_FEW = 16
"""Values of each that are moved together with another's: those that every backend is asked about, and some more."""


class Search:
    """Asks one backend on one device, each cell once.

    Args:
        backend: the class.
        device: as it is validated for.
        axes: the values to pair, as `axes_of` gives them.
    """

    def __init__(self, backend: type[AttentionBackend], device: Device, axes: Axes) -> None:
        self._backend = backend
        self._device = device
        self._axes = axes
        latents = own_latents(backend)
        self._fitting: dict[str, dict[str, tuple[Any, ...]]] = {
            feature: {
                axis: tuple(value for value in (*values, None) if goes_with(feature, axis, value, latents))
                for axis, values in axes.items()
                if axis != "feature"
            }
            for feature in FEATURES
        }
        blocks, _ = guarded_call(lambda: tuple(backend.get_supported_kernel_block_sizes()))
        self._blocks: tuple[int | MultipleOf, ...] = blocks or ()
        self._asked: dict[Cell, tuple[Reason, ...]] = {}
        self._movable = axes
        self.base: Cell
        """The plainest cell that is served, or one that is refused for as little as can be."""
        self._plainest: dict[str, dict[str, Any]] = {}
        self._find_base()

    def reasons(self, cell: Cell) -> tuple[Reason, ...]:
        """As `reasons_of`."""
        found = self._asked.get(cell)
        if found is None:
            found = self._asked[cell] = reasons_of(self._backend, self._device, cell)
        return found

    def pairs(self) -> dict[Cell, tuple[Reason, ...]]:
        """A cell for every two values of two axes that mean something together, with the reasons against it."""
        moves = self._moves()
        found: dict[Cell, tuple[Reason, ...]] = {}
        for one, other in itertools.combinations(self._axes, 2):
            for first, second in itertools.product(self._axes[one], self._axes[other]):
                cell = self._pair({one: first, other: second}, moves[one, first], moves[other, second])
                if cell is not None and cell not in found:
                    found[cell] = self.reasons(cell)
        return found

    def _pair(
        self, fixed: Mapping[str, Any], first: Mapping[str, Any] | None, second: Mapping[str, Any] | None
    ) -> Cell | None:
        """The cell of two values, given what each alone wants moved, None for what is never served."""
        plainest = self._settled(fixed)
        if plainest is None or first is None or second is None or not self.reasons(plainest):
            return plainest
        starts = [fixed, {**first, **fixed}, {**second, **fixed}, {**first, **second, **fixed}]
        return self._served(fixed, starts) or plainest

    def _moves(self) -> dict[tuple[str, Any], Mapping[str, Any] | None]:
        """What has to be moved from the base so that a value is served, by axis and value; None for nothing helps."""
        plainest = {
            (axis, value): self._settled({axis: value})
            for axis, values in self._axes.items()
            for value in values
        }
        moves: dict[tuple[str, Any], Mapping[str, Any] | None] = {
            key: {} for key, cell in plainest.items() if cell is not None and not self.reasons(cell)
        }
        doubtful = {
            (axis, value): cell
            for (axis, value), cell in plainest.items()
            if (axis, value) not in moves and cell is not None and not self._is_hopeless({axis: value}, cell)
        }
        # What is never served helps nothing else.
        self._movable = self._only(moves.keys() | doubtful.keys())
        for (axis, value), cell in doubtful.items():
            found = self._served({axis: value}, [{axis: value}], twice=True)
            if found is not None:
                moves[axis, value] = {
                    name: new for name in self._axes if (new := getattr(found, name)) != getattr(cell, name)
                }
        self._movable = self._only(moves.keys())
        return {key: moves.get(key) for key in plainest}

    def _only(self, keys: Set[tuple[str, Any]]) -> Axes:
        return {
            axis: tuple(value for value in values if (axis, value) in keys)
            for axis, values in self._axes.items()
        }

    def _served(
        self, fixed: Mapping[str, Any], starts: list[Mapping[str, Any]], *, twice: bool = False
    ) -> Cell | None:
        """The first that is served of the starts, then of those that differ from one in one more value, or two."""
        begun: dict[Cell, Mapping[str, Any]] = {}
        for start in starts:
            cell = self._settled(start)
            if cell is not None:
                begun.setdefault(cell, start)
        for cell in begun:
            if not self.reasons(cell):
                return cell
        for cell, start in begun.items():
            if not self._is_hopeless(fixed, cell):
                for moved in self._moved(start, fixed, twice=twice):
                    if not self.reasons(moved):
                        return moved
        return None

    def _moved(
        self, start: Mapping[str, Any], fixed: Mapping[str, Any], *, twice: bool = False
    ) -> Iterator[Cell]:
        """The cells that differ from a start in one value that is not fixed, then, if asked for, in two."""
        for moves in self._steps(fixed, twice=twice):
            cell = self._settled({**start, **moves})
            if cell is not None:
                yield cell

    def _steps(self, fixed: Mapping[str, Any], *, twice: bool) -> Iterator[Mapping[str, Any]]:
        for axis in _MOVED:
            for value in () if axis in fixed else self._movable[axis]:
                yield {axis: value}
        for axes in itertools.combinations(_TOGETHER, 2) if twice else ():
            if fixed.keys().isdisjoint(axes):
                for values in itertools.product(*(self._movable[axis][:_FEW] for axis in axes)):
                    yield dict(zip(axes, values, strict=True))

    def _is_hopeless(self, fixed: Mapping[str, Any], cell: Cell) -> bool:
        """Whether a reason against the cell stands against a fixed value, whatever the others are."""
        for reason in self.reasons(cell):
            code = reason.code
            if code in _WHATEVER_THE_LAYER:
                return True
            axis = _AT_FAULT.get(code) or ("feature" if code.startswith("feature.") else None)
            if axis in fixed and reason.field != "head_size_v":
                return True
            if code == "block_size" and "block_size" in fixed:
                allowed, error = guarded_call(MultipleOf.allows, self._blocks, cell.block_size)
                if error is None and not allowed:
                    return True
        return False

    def _settled(self, fixed: Mapping[str, Any]) -> Cell | None:
        """The base with some values fixed, others moved where they would mean nothing with them; None: none can."""
        feature = fixed.get("feature")
        if feature is None:
            wanted = (self.base.feature, PLAIN, "fp8_kv", "mla")
            feature = next((name for name in wanted if self._fits(name, fixed)), None)
        elif not self._fits(feature, fixed):
            return None
        if feature is None:
            return None
        return Cell(**{**self._plainest[feature], **fixed})

    def _fits(self, feature: str, fixed: Mapping[str, Any]) -> bool:
        fitting = self._fitting[feature]
        return all(value in fitting[axis] for axis, value in fixed.items() if axis != "feature")

    def _find_base(self) -> None:
        self._stand_on(Cell(**{axis: values[0] for axis, values in self._axes.items()}))
        # Another feature is the last resort: one without pages has no reasons against its pages either.
        for kept in ({"feature": self.base.feature}, {}):
            while self.reasons(self.base) and not self._is_hopeless({}, self.base):
                moved = min(self._moved({}, kept), key=lambda cell: len(self.reasons(cell)))
                if len(self.reasons(moved)) >= len(self.reasons(self.base)):
                    break
                self._stand_on(moved)

    def _stand_on(self, base: Cell) -> None:
        self.base = base
        self._plainest = {
            feature: {
                "feature": feature,
                **{
                    axis: value if (value := getattr(base, axis)) in fitting else fitting[0]
                    for axis, fitting in fittings.items()
                },
            }
            for feature, fittings in self._fitting.items()
        }
