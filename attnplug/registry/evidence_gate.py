"""The gate of evidence: what was run here and was wrong is refused, unless the user wants it all the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, TypeAlias

from attnplug.core.composite import CompositeBackend
from attnplug.core.errors import LayoutError, PolicyError
from attnplug.registry.decision import Candidate, Decision, Gate
from attnplug.registry.evidence import Evidence, RefutedCell, reason_of
from attnplug.registry.gates import preferred_pages
from attnplug.registry.policy import Rule
from attnplug.registry.records import Offer
from attnplug.registry.switches import ALLOW_REFUTED

if TYPE_CHECKING:
    from attnplug.core.device import Device
    from attnplug.core.reasons import Reason
    from attnplug.core.spec import LayerSpec, Phase
    from attnplug.registry.evidence import Pages
    from attnplug.registry.installed import Assumed
    from attnplug.registry.plugins import PluginSet

__all__ = ["ALL", "ARGUMENT", "AllowRefuted", "Question", "Scales", "allowed_names"]

AllowRefuted: TypeAlias = str | Collection[str] | None
"""Names of backends with commas between, or one by one; "all"; None leaves it to ATTNPLUG_ALLOW_REFUTED."""

ALL = "all"
ARGUMENT = "allow_refuted"


def allowed_names(given: AllowRefuted) -> tuple[str, ...] | None:
    """The argument as a hashable value; PolicyError for what are no names."""
    if given is None:
        return None
    parts = given.split(",") if isinstance(given, str) else given
    names = tuple(parts) if isinstance(parts, Collection) else (parts,)
    if not all(isinstance(name, str) and name.strip() for name in names):
        raise PolicyError(ARGUMENT, given, "must be names of backends, or 'all'", "as 'FLASHINFER'")
    return tuple(dict.fromkeys(name.strip() for name in names))


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """What was asked of every candidate."""

    spec: LayerSpec
    device: Device
    phase: Phase | None
    assumed: Assumed


class Scales:
    """Weighs candidates of one registry against the evidence.

    Args:
        plugins: they know who ships the halves of a composite.
        evidence: what was refuted.
        allowed: the names that the user asked for, or None for those of ATTNPLUG_ALLOW_REFUTED.

    Raises:
        UnknownBackendError, PluginError: a name that stands for no backend here.
    """

    def __init__(self, plugins: PluginSet, evidence: Evidence, allowed: tuple[str, ...] | None) -> None:
        self._plugins = plugins
        self._evidence = evidence
        self._source = ALLOW_REFUTED if allowed is None else ARGUMENT
        self.allowed = plugins.allow_refuted if allowed is None else allowed
        """The names in force."""
        names = (name for name in self.allowed if name != ALL)
        rules = (Rule(name, "default", "*", self._source) for name in names)
        self._offers = {offer for rule in rules for offer in plugins.resolve(rule)}

    def weigh(self, offer: Offer, candidate: Candidate, asked: Question) -> tuple[Candidate, str | None]:
        """An accepted candidate, refused where it was refuted; and a note where the user allows it."""
        if not self._evidence.cells:
            return candidate, None
        reasons, allowed = self._against(
            offer, asked, preferred_pages(offer.backend, asked.spec, asked.device)
        )
        if reasons:
            return dataclasses.replace(candidate, refused_at=Gate.EVIDENCE, reasons=tuple(reasons)), None
        return candidate, f"allowed by {self._source}: {'; '.join(allowed)}" if allowed else None

    def check_pages(self, decision: Decision) -> None:
        """That the block size and layout of a decision, which other layers had a say in, were not refuted.

        Raises:
            LayoutError: they were; it names the layer, the backend and the evidence.
        """
        chosen, backend = decision.chosen, decision.backend_cls
        if chosen is None or backend is None:
            return
        size, layout = decision.block_size, decision.kv_cache_layout
        settled = None if size is None or layout is None else (size, layout)
        offer = Offer(chosen.name, backend, "", chosen.distribution, chosen.version)
        asked = Question(decision.spec, decision.device, decision.phase, decision.assumed)
        reasons, _ = self._against(offer, asked, settled)
        if reasons:
            limit = f"in {layout}, agreed on with other layers, does not serve layer {decision.layer_name}"
            raise LayoutError("block_size", size, f"{limit} on {chosen.name}: {'; '.join(reasons)}")

    def _against(self, offer: Offer, asked: Question, at: Pages) -> tuple[list[Reason], list[str]]:
        """Reasons against what is offered, and in short those that the user overrides."""
        reasons, allowed = [], []
        for owner, cells in self._found(offer, asked, at):
            reason = reason_of(owner.name, cells)
            if self._allows(offer) or self._allows(owner):
                allowed.append(str(reason).removesuffix(f"; {reason.remedy}"))
            else:
                reasons.append(reason)
        return reasons, allowed

    def _found(
        self, offer: Offer, asked: Question, at: Pages
    ) -> Iterator[tuple[Offer, tuple[RefutedCell, ...]]]:
        """Who was refuted: what is offered itself, or a composite's half in the phase that it serves."""
        members: list[tuple[Offer, Phase | None]] = [(offer, asked.phase)]
        if issubclass(offer.backend, CompositeBackend):
            halves = offer.backend.members().items()
            members += [
                (each, phase)
                for phase, half in halves
                if asked.phase in (None, phase)
                for each in self._plugins.every_offer
                if each.backend is half
            ]
        for each, phase in members:
            cells = self._evidence.against(each, asked.spec, asked.device, phase, at, asked.assumed)
            if cells:
                yield each, cells

    def _allows(self, offer: Offer) -> bool:
        named = (offer.name, offer.distribution)
        return ALL in self.allowed or any((each.name, each.distribution) == named for each in self._offers)
