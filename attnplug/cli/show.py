"""`attnplug show`: the declarations of one backend."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnplug.cli.arguments import AsJson
from attnplug.cli.output import console, print_json, table

if TYPE_CHECKING:
    from attnplug.registry.records import Offer


def show(
    backend: Annotated[str, typer.Argument(metavar="BACKEND", help="A backend or family name.")],
    as_json: AsJson = False,
) -> None:
    """Show all that a backend declares."""
    from attnplug.registry.default import get_registry
    from attnplug.registry.policy import Rule

    offers = get_registry().plugins.resolve(Rule(backend, "default", "*", "BACKEND"))
    facts = [_facts(offer) for offer in offers]
    if as_json:
        print_json(facts[0] if len(facts) == 1 else facts)
        return
    out = console()
    for fact in facts:
        shown = table(("", " "), fixed=("",))
        for name, value in fact.items():
            words = ", ".join(map(str, value)) if isinstance(value, list) else value
            shown.add_row(name.replace("_", " "), "-" if words in (None, "") else str(words))
        shown.show_header = False
        out.print(shown)


def _facts(offer: Offer) -> dict[str, Any]:
    from attnplug.core.spec import AttentionType
    from attnplug.registry.installed import missing_requirements

    backend = offer.backend
    options = dataclasses.fields(backend.Options) if backend.Options is not None else ()
    missing = [str(reason) for reason in missing_requirements(backend.requires)]
    requires = [item if isinstance(item, str) else " or ".join(item) for item in backend.requires]
    return {
        "name": offer.name,
        "family": backend.family,
        "shipped_by": f"{offer.plugin} {offer.version or ''}".strip(),
        "class": f"{backend.__module__}.{backend.__qualname__}",
        "requires": requires,
        "missing": missing,
        "device_types": [str(kind) for kind in backend.device_types],
        "dtypes": [str(dtype) for dtype in backend.supported_dtypes],
        "kv_cache_dtypes": list(backend.supported_kv_cache_dtypes),
        "head_sizes": [str(size) for size in backend.get_supported_head_sizes()] or ["any size"],
        "block_sizes": [str(size) for size in backend.get_supported_kernel_block_sizes()],
        "kv_cache_layouts": list(backend.supported_kv_cache_layouts()),
        "phases": [str(phase) for phase in backend.supported_phases],
        "attention_types": [str(kind) for kind in AttentionType if backend.supports_attn_type(kind)],
        "features": list(backend.features.names()),
        "step_safe": backend.step_safe,
        "options": [f"{field.name}: {field.type}" for field in options],
    }
