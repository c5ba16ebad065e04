"""The gates that a candidate passes; an exception in a backend becomes a reason against it."""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from attnplug._system.text import shortened, shown
from attnplug.core.backend import AttentionBackend
from attnplug.core.composite import CompositeBackend
from attnplug.core.features import Feature
from attnplug.core.interface.answers import HookError, answer, declared, serving_class
from attnplug.core.interface.guarded import class_name, class_title, describe, guarded_call
from attnplug.core.interface.interface import backend_faults
from attnplug.core.interface.signatures import is_own, overrides
from attnplug.core.reasons import Reason
from attnplug.core.spec import Phase
from attnplug.registry.plugins.installed import Assumed, missing_requirements
from attnplug.registry.plugins.options import build_options
from attnplug.registry.plugins.records import COMPOSITE_SEPARATOR, PROJECT, Offer, PluginRecord, PluginStatus
from attnplug.registry.plugins.waiting import announce, is_joined_by_import, waited
from attnplug.registry.selection.decision import Candidate, Gate, Placement

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.core.device import Device
    from attnplug.core.spec import LayerSpec


_LONGEST_FAULTS, _MOST_FAULTS = 4000, 100
_LAYOUTS = frozenset({"NHD", "HND"})
_CODES = {
    PluginStatus.BLOCKED: "blocked",
    PluginStatus.INCOMPATIBLE: "api_version",
    PluginStatus.CONFLICT: "conflict",
    PluginStatus.BROKEN: "import_failed",
}


def not_loaded(record: PluginRecord) -> Candidate:
    """Gate 1: the candidate for a plugin that did not load."""
    lines = (record.reason or f"{record.name} was not loaded").splitlines()
    reasons = tuple(Reason(line.removeprefix("- "), code=_CODES[record.status]) for line in lines)
    return Candidate(record.name, record.distribution, record.version, None, Gate.PLUGIN, reasons)


def conflicting(offer: Offer, rivals: Sequence[Offer]) -> Candidate:
    """Gate 1: an offer whose name another distribution offers too."""
    names = " or ".join(rival.full_name for rival in rivals)
    reason = Reason(
        f"{offer.name} is offered by more than one distribution", code="conflict", remedy=f"ask for {names}"
    )
    return Candidate(offer.full_name, offer.distribution, offer.version, None, Gate.PLUGIN, (reason,))


def serving(offer: Offer, placement: Placement) -> tuple[Offer, Placement]:
    """The offer with the class that serves the layer, and the layer as this class sees it.

    A backend without latent attention may prefill such a layer, with expanded K and V: it then sees the expanded layer.

    Raises:
        HookError: `for_layer` gives no class of the plugin.
        AttnplugError: as `for_layer` raises it.
    """
    spec = placement.spec
    backend = serving_class(offer.backend, spec, keep=True)
    prefills = spec.mla is not None and spec.sparse is None and placement.phase is Phase.PREFILL
    if prefills and Feature.MLA not in declared(backend, "features"):
        expanded, error = guarded_call(spec.expanded)
        if error is None:
            spec = expanded
            backend = serving_class(offer.backend, spec, keep=True)
    if faults := _faults_of(backend, offer.backend):
        given = f"{class_title(offer.backend)} returned {class_title(backend)} from for_layer"
        raise HookError(f"{given}, which does not follow the interface: {faults}")
    if backend is offer.backend:
        return offer, placement if spec is placement.spec else dataclasses.replace(placement, spec=spec)
    return dataclasses.replace(offer, backend=backend), dataclasses.replace(placement, spec=spec)


@functools.lru_cache(maxsize=256)
def _faults_of(backend: type[AttentionBackend], offered: type[AttentionBackend]) -> str:
    """The faults of a class that `for_layer` gave; the offered class was checked before."""
    if backend is offered:
        return ""
    return shortened("; ".join(backend_faults(backend, AttentionBackend)), _LONGEST_FAULTS)


@dataclasses.dataclass(frozen=True, slots=True)
class Examined:
    """An offer that was examined for a layer.

    Args:
        candidate: the verdict.
        backend: the class that serves the layer.
        spec: the layer as this class sees it.
        pages: the block size and layout that it prefers; None without pages, and where it is refused.
    """

    candidate: Candidate
    backend: type[AttentionBackend]
    spec: LayerSpec
    pages: tuple[int, str] | None


