"""The cells of a backend: for each two values the plainest that it serves, or one that it refuses.

The declared matrix: a backend's class answers each cell, for any device, without running anything. Also the cells that
a pattern names, of which the design samples none.
"""

from __future__ import annotations

import bisect
import datetime as dt
import fnmatch
import functools
import itertools
import math
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attnplug
from attnplug._system.processes import Child
from attnplug.core.blocks import MultipleOf
from attnplug.core.errors import SpecError
from attnplug.core.features import Feature
from attnplug.core.interface.answers import answer
from attnplug.core.interface.guarded import guarded_call
from attnplug.core.prefix_sharing import sharing_refusal
from attnplug.core.reasons import Reason
from attnplug.matrix.axes import (
    AXES,
    FEATURES,
    LATENT,
    PLAIN,
    axes_of,
    goes_with,
    own_latents,
    phase_of,
    served_values,
    spec_of,
)
from attnplug.matrix.model import Cell, Finding, Run, Status
from attnplug.registry.devices import resolve_device
from attnplug.registry.plugins.records import Offer
from attnplug.registry.selection.decision import Placement
from attnplug.registry.selection.gates import blame, configuration_reasons, fault
from attnplug.testing.design.search import Axes, Row, Search

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.core.device import Device
    from attnplug.registry.devices import DeviceLike


# A backend that lists too many values for this number has only some of them tried.
MOST_CELLS = 2500
"""The most cells of one backend."""
# Of one axis: each needs at least ten cells, one for each feature.
_MOST_VALUES = 150
_AXIS_OF_CODE = {
    **{flag.code: "feature" for flag in Feature},
    **{axis: axis for axis in ("head_size", "dtype", "kv_cache_dtype", "phase")},
    Feature.FP8_KV.code: "kv_cache_dtype",
}
"""The axis whose value a reason refuses, by the reason's code."""
_REFUSE_ALL = ("device_type", "compute_capability", "plugin_error")
"""Codes of reasons that refuse every layer."""


def design(backend: type[AttentionBackend], device: Device) -> list[Cell]:
    """The cells of `answers`."""
    return list(answers(backend, device))


def answers(backend: type[AttentionBackend], device: Device) -> dict[Cell, tuple[Reason, ...]]:
    """The cells of a backend on a device, at most 2,500, each with the reasons against it; none if it is served.

    Every two values of two axes that go together are in a cell. Its other values are the backend's plainest.
    If that cell is refused, other values are changed in a fixed order until one is served. If none is, the
    plainest cell remains, refused for the two values alone. So a cell depends only on the backend's answers
    for layers with its two values and for the plainest layer, and keeps its id when other features are added.

    Args:
        backend: the class.
        device: that its layers are validated for; it may be absent.
    """

    def found(most_own: int | None) -> dict[Cell, tuple[Reason, ...]]:
        search = _CellSearch(backend, device, axes_of(backend, most_own))
        return {Cell(**row): tuple(search.reasons(row)) for _, row in search.pairs()}

    axes = axes_of(backend)
    most = max(map(len, axes.values()))
    # The full search is skipped where its size alone exceeds the limit.
    cells = found(None) if most <= _MOST_VALUES else {}
    if not 0 < len(cells) <= MOST_CELLS:
        fewer = range(min(most, _MOST_VALUES) + 1)
        # More own values give more cells, so a bisection finds the most values within the limit.
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


class _CellSearch(Search):
    """Asks one backend on one device about cells; the libraries that the backend requires count as installed."""

    order = ("block_size", "head_size", "dtype", "kv_cache_dtype", "phase", "feature", "layout")
    joined = ("block_size", "head_size", "dtype", "kv_cache_dtype", "feature")
    """`supports_combination` sees these in a layer, and may refuse two of them together."""

    def __init__(self, backend: type[AttentionBackend], device: Device, axes: Axes) -> None:
        self._backend = backend
        self._device = device
        latents = own_latents(backend)
        self._fitting: dict[str, dict[str, tuple[Any, ...]]] = {
            feature: {
                # None is the block size and layout of a layer without pages.
                axis: tuple(value for value in (*values, None) if goes_with(feature, axis, value, latents))
                for axis, values in axes.items()
                if axis != "feature"
            }
            for feature in FEATURES
        }
        blocks, _ = guarded_call(answer, backend, "get_supported_kernel_block_sizes")
        self._blocks: tuple[int | MultipleOf, ...] = blocks or ()
        self._plainest: dict[str, Row] = {}
        super().__init__(axes)

    def ask(self, row: Row) -> tuple[Reason, ...]:
        """The reasons of `cell_reasons`."""
        return cell_reasons(self._backend, self._device, Cell(**row))

    def start_from(self, base: Row) -> None:
        """For each feature, the plainest row has the base's values where they have a meaning with the feature."""
        super().start_from(base)
        self._plainest = {
            feature: {
                "feature": feature,
                **{
                    axis: base[axis] if base[axis] in values else values[0]
                    for axis, values in fitting.items()
                },
            }
            for feature, fitting in self._fitting.items()
        }

    def complete(self, fixed: Mapping[str, Any]) -> Row | None:
        """The plainest row of the fixed feature, or of the first feature that the other values go with."""
        features = (
            (fixed["feature"],) if "feature" in fixed else (self.base["feature"], PLAIN, "fp8_kv", "mla")
        )
        for feature in features:
            fitting = self._fitting[feature]
            if all(value in fitting[axis] for axis, value in fixed.items() if axis != "feature"):
                return {**self._plainest[feature], **fixed}
        return None

    def is_hopeless(self, fixed: Mapping[str, Any], row: Row) -> bool:
        """Whether the code of a reason names the axis of a fixed value."""
        for reason in self.reasons(row):
            code = reason.code
            if code in _REFUSE_ALL:
                return True
            # Sparse attention over latents is another layer, which a backend may serve alone.
            if code == Feature.SPARSE.code and fixed.get("head_size", LATENT) == LATENT != row["head_size"]:
                continue
            if _AXIS_OF_CODE.get(code) in fixed and reason.field != "head_size_v":
                return True
            if code == "block_size" and "block_size" in fixed:
                allowed, error = guarded_call(MultipleOf.allows, self._blocks, row["block_size"])
                if error is None and not allowed:
                    return True
        return False


