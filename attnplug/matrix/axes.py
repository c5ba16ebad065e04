"""The axes of the matrix: their values for each backend, the values that go together, and the layer of a cell.

Also the combinations that a run tried of those that its backend serves: a sample says nothing about the others.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnplug.core.dtypes import kv_cache_dtype_name
from attnplug.core.errors import SpecError
from attnplug.core.features import Feature
from attnplug.core.interface.answers import answer, declared
from attnplug.core.interface.guarded import guarded_call
from attnplug.core.kv_format import common_kv_cache_dtypes, kv_format, with_codecs
from attnplug.core.spec import LayerSpec, Phase
from attnplug.matrix.model import CLAIMED, Cell, Finding, Run, Status
from attnplug.matrix.words import AXIS_NAMES, Value
from attnplug.testing.design.search import BLOCK_SIZES, HEAD_SIZES, sizes_to_try

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend

PLAIN = "plain"
"""The feature of a layer that asks for none."""
FEATURES: tuple[str, ...] = (PLAIN, *(~Feature(0)).names())
"""Values of the axis `feature`."""
LATENT = 576
"""Head size of latents, with which MLA and sparse attention are tried: DeepSeek's 512 elements and 64 for positions."""
ROPE = 64
"""Elements of a latent that hold positions."""

_UNPAGED = tuple(flag.names()[0] for flag in Feature if flag.ask.unpaged)
_LATENTS = ("mla", "sparse")


def axes_of(backend: type[AttentionBackend], most_own: int | None = None) -> dict[str, tuple[Any, ...]]:
    """The values of each axis to try with a backend, by the name of the field of Cell, the plainest first.

    They are those tried with every backend, then those that this one lists.

    Args:
        backend: the class. A declaration that raises, or is not a sequence, adds nothing.
        most_own: the number of values that the backend may add to an axis, the ends first; None for all.
    """
    heads = _read(lambda: answer(backend, "get_supported_head_sizes"))
    blocks = _read(lambda: answer(backend, "get_supported_kernel_block_sizes"))
    preferred = _read(lambda: (answer(backend, "get_preferred_block_size"),))
    kv_dtypes = _read(
        lambda: tuple(
            with_codecs(
                kv_cache_dtype_name(name, "kv") for name in declared(backend, "supported_kv_cache_dtypes")
            )
        )
    )
    layouts = _read(lambda: answer(backend, "supported_kv_cache_layouts"))

    def joined(common: Sequence[Any], own: Iterable[Any]) -> tuple[Any, ...]:
        more = list(dict.fromkeys(value for value in own if value not in common))
        return (*common, *(more if most_own is None else _spread(more, most_own)))

    return {
        "feature": FEATURES,
        # A mixed batch runs both phases, so the others follow.
        "phase": ("mixed", "prefill", "decode"),
        # Common values come first, so cells of all backends are comparable.
        "head_size": joined((*HEAD_SIZES, LATENT), sizes_to_try(heads, HEAD_SIZES)),
        "dtype": ("bfloat16", "float16", "float32"),
        "kv_cache_dtype": joined(common_kv_cache_dtypes(), kv_dtypes),
        "block_size": joined(BLOCK_SIZES, (*sizes_to_try(preferred, ()), *sizes_to_try(blocks, BLOCK_SIZES))),
        "layout": joined(("NHD", "HND"), layouts),
    }


def own_latents(backend: type[AttentionBackend]) -> frozenset[int]:
    """The head sizes that a backend of MLA lists; empty for other backends."""
    is_mla, _ = guarded_call(answer, backend, "is_mla")
    sizes = _read(lambda: answer(backend, "get_supported_head_sizes")) if is_mla else ()
    return frozenset(sizes_to_try(sizes, ()))


def goes_with(feature: str, axis: str, value: Any, latents: Collection[int] = ()) -> bool:
    """Whether a layer with a feature can have a value of another axis.

    Args:
        feature: of FEATURES.
        axis: a field of Cell other than the feature.
        value: of that axis; None for the block size and layout of a layer without pages.
        latents: other head sizes than LATENT that go with MLA, from `own_latents`.
    """
    unpaged = feature in _UNPAGED
    if axis in ("block_size", "layout"):
        return (value is None) == unpaged
    if value is None:
        return False
    if axis == "kv_cache_dtype":
        if unpaged:
            return bool(value == "auto")  # K and V that are not stored have no storage dtype
        if feature == "head_scales":
            return kv_format(value).feature == "fp8_kv"
        # Some types are a feature of their own, so a plain layer lacks them.
        return feature not in ("fp8_kv", PLAIN) or feature == (kv_format(value).feature or PLAIN)
    if axis == "head_size":
        # Only features that store latents use this size, so others are not asked for it.
        if value == LATENT:
            return feature in _LATENTS
        return feature != "mla" or (value in latents and value > ROPE)
    return (
        axis != "phase" or feature != "encoder" or value == "prefill"
    )  # encoders compute all tokens at once


def phase_of(cell: Cell) -> Phase | None:
    """The phase that the layer is validated for: None, which is both, for a mixed batch."""
    return None if cell.phase == "mixed" else Phase(cell.phase)


def spec_of(cell: Cell) -> LayerSpec:
    """The layer of a cell: 4 query heads over 2, or over 1 with MLA, and the one feature.

    Sparse attention over LATENT elements is also MLA.

    Raises:
        SpecError: the feature is unknown, or the values exclude each other.
    """
    # Models combine sparse attention with latents of this size.
    return _spec(cell.feature, cell.head_size, cell.dtype, cell.kv_cache_dtype, cell.block_size)


