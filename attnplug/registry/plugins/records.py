"""The hooks of a plugin, and records of plugins and of the backends that they offer."""

from __future__ import annotations

import dataclasses
import enum
import functools
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

from attnplug.core.interface.answers import Declared, declarations

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.core.device import Device
    from attnplug.core.kv_format import KVFormat
    from attnplug.core.spec import LayerSpec, Phase


COMPOSITE_SEPARATOR = "+"
"""Between the names of a composite's halves; no backend, plugin or distribution has it in its name."""


class PluginStatus(enum.StrEnum):
    """The outcome of loading a plugin."""

    LOADED = "loaded"
    BLOCKED = "blocked"
    """Left out by ATTNPLUG_PLUGINS or ATTNPLUG_BLOCK_PLUGINS, or not run on request."""
    BROKEN = "broken"
    """Raised, or does not follow the interface."""
    INCOMPATIBLE = "incompatible"
    """Made for another version of the interface."""
    CONFLICT = "conflict"
    """Offers a name that another distribution offers too, or a reserved one."""


@dataclasses.dataclass(frozen=True, slots=True)
class PluginRecord:
    """One plugin: its distribution, the outcome of loading it, and why.

    `name` is `distribution:entry-point`, or the name given to `register`. `reason` is a sentence
    that names the plugin; for a loaded plugin it is a warning.
    """

    name: str
    distribution: str | None
    version: str | None
    status: PluginStatus
    reason: str | None = None
    backends: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()

    @property
    def entry_point(self) -> str:
        """The entry point's own name."""
        return self.name.rpartition(":")[2]

    @property
    def owner(self) -> str:
        """The distribution, or the name given to `register`."""
        return self.distribution or self.name

    def is_owned_by(self, name: str) -> bool:
        """Whether `name` is the owner's or the plugin's whole name, as in `BACKEND@NAME`.

        An entry point's name alone is not enough: every distribution can choose it freely.
        """
        return canonical_name(name) in (canonical_name(self.owner), canonical_name(self.name))

    def answers_to(self, name: str) -> bool:
        """Whether a user may call the plugin `name`: its own, its entry point's or its distribution's."""
        wanted = canonical_name(name)
        known = (self.name, self.entry_point, self.distribution)
        return any(item is not None and canonical_name(item) == wanted for item in known)

    def to_dict(self) -> dict[str, Any]:
        """A JSON object with every field."""
        return {
            **dataclasses.asdict(self),
            "status": str(self.status),
            "backends": list(self.backends),
            "formats": list(self.formats),
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """One backend class as one plugin offers it."""

    name: str
    backend: type[AttentionBackend]
    plugin: str
    distribution: str | None
    version: str | None
    declared: Declared = dataclasses.field(init=False, compare=False, repr=False)
    """The declarations of the class when the offer was made; a wrong one raises HookError then."""

    def __post_init__(self) -> None:
        # Also for a copy with another class, which declares for itself.
        object.__setattr__(self, "declared", declarations(self.backend))

    @property
    def full_name(self) -> str:
        """`name@distribution`, which no other offer has."""
        return f"{self.name}@{self.distribution or self.plugin}"


@functools.lru_cache(maxsize=1024)
def canonical_name(name: str) -> str:
    """A distribution or plugin name in lower case, with runs of -, _ and . as one - (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def joined(items: Iterable[str | None]) -> str | None:
    """The distributions or versions of a composite's halves as one text; equal ones appear once."""
    return COMPOSITE_SEPARATOR.join(dict.fromkeys(item for item in items if item is not None)) or None


PROJECT = "attnplug"
"""The pluggy project name."""
ENTRY_POINT_GROUP = "attnplug.backends"
"""The entry-point group under which distributions name their plugin modules."""
API_VERSION = 1
"""The plugin interface this release offers; a module states its range as `ATTNPLUG_API`."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Decorates a plugin's hook functions."""


class BackendHooks:
    """The hooks that a plugin module may implement; every argument is always passed."""

    @hookspec
    def attnplug_backends(self) -> Sequence[type[AttentionBackend]]:  # type: ignore[empty-body]
        """The backend classes this plugin offers. Imports nothing heavy."""

    @hookspec
    def attnplug_kv_formats(self) -> Sequence[KVFormat]:  # type: ignore[empty-body]
        """The formats of KV caches this plugin offers. Imports nothing heavy: a codec is named, and imported when used."""

    @hookspec
    def attnplug_rank(
        self, spec: LayerSpec, device: Device, phase: Phase | None, candidates: Sequence[str]
    ) -> Sequence[str] | None:
        """The candidates' names in the order preferred, or None for no opinion.

        It cannot add a candidate or bring back a refused one; names left out keep their order
        behind. Called only on a plugin that was registered in code or is named in ATTNPLUG_RANK.
        """
