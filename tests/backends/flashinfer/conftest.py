"""A FlashInfer that runs on the CPU, in the place of the real one."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator

import pytest
from fake_flashinfer import make_flashinfer
from flashinfer_signatures import VERSIONS

import attnplug.backends.flashinfer.library as adapter
from attnplug.backends.flashinfer.library import Library, library

# Each runs many cases or steps; a plain run keeps another of its kind.
_LONG = (
    *(
        "options/",
        "refused/never-after-acceptance",
        "state/memory",
        "state/like-layers",
        "state/dropped-layers",
    ),
    *(f"builder/common-prefix-{name}" for name in ("fp8", "lse", "full", "cap", "chunk")),
)
_EVERY = 5
"""Of the numeric cases."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = Counter[str]()
    for item in items:
        check = getattr(item, "callspec", None) and item.callspec.params.get("check")
        on_cpu = item.path.name == "test_flashinfer_conformance_cpu.py"
        if not on_cpu or check is None:
            continue
        found["correct/"] += check.id.startswith("correct/")
        is_sampled_out = check.id.startswith("correct/") and found["correct/"] % _EVERY != 1
        if is_sampled_out or check.id.startswith(_LONG):
            item.add_marker(pytest.mark.slow)


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
