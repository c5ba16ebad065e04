"""The conformance kit as a test module; see attnplug.testing.plugin for how to run it."""

from __future__ import annotations

import ctypes
import os
import sys

import pytest

from attnplug.testing.conformance.check import Check, ConformanceError
from attnplug.testing.decorator import as_parameters
from attnplug.testing.isolation.failures import Failure
from attnplug.testing.plugin import RERUN, SHRINK, SUITE

_SHOWN = 200


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each check of the backend in `--attn-backend`."""
    suite = metafunc.config.stash.get(SUITE, None)
    if suite is None:
        raise pytest.UsageError(
            "attnplug.testing.suite needs a backend: pytest -p attnplug.testing.plugin "
            "--pyargs attnplug.testing.suite --attn-backend NAME"
        )
    # Workers of `attnplug conformance` have none: the command prints a line of its own.
    rerun = metafunc.config.stash.get(RERUN, lambda check: None)
    shrink = metafunc.config.stash.get(SHRINK, 0.0)
    metafunc.parametrize("check", as_parameters(suite.checks, suite.known, rerun, shrink))


def test_conformance(check: Check, capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> None:
    """The check passes and writes nothing to standard output."""
    try:
        check()
    except Exception as problem:
        request.node.user_properties += Failure.of(problem).properties()
        _flush()
        out, err = capfd.readouterr()
        for name, text in (("stdout", out), ("stderr", err)):
            if text:
                request.node.add_report_section("call", name, text)
        if _out_of_memory(problem):
            first = (str(problem).strip() or type(problem).__name__).splitlines()[0]
            raise ConformanceError(f"out of memory: {first}") from problem
        raise
    _flush()
    out = capfd.readouterr().out
    if out:
        more = f"... ({len(out)} characters)" if len(out) > _SHOWN else ""
        raise ConformanceError(f"wrote to stdout: {out[:_SHOWN]!r}{more}")


def _flush() -> None:
    """Write out all buffers, with those of C."""
    # A kernel may print with printf, whose buffer Python does not know.
    for stream in (sys.stdout, sys.__stdout__):
        if stream is not None and not stream.closed:
            stream.flush()
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)


def _out_of_memory(problem: BaseException | None) -> bool:
    while problem is not None:
        name, text = type(problem).__name__, str(problem)
        if isinstance(problem, MemoryError) or name == "OutOfMemoryError" or "can't allocate memory" in text:
            return True
        problem = problem.__cause__ or problem.__context__
    return False
