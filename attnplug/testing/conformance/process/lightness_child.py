"""A child process that imports a backend's module and reports which heavy modules this loaded, and from where."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import io
import json
import operator
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

# Loaded before the watch begins, since attnplug's own imports are not the plugin's.
import attnplug.registry  # noqa: F401
from attnplug.core.backend import AttentionBackend
from attnplug.core.device import Device
from attnplug.core.features import Feature
from attnplug.core.spec import AttentionType, LayerSpec, Phase
from attnplug.registry.plugins.waiting import describe, guarded_call
from attnplug.testing.conformance.process.import_effects import ImportEffects

_ATTRIBUTES = (
    *("family", "requires", "device_types", "supported_dtypes", "supported_kv_cache_dtypes"),
    *("supported_phases", "features", "step_safe"),
)
_METHODS = (
    *("get_name", "get_supported_head_sizes", "get_supported_kernel_block_sizes", "get_preferred_block_size"),
    *("is_mla", "is_sparse", "supports_sink", "supports_mm_prefix", "supported_kv_cache_layouts"),
    "get_required_kv_cache_layout",
)


def declarations(
    backend: type[AttentionBackend], layers: Iterable[tuple[LayerSpec, Device]]
) -> dict[str, list[Any]]:
    """The declarations of a backend as plain values, by attribute or method; needs no torch.

    Methods that take a layer have one value for each of `layers`.
    """
    found: dict[str, list[Any]] = {name: [_plain(getattr(backend, name))] for name in _ATTRIBUTES}
    found |= {f"{name}()": [_plain(getattr(backend, name)())] for name in _METHODS}
    found["supports_attn_type"] = [bool(backend.supports_attn_type(kind)) for kind in AttentionType]
    phases = (None, *Phase)
    per_layer: dict[str, Callable[[LayerSpec, Device], Any]] = {
        "validate_configuration": lambda spec, device: [
            str(reason) for phase in phases for reason in backend.validate_configuration(spec, device, phase)
        ],
        "get_priority": lambda spec, device: [backend.get_priority(spec, device, phase) for phase in phases],
        "get_step_priorities": lambda spec, device: [
            (str(each.steps), each.priority) for each in backend.get_step_priorities(spec, device)
        ],
        "supports_combination": backend.supports_combination,
        "supports_head_size": lambda spec, device: backend.supports_head_size(spec.head_size),
        "get_supported_kernel_block_sizes": backend.get_supported_kernel_block_sizes,
        "get_preferred_block_size": backend.get_preferred_block_size,
        "compile_key": lambda spec, device: backend.compile_key(spec),
        "get_kv_cache_stride_order": lambda spec, device: [
            backend.get_kv_cache_stride_order(layers, layout=layout, spec=spec)
            for layers in (False, True)
            for layout in backend.supported_kv_cache_layouts()
        ],
        "get_kv_cache_shape": lambda spec, device: backend.get_kv_cache_shape(
            4, 16, spec.num_kv_heads, spec.head_size, spec.kv_cache_dtype, spec.head_size_v
        ),
    }
    listed = list(layers)
    for name, value_of in per_layer.items():
        found[name] = [_plain(value_of(spec, device)) for spec, device in listed]
    return found


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (tuple, list)) else value


def _text(value: Any) -> str:
    """A value as text that is the same in each process: sets in order, objects without their addresses."""
    if isinstance(value, (set, frozenset)):
        return repr(sorted(map(repr, value)))
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


class _ImportWatch(importlib.abc.MetaPathFinder):
    """Records where each module is first imported, and leaves finding it to others."""

    def __init__(self, names: Iterable[str]) -> None:
        self.places: dict[str, str] = dict.fromkeys(names, "")

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if self.places.get(fullname) == "":
            frames = [each for each in traceback.extract_stack() if not each.filename.startswith("<frozen")]
            # The last frame is this one.
            self.places[fullname] = f"{frames[-2].filename}:{frames[-2].lineno}"


def main(task: str, report: str) -> None:
    """Read from the file `task` which class to import; write what was loaded to the file `report` as JSON."""
    request: dict[str, Any] = json.loads(Path(task).read_text(encoding="utf-8"))
    watch = _ImportWatch(request["watched"])
    before = set(sys.modules)
    sys.meta_path.insert(0, watch)
    raised, printed = None, io.StringIO()
    effects = ImportEffects() if request.get("effects") else None
    values: dict[str, list[Any]] = {}
    with contextlib.redirect_stdout(printed):
        backend = operator.attrgetter(request["name"])(importlib.import_module(request["module"]))
        if request["call_methods"]:
            spec = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64)
            asked = [spec.replace(**flag.fields(64, None)) for flag in Feature] if effects else []
            layers = [(spec, Device.parse(name)) for name in ("cpu", "sm90", "rocm:9.4")]
            layers += [(each, Device("cpu")) for each in asked]
            answers, error = guarded_call(declarations, backend, layers)
            raised = None if error is None else describe(error)
            values = {name: [_text(each) for each in found] for name, found in (answers or {}).items()}
    loaded = {
        name: where for name, where in watch.places.items() if name in sys.modules and name not in before
    }
    answer: dict[str, Any] = {"loaded": loaded, "raised": raised}
    if request.get("parts"):
        # It imports torch, which the other requests watch for.
        from attnplug.testing.conformance.process.part_effects import part_effects

        with contextlib.redirect_stdout(printed):
            answer["parts"] = part_effects(backend)
    if effects is not None:
        answer["effects"] = [*effects.found(), *(["prints to stdout"] if printed.getvalue() else [])]
        answer["values"] = values
    Path(report).write_text(json.dumps(answer), encoding="utf-8")
