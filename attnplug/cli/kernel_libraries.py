"""The kernel libraries in `attnplug doctor`: versions, suitability for this GPU, use, and problems."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from attnplug.backends.libraries import LIBRARY_RULES, LibraryRule, rules_of
from attnplug.backends.library_imports import problem_of
from attnplug.backends.unbound_libraries import UNBOUND_LIBRARIES

if TYPE_CHECKING:
    from attnplug.core.device import Device


@dataclasses.dataclass(frozen=True, slots=True)
class LibraryState:
    """One line of the report.

    Args:
        library: its usual name.
        version: the installed version, if any.
        backend: the backend that calls it; empty if none does.
        state: "ok", "missing", "refused" (this version, or this GPU) or "broken".
        detail: its use, or the problem.
        compiles: the kernels that an "ok" library compiles at first use.
        remedy: the command or change that fixes the problem, if there is one.
    """

    library: str
    version: str | None
    backend: str
    state: str
    detail: str
    compiles: str | None = None
    remedy: str | None = None


def library_states(device: Device | None, backends: Collection[str] | None = None) -> list[LibraryState]:
    """The state of each kernel library, or of those of `backends`, in the order of LIBRARY_RULES.

    Imports no library. If `device` is None, it is unknown, and no library is refused for its GPU.
    """
    names = dict.fromkeys(rule.backend for rule in LIBRARY_RULES)
    return [_state(name, device) for name in names if backends is None or name in backends]


def unbound_states() -> list[LibraryState]:
    """The installed libraries that no backend calls, such as FlashMLA. Imports none of them."""
    found = []
    for each in UNBOUND_LIBRARIES:
        if each.distribution is None:
            continue
        try:
            version = importlib.metadata.version(each.distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        detail = f"not called: {each.why}"
        remedy = f"{each.instead} serves such layers"
        found.append(LibraryState(each.library, version, "", "refused", detail, remedy=remedy))
    return found


def used_by_phase(device: Device, states: Sequence[LibraryState]) -> dict[str, str | None]:
    """The backend that would serve a plain layer in each phase: the first neither refused nor broken."""
    from attnplug.core.spec import LayerSpec, Phase
    from attnplug.registry.default import explain

    layer = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
    broken = {state.backend for state in states if state.state == "broken"}
    used: dict[str, str | None] = {}
    for phase in (Phase.PREFILL, Phase.DECODE):
        accepted = (each for each in explain(layer, device, phase).candidates if each.refused_at is None)
        used[str(phase)] = next((each.name for each in accepted if each.name not in broken), None)
    return used


def _state(backend: str, device: Device | None) -> LibraryState:
    rules = rules_of(backend)
    main = next(rule for rule in rules if rule.serves)
    install = f"pip install '{main.distribution}{main.versions}'"
    try:
        version = importlib.metadata.version(main.distribution)
    except importlib.metadata.PackageNotFoundError:
        refused = _device_refusal(rules, device)
        remedy = install if refused is None else None
        return LibraryState(main.library, None, backend, "missing", refused or main.what, remedy=remedy)
    known = [rule for rule in rules if rule.covers_version(version)]
    served = [rule for rule in known if rule.serves]
    if not served:
        rule = known[0] if known else main
        detail = f"this version: {rule.what}" if known else f"this version is not one of {main.versions}"
        return LibraryState(main.library, version, backend, "refused", detail, remedy=rule.remedy or install)
    refused = _device_refusal(known, device)
    if refused is not None:
        capability = None if device is None else device.capability
        here = [rule for rule in known if capability is not None and rule.covers_capability(capability)]
        remedy = next((rule.remedy for rule in here if rule.remedy), None)
        return LibraryState(main.library, version, backend, "refused", refused, remedy=remedy)
    problem = problem_of(main)
    if problem is not None:
        what, _, remedy = problem.rpartition("; ")
        return LibraryState(main.library, version, backend, "broken", what, remedy=remedy)
    return LibraryState(main.library, version, backend, "ok", served[0].what, served[0].compiles)


def _device_refusal(rules: Sequence[LibraryRule], device: Device | None) -> str | None:
    """The reason why no version in `rules` serves the device; None if one does."""
    if device is None or (device.type == "cuda" and device.capability is None):
        return None
    if device.type != "cuda" or device.capability is None:
        return f"not for {device}: it needs an NVIDIA GPU"
    here = [rule for rule in rules if rule.covers_capability(device.capability)]
    if any(rule.serves for rule in here):
        return None
    return f"not for {device}: {here[0].what if here else 'its kernels are made for other GPUs'}"
