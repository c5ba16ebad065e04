"""The versions of one backend on one device, for which evidence and measured times are valid."""

from __future__ import annotations

import dataclasses
import platform
from typing import TYPE_CHECKING

from attnplug.core.device import same_gpu_name
from attnplug.registry.plugins.installed import installed_version
from attnplug.registry.plugins.records import COMPOSITE_SEPARATOR, canonical_name, joined

if TYPE_CHECKING:
    from attnplug.core.device import Device
    from attnplug.registry.plugins.installed import Assumed
    from attnplug.registry.plugins.records import Offer


@dataclasses.dataclass(frozen=True, slots=True)
class BackendVersions:
    """One backend on one device with given versions; evidence is valid for exactly these.

    Args:
        backend: its name.
        distribution: its distribution.
        version: of that distribution.
        device: type, capability and, where it is known, name.
        versions: of Python and of distributions, as installed then.
    """

    backend: str
    distribution: str | None
    version: str | None
    device: Device
    versions: tuple[tuple[str, str], ...]

    def is_of(self, offer: Offer) -> bool:
        """Whether the offer has the same backend, distribution and version."""
        theirs = (offer.name, offer.distribution, offer.version)
        return (self.backend, self.distribution, self.version) == theirs

    @property
    def is_installed(self) -> bool:
        """Whether that version of its distribution is installed; true where it has no distribution."""
        names = [] if self.distribution is None else self.distribution.split(COMPOSITE_SEPARATOR)
        return not names or joined(map(installed_version, names)) == self.version

    def is_on(self, device: Device, assumed: Assumed = None) -> bool:
        """Whether it was run on an equal device, with the versions installed now, or assumed instead."""
        mine = self.device
        return (
            (mine.type, mine.capability) == (device.type, device.capability)
            # A device of unknown name may be the same one, so the evidence stays valid.
            and (mine.name is None or device.name is None or same_gpu_name(mine.name, device.name))
            and all(_version(name, assumed) == version for name, version in self.versions)
        )


def _version(name: str, assumed: Assumed) -> str | None:
    if name == "Python":
        return platform.python_version()
    # A what-if query may leave a version open, such as torch's: then the installed one counts.
    known = dict(assumed).get(canonical_name(name)) if isinstance(assumed, tuple) else None
    return installed_version(name) if known is None else known
