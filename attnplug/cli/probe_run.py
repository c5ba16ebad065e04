"""The child process of `attnplug doctor`: `run_probe` starts it and reads its report, which a plugin may have damaged.

The child loads a plugin, or imports a backend. Without a plugin it finds the current device, and the backends for a plain
layer on it. Each step is appended to REPORT as a JSON line before it begins, so that the parent can tell where a child
crashed or hung.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnplug._system import files
from attnplug._system.processes import end, signal_name, start_python


def main(report: str, plugin: str | None = None, backend: str | None = None) -> None:
    """Run the steps; raises the plugin's own errors."""
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
# A plugin may print without end.
_MOST_BYTES = 1 << 20
_CHILD = (
    "import json; from attnplug.cli.probe_run import main; main(sys.argv[1], *json.loads(sys.argv[2])); "
    "from attnplug.cli.own_process import leave_threads; leave_threads(0)"
)

_running: set[subprocess.Popen[bytes]] = set()


def end_probes() -> None:
    """Kill the children of all threads, after an interrupt."""
    for child in list(_running):
        if child.returncode is None:
            end(child)


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """The facts that one child reported, and its failure if there was one."""

    facts: dict[str, Any]
    failure: str | None


def run_probe(plugin: str | None, backend: str | None, timeout: float) -> Probe:
    """Load a plugin in a child process, or import a backend of it; without a plugin, query the device."""
    with files.temporary_folder("attnplug-doctor-") as folder:
        report, log = Path(folder, "report"), Path(folder, "log")
        names = [name for name in (plugin, backend) if name]
        # As JSON, because an argument of a process cannot contain every character of an entry point's name.
        with log.open("wb") as output:
            child = start_python(_CHILD, str(report), json.dumps(names), stdout=output)
            _running.add(child)
            try:
                code: int | None = child.wait(timeout)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _running.discard(child)
                end(child)
        facts, damage = _read_report(report)
        lines = _tail(log).decode(errors="replace").strip().splitlines()
    # A plugin may end the process with code 0 in its import; the last step shows that.
    step = facts.get("step", "starting")
    last = f"loaded {plugin}" if plugin and not backend else "done"
    # After its last step a child has nothing more to do, but a plugin may keep it from ending.
    is_over = code == 0 or (code is None and not damage)
    if not is_over or not (damage or step == last):
        return Probe(facts, _failure(code, step, lines, timeout))
    lacking = ", ".join(sorted(_LAST[len(names)] - facts.keys()))
    damage = damage or (f"its report lacks {lacking}" if lacking else None)
    return Probe(facts, damage and f"damaged the report of its own check: {damage}")


def _read_report(path: Path) -> tuple[dict[str, Any], str | None]:
    """The facts whose values have the right types, and the first fault of the report."""
    text = _tail(path)
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


def _tail(path: Path) -> bytes:
    """The end of a file; empty if it cannot be read."""
    # A plugin may have deleted it, or put something else in its place.
    try:
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _MOST_BYTES))
            return file.read(_MOST_BYTES)
    except OSError:
        return b""


def _failure(code: int | None, step: str, output: list[str], timeout: float) -> str:
    if code is None:
        return f"hung {step}: killed after {timeout:g} s"
    if code < 0:
        return f"crashed {step}: {signal_name(-code)}"
    if code == 0:
        return f"left the process {step}"
    return f"raised {step}: {output[-1] if output else f'exit code {code}'}"
