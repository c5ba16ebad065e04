"""`attnplug list` and `attnplug show`: the backends and plugins of this installation, and what one declares."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnplug._system.terminal_tables import Paragraph, WrappedTable
from attnplug.cli.arguments import AsJson, Quiet, complete_backends
from attnplug.cli.output.output import console, print_json, verdict
from attnplug.cli.output.own_output import is_quiet
from attnplug.core.errors import PolicyError
from attnplug.core.interface.guarded import class_title, describe, guarded_call
from attnplug.core.kv_format import with_codecs

if TYPE_CHECKING:
    from attnplug.registry.plugins.records import Offer

_MOST_ENTRIES = 100
_MOST_CHARACTERS = 1000


def list_backends(
    as_json: AsJson = False,
    no_load: Annotated[
        bool, typer.Option("--no-load", help="List the installed plugins without running their code.")
    ] = False,
    known: Annotated[
        bool,
        typer.Option(
            "--known",
            help="List the packages of other backends that the project knows, and how to install them.",
        ),
    ] = False,
    _quiet: Quiet = False,
) -> None:
    """List the backends, their distributions, and whether their requirements are installed."""
    # These two run no plugin code, so they also list a plugin that fails to load.
    if no_load and known:
        raise PolicyError("--no-load", "with --known", "is another list", "give one of the two")
    if known:
        _list_known(as_json)
        return
    if no_load:
        _list_entry_points(as_json)
        return
    from attnplug.registry.default import get_registry

    registry = get_registry()
    rows = _backend_rows()
    if as_json:
        print_json(
            {"backends": rows, "plugins": [record.to_dict() for record in registry.records]}, "attnplug.list"
        )
        return
    out = console()
    columns = ("backend", "priority", "from", "devices", "needs")
    shown = WrappedTable(columns, right=("priority",), fixed=("backend",))
    for row in rows:
        wanted = ", ".join(each if isinstance(each, str) else " or ".join(each) for each in row["requires"])
        shown.add_row(
            row["name"],
            "-" if row["priority"] is None else str(row["priority"]),
            f"{row['distribution'] or 'this process'} {row['version'] or ''}".strip(),
            ", ".join(row["device_types"]),
            f"{wanted} ({'missing' if row['unmet'] else 'installed'})" if wanted else "nothing",
        )
    out.print(shown)
    reports = WrappedTable(("status", "plugin problem"), fixed=("status",))
    for record in registry.records:
        # A loaded plugin's reason is a note.
        if record.reason and not (is_quiet() and record.status == "loaded"):
            reports.add_row(verdict(str(record.status)), record.reason)
    if reports.row_count:
        out.print()
        out.print(reports)


def _backend_rows() -> list[dict[str, Any]]:
    from attnplug.core.device import Device
    from attnplug.core.spec import LayerSpec
    from attnplug.registry.default import get_registry
    from attnplug.registry.selection.decision import Placement
    from attnplug.registry.selection.gates import examine

    layer = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
    rows = []
    for offer in get_registry().plugins.offers:
        types = list(offer.declared.device_types)
        # Priorities may depend on the device, so each backend is queried on one that it supports.
        device = Device("cpu") if "cpu" in types else Device("cuda", (9, 0))
        candidate = examine(offer, Placement(layer, device), None).candidate
        unmet = [r for r in candidate.reasons if r.code in ("not_installed", "version")]
        rows.append(
            {
                "name": offer.name,
                "family": offer.declared.family,
                "priority": candidate.priority,
                "distribution": offer.distribution,
                "version": offer.version,
                "plugin": offer.plugin,
                "device_types": types,
                "requires": [
                    item if isinstance(item, str) else list(item) for item in offer.declared.requires
                ],
                "unmet": [str(reason) for reason in unmet],
            }
        )
    return sorted(rows, key=lambda row: (-(row["priority"] or 0), row["name"]))


def _list_entry_points(as_json: bool) -> None:
    from attnplug.registry.plugins.discovery import installed_plugins
    from attnplug.registry.plugins.switches import Switches

    switches = Switches.read()
    rows = [
        {
            "plugin": plugin.record.name,
            "version": plugin.record.version,
            "module": plugin.entry_point.value if plugin.entry_point else None,
            "blocked_by": switches.blocked_by(plugin.record, plugin.is_builtin),
        }
        for plugin in installed_plugins()
    ]
    if as_json:
        print_json({"plugins": rows}, "attnplug.plugins")
        return
    shown = WrappedTable(("plugin", "version", "module", "would load"), fixed=("plugin",))
    for row in rows:
        would = f"no, {row['blocked_by']}" if row["blocked_by"] else "yes"
        shown.add_row(str(row["plugin"]), row["version"] or "-", str(row["module"]), would)
    console().print(shown)


def _list_known(as_json: bool) -> None:
    from importlib.resources import files
    from tomllib import loads

    from attnplug.registry.plugins.installed import installed_version

    table = files("attnplug.registry.plugins") / "known_plugins.toml"
    rows = [
        {"package": name, **each, "installed": installed_version(name)}
        for name, each in loads(table.read_text(encoding="utf-8")).items()
    ]
    if as_json:
        print_json({"known": rows}, "attnplug.known-plugins")
        return
    shown = WrappedTable(
        ("package", "backends", "runs", "installed", "install"), fixed=("package", "install")
    )
    for row in rows:
        shown.add_row(
            row["package"],
            ", ".join(row["backends"]),
            row["summary"],
            row["installed"] or "no",
            f"pip install {row['install']}",
        )
    console().print(shown)
    if not is_quiet():
        console().print(
            Paragraph(
                "\nRun these commands in a clone of attnplug. A plugin runs its code in your process, and the project does not review it."
            )
        )


def show(
    backend: Annotated[
        str,
        typer.Argument(metavar="BACKEND", help="A backend or family name.", autocompletion=complete_backends),
    ],
    as_json: AsJson = False,
) -> None:
    """Show all that a backend declares."""
    from attnplug.registry.default import get_registry
    from attnplug.registry.selection.policy import Rule

    offers = get_registry().plugins.resolve(Rule(backend, "default", "*", "BACKEND"))
    facts = [_facts(offer) for offer in offers]
    if as_json:
        print_json(facts[0] if len(facts) == 1 else {"backends": facts}, "attnplug.show")
        return
    out = console()
    for fact in facts:
        shown = WrappedTable(("", ""))
        for name, value in fact.items():
            words = ", ".join(map(str, value)) if isinstance(value, list) else value
            shown.add_row(name.replace("_", " "), "-" if words in (None, "") else str(words))
        out.print(shown)


def _facts(offer: Offer) -> dict[str, Any]:
    from attnplug.core.interface.answers import answer
    from attnplug.core.spec import AttentionType
    from attnplug.registry.plugins.installed import missing_requirements

    backend, declared = offer.backend, offer.declared
    facts: dict[str, Callable[[], Any]] = {
        "requires": lambda: [
            each if isinstance(each, str) else " or ".join(each) for each in declared.requires
        ],
        "missing": lambda: [str(reason) for reason in missing_requirements(declared.requires)],
        "device_types": lambda: [str(kind) for kind in declared.device_types],
        "dtypes": lambda: [str(dtype) for dtype in declared.supported_dtypes],
        "kv_cache_dtypes": lambda: with_codecs(map(str, declared.supported_kv_cache_dtypes)),
        "head_sizes": lambda: (
            [str(size) for size in answer(backend, "get_supported_head_sizes")] or ["any size"]
        ),
        "block_sizes": lambda: [str(size) for size in answer(backend, "get_supported_kernel_block_sizes")],
        "kv_cache_layouts": lambda: list(answer(backend, "supported_kv_cache_layouts")),
        "phases": lambda: list(declared.supported_phases),
        "attention_types": lambda: [
            str(kind) for kind in AttentionType if answer(backend, "supports_attn_type", kind)
        ],
        "features": lambda: list(declared.features.names()),
        "step_safe": lambda: declared.step_safe,
        "options": lambda: (
            []
            if declared.Options is None
            else [f"{field.name}: {field.type}" for field in dataclasses.fields(declared.Options)]
        ),
    }
    return {
        "name": offer.name,
        "family": declared.family,
        "shipped_by": f"{offer.plugin} {offer.version or ''}".strip(),
        "class": class_title(backend),
        **{name: _declared(read) for name, read in facts.items()},
    }


def _declared(read: Callable[[], Any]) -> Any:
    """A value that a backend declares, or the error that reading it raised."""
    # Printed in its place, because an error of one backend must not end the listing.
    value, error = guarded_call(lambda: _short(read()))
    return value if error is None else [f"cannot be read: {describe(error)}"]


def _short(value: Any) -> Any:
    """A declared value with at most `_MOST_ENTRIES` entries of `_MOST_CHARACTERS` each."""
    if isinstance(value, str):
        return value if len(value) <= _MOST_CHARACTERS else f"{value[: _MOST_CHARACTERS - 3]}..."
    if not isinstance(value, list):
        return value
    more = [f"... ({len(value)} in all)"] if len(value) > _MOST_ENTRIES else []
    return [*map(_short, value[:_MOST_ENTRIES]), *more]