def examine(offer: Offer, placement: Placement, assumed: Assumed) -> Examined:
    """Gates 2 and 3, the priority and the pages. Both gates record their reasons, the configuration's first."""
    announce(f"while it examined the backend {offer.name}")
    served, error = guarded_call(serving, offer, placement)
    configuration = [] if error is None else [blame(offer.backend, error, "for_layer")]
    if error is None:
        offer, placement = served
        configuration = configuration_reasons(offer.backend, placement)
    backend = offer.backend
    pages: tuple[int, str] | None = None
    # An installation makes no other device of this one, so that it is no remedy.
    helps = not any(map(_is_of_device, configuration))
    installed, error = guarded_call(missing_requirements, offer.declared.requires, assumed, helps=helps)
    if error is not None:
        installed = [fault(backend, f"has requires={shown(offer.declared.requires)}: {describe(error)}")]
    priority = _priority(offer, placement)
    if isinstance(priority, Reason):
        configuration.append(priority)
    if not configuration:
        pages, configuration = _declarations(backend, placement)
    announce()
    refused_at = Gate.INSTALLED if installed else Gate.CONFIGURATION if configuration else None
    rank = None if isinstance(priority, Reason) else priority
    named = offer.name, offer.distribution, offer.version
    candidate = Candidate(*named, rank, refused_at, (*configuration, *installed))
    return Examined(candidate, backend, placement.spec, pages)


def _is_of_device(reason: Reason) -> bool:
    """Whether a backend is not for the device; one whose capability is not known may be."""
    return reason.code == "device_type" or (reason.code == "compute_capability" and bool(reason.requested))


def import_parts(backend: type[AttentionBackend]) -> tuple[Reason, ...]:
    """The last gate: import the impl and the builder and check both classes; the reasons for a failure."""
    # The classes of a composite are attnplug's own, and they call those of its members.
    members = tuple(backend.members().values()) if issubclass(backend, CompositeBackend) else ()
    found = (_part_reasons(owner, backend) for owner in (*members, backend))
    return next(filter(None, found), ())


def _part_reasons(owner: type[AttentionBackend], backend: type[AttentionBackend]) -> tuple[Reason, ...]:
    """The faults of the parts of `owner`, which is `backend` or a member of it."""
    parts = _parts(owner, backend)
    if isinstance(parts, Reason):
        return (parts,)
    # This module imports torch, as the parts have done by now.
    from attnplug.core.interface.impl_and_builder import part_faults

    faults, error = guarded_call(part_faults, *parts)
    if error is not None:
        return (fault(owner, f"raised {describe(error)} when its impl and builder were examined"),)
    if owner is not backend and overrides(parts[0], "forward"):
        faults.append(f"{class_name(parts[0])}.forward is not called in a composite; override attend alone")
    if len(faults) <= 1:
        return tuple(fault(owner, f"does not follow the interface: {each}") for each in faults)
    return (
        fault(owner, "does not follow the interface"),
        *(Reason(each, code="plugin_error") for each in faults[:_MOST_FAULTS]),
    )


def _parts(owner: type[AttentionBackend], backend: type[AttentionBackend]) -> tuple[type, ...] | Reason:
    """The impl and the builder of `owner`, or why they cannot be imported."""
    parts: list[type] = []
    name: str = answer(backend, "get_name")
    for getter in ("get_impl_cls", "get_builder_cls"):
        announce(f"in {getter} of {class_title(owner)}")
        part, error = guarded_call(operator.methodcaller(getter), owner)
        announce()
        if error is not None or not isinstance(part, type):
            given = f"returned {shown(part)}, which is not a class"
            did = f"{getter} {given if error is None else f'raised {describe(error)}'}"
            text, remedy = f"{name} cannot be imported here", f"attnplug doctor {name} shows more"
            return Reason(text, code="import_failed", requested=did, remedy=remedy)
        parts.append(part)
    return tuple(parts)


def preferred_pages(
    backend: type[AttentionBackend], spec: LayerSpec, device: Device
) -> tuple[int, str] | None:
    """The block size and the layout that a backend prefers for a layer's pages; None without pages."""
    if not spec.has_pages:
        return None
    size: int = spec.block_size or answer(backend, "get_preferred_block_size", spec, device)
    layouts = answer(backend, "supported_kv_cache_layouts")
    if not _LAYOUTS.issuperset(layouts):
        limit = f"which must be of {', '.join(sorted(_LAYOUTS))}"
        given = f"{class_title(backend)} returned {shown(layouts, 200)}"
        raise HookError(f"{given} from supported_kv_cache_layouts, {limit}")
    return size, layouts[0]


def configuration_reasons(backend: type[AttentionBackend], placement: Placement) -> list[Reason]:
    """Gate 3: the reasons of `validate_configuration`; a fault where it raises or returns no list."""
    hook, asked = "validate_configuration", (placement.spec, placement.device, placement.phase)
    found, error = guarded_call(answer, backend, hook, *asked)
    return [blame(backend, error, hook)] if error is not None else list(found)


