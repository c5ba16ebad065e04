"""The child process of `attnplug doctor`: loads one plugin, or opens one backend's doors, and reports each step.

Run as `python -m attnplug.cli.probe REPORT PLUGIN [BACKEND]`; without a plugin it asks which device there
is, and who would serve a layer on it. Each step is appended to REPORT as a
JSON line before it is taken, so that the parent knows how far a child came that crashed or hung.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

__all__ = ["main"]


def main(report: str, plugin: str | None = None, backend: str | None = None) -> None:
    """Take the steps; raises whatever the plugin raises."""
    if plugin is None:
        _ask_device(report)
        return
    from attnplug.registry.discovery import Host, installed_plugins

    _note(report, step=f"importing {plugin}")
    found = next(item for item in installed_plugins() if item.record.name == plugin)
    loaded = Host().load(found)
    offers = {offer.name: offer for offer in loaded.offers}
    _note(
        report,
        step=f"loaded {plugin}",
        status=str(loaded.record.status),
        reason=loaded.record.reason,
        backends={name: offer.backend.family for name, offer in offers.items()},
    )
    if backend is None:
        return
    chosen = offers[backend].backend
    from attnplug.registry.installed import missing_requirements

    _note(
        report,
        step="checking what it requires",
        unmet=[str(reason) for reason in missing_requirements(chosen.requires)],
    )
    for door in ("get_impl_cls", "get_builder_cls"):
        _note(report, step=f"in {door}")
        part = getattr(chosen, door)()
        _note(report, step=f"after {door}", **{door: part.__qualname__})
    _note(report, step="done")


def _ask_device(report: str) -> None:
    from attnplug.cli.kernel_libraries import library_states, used_by_phase
    from attnplug.core.device import Device

    _note(report, step="asking torch for the device")
    device = Device.current()
    _note(report, step="asking the plugins who serves it", device=device.to_dict())
    _note(report, step="done", used=used_by_phase(device, library_states(device)))


def _note(report: str, **facts: Any) -> None:
    with Path(report).open("a") as file:
        file.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
