"""The hooks of a backend plugin, and the version of the interface they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.core.device import Device
    from attnplug.core.spec import LayerSpec, Phase

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
    def attnplug_rank(
        self, spec: LayerSpec, device: Device, phase: Phase | None, candidates: Sequence[str]
    ) -> Sequence[str] | None:
        """The candidates' names in the order preferred, or None for no opinion.

        It cannot add a candidate or bring back a refused one; names left out keep their order
        behind. Called only on a plugin that was registered in code or is named in ATTNPLUG_RANK.
        """
