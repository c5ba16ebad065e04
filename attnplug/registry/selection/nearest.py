"""The nearest miss: the cheapest changes with which a refused backend would serve a layer.

Each change is found by asking the backend again, never from the words of its reasons.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from attnplug.core.dtypes import is_quantized_kv_cache
from attnplug.core.errors import SpecError
from attnplug.core.kv_format import kv_formats
from attnplug.registry.plugins.installed import missing_requirements
from attnplug.registry.plugins.waiting import guarded_call
from attnplug.registry.selection.decision import Candidate, Decision, Placement
from attnplug.registry.selection.evidence_gate import EvidenceGate
from attnplug.registry.selection.gates import examine, serving

if TYPE_CHECKING:
    from attnplug.registry.plugins.installed import Assumed
    from attnplug.registry.plugins.records import Offer
    from attnplug.registry.registry import Registry

_INSTALL, _SAME_KIND, _OTHER_KIND, _DTYPE = 1, 2, 3, 4
"""Costs: to install a package, to change an option to a like value, to an unlike one, and to convert a model."""
_WORDS: Final = {"requires": "after", "block_size": "without"}


@dataclasses.dataclass(frozen=True, slots=True)
class SpecChange:
    """One change by the user.

    Args:
        field: "requires" for packages, or the field of the LayerSpec.
        value: the packages to install, or the new value; None for a block size that the backend chooses.
        command: what to type: an option of `attnplug select`, or a command of its own. For a block size it is the
            option to leave out, and for a dtype the field of the model's configuration.
    """

    field: str
    value: str | None
    command: str

    def __str__(self) -> str:
        """The change as a part of a sentence: "with --kv-cache-dtype fp8_e5m2"."""
        return f"{_WORDS.get(self.field, 'with')} {self.command}"

    def to_dict(self) -> dict[str, str | None]:
        """A JSON object with every field."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, slots=True)
class NearMiss:
    """A refused backend, and the changes with which it would serve the layer; `cost` orders several."""

    backend: str
    changes: tuple[SpecChange, ...]
    cost: int

    def __str__(self) -> str:
        """All changes in words: "after pip install 'flash-attn' and with --kv-cache-dtype auto"."""
        return " and ".join(map(str, self.changes))

    def to_dict(self) -> dict[str, Any]:
        """A JSON object: `backend`, `changes` with their commands, and all of them in `words`."""
        return {
            "backend": self.backend,
            "changes": [each.to_dict() for each in self.changes],
            "words": str(self),
        }


def only_reference_serves(decision: Decision) -> bool:
    """Whether a layer on a GPU is served by attnplug's reference alone, which is made for correctness, not speed."""
    if decision.device.type == "cpu" or decision.chosen is None or decision.rule is not None:
        return False
    # Priority 0 is kept for the reference.
    return all(candidate.priority == 0 for candidate in decision.candidates if candidate.accepted)


def nearest_misses(registry: Registry, decision: Decision) -> tuple[NearMiss, ...]:
    """For each refused backend that some changes would make serve the layer, the cheapest ones; nearest first.

    The reference, and backends that only another device or another model would help, are not among them. Where a
    rule asked for a backend, no other one is.
    """
    found: list[tuple[int, int, NearMiss]] = []
    gate = EvidenceGate(registry.plugins, registry.evidence, decision.allow_refuted or None, decision.assumed)
    offers = {offer.name: offer for offer in registry.plugins.offers}
    if decision.rule is not None:
        asked = registry.plugins.find(decision.rule.rpartition("=")[2])
        offers = {offer.name: offer for offer in asked}
    for candidate in decision.refused:
        offer = offers.get(candidate.name)
        if offer is None or candidate.priority == 0:
            continue
        miss = next(_changes_that_help(offer, decision, gate), None)
        if miss is not None:
            found.append((miss.cost, -(candidate.priority or 0), miss))
    return tuple(miss for *_, miss in sorted(found, key=lambda each: (each[:2], each[2].backend)))


def _changes_that_help(offer: Offer, decision: Decision, gate: EvidenceGate) -> Iterator[NearMiss]:
    """The sets of changes with which an offer passes the gates, cheapest first."""
    choices = (_installs(offer, decision), _dtypes(decision), _kv_dtypes(decision), _block_sizes(decision))
    # At most one change of each kind.
    products = itertools.product(*([None, *each] for each in choices))
    sets = [[change for change in each if change is not None] for each in products]
    for changes in sorted(sets, key=lambda each: (sum(cost for cost, _ in each), len(each))):
        if changes and _passes(offer, decision, [change for _, change in changes], gate):
            yield NearMiss(offer.name, tuple(change for _, change in changes), sum(c for c, _ in changes))


def _passes(offer: Offer, decision: Decision, changes: list[SpecChange], gate: EvidenceGate) -> bool:
    fields = {change.field: change.value for change in changes if change.field != "requires"}
    installs = any(change.field == "requires" for change in changes)
    assumed: Assumed = "all" if installs else decision.assumed
    try:
        spec = decision.spec.replace(**fields)
    except SpecError:
        return False
    placement = Placement(spec, decision.device, decision.phase)
    candidate: Candidate = examine(offer, placement, assumed).candidate
    if candidate.accepted:
        candidate, _ = gate.check(offer, candidate, placement)
    return candidate.accepted


_Choices = list[tuple[int, SpecChange]]


def _installs(offer: Offer, decision: Decision) -> _Choices:
    """The installation of what the backend lacks, if it lacks anything."""
    # Another class than the one that is offered can serve the layer, and need another version.
    placement = Placement(decision.spec, decision.device, decision.phase)
    missing, error = guarded_call(
        lambda: missing_requirements(serving(offer, placement)[0].declared.requires, decision.assumed)
    )
    if error is not None or not missing:
        return []
    commands = [reason.remedy or str(reason) for reason in missing]
    command = " and ".join(commands)
    return [(_INSTALL, SpecChange("requires", command.replace("pip install ", ""), command))]


def _dtypes(decision: Decision) -> _Choices:
    # A conversion of the model to float32 would only cost memory and time.
    others = [dtype for dtype in ("bfloat16", "float16") if dtype != decision.spec.dtype]
    return [(_DTYPE, SpecChange("dtype", each, f"dtype {each}")) for each in others]


def _kv_dtypes(decision: Decision) -> _Choices:
    # Like storage dtypes cost less, because a user of quantised pages wants to save memory.
    spec = decision.spec
    if spec.direct_kv or spec.kv_cache_dtype == "auto":
        return []
    quantized = is_quantized_kv_cache(spec.kv_cache_dtype)
    same = (spec.kv_cache_dtype, spec.resolved_kv_cache_dtype)
    known = ("auto", *(row.name for row in sorted(kv_formats(), key=lambda row: not row.is_quantized)))
    changes = [SpecChange("kv_cache_dtype", n, f"--kv-cache-dtype {n}") for n in known if n not in same]
    is_like = [is_quantized_kv_cache(str(change.value)) == quantized for change in changes]
    return [
        (_SAME_KIND if each else _OTHER_KIND, change) for each, change in zip(is_like, changes, strict=True)
    ]


def _block_sizes(decision: Decision) -> _Choices:
    """No block size: the backend then chooses one of its own."""
    if decision.spec.direct_kv or decision.spec.block_size is None:
        return []
    return [(_SAME_KIND, SpecChange("block_size", None, "--block-size"))]
