"""The versions for which a time is valid, and the facts about this machine that a table keeps for people."""

from __future__ import annotations

import platform
import sys
from typing import TYPE_CHECKING, Any

from attnplug.registry.plugins.backend_versions import BackendVersions
from attnplug.registry.plugins.installed import installed_versions, library_versions

if TYPE_CHECKING:
    from attnplug.core.device import Device
    from attnplug.registry.plugins.records import Offer


_CONTEXT = 2 << 30
"""The memory of a GPU that the context and libraries of one process take at most."""


def subject_of(offer: Offer, device: Device) -> BackendVersions:
    """A backend with the versions of torch, its distribution and the distributions that it requires.

    Python's version is not among them: it changes no kernel.
    """
    versions = tuple(sorted(library_versions(offer).items()))
    return BackendVersions(offer.name, offer.distribution, offer.version, device, versions)


def environment() -> dict[str, str]:
    """Names and versions of this machine. It imports torch if another module has."""
    found = {"Python": platform.python_version(), "system": platform.system(), "machine": platform.machine()}
    found |= installed_versions(("attnplug", "torch", "triton"))
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        about = torch.cuda.get_device_properties(torch.cuda.current_device())
        found |= {"CUDA": str(torch.version.cuda), "multiprocessors": str(about.multi_processor_count)}
        found["memory"] = f"{about.total_memory >> 30} GiB"
        free, total = torch.cuda.mem_get_info()
        others = total - free - torch.cuda.memory_reserved()
        if others > _CONTEXT:
            found["held by other processes"] = f"{others / 2**30:.1f} GiB"
    return found
