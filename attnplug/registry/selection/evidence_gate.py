"""The gate of evidence: it refuses a backend that gave wrong results here, unless the user allows it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, TypeAlias

from attnplug.core.composite import CompositeBackend
from attnplug.core.errors import LayoutError, PolicyError
from attnplug.registry.plugins.records import Offer
from attnplug.registry.selection.decision import Candidate, Decision, Gate, Placement
from attnplug.registry.selection.evidence import Evidence, reason_of
from attnplug.registry.selection.gates import preferred_pages
from attnplug.registry.selection.policy import Rule

if TYPE_CHECKING:
    from attnplug.core.reasons import Reason
    from attnplug.registry.plugin_set import PluginSet
    from attnplug.registry.plugins.installed import Assumed
    from attnplug.registry.selection.evidence import Pages

AllowRefuted: TypeAlias = str | Collection[str] | None
"""Names of backends with commas between, or one by one; "all"; None leaves it to ATTNPLUG_ALLOW_REFUTED."""

_ALL = "all"
_ARGUMENT = "allow_refuted"


def allowed_names(given: AllowRefuted) -> tuple[str, ...] | None:
    """The argument as a hashable value; PolicyError where it has no names."""
    if given is None:
        return None
    parts = given.split(",") if isinstance(given, str) else given
    names: tuple[Any, ...]
    try:
        names = tuple(parts) if isinstance(parts, Collection) else (parts,)
    except Exception:  # noqa: BLE001  (`__iter__` is code of the caller)
        names = (parts,)
    if not all(isinstance(name, str) and name.strip() for name in names):
        raise PolicyError(_ARGUMENT, given, "must be names of backends, or 'all'", "as 'FLASHINFER'")
    return tuple(dict.fromkeys(name.strip() for name in names))


class EvidenceGate:
    """Checks candidates of one registry against the evidence.

    Args:
        plugins: say which distribution ships each half of a composite.
        evidence: the refuted cells.
        allowed: the names that the user gave, or None for those of ATTNPLUG_ALLOW_REFUTED.
        assumed: versions to judge by instead of the installed ones.

    Raises:
        UnknownBackendError, PluginError: a name in `allowed` that is not a backend here.
    """

    def __init__(
        self, plugins: PluginSet, evidence: Evidence, allowed: tuple[str, ...] | None, assumed: Assumed
    ) -> None:
        self._plugins = plugins
        self._evidence = evidence
        self._assumed: Assumed = assumed
        self._source = plugins.allow_refuted_source if allowed is None else _ARGUMENT
        self.allowed = plugins.allow_refuted if allowed is None else allowed
        """The names in force."""
        names = (name for name in self.allowed if name != _ALL)
        rules = (Rule(name, "default", "*", self._source) for name in names)
        # Resolved here, so that a misspelt name raises an error instead of allowing nothing.
        self._offers = {offer for rule in rules for offer in plugins.resolve(rule)}

    def check(self, offer: Offer, candidate: Candidate, placement: Placement) -> tuple[Candidate, str | None]:
        """An accepted candidate, refused where it was refuted; and a note where the user allows it."""
        if not self._evidence.cells:
            return candidate, None
        pages = preferred_pages(offer.backend, placement.spec, placement.device)
        reasons, allowed = self._reasons(offer, placement, pages)
        if reasons:
            return dataclasses.replace(candidate, refused_at=Gate.EVIDENCE, reasons=tuple(reasons)), None
        return candidate, f"allowed by {self._source}: {'; '.join(allowed)}" if allowed else None

    def check_pages(self, decision: Decision) -> None:
        """Check the block size and layout of a decision, which it may have agreed on with other layers.

        Raises:
            LayoutError: they were refuted; it names the layer, the backend and the evidence.
        """
        chosen, backend = decision.chosen, decision.backend_cls
        if chosen is None or backend is None:
            return
        offer = Offer(chosen.name, backend, "", chosen.distribution, chosen.version)
        placement = Placement(decision.spec, decision.device, decision.phase)
        reasons, _ = self._reasons(offer, placement, decision.pages)
        if reasons:
            size, layout = decision.block_size, decision.kv_cache_layout
            limit = f"in {layout}, agreed on with other layers, does not serve layer {decision.layer_name}"
            raise LayoutError("block_size", size, f"{limit} on {chosen.name}: {'; '.join(reasons)}")

    def _reasons(self, offer: Offer, placement: Placement, pages: Pages) -> tuple[list[Reason], list[str]]:
        """The reasons against an offer, or a composite's halves, and in short those that the user overrides."""
        reasons, allowed = [], []
        found = [(offer, placement)]
        # Evidence is recorded per backend, so evidence against one half counts against the composite.
        if issubclass(offer.backend, CompositeBackend):
            members = offer.backend.members()
            found += [
                (each, dataclasses.replace(placement, phase=phase))
                for place, phases in offer.backend.served_phases().items()
                for phase in phases
                if placement.phase is None or phase in (None, placement.phase)
                for each in self._plugins.every_offer
                if each.backend is members[place]
            ]
        for owner, where in found:
            if cells := self._evidence.against(owner, where, pages, self._assumed):
                reason = reason_of(owner.name, cells)
                if self._allows(offer) or self._allows(owner):
                    allowed.append(str(reason).removesuffix(f"; {reason.remedy}"))
                else:
                    reasons.append(reason)
        return reasons, allowed

    def _allows(self, offer: Offer) -> bool:
        # Offers are not compared whole, because check_pages makes one without its plugin's name.
        named = (offer.name, offer.distribution)
        return _ALL in self.allowed or any((each.name, each.distribution) == named for each in self._offers)
