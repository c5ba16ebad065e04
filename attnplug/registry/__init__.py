"""Finds plugins, checks their backends and chooses one. Loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.core._lazy import lazy_exports

if TYPE_CHECKING:
    from attnplug.registry.default import explain as explain
    from attnplug.registry.default import get_registry as get_registry
    from attnplug.registry.default import list_backends as list_backends
    from attnplug.registry.default import register as register
    from attnplug.registry.default import select as select
    from attnplug.registry.default import select_layers as select_layers
    from attnplug.registry.measured.comparisons import Measured as Measured
    from attnplug.registry.measured.step_shapes import StepShape as StepShape
    from attnplug.registry.measured.tuned import TunedTable as TunedTable
    from attnplug.registry.measured.tuned_files import read_table as read_table
    from attnplug.registry.plugins.records import API_VERSION as API_VERSION
    from attnplug.registry.plugins.records import ENTRY_POINT_GROUP as ENTRY_POINT_GROUP
    from attnplug.registry.plugins.records import PluginRecord as PluginRecord
    from attnplug.registry.plugins.records import PluginStatus as PluginStatus
    from attnplug.registry.plugins.records import hookimpl as hookimpl
    from attnplug.registry.registry import Registry as Registry
    from attnplug.registry.selection.decision import Candidate as Candidate
    from attnplug.registry.selection.decision import Decision as Decision
    from attnplug.registry.selection.decision import Gate as Gate
    from attnplug.registry.selection.policy import Rule as Rule
    from attnplug.registry.selection.policy import parse_rules as parse_rules
    from attnplug.registry.selection.policy import use as use

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "selection.decision": "Candidate Decision Gate",
        "default": "explain get_registry list_backends register select select_layers",
        "measured.comparisons": "Measured",
        "selection.policy": "Rule parse_rules use",
        "plugins.records": "API_VERSION ENTRY_POINT_GROUP PluginRecord PluginStatus hookimpl",
        "registry": "Registry",
        "measured.step_shapes": "StepShape",
        "measured.tuned": "TunedTable",
        "measured.tuned_files": "read_table",
    },
)
