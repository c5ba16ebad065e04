"""Distributions planted by hand: their plugins are TORCH with a fault, found by every process with this PYTHONPATH."""

from __future__ import annotations

import textwrap
from pathlib import Path

__all__ = ["plant"]

_MODULE = """
import os
import pluggy
from attnplug.backends.torch_native.backend import TorchBackend

ATTNPLUG_API = (1, 1)
hookimpl = pluggy.HookimplMarker("attnplug")


class Backend(TorchBackend):
    @staticmethod
    def get_name():
        return "{name}"

    @classmethod
    def get_priority(cls, spec, device, phase=None):
        return {priority}

    @classmethod
    def for_layer(cls, spec):
        return cls

    @staticmethod
    def get_impl_cls():
        from attnplug.backends.torch_native.impl import TorchImpl

        class Impl(TorchImpl):
            @classmethod
            def from_spec(cls, spec, **kwargs):
                return super().from_spec({spec}, **kwargs)

            def attend(self, *args, **kwargs):
                {attend}
                return super().attend(*args, **kwargs)

        return Impl


@hookimpl
def attnplug_backends():
    return (Backend,)
"""


def plant(
    folder: Path,
    name: str,
    *,
    priority: int = 50,
    version: str = "1.0",
    spec: str = "spec",
    attend: str = "pass",
) -> Path:
    """Put a distribution with the backend `name` into `folder`; `spec` and `attend` are the code of its fault."""
    package = f"planted_{name.lower()}"
    folder.mkdir(exist_ok=True)
    text = _MODULE.format(name=name, priority=priority, spec=spec, attend=attend)
    (folder / f"{package}.py").write_text(text)
    for old in folder.glob(f"{package}-*.dist-info"):
        for file in old.iterdir():
            file.unlink()
        old.rmdir()
    about = folder / f"{package}-{version}.dist-info"
    about.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: {version}\n"
    (about / "METADATA").write_text(metadata)
    entry = f"[attnplug.backends]\n{name.lower()} = {package}\n"
    (about / "entry_points.txt").write_text(textwrap.dedent(entry))
    return folder