def cell_reasons(backend: type[AttentionBackend], device: Device, cell: Cell) -> tuple[Reason, ...]:
    """The reasons of `validate_configuration` against a cell, and one if the backend cannot read its page layout."""
    try:
        spec = spec_of(cell)
    except SpecError as problem:
        # A backend may list values that no layer has, and they must not end the matrix of the others.
        return (fault(backend, f"declares a value of no layer: {problem}"),)
    reasons = configuration_reasons(backend, Placement(spec, device, phase_of(cell)))
    return (*reasons, *(() if cell.layout is None else _unread(backend, cell.layout)))


def _unread(backend: type[AttentionBackend], layout: str) -> tuple[Reason, ...]:
    hook = "supported_kv_cache_layouts"
    layouts, error = guarded_call(answer, backend, hook)
    if error is not None:
        return (blame(backend, error, hook),)
    if layout in layouts:
        return ()
    text = "KV layout not supported"
    return (Reason(text, code="kv_cache_layout", field="layout", requested=layout, supported=layouts),)


def _finding(cell: Cell, reasons: tuple[Reason, ...]) -> Finding:
    return Finding(cell, Status.REFUSED if reasons else Status.DECLARED, tuple(map(str, reasons)))


def declare(backend: Offer | type[AttentionBackend], device: DeviceLike) -> Run:
    """The run of a backend and a device: each cell of the design is declared, or refused with reasons.

    Only the class is consulted: its requirements count as installed, and the device may be absent.

    Args:
        backend: an offer of a plugin, which names the distribution too, or only the class.
        device: a Device or "sm90", "rocm:9.4", "cpu", ... as for `attnplug.select`.

    Raises:
        SpecError: the text names no device.
    """
    where = resolve_device(device)
    offer = backend if isinstance(backend, Offer) else None
    backend_cls = backend.backend if isinstance(backend, Offer) else backend
    findings = tuple(_finding(cell, reasons) for cell, reasons in answers(backend_cls, where).items())
    return Run(
        backend=offer.name if offer else backend_cls.get_name(),
        distribution=offer.distribution if offer else None,
        version=offer.version if offer else None,
        device=str(where),
        device_name=None,
        versions={},
        date=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        commit=source_commit(),
        findings=findings,
        axes=served_values(findings),
        prefixes=_prefixes(backend_cls, where, findings),
    )


def _prefixes(
    backend: type[AttentionBackend], device: Device, findings: Iterable[Finding]
) -> dict[str, str | None]:
    """By served feature, why prefixes are not shared in the first cell of it; None if they are."""
    found: dict[str, str | None] = {}
    for cell in (each.cell for each in findings if each.status is Status.DECLARED):
        if cell.feature not in found:
            asked = backend, spec_of(cell), device, cell.block_size
            reason, error = guarded_call(sharing_refusal, *asked)
            found[cell.feature] = (
                reason if error is None else str(blame(backend, error, "validate_configuration"))
            )
    return found


@functools.cache
def source_commit() -> str | None:
    """The commit of attnplug's own source if it is imported from a checkout; else None."""
    checkout = Path(attnplug.__file__).resolve().parents[1]
    if not (checkout / ".git").exists():  # a repository further up is another project's
        return None
    git = shutil.which("git")
    if git is None:
        return None
    with Child([git, "-C", str(checkout), "rev-parse", "HEAD"]) as child:
        return child.last_line() if child.wait(10) == 0 else None


MOST_COMBINATIONS = 1500
"""The most combinations of one pattern that are evaluated."""
_LETTERS = {"head_size": "d", "block_size": "b"}


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
    for values in _values_named(pattern, axes):
        number += math.prod(map(len, values))
        if number > MOST_COMBINATIONS:
            return [], number
        for each in itertools.product(*values):
            cell = Cell(*each)
            asked = zip(AXES[1:], each[1:], strict=True)
            if all(goes_with(cell.feature, axis, value, latents) for axis, value in asked):
                found[cell] = None
    return list(found), number


def evaluate(backend: type[AttentionBackend], device: Device, cells: Sequence[Cell]) -> tuple[Finding, ...]:
    """What the class declares for each cell: `validate_configuration` is called for exactly its values."""
    return tuple(_finding(cell, cell_reasons(backend, device, cell)) for cell in cells)


def _values_named(pattern: str, axes: Mapping[str, Sequence[Any]]) -> Iterator[list[list[Any]]]:
    """For each reading of the pattern the values of every axis."""
    parts = pattern.split("/")
    for reading in {tuple(each) for each in _readings(parts, len(AXES))}:
        values = [_matching(part, axis, axes[axis]) for axis, part in zip(AXES, reading, strict=True)]
        if all(values):
            yield values
    # The last two axes of a layer without pages have one part of the id.
    for reading in {tuple(each) for each in _readings(parts, len(AXES) - 1)}:
        *others, last = reading
        values = [_matching(part, axis, axes[axis]) for axis, part in zip(AXES[:-2], others, strict=True)]
        if all(values) and fnmatch.fnmatchcase("direct", last):
            yield [*values, [None], [None]]


def _readings(parts: Sequence[str], slots: int) -> Iterator[list[str]]:
    """The parts for that many slots; a part "*" may match several, because it matches "/" too."""
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
