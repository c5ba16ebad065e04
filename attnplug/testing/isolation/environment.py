"""What a run depends on: versions, the files of packages, this machine's memory, pytest's surroundings."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnplug.registry.records import Offer

__all__ = ["fingerprint", "memory_of_this_machine", "only_our_pytest", "versions"]

_CODE = {".py", ".so", ".pyd", ".dylib", ".cu", ".cpp", ".h", ".json", ".toml"}
_LARGE = 2**20
_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_SET = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONSAFEPATH": "1"}
_UNSET = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_TIMEOUT", "PYTEST_DEBUG")


def versions(offer: Offer) -> dict[str, str]:
    """Versions of Python, attnplug, torch, the backend's distribution and those that it requires."""
    from packaging.requirements import Requirement

    wanted = ["attnplug", "torch", *(offer.distribution.split("+") if offer.distribution else [])]
    for entry in offer.backend.requires:
        wanted += [Requirement(text).name for text in ([entry] if isinstance(entry, str) else entry)]
    found = {"Python": platform.python_version()}
    for name in dict.fromkeys(wanted):
        with contextlib.suppress(PackageNotFoundError):  # an alternative that is not installed
            found[name] = version(name)
    return found


def fingerprint(packages: Sequence[str]) -> str:
    """A digest of the code of `packages`: it changes where they are edited, not where they are copied.

    Of large files, which are compiled libraries, it holds the size and the time only.
    """
    digest = hashlib.sha256()
    for package in dict.fromkeys(packages):
        for path in sorted(_files(package)):
            about = path.stat()
            digest.update(f"{path}\0{about.st_size}\0".encode())
            is_small = about.st_size <= _LARGE
            digest.update(path.read_bytes() if is_small else str(about.st_mtime_ns).encode())
    return digest.hexdigest()[:16]


def _files(package: str) -> Iterator[Path]:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # a module made in code
        return
    if spec is None:
        return
    if not spec.submodule_search_locations:
        yield from [Path(spec.origin)] if spec.origin and Path(spec.origin).is_file() else []
        return
    for folder in spec.submodule_search_locations:
        yield from (path for path in Path(folder).rglob("*") if path.suffix in _CODE and path.is_file())


def memory_of_this_machine() -> int | None:
    """Bytes that this process and its children may use in all: the machine's, or its container's; None if unknown."""
    sizes = []
    with contextlib.suppress(AttributeError, ValueError, OSError):
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for name in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            sizes.append(int(Path(name).read_text(encoding="ascii")))
    return min((size for size in sizes if size > 0), default=None)


@contextlib.contextmanager
def only_our_pytest() -> Iterator[None]:
    """Nothing in the environment changes how pytest runs here and in the workers started meanwhile."""
    before = {name: os.environ.get(name) for name in (*_SET, *_UNSET)}
    for name in _UNSET:
        os.environ.pop(name, None)
    os.environ.update(_SET)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
