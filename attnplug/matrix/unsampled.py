"""Cells that no design samples: the combinations that a pattern names, and what a backend declares for them."""

from __future__ import annotations

import fnmatch
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnplug.matrix.axes import goes_with
from attnplug.matrix.design import cell_reasons
from attnplug.matrix.model import Cell, Finding, Status

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.core.device import Device

MOST_COMBINATIONS = 1500
"""The most combinations of one pattern that are evaluated."""

_SLOTS = ("feature", "phase", "head_size", "dtype", "kv_cache_dtype", "block_size", "layout")
_LETTERS = {"head_size": "d", "block_size": "b"}
_DIRECT = "direct"


def combinations(
    pattern: str, axes: Mapping[str, Sequence[Any]], latents: frozenset[int]
) -> tuple[list[Cell], int]:
    """The cells whose ids match a pattern, sampled or not, and the number of combinations of its values.

    Above 1,500 combinations there are no cells. Combinations of values that no layer has together are left out.

    A size in the pattern may be any, such as 72 in "sinks/decode/d72/*"; other values are those of `axes`.

    Args:
        pattern: as for `attnplug matrix --only`.
        axes: the values of each axis.
        latents: head sizes of latents that go with MLA, from `own_latents`.
    """
    found: dict[Cell, None] = {}
    number = 0
    for values in _values(pattern, axes):
        number += math.prod(map(len, values))
        if number > MOST_COMBINATIONS:
            return [], number
        for each in itertools.product(*values):
            cell = Cell(*each)
            asked = {axis: getattr(cell, axis) for axis in _SLOTS[1:]}
            if all(goes_with(cell.feature, axis, value, latents) for axis, value in asked.items()):
                found[cell] = None
    return list(found), number


def evaluate(backend: type[AttentionBackend], device: Device, cells: Sequence[Cell]) -> tuple[Finding, ...]:
    """What the class declares for each cell: `validate_configuration` is called for exactly its values."""
    findings = []
    for cell in cells:
        reasons = tuple(map(str, cell_reasons(backend, device, cell)))
        findings.append(Finding(cell, Status.REFUSED if reasons else Status.DECLARED, reasons))
    return tuple(findings)


def _values(pattern: str, axes: Mapping[str, Sequence[Any]]) -> Iterator[list[list[Any]]]:
    """For each reading of the pattern the values of every axis."""
    parts = pattern.split("/")
    for reading in {tuple(each) for each in _readings(parts, len(_SLOTS))}:
        values = [_matching(part, axis, axes[axis]) for axis, part in zip(_SLOTS, reading, strict=True)]
        if all(values):
            yield values
    # The last two axes of a layer without pages have one part of the id.
    for reading in {tuple(each) for each in _readings(parts, len(_SLOTS) - 1)}:
        *others, last = reading
        values = [_matching(part, axis, axes[axis]) for axis, part in zip(_SLOTS[:-2], others, strict=True)]
        if all(values) and fnmatch.fnmatchcase(_DIRECT, last):
            yield [*values, [None], [None]]


def _readings(parts: Sequence[str], slots: int) -> Iterator[list[str]]:
    """The parts for that many slots; a part "*" may stand for several, because it matches "/" too."""
    if not parts or not slots:
        if not parts and not slots:
            yield []
        return
    first, *rest = parts
    for width in range(1, slots + 1) if first == "*" else (1,):
        for others in _readings(rest, slots - width):
            yield [first] * width + others


def _matching(part: str, axis: str, values: Sequence[Any]) -> list[Any]:
    letter = _LETTERS.get(axis, "")
    found = [value for value in values if value is not None and fnmatch.fnmatchcase(f"{letter}{value}", part)]
    if not found and letter and (size := re.fullmatch(rf"{letter}([1-9][0-9]{{0,5}})", part)):
        return [int(size[1])]
    return found
