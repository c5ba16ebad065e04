"""Which cells a backend is asked: for every two values of two axes the plainest that it serves, or one refused."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from attnplug.core.blocks import MultipleOf
from attnplug.matrix.asking import reasons_of
from attnplug.matrix.axes import FEATURES, PLAIN, Axes, axes_of, goes_with
from attnplug.matrix.layers import spec_of
from attnplug.matrix.model import Cell
from attnplug.registry.containment import attempt

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.core.device import Device
    from attnplug.core.reasons import Reason

__all__ = ["MOST_CELLS", "answers", "design", "spec_of"]

MOST_CELLS = 1500
"""Of one backend. Where it lists more values than can be paired in so many, some of its own stand for all."""

_FIRM = {
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
    "kv_cache_layout": "layout",
}
"""The axis whose value alone is at fault, by the code of a reason; of other features it is the feature."""
_HOPELESS = ("device_type", "compute_capability", "plugin_error")
"""Codes of reasons that no other layer would be without."""
_MOVED = ("block_size", "head_size", "dtype", "kv_cache_dtype", "phase", "layout", "feature")
"""The order in which what a pair leaves open is moved from its plain value."""


def design(backend: type[AttentionBackend], device: Device) -> list[Cell]:
    """The cells of a backend on a device, at most 1,500, in the order of the axes.

    Every value of every axis and every two values of two axes that mean something together are in one.
    For two values it is the cell that has them and else the backend's plainest values; where those do not go
    with the two, the first moved in a fixed order until the backend serves it; and where nothing is served,
    the plainest, which is refused for the two values alone. So a cell's place depends on what the backend
    says of it and of the values in it, and on little else.
    """
    return list(answers(backend, device))


def answers(backend: type[AttentionBackend], device: Device) -> dict[Cell, tuple[Reason, ...]]:
    """The cells of `design`, each with the reasons against it; no reason where it is served."""
    most_own = None
    while True:
        axes = axes_of(backend, most_own)
        found = _Search(backend, device, axes).pairs()
        if len(found) <= MOST_CELLS or most_own == 0:
            return _in_order(found, axes)
        own = max(map(len, axes.values()))
        most_own = own - 1 if most_own is None else most_own - 1


def _in_order(found: Mapping[Cell, tuple[Reason, ...]], axes: Axes) -> dict[Cell, tuple[Reason, ...]]:
    places = {name: {value: place for place, value in enumerate(values)} for name, values in axes.items()}
    for name in ("head_size", "block_size"):
        places[name] = {value: value for value in axes[name]}
    for name in ("block_size", "layout"):
        places[name] |= {None: -1}

    def key(cell: Cell) -> tuple[int, ...]:
        return tuple(order[getattr(cell, name)] for name, order in places.items())

    return {cell: found[cell] for cell in sorted(found, key=key)}


class _Search:
    """Asks one backend on one device, each cell once."""

    def __init__(self, backend: type[AttentionBackend], device: Device, axes: Axes) -> None:
        self.backend = backend
        self.device = device
        self.axes = axes
        self.asked: dict[Cell, tuple[Reason, ...]] = {}
        is_mla, _ = attempt(backend.is_mla)
        sizes, _ = attempt(lambda: tuple(backend.get_supported_head_sizes()))
        latents: Collection[int] = [size for size in sizes or () if type(size) is int] if is_mla else ()
        self.fitting: dict[str, dict[str, tuple[Any, ...]]] = {
            feature: {
                axis: tuple(v for v in (*values, None) if goes_with(feature, axis, v, latents))
                for axis, values in axes.items()
                if axis != "feature"
            }
            for feature in FEATURES
        }
        blocks, _ = attempt(lambda: tuple(backend.get_supported_kernel_block_sizes()))
        self.blocks: tuple[int | MultipleOf, ...] = blocks or ()
        self.base = self._base()

    def reasons(self, cell: Cell) -> tuple[Reason, ...]:
        found = self.asked.get(cell)
        if found is None:
            found = self.asked[cell] = reasons_of(self.backend, self.device, cell)
        return found

    def pairs(self) -> dict[Cell, tuple[Reason, ...]]:
        moves = {
            (axis, value): self._moves(axis, value) for axis, values in self.axes.items() for value in values
        }
        found: dict[Cell, tuple[Reason, ...]] = {}
        for (one, first), (other, second) in itertools.combinations(moves, 2):
            if one == other:
                continue
            fixed = {one: first, other: second}
            cell = self._pair(fixed, (moves[one, first], moves[other, second]))
            if cell is not None and cell not in found:
                found[cell] = self.reasons(cell)
        return found

    def _pair(self, fixed: Mapping[str, Any], moves: tuple[Mapping[str, Any] | None, ...]) -> Cell | None:
        """The cell of two values, given what each alone asks to be moved, or None for what is never served."""
        plainest = self._settled(fixed)
        if plainest is None or not self.reasons(plainest):
            return plainest
        first, second = moves
        if first is None or second is None:
            return plainest
        starts = [{**first, **fixed}, {**second, **fixed}, {**first, **second, **fixed}]
        return self._served(fixed, starts) or plainest

    def _moves(self, axis: str, value: Any) -> dict[str, Any] | None:
        """What has to be moved from the base so that the value is served; None where nothing helps."""
        fixed = {axis: value}
        plainest = self._settled(fixed)
        if plainest is None:
            return None
        if not self.reasons(plainest):
            return {}
        found = self._served(fixed, [fixed])
        if found is None:
            return None
        return {name: new for name in self.axes if (new := getattr(found, name)) != getattr(plainest, name)}

    def _served(self, fixed: Mapping[str, Any], starts: list[dict[str, Any]]) -> Cell | None:
        """The first served cell of the starts and of those that differ from one in one more value."""
        begun = [cell for start in starts if (cell := self._settled(start)) is not None]
        for cell in begun:
            if not self.reasons(cell):
                return cell
        for start in starts:
            cell = self._settled(start)
            if cell is None or self._is_hopeless(fixed, cell):
                continue
            for moved in self._one_more(start, fixed):
                if not self.reasons(moved):
                    return moved
        return None

    def _one_more(self, start: Mapping[str, Any], fixed: Mapping[str, Any]) -> Iterator[Cell]:
        for axis in _MOVED:
            if axis in fixed:
                continue
            for value in self.axes[axis]:
                cell = self._settled({**start, axis: value})
                if cell is not None:
                    yield cell

    def _is_hopeless(self, fixed: Mapping[str, Any], cell: Cell) -> bool:
        """Whether a reason against the cell is one against a fixed value, whatever the others are."""
        for reason in self.reasons(cell):
            code = reason.code
            axis = _FIRM.get(code) or ("feature" if code.startswith("feature.") else None)
            if code in _HOPELESS or (axis in fixed and reason.field != "head_size_v"):
                return True
            if code == "block_size" and "block_size" in fixed:
                allowed, error = attempt(MultipleOf.allows, self.blocks, cell.block_size)
                if error is None and not allowed:
                    return True
        return False

    def _settled(self, fixed: Mapping[str, Any], base: Cell | None = None) -> Cell | None:
        """The base with some values fixed, and others moved only where they would mean nothing with them."""
        base = base or self.base
        feature = fixed.get("feature")
        if feature is None:
            wanted = (base.feature, PLAIN, "fp8_kv", "mla")
            feature = next((name for name in wanted if self._fits(name, fixed)), None)
        elif not self._fits(feature, fixed):
            return None
        if feature is None:
            return None
        values: dict[str, Any] = {"feature": feature}
        for axis, fitting in self.fitting[feature].items():
            value = fixed.get(axis, getattr(base, axis))
            values[axis] = value if value in fitting else fitting[0]
        return Cell(**values)

    def _fits(self, feature: str, fixed: Mapping[str, Any]) -> bool:
        fitting = self.fitting[feature]
        return all(value in fitting[axis] for axis, value in fixed.items() if axis != "feature")

    def _base(self) -> Cell:
        """The plainest cell that is served, or else one that is refused for as little as can be."""
        plain = {name: values[0] for name, values in self.axes.items()}
        best = Cell(**plain)
        while not self._is_hopeless({}, best):
            self.base = best
            count = len(self.reasons(best))
            better = [(len(self.reasons(cell)), cell) for cell in self._one_more({}, {})]
            least = min(better, key=lambda pair: pair[0])
            if least[0] >= count:
                break
            best = least[1]
        return best
