"""Whether torch can see a GPU at all, found without importing it: the import takes more than a second."""

from __future__ import annotations

import ctypes
import importlib.util
import runpy
import sys
from pathlib import Path
from typing import Any

_AMD_DRIVER = Path("/dev/kfd")
"""The compute interface of the kernel's driver for AMD GPUs."""


def may_see_gpus() -> bool:
    """False only if torch would certainly find no GPU: it is built without one, or the driver is absent."""
    # An imported torch answers itself, and at once.
    if "torch" in sys.modules:
        return True
    build = _build()
    if build is None or build.get("xpu") is not None or not {"cuda", "hip"} <= build.keys():
        return True
    if build["hip"] is not None:
        return sys.platform != "linux" or _AMD_DRIVER.exists()
    return build["cuda"] is not None and (sys.platform != "linux" or _loads("libcuda.so.1"))


def _build() -> dict[str, Any] | None:
    """The variables of `torch/version.py`, which torch's build writes; None if there is no such file."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name("version.py")
    try:
        return runpy.run_path(str(path))
    except Exception:  # noqa: BLE001  (the file may be of any torch)
        return None


def _loads(library: str) -> bool:
    """Whether the dynamic linker finds `library`; torch asks the same linker for it."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
