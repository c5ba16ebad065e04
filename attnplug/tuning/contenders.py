"""The backends that a tuning measures for a layer: those that a selection accepts, and composites for mixed steps."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from attnplug.core.spec import LayerSpec, Phase
from attnplug.registry.selection.decision import Placement
from attnplug.registry.selection.gates import preferred_pages, serving
from attnplug.tuning.cells import Contender
from attnplug.tuning.subjects import subject_of

if TYPE_CHECKING:
    from attnplug.core.device import Device
    from attnplug.registry.measured.tuned import TunedTable
    from attnplug.registry.plugins.records import Offer
    from attnplug.registry.registry import Registry


def contenders(
    registry: Registry, device: Device, spec: LayerSpec, phase: Phase | None, names: Collection[str] | None
) -> tuple[Contender, ...]:
    """The accepted backends in the order of their priority; of the others than the first, those in `names`."""
    plugins = registry.plugins
    offers = {(offer.name, offer.distribution): offer for offer in plugins.offers}
    wanted = None if names is None else {offer for name in names for offer in plugins.find(name)}
    found: list[Contender] = []
    for candidate in registry.explain(spec, device, phase, tuned=False).candidates:
        # A rule of the user may name a composite, which is no offer.
        offer = offers.get((candidate.name, candidate.distribution))
        if not candidate.accepted or offer is None:
            continue
        if not found or wanted is None or offer in wanted:
            found.append(_contender(offer, Placement(spec, device, phase)))
    return tuple(found)


def composites(
    registry: Registry, device: Device, spec: LayerSpec, table: TunedTable
) -> tuple[Contender, ...]:
    """The composite of the backends that a table chooses for the phases; none if they cannot share one KV cache."""
    best = [
        registry.explain(spec, device, phase, tuned=table).backend for phase in (Phase.PREFILL, Phase.DECODE)
    ]
    if None in best or best[0] == best[1]:
        return ()
    pairs = registry.plugins.find(f"{best[0]}+{best[1]}")
    serves = [offer for offer in pairs if registry.explain(spec, device, backend=offer.name, tuned=False)]
    return tuple(_contender(offer, Placement(spec, device)) for offer in serves)


def _contender(offer: Offer, placement: Placement) -> Contender:
    served, asked = serving(offer, placement)
    pages = preferred_pages(served.backend, asked.spec, placement.device)
    return Contender(offer, subject_of(offer, placement.device), pages)
