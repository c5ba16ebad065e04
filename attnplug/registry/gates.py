"""The gates that a candidate passes; an exception in a backend becomes a reason against it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnplug.core.composite import CompositeBackend
from attnplug.core.features import Feature
from attnplug.core.overrides import overrides
from attnplug.core.reasons import Reason, as_reason
from attnplug.core.spec import Phase
from attnplug.core.text import shown
from attnplug.registry.decision import Candidate, Gate, Placement
from attnplug.registry.hookspecs import PROJECT
from attnplug.registry.installed import Assumed, missing_requirements
from attnplug.registry.options import build_options
from attnplug.registry.plugin_calls import announce, describe, guarded_call, listed, plain_text
from attnplug.registry.records import COMPOSITE_SEPARATOR, Offer, PluginRecord, PluginStatus

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.core.device import Device
    from attnplug.core.spec import LayerSpec

_LONGEST_OWNER = 200
_LAYOUTS = frozenset({"NHD", "HND"})
_CODES = {
    PluginStatus.BLOCKED: "blocked",
    PluginStatus.INCOMPATIBLE: "api_version",
    PluginStatus.CONFLICT: "conflict",
    PluginStatus.BROKEN: "import_failed",
}


def not_loaded(record: PluginRecord) -> Candidate:
    """Gate 1: the candidate for a plugin that did not load."""
    reason = Reason(record.reason or f"{record.name} was not loaded", code=_CODES[record.status])
    return Candidate(record.name, record.distribution, record.version, None, Gate.PLUGIN, (reason,))


def conflicting(offer: Offer, rivals: Sequence[Offer]) -> Candidate:
    """Gate 1: an offer whose name another distribution offers too."""
    names = " or ".join(rival.full_name for rival in rivals)
    reason = Reason(
        f"{offer.name} is offered by more than one distribution", code="conflict", remedy=f"ask for {names}"
    )
    return Candidate(offer.full_name, offer.distribution, offer.version, None, Gate.PLUGIN, (reason,))


def serving(offer: Offer, placement: Placement) -> tuple[Offer, Placement]:
    """The offer with the class that serves the layer, and the layer that the class is asked about.

    A backend without latent attention may prefill such a layer, with expanded K and V: it is asked about that layer.
    """
    spec = placement.spec
    backend, error = guarded_call(offer.backend.for_layer, spec)
    prefills = spec.mla is not None and spec.sparse is None and placement.phase is Phase.PREFILL
    if error is None and prefills and Feature.MLA not in backend.features:
        expanded, error = guarded_call(spec.expanded)
        if error is None:
            spec = expanded
            backend, error = guarded_call(offer.backend.for_layer, spec)
    if error is not None or (backend is offer.backend and spec is placement.spec):
        # A for_layer that raises does so again in validate_configuration, whose gate records it.
        return offer, placement
    return dataclasses.replace(offer, backend=backend), dataclasses.replace(placement, spec=spec)


@dataclasses.dataclass(frozen=True, slots=True)
class Examined:
    """An offer that was examined for a layer.

    Args:
        candidate: the verdict.
        backend: the class that serves the layer.
        spec: the layer that this class is asked about.
        pages: the block size and layout that it prefers; None without pages, and where it is refused.
    """

    candidate: Candidate
    backend: type[AttentionBackend]
    spec: LayerSpec
    pages: tuple[int, str] | None


def examine(offer: Offer, placement: Placement, assumed: Assumed) -> Examined:
    """Gates 2 and 3, the priority and the pages. Both gates record their reasons, the configuration's first."""
    offer, placement = serving(offer, placement)
    backend = offer.backend
    pages: tuple[int, str] | None = None
    announce(f"while it examined the backend {offer.name}")
    configuration = configuration_reasons(backend, placement)
    installed, error = guarded_call(missing_requirements, backend.requires, assumed)
    if error is not None:
        installed = [fault(backend, f"has requires={shown(backend.requires)}: {describe(error)}")]
    priority = _priority(offer, placement)
    if isinstance(priority, Reason):
        configuration.append(priority)
    if not configuration:
        pages, configuration = _declarations(backend, placement)
    announce()
    refused_at = Gate.INSTALLED if installed else Gate.CONFIGURATION if configuration else None
    candidate = Candidate(
        offer.name,
        offer.distribution,
        offer.version,
        None if isinstance(priority, Reason) else priority,
        refused_at,
        (*configuration, *installed),
    )
    return Examined(candidate, backend, placement.spec, pages)


