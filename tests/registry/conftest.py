"""No switch of the surrounding shell, and no plugin of one test in another."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.configuration import set_hypothesis_home_dir
from plugin_env import InstallPlugins

# pytest would try to collect a folder .hypothesis in the root.
set_hypothesis_home_dir(Path(__file__).parents[2] / ".pytest_cache" / "hypothesis")
settings.register_profile("attnplug", deadline=None, print_blob=True)
settings.load_profile("attnplug")


@pytest.fixture(autouse=True)
def _no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ATTNPLUG_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def see_plugins(
    install_plugins: InstallPlugins, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., None]]:
    """`see_plugins(*names)`: this process sees these distributions until the test ends."""
    before = set(sys.modules)

    def see(*names: str) -> None:
        monkeypatch.syspath_prepend(str(install_plugins(*names)))

    yield see
    for name in set(sys.modules) - before:
        if name.startswith(("attnplug_acme", "attnplug_bad")):
            del sys.modules[name]
