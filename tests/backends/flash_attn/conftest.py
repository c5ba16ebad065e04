"""Kernels computed one request at a time are slow: a plain run has a part of the checks, `pytest -m slow` the others."""

from __future__ import annotations

from collections import Counter

import pytest

_MANY_STEPS = (
    *("builder/", "runtime/", "merge/context", "refused/never-after-acceptance", "state/", "batch/c"),
    "declared/",
)
_EVERY = 4
"""Of the numeric cases."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = Counter[str]()
    for item in items:
        check = getattr(item, "callspec", None) and item.callspec.params.get("check")
        on_cpu = item.path.name == "test_flash_attn_conformance.py"
        if not on_cpu or check is None:
            continue
        found["correct/"] += check.id.startswith("correct/")
        is_sampled_out = check.id.startswith("correct/") and found["correct/"] % _EVERY != 1
        if is_sampled_out or check.id.startswith(_MANY_STEPS):
            item.add_marker(pytest.mark.slow)
