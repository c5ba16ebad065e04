"""Kernels computed one request at a time are slow: checks of many steps are left to `pytest -m slow`."""

from __future__ import annotations

import pytest

_MANY_STEPS = ("builder/", "runtime/", "merge/context", "refused/never-after-acceptance", "state/", "batch/c")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        check = getattr(item, "callspec", None) and item.callspec.params.get("check")
        on_cpu = item.path.name == "test_flash_attn_conformance.py"
        if on_cpu and check is not None and check.id.startswith(_MANY_STEPS):
            item.add_marker(pytest.mark.slow)
