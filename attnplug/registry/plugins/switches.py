"""The environment variables for discovery and selection, and the reading of all those that are on or off.

The command line takes those that are unset from the project's file.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Self

from attnplug.core.errors import PolicyError
from attnplug.registry.plugins.project import PROJECT, setting

if TYPE_CHECKING:
    from attnplug.registry.plugins.records import PluginRecord

BACKEND = "ATTNPLUG_BACKEND"
ALLOW = "ATTNPLUG_PLUGINS"
BLOCK = "ATTNPLUG_BLOCK_PLUGINS"
RANK = "ATTNPLUG_RANK"
STRICT = "ATTNPLUG_STRICT"
ALLOW_REFUTED = "ATTNPLUG_ALLOW_REFUTED"
EVIDENCE = "ATTNPLUG_EVIDENCE"
TUNED = "ATTNPLUG_TUNED"
DEBUG = "ATTNPLUG_DEBUG"


@dataclasses.dataclass(frozen=True, slots=True)
class Switches:
    """The variables for plugins and backends, read once when a registry is built.

    `of_project` has those that the project's file sets in their place.

    `allow` is None where ATTNPLUG_PLUGINS is unset, so that every plugin may load. An empty value lets
    only the built-in backends load.
    """

    allow: tuple[str, ...] | None = None
    block: tuple[str, ...] = ()
    rank: tuple[str, ...] = ()
    strict: bool = False
    allow_refuted: tuple[str, ...] = ()
    of_project: frozenset[str] = frozenset()

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read the variables; PolicyError names one whose value is not valid."""
        names = (ALLOW, BLOCK, RANK, STRICT, ALLOW_REFUTED)
        found = {name: setting(name) if environ is None else (environ.get(name), name) for name in names}
        env = {name: text for name, (text, _) in found.items() if text is not None}
        allow = env.get(ALLOW)
        return cls(
            allow=None if allow is None else _names(ALLOW, allow),
            block=_names(BLOCK, env.get(BLOCK, "")),
            rank=_names(RANK, env.get(RANK, "")),
            strict=is_on(STRICT, env),
            allow_refuted=_names(ALLOW_REFUTED, env.get(ALLOW_REFUTED, ""), "backend"),
            of_project=frozenset(name for name, (_, source) in found.items() if source == PROJECT),
        )

    def source(self, variable: str) -> str:
        """Where the value of a variable is from: the variable itself, or the project's file."""
        return PROJECT if variable in self.of_project else variable

    def blocked_by(self, plugin: PluginRecord, is_builtin: bool = False) -> str | None:
        """The variable or file that blocks a plugin, or None; the allow list does not apply to built-in plugins."""
        if any(map(plugin.answers_to, self.block)):
            return self.source(BLOCK)
        allowed = self.allow is None or is_builtin or any(map(plugin.answers_to, self.allow))
        return None if allowed else self.source(ALLOW)

    def check_names(self, plugins: Iterable[PluginRecord]) -> None:
        """PolicyError for a name of no installed plugin, and for one that two distributions answer to."""
        known = tuple(plugins)
        for variable, names in ((ALLOW, self.allow or ()), (BLOCK, self.block), (RANK, self.rank)):
            for name in names:
                found = [plugin for plugin in known if plugin.answers_to(name)]
                # A block list may name plugins that are not installed.
                if not found and variable != BLOCK:
                    every = ", ".join(plugin.name for plugin in known) or "none"
                    raise PolicyError(
                        self.source(variable), name, f"names no installed plugin; there are: {every}"
                    )
                if len({plugin.owner for plugin in found}) > 1:
                    choices = " or ".join(plugin.name for plugin in found)
                    limit = "names plugins of two distributions"
                    raise PolicyError(self.source(variable), name, limit, f"write {choices}")


def _names(variable: str, text: str, of: str = "plugin") -> tuple[str, ...]:
    if not text.strip():
        return ()
    names = tuple(part.strip() for part in text.split(","))
    if not all(names):
        raise PolicyError(variable, text, f"must be {of} names with commas between them")
    return names


def is_on(variable: str, environ: Mapping[str, str] | None = None) -> bool:
    """Whether a variable is 1, true, yes or on, in any case; unset, empty, 0, false, no and off are False.

    Raises:
        PolicyError: any other value.
    """
    text = (os.environ if environ is None else environ).get(variable, "")
    word = text.strip().lower()
    if word in ("true", "yes", "on") or word.lstrip("0") == "1":
        return True
    if word in ("false", "no", "off") or not word.strip("0"):
        return False
    raise PolicyError(variable, text, "must be 1 or 0")
