"""The child process of `attnplug doctor`: loads a plugin, or imports a backend, and reports each step.

Without a plugin it finds the current device, and the backends for a plain layer on it. Each step is appended to REPORT as
a JSON line before it begins, so that the parent can tell where a child crashed or hung.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def main(report: str, plugin: str | None = None, backend: str | None = None) -> None:
    """Run the steps; raises the plugin's own errors."""
    if plugin is None:
        _find_device(report)
        return
    from attnplug.registry.plugins.discovery import Host, installed_plugins

    _note(report, step=f"importing {plugin}")
    found = next(item for item in installed_plugins() if item.record.name == plugin)
    loaded = Host().load(found)
    offers = {offer.name: offer for offer in loaded.offers}
    _note(
        report,
        step=f"loaded {plugin}",
        status=str(loaded.record.status),
        reason=loaded.record.reason,
        backends={name: offer.declared.family for name, offer in offers.items()},
    )
    if backend is None:
        return
    chosen, declared = offers[backend].backend, offers[backend].declared
    from attnplug.registry.plugins.installed import missing_requirements

    missing = [str(reason) for reason in missing_requirements(declared.requires)]
    _note(report, step="checking its requirements", unmet=missing)
    for method in ("get_impl_cls", "get_builder_cls"):
        _note(report, step=f"in {method}")
        part = getattr(chosen, method)()
        _note(report, step=f"after {method}", **{method: part.__qualname__})
    _note(report, step="done")


def _find_device(report: str) -> None:
    from attnplug.cli.output.doctor_sections import library_states, used_by_phase
    from attnplug.core.device import Device

    _note(report, step="finding the device with torch")
    device = Device.current()
    _note(report, step="selecting backends for it", device=device.to_dict())
    _note(report, step="done", used=used_by_phase(device, library_states(device)))


def _note(report: str, **facts: Any) -> None:
    # Closed after each line, so that a crash of the next step loses none.
    with Path(report).open("a") as file:
        file.write(json.dumps(facts) + "\n")
