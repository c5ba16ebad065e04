"""Exports of a package that are imported when first used (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_exports(
    package: str, exports: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` for `package`.

    Args:
        package: its name.
        exports: by submodule, the names that it defines, with spaces between; "" for submodules themselves.
    """
    homes = {name: home for home, names in exports.items() for name in names.split()}
    exported = sorted(homes)

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        module = importlib.import_module(f"{package}.{home or name}")
        value = getattr(module, name) if home else module
        # Python calls __getattr__ only for missing names, so later uses of this name skip this function.
        setattr(sys.modules[package], name, value)
        return value

    return load, exported.copy, exported