def _priority(offer: Offer, placement: Placement) -> int | Reason:
    backend = offer.backend
    hook, asked = "get_priority", (placement.spec, placement.device, placement.phase)
    priority, error = guarded_call(answer, backend, hook, *asked)
    if error is not None:
        return blame(backend, error, hook)
    lowest = 0 if _is_of_attnplug(offer) else 1
    if not lowest <= priority <= 999:
        return fault(backend, f"has priority {shown(priority)}; it must be an integer from {lowest} to 999")
    return int(priority)


def _is_of_attnplug(offer: Offer) -> bool:
    # A composite may name two distributions. A module of attnplug may be registered in code, without one.
    if PROJECT in (offer.distribution or "").split(COMPOSITE_SEPARATOR):
        return True
    backend = offer.backend
    every = backend.members().values() if issubclass(backend, CompositeBackend) else (backend,)
    return any(is_own(each) for each in every)


def _declarations(
    backend: type[AttentionBackend], placement: Placement
) -> tuple[tuple[int, str] | None, list[Reason]]:
    """The pages that a backend prefers, and faults in its declarations that would raise once it is chosen."""
    faults = []
    pages, error = guarded_call(preferred_pages, backend, placement.spec, placement.device)
    if error is not None:
        faults.append(blame(backend, error, "get_preferred_block_size"))
    # Options without defaults would otherwise raise after the backend is chosen.
    wrong, error = guarded_call(lambda: _options_fault(backend, declared(backend, "Options")))
    if error is not None or wrong:
        faults.append(fault(backend, wrong) if error is None else blame(backend, error, "its Options"))
    return pages, faults


# They depend on no layer, and take longer to make than all else of a plain selection.
@functools.lru_cache(maxsize=256)
def _options_fault(backend: type[AttentionBackend], options: type | None) -> str | None:
    """The fault in the defaults of a backend's `options`, or None."""
    error = None if options is None else guarded_call(build_options, backend, None)[1]
    return None if error is None else f"has Options that cannot be made: {describe(error)}"


def fault(backend: type[AttentionBackend], what: str) -> Reason:
    """The reason against a backend that did `what`, which breaks the interface."""
    return _of_plugin(f"{class_title(backend)} {what}")


def blame(backend: type[AttentionBackend], error: BaseException, hook: str) -> Reason:
    """The reason against a backend one of whose hooks raised; `hook` is the one that was called."""
    if isinstance(error, HookError):
        return _of_plugin(str(error))
    return fault(backend, f"raised {describe(error)} in {hook}")


def _of_plugin(text: str) -> Reason:
    return Reason(text, code="plugin_error", remedy="tell its author")


class _StillImporting(enum.Enum):
    STILL_IMPORTING = enum.auto()


STILL_IMPORTING: Final = _StillImporting.STILL_IMPORTING
"""Not known yet: another thread imports the parts, and waiting for it could last for ever."""
StillImporting: TypeAlias = Literal[_StillImporting.STILL_IMPORTING]


class PartImports:
    """Whether the parts of each backend import here. Importing a kernel library is slow, so each is tried once."""

    def __init__(self) -> None:
        # Reentrant: an interrupt at the end of `with` leaves it held by this thread.
        self._lock = threading.RLock()
        self._found: dict[type[AttentionBackend], tuple[int, Future[tuple[Reason, ...]]]] = {}

    def under_way(self) -> PartImports:
        """A new record that knows only the imports that other threads have begun, and begins no second one of these."""
        made = PartImports()
        with self._lock:
            made._found = {each: known for each, known in self._found.items() if not known[1].done()}
        return made

    def failure(self, backend: type[AttentionBackend]) -> tuple[Reason, ...] | StillImporting:
        """Why the parts of a backend do not import, or (). The first thread that asks imports them.

        Other threads wait for its result, unless the first may be waiting for them; see `waited`. They then get
        STILL_IMPORTING, as does a call by the parts themselves while they are imported.
        """
        me, mine = threading.get_ident(), Future[tuple[Reason, ...]]()
        # Such a module may be one of the parts, whose import would wait for the other thread.
        if backend not in self._found and is_joined_by_import():
            return STILL_IMPORTING
        with self._lock:
            owner, result = self._found.setdefault(backend, (me, mine))
        if result is not mine:
            if owner == me and not result.done():
                return STILL_IMPORTING
            if result.done():
                return result.result()
            if not waited(lambda seconds: bool(wait([result], seconds).done), lambda: owner):
                return STILL_IMPORTING
            return result.result()
        try:
            reasons = import_parts(backend)
        except BaseException:
            # Such as KeyboardInterrupt: nothing is known, so the next call tries again, and those who wait see it.
            with self._lock:
                self._found.pop(backend, None)
            result.set_result(())
            raise
        result.set_result(reasons)
        return reasons
