"""A FlashMLA that runs on the CPU, in the place of the real one."""

from __future__ import annotations

import types
from collections.abc import Iterator

import pytest
from fake_flash_mla import make_flash_mla

import attnplug.backends.flash_mla.library as adapter
from attnplug.backends.flash_mla.library import library


@pytest.fixture
def fake_flash_mla(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    module = make_flash_mla()
    monkeypatch.setattr(adapter, "import_library", lambda backend: module)
    library.cache_clear()
    yield module
    library.cache_clear()
