"""A FlashInfer that runs on the CPU, in the place of the real one."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from fake_flashinfer import make_flashinfer
from flashinfer_signatures import VERSIONS

import attnplug.backends.flashinfer.library as adapter
from attnplug.backends.flashinfer.library import Library, library


@pytest.fixture
def fake_version() -> str:
    """The version that stands in; the newest."""
    return VERSIONS[-1]


@pytest.fixture
def fake_library(fake_version: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """The library as the backend then finds it."""
    for name in [each for each in sys.modules if each.split(".")[0] == "flashinfer"]:
        monkeypatch.delitem(sys.modules, name)
    modules = make_flashinfer(fake_version)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(adapter, "import_library", lambda backend: modules["flashinfer"])
    monkeypatch.setattr(Library, "why_not_compiling", lambda self: None)
    library.cache_clear()
    yield library()
    library.cache_clear()
