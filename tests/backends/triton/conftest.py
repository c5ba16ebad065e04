"""Interpreted kernels are slow: checks of many steps are left to `pytest -m slow` where there is no GPU."""

from __future__ import annotations

import pytest
import torch

_MANY_STEPS = ("builder/", "runtime/", "merge/context", "refused/never-after-acceptance")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        check = getattr(item, "callspec", None) and item.callspec.params.get("check")
        if item.path.parent.name == "triton" and check is not None and check.id.startswith(_MANY_STEPS):
            item.add_marker(pytest.mark.slow)
