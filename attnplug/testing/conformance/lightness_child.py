"""Run as a process: imports a backend's module and says which heavy modules that loaded, and who asked."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import json
import operator
import sys
import traceback
from collections.abc import Iterable
from typing import Any

__all__ = ["main"]


class _Watch(importlib.abc.MetaPathFinder):
    """Notes who first looks for a module, and leaves the finding to others."""

    def __init__(self, names: Iterable[str]) -> None:
        self.places: dict[str, str] = dict.fromkeys(names, "")

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if self.places.get(fullname) == "":
            frames = [each for each in traceback.extract_stack() if not each.filename.startswith("<frozen")]
            # The last frame is this one.
            self.places[fullname] = f"{frames[-2].filename}:{frames[-2].lineno}"


def main() -> None:
    """Read what to import from stdin; write what was loaded as one line of JSON."""
    asked: dict[str, Any] = json.load(sys.stdin)
    # What attnplug itself loads is not the plugin's doing.
    import attnplug.registry  # noqa: F401
    from attnplug.core import Device, LayerSpec
    from attnplug.registry.plugin_calls import describe, guarded_call
    from attnplug.testing.conformance.declarations import declarations

    watch = _Watch(asked["watched"])
    before = set(sys.modules)
    sys.meta_path.insert(0, watch)
    raised = None
    with contextlib.redirect_stdout(sys.stderr):
        backend = operator.attrgetter(asked["name"])(importlib.import_module(asked["module"]))
        if asked["asks"]:
            spec = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64)
            here = [(spec, Device.parse(name)) for name in ("cpu", "sm90", "rocm:9.4")]
            _, error = guarded_call(declarations, backend, here)
            raised = None if error is None else describe(error)
    loaded = {
        name: where for name, where in watch.places.items() if name in sys.modules and name not in before
    }
    print("\n" + json.dumps({"loaded": loaded, "raised": raised}))  # noqa: T201 - the answer to the parent


if __name__ == "__main__":
    main()
