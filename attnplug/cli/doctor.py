"""`attnplug doctor`: imports every backend's parts in child processes and reports what happened."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from attnplug.backends.libraries import LIBRARY_RULES
from attnplug.cli.arguments import AsJson
from attnplug.cli.evidence import evidence_findings
from attnplug.cli.kernel_libraries import LibraryState, library_states
from attnplug.cli.output import console, print_json, table
from attnplug.core.device import Device
from attnplug.core.errors import UnknownBackendError

__all__ = ["doctor"]


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: `state` is ok, warning, lacking, blocked or failed."""

    what: str
    state: str
    detail: str


def doctor(
    backends: Annotated[
        list[str] | None, typer.Argument(metavar="[BACKEND]...", help="Look at these only.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="How long each import may take.")
    ] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Import each backend's parts in a child process; a crash, hang or missing symbol is one line.

    Exit code 1 where anything failed.
    """
    findings = _examine(backends or [], timeout)
    look = _run(None, None, timeout)
    device, used = None, look.facts.get("used", {})
    if "device" in look.facts:
        device = Device.from_dict(look.facts["device"])
    else:
        findings.append(Finding("current device", "failed", str(look.failure)))
    findings += (Finding(*each) for each in evidence_findings(device, backends or []))
    libraries = library_states(device, _with_library(backends or []))
    if as_json:
        report = {
            "environment": _environment(),
            "device": None if device is None else device.to_dict(),
            "findings": [dataclasses.asdict(f) for f in findings],
            "libraries": [dataclasses.asdict(state) for state in libraries],
            "used": used,
        }
        print_json(report)
    else:
        out = console()
        out.print(", ".join(f"{name} {found}" for name, found in _environment().items()), end="\n\n")
        shown = table(("what", "state", "detail"), fixed=("state",))
        for finding in findings:
            shown.add_row(finding.what, finding.state, finding.detail)
        out.print(shown)
        _print_libraries(libraries, device, used)
    raise typer.Exit(int(any(finding.state == "failed" for finding in findings)))


def _print_libraries(
    libraries: Sequence[LibraryState], device: Device | None, used: dict[str, str | None]
) -> None:
    if not libraries:
        return
    out = console()
    out.print()
    shown = table(("kernel library", "version", "state", "detail"), fixed=("state",))
    for each in libraries:
        lines = [each.detail]
        lines += [f"at first use it compiles {each.compiles}"] if each.compiles else []
        lines += [f"to do: {each.remedy}"] if each.remedy else []
        shown.add_row(each.library, each.version or "-", each.state, "\n".join(lines))
    out.print(shown)
    if device is not None and used:
        phases = ", ".join(f"{phase} by {name or 'nobody'}" for phase, name in used.items())
        out.print(
            f"\nOn {device.name or device}, a layer of 32 heads over 8 of size 128 in bfloat16: {phases}"
        )


def _with_library(wanted: Sequence[str]) -> list[str]:
    """The backends with a kernel library that are named, families by their members; all without a name."""
    names = dict.fromkeys(rule.backend for rule in LIBRARY_RULES)
    return [name for name in names if not wanted or any(f"{name}_".startswith(f"{each}_") for each in wanted)]


def _environment() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for name in ("attnplug", "torch", "triton", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _examine(wanted: Sequence[str], timeout: float) -> list[Finding]:
    from attnplug.registry.discovery import installed_plugins
    from attnplug.registry.switches import Switches

    switches = Switches.read()
    findings, plugins = [], []
    for found in installed_plugins():
        variable = switches.blocked_by(found.record, found.is_builtin)
        if variable is None:
            plugins.append(found.record.name)
        elif not wanted:
            findings.append(Finding(found.record.name, "blocked", f"left out by {variable}, not run"))
    # Two at a time: importing torch twice over is enough for a small machine.
    with ThreadPoolExecutor(2) as pool:
        looks = list(pool.map(lambda plugin: _run(plugin, None, timeout), plugins))
        pairs: list[tuple[str, str]] = []
        for plugin, look in zip(plugins, looks, strict=True):
            offered = dict(look.facts.get("backends", {}))
            finding = _plugin_finding(plugin, look)
            if finding is not None and not (wanted and offered):
                findings.append(finding)
            pairs += [
                (plugin, name)
                for name, family in offered.items()
                if not wanted or name in wanted or family in wanted
            ]
        if wanted and not pairs:
            offered_names = sorted({name for look in looks for name in look.facts.get("backends", {})})
            raise UnknownBackendError(
                "BACKEND", wanted[0], f"is no backend that loads; loaded are {', '.join(offered_names)}"
            )
        done = pool.map(lambda pair: _run(pair[0], pair[1], timeout), pairs)
        for (plugin, name), look in zip(pairs, done, strict=True):
            findings.append(_backend_finding(f"{name} ({plugin})", look))
    return findings


def _plugin_finding(plugin: str, look: Look) -> Finding | None:
    if look.failure is not None:
        return Finding(plugin, "failed", look.failure)
    if look.facts["status"] != "loaded":
        return Finding(plugin, "failed", str(look.facts["reason"]))
    if look.facts["reason"]:
        return Finding(plugin, "warning", str(look.facts["reason"]))
    return None


def _backend_finding(what: str, look: Look) -> Finding:
    unmet = look.facts.get("unmet")
    if unmet:
        return Finding(what, "lacking", "; ".join(unmet))
    if look.failure is not None:
        return Finding(what, "failed", look.failure)
    return Finding(what, "ok", f"{look.facts['get_impl_cls']} and {look.facts['get_builder_cls']} import")


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """What one child reported, and how it failed if it did."""

    facts: dict[str, Any]
    failure: str | None


def _run(plugin: str | None, backend: str | None, timeout: float) -> Look:
    """Load a plugin in a child, or open a backend's doors; without a plugin, ask for the device."""
    with tempfile.TemporaryDirectory(prefix="attnplug-doctor-") as folder:
        report, log = Path(folder, "report"), Path(folder, "log")
        command = [sys.executable, "-m", "attnplug.cli.probe", str(report)]
        command += [each for each in (plugin, backend) if each is not None]
        # A file, not a pipe: a grandchild that outlives its parent would hold a pipe open.
        with log.open("wb") as output:
            child = subprocess.Popen(  # noqa: S603  (our own interpreter on our own module)
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = child.wait(timeout)
            except subprocess.TimeoutExpired:
                code = None
                _kill(child)
        lines = report.read_text().splitlines() if report.exists() else []
        facts: dict[str, Any] = {}
        for line in lines:
            facts.update(json.loads(line))
        said = log.read_text(errors="replace").strip().splitlines()
    if code == 0 and facts.get("step") in ("done", f"loaded {plugin}"):
        return Look(facts, None)
    return Look(facts, _how_it_failed(code, str(facts.get("step", "starting")), said, timeout))


def _kill(child: subprocess.Popen[bytes]) -> None:
    if hasattr(os, "killpg"):
        os.killpg(child.pid, signal.SIGKILL)
    else:
        child.kill()
    child.wait()


def _how_it_failed(code: int | None, step: str, said: list[str], timeout: float) -> str:
    if code is None:
        return f"hung {step}: killed after {timeout:g} s"
    if code < 0:
        return f"crashed {step}: {signal.Signals(-code).name}"
    if code == 0:
        return f"left the process {step}"
    last = said[-1] if said else f"exit code {code}"
    return f"raised {step}: {last}"
