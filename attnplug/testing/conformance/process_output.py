"""Layers and steps print nothing to stdout."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Iterator

from attnplug.testing.conformance.check import Check, ConformanceError
from attnplug.testing.conformance.harness import Harness
from attnplug.testing.conformance.steps import scenario_factory
from attnplug.testing.conformance.target import Target

_STEPS = 3


def checks(target: Target) -> Iterator[Check]:
    """The check of what is printed."""
    summary = "layers and steps print nothing to stdout"
    yield Check.of("state/prints-nothing", summary, _check_printed, target)


def _check_printed(target: Target) -> None:
    make = scenario_factory(target, "decode")

    def live() -> None:
        batch = make()
        harness = Harness.of(target, batch)
        for _ in range(_STEPS):
            harness.forward(batch)

    # A library may print a notice when it is first used.
    for _ in range(2):
        live()
    with _stdout() as written:
        live()
    if written:
        text = written[0] if len(written[0]) <= 60 else f"{written[0][:60]}..."
        raise ConformanceError(
            f"layers and steps print to stdout: {text!r}; write to a logger, since commands print data there"
        )


@contextlib.contextmanager
def _stdout() -> Iterator[list[str]]:
    """Keep what is printed, also by C code; the list has it at the end, unless it is empty."""
    written: list[str] = []
    printed = io.StringIO()
    sys.stdout.flush()
    with tempfile.TemporaryFile() as raw:
        saved = os.dup(1)
        os.dup2(raw.fileno(), 1)
        try:
            with contextlib.redirect_stdout(printed):
                yield written
        finally:
            os.dup2(saved, 1)
            os.close(saved)
        raw.seek(0)
        text = printed.getvalue() + raw.read().decode(errors="replace")
    if text:
        written.append(text)
