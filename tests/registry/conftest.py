"""No plugin of one test in another."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
from plugin_env import InstallPlugins


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
