"""`attnplug list`: the backends and plugins there are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnplug.cli.arguments import AsJson
from attnplug.cli.output import console, print_json, table

if TYPE_CHECKING:
    from attnplug.registry.records import PluginRecord

__all__ = ["list_backends"]


def list_backends(
    as_json: AsJson = False,
    no_load: Annotated[
        bool, typer.Option("--no-load", help="Show the installed plugins without running any.")
    ] = False,
) -> None:
    """List the backends, who ships them and whether what they need is installed."""
    if no_load:
        _list_entry_points(as_json)
        return
    from attnplug.registry.default import get_registry

    registry = get_registry()
    rows = _backends()
    troubled = [record for record in registry.records if record.reason]
    if as_json:
        records = [record.to_dict() for record in registry.records]
        print_json({"backends": rows, "plugins": records})
        return
    out = console()
    shown = table(
        ("backend", "priority", "from", "version", "devices", "needs"),
        right=("priority",),
        fixed=("backend",),
    )
    for row in rows:
        shown.add_row(
            row["name"],
            "-" if row["priority"] is None else str(row["priority"]),
            row["distribution"] or "this process",
            row["version"] or "-",
            ", ".join(row["device_types"]),
            _needs(row),
        )
    out.print(shown)
    _print_troubled(troubled)


def _print_troubled(records: list[PluginRecord]) -> None:
    if not records:
        return
    shown = table(("plugins", "with something to say"), fixed=("plugins",))
    for record in records:
        shown.add_row(str(record.status), record.reason)
    out = console()
    out.print()
    out.print(shown)


def _needs(row: dict[str, Any]) -> str:
    if not row["requires"]:
        return "nothing"
    wanted = ", ".join(item if isinstance(item, str) else " or ".join(item) for item in row["requires"])
    return f"{wanted} ({'missing' if row['unmet'] else 'installed'})"


def _backends() -> list[dict[str, Any]]:
    from attnplug.core.device import Device
    from attnplug.core.spec import LayerSpec
    from attnplug.registry.default import get_registry
    from attnplug.registry.gates import examine

    layer = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
    rows = []
    for offer in get_registry().plugins.offers:
        types = [str(kind) for kind in offer.backend.device_types]
        device = Device("cpu") if "cpu" in types else Device("cuda", (9, 0))
        candidate = examine(offer, layer, device, None, None)
        unmet = [r for r in candidate.reasons if r.code in ("not_installed", "version")]
        rows.append(
            {
                "name": offer.name,
                "family": offer.backend.family,
                "priority": candidate.priority,
                "distribution": offer.distribution,
                "version": offer.version,
                "plugin": offer.plugin,
                "device_types": types,
                "requires": [
                    item if isinstance(item, str) else list(item) for item in offer.backend.requires
                ],
                "unmet": [str(reason) for reason in unmet],
            }
        )
    return sorted(rows, key=lambda row: (-(row["priority"] or 0), row["name"]))


def _list_entry_points(as_json: bool) -> None:
    from attnplug.registry.discovery import installed_plugins
    from attnplug.registry.switches import Switches

    switches = Switches.read()
    rows = []
    for plugin in installed_plugins():
        blocked = switches.blocked_by(plugin.record, plugin.is_builtin)
        record = plugin.record
        rows.append(
            {
                "plugin": record.name,
                "version": record.version,
                "module": plugin.entry_point.value if plugin.entry_point else None,
                "blocked_by": blocked,
            }
        )
    if as_json:
        print_json({"plugins": rows})
        return
    shown = table(("plugin", "version", "module", "would load"), fixed=("plugin",))
    for row in rows:
        would = f"no, {row['blocked_by']}" if row["blocked_by"] else "yes"
        shown.add_row(str(row["plugin"]), row["version"] or "-", str(row["module"]), would)
    console().print(shown)
