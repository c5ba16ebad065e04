"""SGLang on a CPU from its wheel and a few small packages: what it imports at start and never calls here has stand-ins.

`prepare` comes before SGLang's first import.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

NAMES = frozenset(("IPython", "zstandard", "xgrammar", "llguidance", "torchvision", "vllm", "datasets"))
_VERSION = "0.26.0"


class _Anything(type):
    """Classes whose every attribute is another such class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(name)


def _stand_in(name: str) -> type:
    members = {
        "__init__": lambda self, *given, **named: None,
        "__class_getitem__": classmethod(lambda cls, key: cls),
        "__get_pydantic_core_schema__": classmethod(lambda cls, source, handler: {"type": "any"}),
    }
    return _Anything(name, (), members)


class _Module(types.ModuleType):
    __path__ = ()  # type: ignore[assignment]
    __version__ = _VERSION

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last finder, so that installed packages come before their stand-ins."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> Any:
        known = name.partition(".")[0] in NAMES
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def prepare() -> None:
    """Let SGLang be imported here; once."""
    os.environ.setdefault("SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK", "1")
    sys.meta_path.append(_Finder())
    read = importlib.metadata.version

    def version(name: str) -> str:
        # transformers asks for the version of torchvision before it lets classes of images be registered.
        try:
            return read(name)
        except importlib.metadata.PackageNotFoundError:
            if name not in NAMES:
                raise
            return _VERSION

    importlib.metadata.version = version