@functools.lru_cache(maxsize=16_384)
def _spec(feature: str, head_size: int, dtype: str, kv_cache_dtype: str, block_size: int | None) -> LayerSpec:
    if feature not in FEATURES:
        raise SpecError("feature", feature, f"must be one of {', '.join(FEATURES)}")
    sizes = {"head_size": head_size, "kv_cache_dtype": kv_cache_dtype}
    spec = LayerSpec(
        num_heads=4,
        dtype=dtype,
        **{"num_kv_heads": 2, "block_size": block_size, **_ask(feature, head_size, block_size), **sizes},
    )
    # A layer without its feature would prove nothing about the cell that names it.
    if feature != PLAIN and Feature[feature.upper()] not in spec.required_features():
        raise SpecError("kv_cache_dtype", kv_cache_dtype, f"does not go with the feature {feature}")
    return spec


def _ask(feature: str, head_size: int, block_size: int | None) -> dict[str, Any]:
    if feature == PLAIN:
        return {}
    # A latent needs more elements than those that hold positions.
    if feature == "mla" and head_size <= ROPE:
        raise SpecError("head_size", head_size, f"must be more than {ROPE} with the feature mla")
    fields = Feature[feature.upper()].fields(head_size, block_size)
    if feature == "sparse" and head_size == LATENT:
        fields |= Feature.MLA.fields(head_size)
    return fields


def _read(declaration: Callable[[], Any]) -> tuple[Any, ...]:
    # A plugin's declaration may raise, and one broken class must not end the matrix of the others.
    found, _ = guarded_call(lambda: tuple(declaration()))
    return found or ()


def _spread(values: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of the values: the ends, and others in even steps between them."""
    if len(values) <= most:
        return list(values)
    if most < 2:
        return list(values[:most])
    step = (len(values) - 1) / (most - 1)
    return [values[round(place * step)] for place in range(most)]


AXES = tuple(AXIS_NAMES)
cell_values = operator.attrgetter(*AXES)
"""The values of a cell, in the order of AXES."""


def served_values(findings: Iterable[Finding]) -> dict[str, tuple[Value, ...]]:
    """The values of each axis that claimed cells have, in order of appearance."""
    claimed = [cell_values(each.cell) for each in findings if each.status in CLAIMED]
    return {axis: tuple(dict.fromkeys(row[place] for row in claimed)) for place, axis in enumerate(AXES)}


class Extent:
    """What a run tried.

    Args:
        run: without `axes`, as files of version 1 are, none of its answers is whole.
    """

    def __init__(self, run: Run) -> None:
        self._served: Mapping[str, Sequence[Value]] = run.axes or served_values(run.findings)
        self._sets = [set(self._served[axis]) for axis in AXES]
        self._is_known = run.axes is not None
        found = served_values(run.findings)
        self._filtered = {axis for axis in AXES if not set(self._served[axis]) <= set(found[axis])}
        self._latents = {each.cell.head_size for each in run.findings if each.cell.feature == "mla"}

    def combinations(self, axis: str | None = None, value: Value = None) -> int:
        """The combinations of all served values, or of those that have a value of an axis."""
        total = 0
        for feature in self._served["feature"]:
            if axis == "feature" and feature != value:
                continue
            counts = [
                sum(
                    goes_with(str(feature), name, each, self._latents)
                    for each in ((value,) if name == axis else self._served[name])
                )
                for name in AXES[1:]
            ]
            total += math.prod(counts)
        return total

    def is_whole(self, findings: Iterable[Finding], axis: str | None = None, value: Value = None) -> bool:
        """Whether every combination was run and is right, or is refused.

        Args:
            findings: of the run, or those with a value of an axis.
            axis: that of the value; None for all findings.
            value: that all `findings` have.
        """
        if not self._is_known:
            return False
        settled = sum(
            each.status in (Status.VERIFIED, Status.REFUSED)
            and all(one in known for one, known in zip(cell_values(each.cell), self._sets, strict=True))
            for each in findings
        )
        return settled == self.combinations(axis, value)

    def lacking(self, findings: Sequence[Finding], axis: str | None = None, value: Value = None) -> str:
        """The first other axis with served values that were not run: "3 of 31 head sizes"; empty if there is none.

        Values that were refused with all `findings` do not count.
        """
        for place, name in enumerate(AXES):
            if name == axis:
                continue
            found = [(cell_values(each.cell)[place], each.status) for each in findings]
            ran = {its for its, status in found if status in (Status.VERIFIED, Status.REFUTED)}
            served = {its for its, status in found if status in CLAIMED}
            refused = {its for its, _ in found} - served
            if name in self._filtered:
                possible = {its for its in self._served[name] if self._goes(axis, value, name, its)}
                served |= possible - refused
            served.discard(None)
            if len(ran & served) < len(served):
                return f"{len(ran & served)} of {len(served)} {AXIS_NAMES[name]}s"
        return ""

    def _goes(self, axis: str | None, value: Value, other: str, its: Value) -> bool:
        """Whether a layer can have both values, as far as a feature decides that."""
        if axis == "feature":
            return goes_with(str(value), other, its, self._latents)
        return axis is None or other != "feature" or goes_with(str(its), axis, value, self._latents)
