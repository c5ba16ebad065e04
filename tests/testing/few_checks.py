"""A backend with a few checks, for tests of the plugin and the decorator."""

from __future__ import annotations

import os
from collections.abc import Iterator

from catching import variant

from attnplug.core.backend import AttentionBackend
from attnplug.testing.conformance.check import Check, CheckSkipped, ConformanceError, Level
from attnplug.testing.conformance.target import Target

__all__ = ["ACME", "few_checks", "noisy_checks"]

ACME: type[AttentionBackend] = variant("ACME")


def few_checks(target: Target) -> Iterator[Check]:
    """One that passes, one that fails and one that is skipped; full has a fourth."""
    yield Check("good/passes", lambda: None, "passes")
    yield Check("bad/fails", _raise(ConformanceError("the numbers are wrong")), "fails")
    yield Check("good/skips", _raise(CheckSkipped("nothing to try here")), "is skipped")
    if target.level is Level.FULL:
        yield Check("good/full-only", lambda: None, "is in full only")


def noisy_checks(target: Target) -> Iterator[Check]:
    """Checks that write where they must not, or find no memory."""
    yield Check("noise/print", lambda: print("acme: 4 blocks"), "prints")
    yield Check("noise/write", lambda: os.write(1, b"x" * 300) and None, "writes to the descriptor")
    yield Check("noise/stderr", lambda: os.write(2, b"a warning") and None, "writes to standard error")
    yield Check("memory/python", _raise(MemoryError()), "has no memory")
    yield Check("memory/torch", _raise(RuntimeError("can't allocate memory: 64 bytes")), "has none for torch")


def _raise(problem: Exception):
    def run() -> None:
        raise problem

    return run