def import_parts(backend: type[AttentionBackend]) -> Reason | None:
    """The last gate: import the impl and the builder and check both classes; the reason for a failure, or None."""
    parts: list[type] = []
    for getter in ("get_impl_cls", "get_builder_cls"):
        announce(f"in {getter} of {backend.__module__}.{backend.__qualname__}")
        part, error = guarded_call(getattr(backend, getter))
        announce()
        if error is not None or not isinstance(part, type):
            did = (
                f"returned {shown(part)}, which is not a class"
                if error is None
                else f"raised {describe(error)}"
            )
            return Reason(
                f"{backend.get_name()} cannot be imported here",
                code="import_failed",
                requested=f"{getter} {did}",
                remedy=f"attnplug doctor {backend.get_name()} shows more",
            )
        parts.append(part)
    # This module imports torch, as the parts have done by now.
    from attnplug.core.parts import part_faults

    checked = [(backend, *parts)]
    if issubclass(backend, CompositeBackend):
        # The classes of a composite are attnplug's own, and they call those of its members.
        checked = [(each, each.get_impl_cls(), each.get_builder_cls()) for each in backend.members().values()]
    for owner, impl, builder in checked:
        faults = part_faults(impl, builder)
        if owner is not backend and overrides(impl, "forward"):
            faults.append(f"{impl.__name__}.forward is not called in a composite; override attend alone")
        if faults:
            return fault(owner, f"does not follow the interface: {'; '.join(faults)}")
    return None


def preferred_pages(
    backend: type[AttentionBackend], spec: LayerSpec, device: Device
) -> tuple[int, str] | None:
    """The block size and the layout that a backend prefers for a layer's pages; None without pages."""
    if spec.direct_kv:
        return None
    size = spec.block_size or backend.get_preferred_block_size(spec, device)
    if type(size) is not int or size < 1:
        raise ValueError(f"the block size {shown(size)} is not an integer of at least 1")
    layouts = [plain_text(layout) for layout in listed(backend.supported_kv_cache_layouts())]
    if not layouts or not set(layouts) <= _LAYOUTS:
        raise ValueError(f"the KV layouts {shown(layouts)} are not of {', '.join(sorted(_LAYOUTS))}")
    return size, layouts[0]


def configuration_reasons(backend: type[AttentionBackend], placement: Placement) -> list[Reason]:
    """Gate 3: the reasons of `validate_configuration`; a fault where it raises or returns no list."""

    def reasons() -> list[Reason] | str:
        found = backend.validate_configuration(placement.spec, placement.device, placement.phase)
        # A str is a Sequence too, and would become one reason for each letter.
        if isinstance(found, str) or not isinstance(found, Sequence):
            return f"returned {shown(found)} from validate_configuration, which must be a list of reasons"
        return list(map(_frozen, listed(found)))

    found, error = guarded_call(reasons)
    if error is not None:
        return [fault(backend, f"raised {describe(error)} in validate_configuration")]
    return [fault(backend, found)] if isinstance(found, str) else list(found)


def _frozen(item: object) -> Reason:
    # A subclass of Reason may answer anything later.
    if type(item) is Reason:
        return item
    return Reason.from_dict(item.to_dict()) if isinstance(item, Reason) else as_reason(str(item))


def _priority(offer: Offer, placement: Placement) -> int | Reason:
    backend = offer.backend
    priority, error = guarded_call(backend.get_priority, placement.spec, placement.device, placement.phase)
    if error is not None:
        return fault(backend, f"raised {describe(error)} in get_priority")
    # A composite may name two distributions.
    lowest = 0 if PROJECT in (offer.distribution or "").split(COMPOSITE_SEPARATOR) else 1
    if type(priority) is not int or not lowest <= priority <= 999:
        return fault(backend, f"has priority {shown(priority)}; it must be an integer from {lowest} to 999")
    return int(priority)


def _declarations(
    backend: type[AttentionBackend], placement: Placement
) -> tuple[tuple[int, str] | None, list[Reason]]:
    """The pages that a backend prefers, and faults in its declarations that would raise once it is chosen."""
    faults = []
    pages, error = guarded_call(preferred_pages, backend, placement.spec, placement.device)
    if error is not None:
        faults.append(fault(backend, f"raised {describe(error)} for its block size and layout"))
    # Options without defaults would otherwise raise after the backend is chosen.
    _, error = guarded_call(build_options, backend, None)
    if error is not None:
        faults.append(fault(backend, f"has Options that cannot be made: {describe(error)}"))
    return pages, faults


def fault(backend: type[AttentionBackend], what: str) -> Reason:
    """The reason against a backend that did `what`, which breaks the interface."""
    owner = f"{backend.__module__}.{backend.__qualname__}"
    # A class can be given a name of any length.
    owner = owner if len(owner) <= _LONGEST_OWNER else f"{owner[:_LONGEST_OWNER]}..."
    return Reason(f"{owner} {what}", code="plugin_error", remedy="tell its author")
