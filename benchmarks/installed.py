"""The versions of distributions, for the head of a report."""

from __future__ import annotations

import contextlib
import importlib.metadata

__all__ = ["versions"]


def versions(*distributions: str) -> dict[str, str]:
    """The versions of the installed ones."""
    found = {}
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
