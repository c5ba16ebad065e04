"""`attnplug doctor`: imports each backend in a child process, and reports problems, libraries and engines."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer

from attnplug._system.processes import end_children
from attnplug._system.terminal_tables import WrappedTable
from attnplug.backends.libraries import LIBRARY_RULES
from attnplug.cli.arguments import MOST_SECONDS, AsJson, complete_backends
from attnplug.cli.output.doctor_sections import LibraryState, engine_states, library_states, unbound_states
from attnplug.cli.output.output import console, print_json, verdict
from attnplug.cli.probe_run import Probe, run_probe
from attnplug.core.device import Device
from attnplug.core.errors import SpecError, UnknownBackendError
from attnplug.registry.plugins.installed import installed_version

_CELLS_SHOWN = 3
_MODEL_SECONDS = 120.0


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: `state` is ok, warning, lacking, blocked or failed."""

    what: str
    state: str
    detail: str


def doctor(
    backends: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="BACKEND", help="Check only these backends.", autocompletion=complete_backends
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=MOST_SECONDS, metavar="SECONDS", help="Time limit of each import.")
    ] = 60.0,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG", help="Say which kernels of this model are cold, and what compiles them."
        ),
    ] = None,
    device_of_model: Annotated[
        str, typer.Option("--device", metavar="DEVICE", help="The GPU of the kernels of --model.")
    ] = "current",
    as_json: AsJson = False,
) -> None:
    """Import each backend in a child process, and report crashes, hangs and missing symbols.

    The exit code is 1 if anything failed.
    """
    wanted = backends or []
    # In a child: a query of the device imports torch, which may crash or hang.
    probe = run_probe(None, None, timeout)
    device, used = None, probe.facts.get("used", {})
    try:
        device = None if probe.failure else Device.from_dict(probe.facts["device"])
    # Code of a plugin may have damaged the report of the child.
    except SpecError as problem:
        probe = dataclasses.replace(probe, failure=str(problem))
    findings = _import_findings(wanted, timeout, device)
    if probe.failure is not None:
        findings.append(Finding("current device", "failed", probe.failure))
    findings += refuted_findings(device, wanted)
    if model is not None:
        from attnplug.cli.cold_kernels import cold_kernels

        # The model is read once without weights, which takes as long as several imports.
        found = cold_kernels(model, device_of_model, max(timeout, _MODEL_SECONDS))
        findings.append(Finding(f"kernels of {model.name}", *found))
    names = dict.fromkeys(rule.backend for rule in LIBRARY_RULES)
    libraries = library_states(device, [name for name in names if _is_wanted(name, wanted)])
    libraries += [] if wanted else unbound_states()
    engines = [] if wanted else engine_states()
    if as_json:
        report = {
            "environment": _environment(),
            "device": None if device is None else device.to_dict(),
            "findings": [dataclasses.asdict(f) for f in findings],
            "libraries": [dataclasses.asdict(state) for state in libraries],
            "used": used,
            "engines": [dataclasses.asdict(state) for state in engines],
        }
        print_json(report, "attnplug.doctor")
    else:
        out = console()
        out.print(", ".join(f"{name} {found}" for name, found in _environment().items()) + "\n")
        shown = WrappedTable(("checked", "state", "detail"), fixed=("state",), heading="{checked}  {state}")
        for finding in findings:
            shown.add_row(finding.what, verdict(finding.state), finding.detail)
        out.print(shown)
        _print_states("kernel library", [(o.library, o.version, o.state, _lines_of(o)) for o in libraries])
        if libraries and device is not None and used:
            phases = ", ".join(f"{phase} by {name or 'no backend'}" for phase, name in used.items())
            layer = "(32 heads, 8 KV heads, size 128, bfloat16)"
            out.print(f"\nTypical layer {layer} on {device.name or device}: {phases}")
        activate = {o.engine: [f"activate: {o.activate}"] if o.activate else [] for o in engines}
        _print_states(
            "engine", [(o.engine, o.version, o.state, [o.detail, *activate[o.engine]]) for o in engines]
        )
    raise typer.Exit(int(any(finding.state == "failed" for finding in findings)))


def _print_states(what: str, states: Sequence[tuple[str, str | None, str, Sequence[str]]]) -> None:
    """Print a table of names, versions, states and lines of detail; nothing without any."""
    if not states:
        return
    out = console()
    out.print()
    heading = f"{{{what}}}  {{state}}"
    shown = WrappedTable((what, "version", "state", "detail"), fixed=("state",), heading=heading)
    for name, found, state, lines in states:
        shown.add_row(name, found or "-", verdict(state), "\n".join(lines))
    out.print(shown)


def _lines_of(library: LibraryState) -> list[str]:
    compiles = [f"at first use it compiles {library.compiles}"] if library.compiles else []
    return [library.detail, *compiles, *([f"remedy: {library.remedy}"] if library.remedy else [])]


