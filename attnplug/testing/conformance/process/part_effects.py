"""The changes that the import of an impl and a builder makes in its process, apart from those of libraries."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

# The kit itself loads these before a check of settings begins.
import attnplug.testing.conformance.harness  # noqa: F401
from attnplug.core.backend import AttentionBackend
from attnplug.testing.conformance.process.process_settings import read_settings, restore_settings
from attnplug.testing.conformance.process.torch_settings import change_of


def part_effects(backend: type[AttentionBackend]) -> list[str]:
    """Each change by `get_impl_cls` and `get_builder_cls`, as a phrase with a verb; for a process of its own."""
    # The backend's own modules are imported a second time. Then all libraries are loaded, so every change is its own.
    before, loaded = read_settings(), set(sys.modules)
    found = _changes(backend, of_libraries=False)
    again = [name for name in sys.modules.keys() - loaded if _is_own(name, backend)]
    restore_settings(before)
    for name in again:
        del sys.modules[name]
    printed = io.StringIO()
    # Some modules cannot be imported twice, such as those that register an operator of torch.
    with contextlib.suppress(Exception), contextlib.redirect_stdout(printed):
        found += _changes(backend, of_libraries=True)
    return [*dict.fromkeys(found), *(["prints to stdout"] if printed.getvalue() else [])]


def _is_own(name: str, backend: type[AttentionBackend]) -> bool:
    """Whether a module is of the backend's package, or a file beside its module."""
    package = backend.__module__.partition(".")[0]
    file, home = (getattr(sys.modules[each], "__file__", None) for each in (name, backend.__module__))
    is_beside = file is not None and home is not None and Path(file).parent == Path(home).parent
    return name.partition(".")[0] == package or is_beside


def _changes(backend: type[AttentionBackend], of_libraries: bool) -> list[str]:
    before = read_settings()
    backend.get_impl_cls()
    backend.get_builder_cls()
    return [
        f"changes {change_of(setting, before[setting], value)}"
        for setting, value in read_settings().items()
        if value != before[setting] and (of_libraries or not setting.by_imports)
    ]
