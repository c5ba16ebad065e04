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
    from attnplug.planning import plan as plan
    from attnplug.registry.default import explain as explain
    from attnplug.registry.default import list_backends as list_backends
    from attnplug.registry.default import register as register
    from attnplug.registry.default import select as select
    from attnplug.registry.default import select_layers as select_layers
    from attnplug.registry.plugins.records import hookimpl as hookimpl
    from attnplug.registry.registry import Registry as Registry
    from attnplug.registry.selection.decision import Decision as Decision
    from attnplug.registry.selection.policy import use as use

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "": "core errors ops runtime testing",
        "core.backend": "AttentionBackend",
        "core.device": "Device",
        "core.features": "Feature",
        "core.reasons": "Reason",
        "core.spec": "AttentionType LayerSpec Phase",
        "planning": "plan",
        "registry.selection.decision": "Decision",
        "registry.default": "explain list_backends register select select_layers",
        "registry.plugins.records": "hookimpl",
        "registry.selection.policy": "use",
        "registry.registry": "Registry",
    },
)
