"""Fixtures for all tests: scratch environments with plugins, no switches or data of the user, the `gpu` marker."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import shutil
import signal
import sys
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from filelock import FileLock
from hypothesis import settings
from plugin_env import InstallPlugins, PluginEnvironments, RunWithPlugins
from quick_interpreter import make_interpreter_quick
from slow_kits import list_checks, share_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# Tensors here are small: threads would wait for each other, and those of several workers take each other's cores.
# torch reads it when it is imported, here and in what tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell's background processes ignore Ctrl-C, and so would the programs that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test here depends on the time it takes.
settings.register_profile("attnplug", deadline=None, print_blob=True)
settings.load_profile("attnplug")


@functools.cache
def _has_gpu() -> bool:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a broken driver warns; the skip says enough
        return torch.cuda.is_available()


# Triton reads it when it is imported, whichever test does that first: without a GPU, kernels run on the CPU.
if not _has_gpu():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    # What this run of pytest was asked for is not meant for those that tests start.
    for name in [name for name in os.environ if name.startswith("ATTNPLUG_") or name == "PYTEST_ADDOPTS"]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, for tests of pages. Playwright runs an event loop, beside which other tests cannot run theirs."""
    playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("chromium is not installed")
    with playwright_api.sync_playwright() as playwright:
        # Containers withhold what chromium's sandbox needs; the pages are our own.
        launched = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="session", autouse=True)
def data_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where tests and what they start keep their data: nothing is read from the user's folder or written there."""
    folder = tmp_path_factory.getbasetemp() / "user-data"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_DATA_HOME", str(folder / "session"))
        yield folder


@pytest.fixture(autouse=True)
def _own_data_folder(data_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A name alone: most tests keep nothing, and no folder is made for them.
    monkeypatch.setenv("XDG_DATA_HOME", str(data_folders / uuid.uuid4().hex))


@pytest.fixture
def sync_errors() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """`with sync_errors():` torch raises where the host would wait for the GPU."""
    import torch

    @contextlib.contextmanager
    def errors() -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that it may not notice every wait
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return errors


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the session, shared by all workers of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def plugin_environments(shared_folder: Path) -> PluginEnvironments:
    """One root of scratch environments for the session."""
    return PluginEnvironments(shared_folder / "plugin-environments")


@pytest.fixture(scope="session")
def models_data(shared_folder: Path) -> dict[str, Any]:
    """The page's data of all models and GPUs: thousands of decisions, made once for the session."""
    file = shared_folder / "models.json"
    with FileLock(f"{file}.lock"):
        if not file.exists():
            from attnplug.matrix.model_page import model_data
            from attnplug.registry import Registry

            file.write_text(json.dumps(model_data(Registry())))
        found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.fixture(scope="session")
def plugin_wheels(plugin_environments: PluginEnvironments) -> dict[str, Path]:
    """The wheel of every distribution under tests/plugins, by distribution name."""
    return plugin_environments.wheels()


@pytest.fixture(scope="session")
def install_plugins(plugin_environments: PluginEnvironments) -> InstallPlugins:
    """`install_plugins(*names)`: a folder into which pip installed them, made once per set."""
    return plugin_environments.install


@pytest.fixture(scope="session")
def run_with_plugins(plugin_environments: PluginEnvironments) -> RunWithPlugins:
    """`run_with_plugins(names, code_or_arguments, env={}, timeout=s)`: Python in a child that sees them."""
    return plugin_environments.run


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--share K/N` runs one share of the tests that were selected, so that N runs run each of them once."""
    parser.addoption("--share", metavar="K/N", help="run the K-th of N shares of the selected tests")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """List the checks of the kits that this run has."""
    list_checks(metafunc)


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a share that is none, before tests are collected."""
    share = config.getoption("share") or "1/1"
    number, _, shares = share.partition("/")
    if not (number.isdecimal() and shares.isdecimal() and 1 <= int(number) <= int(shares)):
        raise pytest.UsageError(f"--share={share}: K/N is expected, with K from 1 to N")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark what was measured as slow, then keep one share, skip `gpu` where there is none, and note groups of attacks."""
    measured = set(Path(__file__).with_name("slow_tests.txt").read_text().split())
    for item in items:
        if item.nodeid.partition("[")[0] in measured:
            item.add_marker("slow")
    yield  # pytest selects by markers
    if share := config.getoption("share"):
        _keep_share(share, config, items)
    for item in items:
        for marker in item.iter_markers("attack"):
            # Unlike markers, these properties reach the terminal from workers of pytest-xdist.
            item.user_properties.append(("attack", marker.args[0]))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a GPU: torch.cuda.is_available() is False"))


def _keep_share(share: str, config: pytest.Config, items: list[pytest.Item]) -> None:
    number, _, shares = share.partition("/")
    kept: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        of_kit = item.get_closest_marker("slow_kit") is not None
        chosen = share_of(item.nodeid, int(shares), of_kit=of_kit) == int(number) - 1
        (kept if chosen else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without garbage collections: nearly all objects stay, and looking through them takes a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Make what all tests share faster: Triton's interpreter, the program's commands, and full garbage collections.

    Checks of memory make many of those. Modules and collected tests are kept out of them.
    """
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1":
        make_interpreter_quick()
    if "typer.main" in sys.modules:
        # Typer makes the commands anew for each call of the program, which takes most of the time of a refusal.
        typer_main = sys.modules["typer.main"]
        vars(typer_main)["get_command"] = functools.cache(typer_main.get_command)
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Keep what the tests of a file have imported out of later collections too."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many attacks of each group held."""
    held: Counter[str] = Counter()
    run: Counter[str] = Counter()
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            groups = [value for name, value in report.user_properties if name == "attack"]
            if report.when == "call":
                run.update(groups)
                held.update(groups if outcome == "passed" else [])
    if run:
        terminalreporter.section("attacks that held")
        for group in sorted(run):
            terminalreporter.write_line(f"{group:20} {held[group]:4} of {run[group]}")
