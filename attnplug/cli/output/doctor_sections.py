"""The engines in `attnplug doctor`: those installed, whether attnplug is active in them, and how to activate it.

The kernel libraries in `attnplug doctor`: versions, suitability for this GPU, use, and problems.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib.metadata import distributions, entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from attnplug.backends.libraries import LIBRARY_RULES, LibraryRule, rules_of
from attnplug.backends.library_imports import problem_of
from attnplug.backends.unbound_libraries import UNBOUND_LIBRARIES
from attnplug.registry.plugins.installed import installed_version

if TYPE_CHECKING:
    from attnplug.core.device import Device


@dataclasses.dataclass(frozen=True, slots=True)
class EngineState:
    """One line of the report.

    Args:
        engine: its usual name.
        version: the installed version, if any.
        state: "active" (the engine offers attnplug's backends), "ready" (a program activates attnplug),
            "inactive" (a setting leaves it out), "refused" (this version) or "missing".
        detail: what attnplug does in it, or the problem.
        activate: the command or line of code that activates attnplug; None if the engine is missing.
    """

    engine: str
    version: str | None
    state: str
    detail: str
    activate: str | None = None


# Read at each call, because a program may install an engine while it runs.
_version = installed_version.__wrapped__
_VLLM = SpecifierSet(">=0.20")
_SGLANG = SpecifierSet(">=0.5.23")
_TRANSFORMERS = SpecifierSet(">=5.15")
_FLASH_ATTN = "flash-attn"


def engine_states() -> list[EngineState]:
    """The engines that attnplug has an adapter for, and installed packages that call flash-attn. Imports none."""
    return [_vllm(), _sglang(), _transformers(), *_flash_attn_users()]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    """An engine that finds attnplug by an entry point, unless a variable leaves it out.

    Args:
        engine: its usual name.
        distribution: its package.
        versions: those that the adapter serves.
        group: of entry points.
        variable: has the names of plugins to load, with commas between.
        is_set: whether a value of the variable restricts what loads.
        names: of the backends.
        command: starts it with attnplug.
    """

    engine: str
    distribution: str
    versions: SpecifierSet
    group: str
    variable: str
    is_set: Callable[[str], bool]
    names: str
    command: str

    def state(self) -> EngineState:
        """The line of the report."""
        engine, found = self.engine, _version(self.distribution)
        offered = f"backends named {self.names}"
        if found is None:
            return EngineState(engine, None, "missing", offered)
        if not self.versions.contains(found, prereleases=True):
            needed = f"the adapter needs {self.distribution}{self.versions}"
            return EngineState(engine, found, "refused", needed, f"pip install -U {self.distribution}")
        allowed = os.environ.get(self.variable)
        if (
            allowed is not None
            and self.is_set(allowed)
            and "attnplug" not in re.split(r"\s*,\s*", allowed.strip())
        ):
            activate = f"{self.variable}={','.join(filter(None, [allowed, 'attnplug']))}"
            return EngineState(
                engine, found, "inactive", f"{self.variable}={allowed!r} leaves it out", activate
            )
        if not any(point.name == "attnplug" for point in entry_points(group=self.group)):
            checkout = str(Path(__file__).parents[3])
            detail = f"attnplug is not installed as a package, so {engine} does not find its entry point"
            return EngineState(engine, found, "inactive", detail, f"pip install {shlex.quote(checkout)}")
        return EngineState(engine, found, "active", offered, self.command)


def _vllm() -> EngineState:
    return _Server(
        engine="vLLM",
        distribution="vllm",
        versions=_VLLM,
        group="vllm.general_plugins",
        variable="VLLM_PLUGINS",
        is_set=lambda value: True,
        names="ATTNPLUG, which selects for each layer, and ATTNPLUG_NAME",
        command="vllm serve MODEL --attention-backend ATTNPLUG",
    ).state()


def _sglang() -> EngineState:
    return _Server(
        engine="SGLang",
        distribution="sglang",
        versions=_SGLANG,
        group="sglang.srt.plugins",
        variable="SGLANG_PLUGINS",
        is_set=bool,
        names="attnplug, which selects for each layer, and attnplug_name",
        command="sglang serve --model-path MODEL --attention-backend attnplug",
    ).state()


def _transformers() -> EngineState:
    served = "forward, generate and generate_batch"
    found = _version("transformers")
    if found is None:
        return EngineState("transformers", None, "missing", served)
    if not _TRANSFORMERS.contains(found, prereleases=True):
        needed = f"the adapter needs transformers{_TRANSFORMERS}"
        return EngineState("transformers", found, "refused", needed, "pip install -U transformers")
    activate = "attnplug.integrations.transformers.set_attention(model)"
    return EngineState("transformers", found, "ready", f"{served}; each program activates it", activate)


def _flash_attn_users() -> Iterator[EngineState]:
    """Installed packages that require flash-attn in every installation of theirs."""
    users = {}
    for each in distributions():
        name = each.metadata["Name"]
        if name and canonicalize_name(name) != "attnplug" and any(map(_is_flash_attn, each.requires or ())):
            users[name] = each.version
    for name, found in sorted(users.items()):
        detail = "calls flash-attn, whose functions attnplug has too; the package changes its import line"
        yield EngineState(name, found, "ready", detail, "from attnplug.integrations.flash_attn import ...")


def _is_flash_attn(requirement: str) -> bool:
    try:
        read = Requirement(requirement)
    except InvalidRequirement:
        return False
    # Requirements of an extra are not part of every installation.
    needed = read.marker is None or read.marker.evaluate({"extra": ""})
    return needed and canonicalize_name(read.name) == _FLASH_ATTN


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
        version = None if each.distribution is None else _version(each.distribution)
        if version is None:
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
    version = _version(main.distribution)
    if version is None:
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
