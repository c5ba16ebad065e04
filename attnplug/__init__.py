"""attnplug: attention backends as plugins.

What a layer asks for is honoured or refused with a reason, never ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.core._lazy import lazy_exports

if TYPE_CHECKING:
    from attnplug import core as core
    from attnplug import errors as errors
    from attnplug import ops as ops
    from attnplug import runtime as runtime
    from attnplug import testing as testing
    from attnplug.core.backend import AttentionBackend as AttentionBackend
    from attnplug.core.device import Device as Device
    from attnplug.core.features import Feature as Feature
    from attnplug.core.reasons import Reason as Reason
    from attnplug.core.spec import AttentionType as AttentionType
    from attnplug.core.spec import LayerSpec as LayerSpec
    from attnplug.core.spec import Phase as Phase
    from attnplug.registry.decision import Decision as Decision
    from attnplug.registry.default import explain as explain
    from attnplug.registry.default import list_backends as list_backends
    from attnplug.registry.default import register as register
    from attnplug.registry.default import select as select
    from attnplug.registry.default import select_layers as select_layers
    from attnplug.registry.hookspecs import hookimpl as hookimpl
    from attnplug.registry.policy import use as use
    from attnplug.registry.registry import Registry as Registry
    from attnplug.runtime.planning import plan as plan

__all__ = [
    "AttentionBackend",
    "AttentionType",
    "Decision",
    "Device",
    "Feature",
    "LayerSpec",
    "Phase",
    "Reason",
    "Registry",
    "core",
    "errors",
    "explain",
    "hookimpl",
    "list_backends",
    "ops",
    "plan",
    "register",
    "runtime",
    "select",
    "select_layers",
    "testing",
    "use",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "AttentionBackend": "core.backend",
        "AttentionType": "core.spec",
        "Decision": "registry.decision",
        "Device": "core.device",
        "Feature": "core.features",
        "LayerSpec": "core.spec",
        "Phase": "core.spec",
        "Reason": "core.reasons",
        "Registry": "registry.registry",
        "core": "",
        "errors": "",
        "explain": "registry.default",
        "hookimpl": "registry.hookspecs",
        "list_backends": "registry.default",
        "ops": "",
        "plan": "runtime.planning",
        "register": "registry.default",
        "runtime": "",
        "select": "registry.default",
        "select_layers": "registry.default",
        "testing": "",
        "use": "registry.policy",
    },
)
