"""A plugin of pytest that measures which branches of core, registry and _system their own tests run.

The whole suite runs once, and a line that only tests of other folders run is not covered. `pytest -p own_coverage`
writes a file for each process: `coverage combine` joins them.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
from collections.abc import Iterator

import coverage
import pytest

SOURCES = ("attnplug._system", "attnplug.core", "attnplug.registry")
OWN_TESTS = (
    "tests/core/",
    "tests/registry/",
    "tests/golden/",
    "tests/system/",
    "tests/cli/test_select_command.py",
)

_coverage = coverage.Coverage(source=SOURCES, branch=True, data_suffix=True)
_coverage.set_option("run:disable_warnings", ["no-data-collected"])


@contextlib.contextmanager
def _measured() -> Iterator[None]:
    _coverage.start()
    try:
        yield
    finally:
        _coverage.stop()


def _measure_fork() -> None:
    """Measures a fork of a test by itself: it ends by os._exit, and the source of all packages takes seconds to read."""
    if coverage.Coverage.current() is not None:
        _coverage.stop()
        fork = coverage.Coverage(
            include=["*/attnplug/_system/*"], branch=True, data_suffix=True, config_file=False
        )
        fork.set_option("run:patch", ["_exit"])
        fork.start()


os.register_at_fork(after_in_child=_measure_fork)

# Lines that run in the import of a module count for its own tests, whichever test would import it first.
with _measured():
    for name in SOURCES:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            importlib.import_module(module.name)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Measures the import of a module of their tests."""
    with _measured() if collector.nodeid.startswith(OWN_TESTS) else contextlib.nullcontext():
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Measures one of their tests with its fixtures."""
    with _measured() if item.nodeid.startswith(OWN_TESTS) else contextlib.nullcontext():
        return (yield)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Writes the data of this process, one of several with pytest-xdist."""
    _coverage.save()
