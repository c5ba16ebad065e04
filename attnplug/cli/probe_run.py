"""The child process of `attnplug doctor`: `run_probe` starts it and reads its report, which a plugin may have damaged.

The child loads a plugin, or imports a backend. Without a plugin it finds the current device, and the backends for a plain
layer on it. Each step is appended to REPORT as a JSON line before it begins, so that the parent can tell where a child
crashed or hung.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnplug._system.files import read_tail
from attnplug._system.processes import Child, python_command, signal_name


def main(task: str, report: str) -> None:
    """Run the steps for the names in the file `task`, and end; raises the plugin's own errors."""
    _run(report, *json.loads(Path(task).read_text(encoding="utf-8")))
    # Imported late: it takes longer than a small plugin.
    from attnplug.cli.own_process import leave_threads

    leave_threads(0)


def _run(report: str, plugin: str | None = None, backend: str | None = None) -> None:
    if plugin is None:
        from attnplug.cli.output.doctor_sections import library_states, used_by_phase
        from attnplug.core.device import Device

        _note(report, step="finding the device with torch")
        device = Device.current()
        _note(report, step="selecting backends for it", device=device.to_dict())
        _note(report, step="done", used=used_by_phase(device, library_states(device)))
        return
    from attnplug.registry.plugins.discovery import Host, installed_plugins

    _note(report, step=f"importing {plugin}")
    found = next(item for item in installed_plugins() if item.record.name == plugin)
    loaded = Host(reads_parts=True).load(found)
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
    bare = [str(reason) for reason in missing_requirements(declared.requires, helps=False)]
    types = list(declared.device_types)
    _note(report, step="checking its requirements", unmet=missing, unmet_elsewhere=bare, device_types=types)
    for method in ("get_impl_cls", "get_builder_cls"):
        _note(report, step=f"in {method}")
        part = getattr(chosen, method)()
        _note(report, step=f"after {method}", **{method: part.__qualname__})
    _note(report, step="done")


def _note(report: str, **facts: Any) -> None:
    # Closed after each line, so that a crash of the next step loses none.
    with Path(report).open("a") as file:
        file.write(json.dumps(facts) + "\n")


_TEXT, _TEXT_OR_NONE = (str,), (str, type(None))
_KINDS: dict[str, tuple[type, ...]] = {
    "step": _TEXT,
    "status": _TEXT,
    "reason": _TEXT_OR_NONE,
    "get_impl_cls": _TEXT,
    "get_builder_cls": _TEXT,
    "unmet": (list,),
    "unmet_elsewhere": (list,),
    "device_types": (list,),
    "backends": (dict,),
    "used": (dict,),
    "device": (dict,),
}
_LAST: dict[int, frozenset[str]] = {
    0: frozenset({"device", "used"}),
    1: frozenset({"status", "reason", "backends"}),
    2: frozenset({"unmet", "get_impl_cls", "get_builder_cls"}),
}
"""The facts of a whole report, by the number of names that the child was given."""
_CHILD = "from attnplug.cli.probe_run import main; main(*sys.argv[1:])"


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """The facts that one child reported, and its failure if there was one."""

    facts: dict[str, Any]
    failure: str | None


def run_probe(plugin: str | None, backend: str | None, timeout: float) -> Probe:
    """Load a plugin in a child process, or import a backend of it; without a plugin, query the device."""
    names = [name for name in (plugin, backend) if name]
    with Child(python_command(_CHILD), names) as child:
        code = child.wait(timeout)
        facts, damage = _read_report(child.report)
        failed = child.last_line()
    # A plugin may end the process with code 0 in its import; the last step shows that.
    step = facts.get("step", "starting")
    last = f"loaded {plugin}" if plugin and not backend else "done"
    # After its last step a child has nothing more to do, but a plugin may keep it from ending.
    is_over = code == 0 or (code is None and not damage)
    if not is_over or not (damage or step == last):
        return Probe(facts, _failure(code, step, failed, timeout))
    lacking = ", ".join(sorted(_LAST[len(names)] - facts.keys()))
    damage = damage or (f"its report lacks {lacking}" if lacking else None)
    return Probe(facts, damage and f"damaged the report of its own check: {damage}")


def _read_report(path: Path) -> tuple[dict[str, Any], str | None]:
    """The facts whose values have the right types, and the first fault of the report."""
    # A plugin may have deleted it, or put something else in its place.
    text = read_tail(path)
    facts: dict[str, Any] = {}
    damage = None
    for number, line in enumerate(text.splitlines(), 1):
        try:
            data = json.loads(line)
        except (ValueError, RecursionError):
            data = None
        read = data if isinstance(data, dict) else {}
        good = {name: value for name, value in read.items() if _is_of_kind(name, value)}
        facts |= good
        if not read or len(good) < len(read):
            damage = damage or f"line {number} was not written by attnplug"
    return facts, damage


def _is_of_kind(name: str, value: object) -> bool:
    if not isinstance(value, _KINDS.get(name, ())):
        return False
    if isinstance(value, list):
        return all(isinstance(item, str) for item in value)
    if isinstance(value, Mapping) and name != "device":
        return all(isinstance(item, _TEXT_OR_NONE) for item in value.values())
    return True


def _failure(code: int | None, step: str, failed: str, timeout: float) -> str:
    if code is None:
        return f"hung {step}: killed after {timeout:g} s"
    if code < 0:
        return f"crashed {step}: {signal_name(-code)}"
    if code == 0:
        return f"left the process {step}"
    return f"raised {step}: {failed}"
