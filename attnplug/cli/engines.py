"""The engines in `attnplug doctor`: those installed, whether attnplug is active in them, and how to activate it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distributions, entry_points, version

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name


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


_VLLM = SpecifierSet(">=0.20")
_TRANSFORMERS = SpecifierSet(">=5.15")
_FLASH_ATTN = "flash-attn"


def engine_states() -> list[EngineState]:
    """The engines that attnplug has an adapter for, and installed packages that call flash-attn. Imports none."""
    return [_vllm(), _transformers(), *_flash_attn_users()]


def _vllm() -> EngineState:
    offered = "backends named ATTNPLUG, which selects for each layer, and ATTNPLUG_NAME"
    found = _version("vllm")
    if found is None:
        return EngineState("vLLM", None, "missing", offered)
    if not _VLLM.contains(found, prereleases=True):
        return EngineState("vLLM", found, "refused", f"the adapter needs vllm{_VLLM}", "pip install -U vllm")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "attnplug" not in allowed.split(","):
        activate = f"VLLM_PLUGINS={','.join(filter(None, [allowed, 'attnplug']))}"
        return EngineState("vLLM", found, "inactive", f"VLLM_PLUGINS={allowed!r} leaves it out", activate)
    if not any(point.name == "attnplug" for point in entry_points(group="vllm.general_plugins")):
        detail = "attnplug is not installed as a package, so vLLM does not find its entry point"
        return EngineState("vLLM", found, "inactive", detail, "pip install attnplug")
    return EngineState("vLLM", found, "active", offered, "vllm serve MODEL --attention-backend ATTNPLUG")


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
    needed = read.marker is None or read.marker.evaluate({"extra": ""})
    return needed and canonicalize_name(read.name) == _FLASH_ATTN


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
