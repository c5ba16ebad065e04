"""The second gate: the distributions that a backend requires, in the versions that it requires.

The versions of one backend on one device, for which evidence and measured times are valid.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from attnplug.core.device import same_gpu_name
from attnplug.core.errors import PolicyError
from attnplug.core.reasons import Reason
from attnplug.registry.plugins.records import COMPOSITE_SEPARATOR, canonical_name, joined

if TYPE_CHECKING:
    from packaging.requirements import Requirement

    from attnplug.core.device import Device
    from attnplug.registry.plugins.records import Offer


AssumeInstalled: TypeAlias = Mapping[str, str] | Literal["all"] | None
"""Versions to assume for a what-if query: all that count, "all" for any, or None for the installed ones."""
Assumed: TypeAlias = tuple[tuple[str, str], ...] | Literal["all"] | None


def freeze_assumed(assume_installed: AssumeInstalled) -> Assumed:
    """The argument as a hashable value; PolicyError for an invalid version or form."""
    if assume_installed is None:
        return None
    if isinstance(assume_installed, str) and assume_installed == "all":
        return "all"
    is_mapping = isinstance(assume_installed, Mapping)
    if not is_mapping or any(not isinstance(name, str) for name in assume_installed):
        limit = "must be 'all' or a mapping of distribution to version"
        raise PolicyError("assume_installed", assume_installed, limit, "as {'flash-attn': '2.8.3'}")
    items = tuple(assume_installed.items())
    try:
        return _checked(items)
    except Exception:  # noqa: BLE001  (a hash is code of the caller)
        # A value without a hash cannot be a version; the function below the cache says which one.
        return _checked.__wrapped__(items)


# Reading versions takes longer than a remembered decision, and what-if queries repeat theirs.
@functools.lru_cache(maxsize=64)
def _checked(items: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    from packaging.version import Version

    for name, version in items:
        try:
            Version(version)
        except Exception:  # noqa: BLE001  (text that is none may be code of the caller)
            raise PolicyError(f"assume_installed[{name!r}]", version, "is not a version") from None
    # Sorted, and under canonical names, so that equal assumptions share one cached decision.
    return tuple(sorted((canonical_name(name), version) for name, version in items))


def missing_requirements(
    requires: Sequence[str | tuple[str, ...]], assumed: Assumed = None, *, helps: bool = True
) -> list[Reason]:
    """A reason for each requirement that no installed or assumed distribution meets.

    Args:
        requires: PEP 508 strings; a tuple is met by any one of its alternatives.
        assumed: versions to judge by instead of the installed ones.
        helps: whether an installation would help, so that it is a remedy.
    """
    if assumed == "all":
        return []
    reasons = []
    for choices in _choices(requires):
        found = [_missing(choice, assumed, helps) for choice in choices]
        refused = [reason for reason in found if reason is not None]
        if choices and len(refused) == len(choices):
            # A wrong version tells the user more than a missing alternative.
            refused.sort(key=lambda reason: reason.code != "version")
            first, others = refused[0], " or ".join(each.remedy for each in refused[1:] if each.remedy)
            if others:
                first = Reason(str(first), code=first.code, field="requires", remedy=f"or {others}")
            reasons.append(first)
    return reasons


def _choices(requires: Sequence[str | tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    for entry in (requires,) if isinstance(requires, str) else requires:
        yield (entry,) if isinstance(entry, str) else entry


# Requirements of the usual form. All of them are PEP 508, and most backends have no other.
_PLAIN = re.compile(
    r"[A-Za-z0-9]+([-_.]+[A-Za-z0-9]+)*"
    r"( *(==|!=|<=?|>=?|~=) *\d+\.\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?"
    r"( *, *(==|!=|<=?|>=?) *\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?)*)?"
)


def check_requirements(requires: Sequence[str | tuple[str, ...]]) -> None:
    """TypeError, ValueError or InvalidRequirement for requirements that `missing_requirements` cannot read."""
    for choices in _choices(requires):
        for choice in choices:
            # packaging takes 25 ms to import, as long as the discovery of all plugins.
            if not _PLAIN.fullmatch(choice):
                _parse(choice)


def requirement_names(requires: Sequence[str | tuple[str, ...]]) -> list[str]:
    """The distributions of all requirements, alternatives among them, as they are spelled there."""
    return [_parse(choice).name for choices in _choices(requires) for choice in choices]


def _missing(text: str, assumed: Assumed, helps: bool) -> Reason | None:
    requirement = _parse(text)
    if requirement.marker is not None and not requirement.marker.evaluate():
        return None
    remedy = f"pip install '{requirement.name}{requirement.specifier}'" if helps else None
    if isinstance(assumed, tuple):
        # Only assumed versions count, so that the answer does not depend on this machine.
        version = dict(assumed).get(canonical_name(requirement.name))
    else:
        version = installed_version(requirement.name)
    if version is None:
        text = f"{requirement.name} not installed"
        return Reason(text, code="not_installed", field="requires", remedy=remedy)
    # Unlike pip, a prerelease counts only if the requirement names one.
    prereleases = bool(requirement.specifier.prereleases)
    if not requirement.specifier or requirement.specifier.contains(version, prereleases=prereleases):
        return None
    return Reason(
        f"{requirement.name} version not supported",
        code="version",
        field="requires",
        requested=version,
        supported=str(requirement.specifier).replace(",", " and "),
        remedy=remedy,
    )


@functools.lru_cache(maxsize=256)
def _parse(text: str) -> Requirement:
    from packaging.requirements import Requirement

    return Requirement(text)


@functools.lru_cache(maxsize=256)
def installed_version(name: str) -> str | None:
    """The version of an installed distribution, cached; None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """The versions of those distributions that are installed, each once and in order."""
    found = {name: installed_version(name) for name in names}
    return {name: version for name, version in found.items() if version is not None}


def library_versions(offer: Offer) -> dict[str, str]:
    """The installed versions of torch, a backend's own distribution and the distributions that it requires."""
    own = offer.distribution.split(COMPOSITE_SEPARATOR) if offer.distribution else []
    return installed_versions(["torch", *own, *requirement_names(offer.declared.requires)])


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