def refuted_findings(device: Device | None, wanted: Sequence[str]) -> Iterator[Finding]:
    """A warning for an unreadable evidence file, and for each backend refuted on `device`, if that is known."""
    from attnplug.registry.selection.evidence import read_evidence

    evidence = read_evidence()
    if evidence.read_error:
        yield Finding("evidence", "warning", f"left out: {evidence.read_error}")
    for subject, cells in evidence.here(device) if device is not None else ():
        # A pair of backends, such as TRITON+TORCH, is reported for both of its members.
        if any(_is_wanted(name, wanted) for name in (subject.backend, *subject.backend.split("+"))):
            more = ", ..." if len(cells) > _CELLS_SHOWN else ""
            named = ", ".join(cell.id for cell in cells[:_CELLS_SHOWN]) + more
            detail = f"{len(cells)} refuted here, and refused: {named} ({evidence.path})"
            yield Finding(f"{subject.backend} on {device}", "warning", detail)


def _is_wanted(name: str, wanted: Sequence[str]) -> bool:
    """Whether the backend or its family is named in `wanted`; an empty list names all."""
    return not wanted or any(f"{name}_".startswith(f"{each}_") for each in wanted)


def _environment() -> dict[str, str]:
    names = ("attnplug", "torch", "triton", "transformers")
    found = {name: installed_version(name) or "not installed" for name in names}
    return {"Python": platform.python_version(), **found}


def _import_findings(wanted: Sequence[str], timeout: float, device: Device | None) -> list[Finding]:
    from attnplug.registry.plugins.discovery import installed_plugins
    from attnplug.registry.plugins.switches import Switches

    switches = Switches.read()
    findings, plugins = [], []
    for found in installed_plugins():
        variable = switches.blocked_by(found.record, found.is_builtin)
        if variable is None:
            plugins.append(found.record.name)
        elif not wanted:
            findings.append(Finding(found.record.name, "blocked", f"left out by {variable}, not run"))
    # Two at a time: each child imports torch, which uses much memory on a small machine.
    with _probing() as pool:
        probes = list(pool.map(lambda plugin: run_probe(plugin, None, timeout), plugins))
        pairs: list[tuple[str, str]] = []
        for plugin, probe in zip(plugins, probes, strict=True):
            offered = dict(probe.facts.get("backends", {}))
            finding = _plugin_finding(plugin, probe)
            if finding is not None and not (wanted and offered):
                findings.append(finding)
            pairs += [
                (plugin, name)
                for name, family in offered.items()
                if not wanted or name in wanted or family in wanted
            ]
        if wanted and not pairs:
            failed = [found for found in findings if found.state == "failed"]
            loaded = sorted({name for probe in probes for name in probe.facts.get("backends", {})})
            if failed and not loaded:
                return findings  # they say why nothing is known of the backend
            others = "".join(f"; {found.what} {found.detail}" for found in failed)
            limit = f"is not a loaded backend; loaded are {', '.join(loaded)}{others}"
            raise UnknownBackendError("BACKEND", wanted[0], limit)
        done = pool.map(lambda pair: run_probe(pair[0], pair[1], timeout), pairs)
        for (plugin, name), probe in zip(pairs, done, strict=True):
            findings.append(_backend_finding(f"{name} ({plugin})", probe, device))
    return findings


@contextlib.contextmanager
def _probing() -> Iterator[ThreadPoolExecutor]:
    """Threads for the probes; an interrupt ends the children, and starts no others."""
    with ThreadPoolExecutor(2) as pool:
        try:
            yield pool
        except KeyboardInterrupt:
            # Before the children end, or a free thread would start the next one.
            pool.shutdown(wait=False, cancel_futures=True)
            end_children()
            raise


def _plugin_finding(plugin: str, probe: Probe) -> Finding | None:
    if probe.failure is not None:
        return Finding(plugin, "failed", probe.failure)
    if probe.facts["status"] != "loaded":
        return Finding(plugin, "failed", str(probe.facts["reason"]))
    if probe.facts["reason"]:
        return Finding(plugin, "warning", str(probe.facts["reason"]))
    return None


def _backend_finding(what: str, probe: Probe, device: Device | None) -> Finding:
    unmet = probe.facts.get("unmet")
    # An installation makes no other device of this one, so that no command is a remedy.
    if device is not None and device.type not in probe.facts.get("device_types", [device.type]):
        unmet = probe.facts.get("unmet_elsewhere")
    if unmet:
        return Finding(what, "lacking", "; ".join(unmet))
    if probe.failure is not None:
        return Finding(what, "failed", probe.failure)
    return Finding(what, "ok", f"{probe.facts['get_impl_cls']} and {probe.facts['get_builder_cls']} import")
